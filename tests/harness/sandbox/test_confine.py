"""What a jailed child cannot do, each attempt by what stops it, and what a kernel author needs and can do."""

import os
import socket
from pathlib import Path

import pytest

from harness.sandbox import confine, policy
from harness.sandbox.process import Child
from tests.support.jails import REFUSED, ROOT, SECRET, answer, ask, jail_in, needs

WRONG = ROOT / "problems" / "nvfp4_gemv" / "wrong.py"
MAKEFILE = str(ROOT / "Makefile")
# What a submission could try, by what stops it. {parent}, {checker}: their pids.
ATTEMPTS = {
    "list the checkout": ("landlock", f"import os; os.listdir({str(ROOT)!r})"),
    "read the judge": ("landlock", f"open({str(ROOT / 'harness' / 'run.py')!r}).read()"),
    "read a reference": ("landlock", f"open({str(ROOT / 'problems/nvfp4_gemv/reference.py')!r}).read()"),
    "write into the checkout": ("landlock", f"open({str(ROOT / 'planted')!r}, 'w')"),
    "write beside its folder": ("landlock", "open({home!r} + '/../planted', 'w')"),
    "leave shared memory": ("landlock", "open('/dev/shm/planted-by-a-test', 'w')"),
    "change its own code": ("landlock", "open({code!r} + '/harness/wire.py', 'a')"),
    "read root's password file": ("landlock", "open('/etc/shadow').read()"),
    "list what lies beside the checkout": ("landlock", f"import os; os.listdir({str(ROOT.parent)!r})"),
    "list the judge's home": ("landlock", f"import os; os.listdir({str(Path.home())!r})"),
    "list the common temporary folder": ("landlock", "import os; os.listdir('/tmp')"),
    "read a temporary file of another process": ("landlock", "open({listening!r} + '.txt').read()"),
    "list the kernel's traces": ("landlock", "import os; os.listdir('/sys/kernel/debug')"),
    "read the parent's memory": ("landlock", "open('/proc/{parent}/mem', 'rb').read(1)"),
    "read the parent's environment": ("landlock", "open('/proc/{parent}/environ', 'rb').read()"),
    "read the checker's memory": ("landlock", "open('/proc/{checker}/mem', 'rb').read(1)"),
    "enter by the parent's root": ("landlock", "import os; os.listdir('/proc/{parent}/root/')"),
    "signal the parent": ("", "import os; os.kill({parent}, 0)"),
    "signal its reaper": ("", "import os; os.kill(os.getppid(), 0)"),
    "signal everybody": ("", "import os; os.kill(-1, 0)"),
    "signal the checker": ("scope", "import os; os.kill({checker}, 0)"),
    "signal the checker by descriptor": (
        "scope",
        "import os, signal; signal.pidfd_send_signal(os.pidfd_open({checker}), 0)",
    ),
    "trace the parent": ("seccomp", "syscall(101, 16, {parent}, 0, 0)"),
    "read memory across": ("seccomp", "syscall(310, {checker}, 0, 0, 0, 0, 0)"),
    "open an internet socket": ("seccomp", "import socket; socket.socket()"),
    "open a netlink socket between processes": ("seccomp", "import socket; socket.socket(16, socket.SOCK_RAW, 2)"),
    "connect to a service by its path": (
        "seccomp",
        "import socket; socket.socket(socket.AF_UNIX).connect({listening!r})",
    ),
    "connect to a service by its name": (
        "seccomp",
        "import socket; socket.socket(socket.AF_UNIX).connect('\\0kernel-judge-test-{parent}')",
    ),
    "hold memory that nobody counts": ("seccomp", "import os; os.memfd_create('x')"),
    "take System V shared memory": ("seccomp", "syscall(29, 0, 4096, 0o1600)"),
    "fork into another namespace": ("seccomp", "syscall(56, 0x10000011, 0, 0, 0, 0)"),
    "set the parent's limits": ("seccomp", "syscall(302, {parent}, 7, 0, bytes(16))"),
    "set the checker's priority": ("seccomp", "import os; os.setpriority(os.PRIO_PROCESS, {checker}, 19)"),
    "pin the checker": ("seccomp", "import os; os.sched_setaffinity({checker}, [0])"),
    "change who may read a file of the checkout": ("seccomp", f"import os; os.chmod({MAKEFILE!r}, 0o644)"),
    "change a time in the checkout": ("seccomp", f"import os; os.utime({MAKEFILE!r})"),
    "become root": ("", "import os; os.setgroups([0])"),
    "set the clock": ("", "import time; time.clock_settime(time.CLOCK_REALTIME, time.time())"),
}


@pytest.mark.parametrize("what", ATTEMPTS)
def test_a_jailed_child_cannot(jailed, open_child, tmp_path, what):
    """Each attempt is refused by the kernel, not by luck: never by a name that was not found."""
    measure, code = ATTEMPTS[what]
    if measure:
        needs(measure)
    path = str(tmp_path / "listening")
    Path(f"{path}.txt").write_text(SECRET)
    with socket.socket(socket.AF_UNIX) as by_path, socket.socket(socket.AF_UNIX) as by_name:
        by_path.bind(path)
        by_path.listen()
        by_name.bind(f"\0kernel-judge-test-{os.getpid()}")
        by_name.listen()
        place = Path(answer(jailed, "import os; answer = os.environ['HOME']")).parent
        code = code.format(
            parent=os.getpid(),
            checker=open_child.pid,
            listening=path,
            home=str(place / "home"),
            tmp=str(place / "tmp"),
            code=str(place / "code"),
        )
        reply = ask(jailed, code)
    assert reply.get("errno") in REFUSED, reply


@pytest.mark.parametrize(
    "what", ["list the checkout", "open an internet socket", "hold memory that nobody counts", "signal the parent"]
)
def test_an_unjailed_child_can(open_child, what):
    """So that the refusals above are the jail's."""
    reply = ask(open_child, ATTEMPTS[what][1].format(parent=os.getpid()))
    assert "answer" in reply, reply


def test_what_a_kernel_author_needs_is_there(jailed):
    seen = answer(
        jailed,
        """
        import os, socket, subprocess, threading
        for variable in ("HOME", "TMPDIR", "KERNEL_BUILD_DIR", "TRITON_CACHE_DIR"):
            os.makedirs(os.environ[variable], exist_ok=True)
            place = os.environ[variable] + "/file"
            with open(place, "w") as file: file.write("mine")
            os.rename(place, place + "2"); os.truncate(place + "2", 2); os.symlink(place + "2", place)
            assert open(place).read() == "mi"
            os.unlink(place)
        os.rename(os.environ["TMPDIR"] + "/file2", os.environ["HOME"] + "/moved")
        open("/dev/null", "w").write("x")
        open("/proc/self/comm", "w").write("renamed")
        assert len(open("/dev/urandom", "rb").read(8)) == 8
        left, right = socket.socketpair(); left.send(b"x"); assert right.recv(1) == b"x"
        thread = threading.Thread(target=print); thread.start(); thread.join()
        assert os.path.exists("/proc/self/maps") and open("/proc/cpuinfo").read()
        os.sched_setaffinity(0, os.sched_getaffinity(0)); os.nice(0)
        child = subprocess.Popen(["sleep", "60"]); child.kill(); child.wait()
        answer = [subprocess.run(["sh", "-c", "echo out"], capture_output=True, text=True).stdout, os.getcwd()]
        """,
    )
    assert seen == ["out\n", answer(jailed, "import os; answer = os.environ['HOME']")]


# How a source can name the file {path}; g++ reads it, and what came of it is its output, or in what it made.
READS = {
    "an include": ('#include "{path}"', "-E"),
    "a macro": ('#define FILE "{path}"\n#include FILE', "-E"),
    "angle brackets": ("#include <{path}>", "-E"),
    "the assembler": ('__asm__(".incbin \\"{path}\\"");', "-c -o out.o; cat out.o"),
    "another line": ('#line 1 "{path}"\nint x = y;', "-fsyntax-only"),
    "a flag": ("", "-E -include {path}"),
    "a file of flags": ("", "-E @{path}"),
    "a look": ('#if __has_include("{path}")\nheld by\n#endif', "-E"),
}
# Files that no runner reads, and a piece of each.
HELD = {
    "/etc/passwd": "root:",
    "/etc/shadow": "root:",
    "/etc/group": "root:",
    str(WRONG): "custom_kernel",
    str(ROOT / "problems" / "nvfp4_gemv" / "reference.py"): "torch",
    str(ROOT / "tests" / "conftest.py"): "pytest",
}


@pytest.mark.parametrize("way", READS)
def test_a_compiler_in_the_jail_reads_no_more_than_the_jail(jailed, tmp_path, way):
    """Nor does it say what is in a file, or that there is such a file."""
    needs("landlock")
    hidden = str(tmp_path / "secret.h")
    Path(hidden).write_text(SECRET + "\n")
    text, flags = READS[way]
    code = f"""
        import os, subprocess
        def compile(path):
            with open("source.cpp", "w") as file: file.write({text!r}.replace("{{path}}", path))
            command = "g++ source.cpp " + {flags!r}.replace("{{path}}", path) + " 2>&1"
            said = subprocess.run(["sh", "-c", command], capture_output=True, text=True, errors="replace").stdout
            if os.path.exists("out.o"): os.unlink("out.o")
            return said.replace(path, "FILE")
        with open("mine.h", "w") as file: file.write({SECRET!r} + chr(10))
        answer = [compile(path) for path in (os.getcwd() + "/mine.h", {hidden!r}, *{list(HELD)!r})]
        """
    mine, secret, *others = answer(jailed, code)
    assert "held" in mine, "the way works for what it may read"
    assert "held" not in secret
    for path, said in zip(HELD, others, strict=True):
        assert "held" not in said and HELD[path] not in said, (path, said)


def test_privileges_are_gone(jailed):
    needs("seccomp")
    status = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{jailed.pid}/status").read_text().splitlines() if ":\t" in line
    )
    assert status["NoNewPrivs"] == "1" and status["Seccomp"] == "2"
    own = int(status["Uid"].split()[0]) in policy.UIDS
    left = 1 << 2 if own and policy.passing() else 0  # CAP_DAC_READ_SEARCH
    assert all(int(status[f"Cap{kind}"], 16) == left for kind in ("Inh", "Prm", "Eff", "Amb"))
    if os.geteuid() == 0:
        assert int(status["CapBnd"], 16) == 0 and status["Groups"].strip() == ""
    assert "vulnerable" in status.get("Speculation_Store_Bypass", "vulnerable")  # the filter costs no speed
    assert Path(f"/proc/{jailed.pid}/oom_score_adj").read_text().strip() == confine.OOM_SCORE
    assert answer(jailed, "import resource; answer = resource.getrlimit(resource.RLIMIT_CORE)") == [0, 0]
    assert os.getsid(jailed.pid) == jailed.pid


def test_no_other_descriptor_is_inherited(tmp_path):
    """Standard input, output and error, and its socket; the lowest free one is the one that lists them."""
    child = Child("jailed", jail=jail_in(tmp_path))
    seen = answer(child, "import os; answer = [sorted(map(int, os.listdir('/proc/self/fd'))), sock.fileno()]")
    child.close()
    assert seen == [[0, 1, 2, *sorted([3, seen[1]])], seen[1]]


@pytest.mark.parametrize("target", ["parent", "reaper"])
@pytest.mark.parametrize("call", ["os.kill(pid, 0)", "os.kill(-os.getpgid(pid), 0)", "syscall(234, pid, pid, 0)"])
def test_without_scopes_the_judge_is_protected_by_name(tmp_path, monkeypatch, target, call):
    """As on a kernel whose Landlock does not govern signals."""
    needs("seccomp")
    found, abi = {**policy.offered(), "scope": "not here"}, min(5, confine.landlock_abi())
    monkeypatch.setattr(policy, "offered", lambda: found)
    monkeypatch.setattr(confine, "landlock_abi", lambda: abi)
    child = Child("jailed", jail=jail_in(tmp_path))
    pid = os.getpid() if target == "parent" else child._process.pid
    reply = ask(child, f"import os; pid = {pid}; {call}")
    child.close()
    assert reply.get("errno") in REFUSED, reply


def test_who_it_is_needs_no_file_of_users(jailed):
    assert answer(jailed, "import getpass; answer = getpass.getuser()") == policy.USER
