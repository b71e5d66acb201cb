"""What a jailed child cannot do, each attempt by what stops it, and what a kernel author needs and can do."""

import ctypes
import os
import re
import socket
import struct
import sys
from pathlib import Path

import pytest

from harness.sandbox import confine, policy
from harness.sandbox.process import Child
from tests.support.jails import REFUSED, ROOT, SECRET, answer, ask, jail_in, needs

WRONG = ROOT / "problems" / "nvfp4_gemv" / "wrong.py"
MAKEFILE = str(ROOT / "Makefile")
CONNECT = "import socket; socket.socket(socket.AF_UNIX).connect"
# What a submission could try, by what stops it; test_syscalls.py has all that the filter refuses. {parent}, {checker}:
# their pids.
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
    "signal it by descriptor": ("scope", "import os, signal; signal.pidfd_send_signal(os.pidfd_open({checker}), 0)"),
    "open an internet socket": ("seccomp", "import socket; socket.socket()"),
    "connect to a service by its path": ("seccomp", f"{CONNECT}({{listening!r}})"),
    "connect to a service by its name": ("seccomp", f"{CONNECT}('\\0kernel-judge-test-{{parent}}')"),
    "hold memory that nobody counts": ("seccomp", "import os; os.memfd_create('x')"),
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
        names = {"parent": os.getpid(), "checker": open_child.pid, "listening": path}
        places = {name: str(place / name) for name in ("home", "code")}
        reply = ask(jailed, code.format(**names, **places))
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


# Files that no runner reads; nor does a compiler that it starts say what is in them.
HELD = ["/etc/passwd", "/etc/shadow", "/etc/group", str(WRONG), str(ROOT / "tests" / "conftest.py")]


def test_a_compiler_in_the_jail_reads_no_more_than_the_jail(jailed, tmp_path):
    needs("landlock")
    (tmp_path / "secret.h").write_text(f"{SECRET}\n")
    code = f"""
        import subprocess
        def included(path):
            with open("source.cpp", "w") as file: file.write(f'#include "{{path}}"')
            return subprocess.run(["g++", "-E", "source.cpp"], capture_output=True, text=True).returncode
        with open("mine.h", "w") as file: file.write("mine")
        answer = [included(path) for path in ("mine.h", *{[str(tmp_path / "secret.h"), *HELD]!r})]
        """
    assert answer(jailed, code) == [0, *[1] * (1 + len(HELD))]


def test_privileges_are_gone(jailed):
    needs("seccomp")
    status = dict(re.findall(r"^(\w+):\t(.*)$", Path(f"/proc/{jailed.pid}/status").read_text(), re.MULTILINE))
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


def test_no_other_descriptor_is_inherited_and_no_file_of_users_needed(child, jailed):
    """Standard input, output and error, and its socket; the lowest free one is the one that lists them."""
    seen = answer(child, "import os; answer = [sorted(map(int, os.listdir('/proc/self/fd'))), sock.fileno()]")
    assert seen == [[0, 1, 2, *sorted([3, seen[1]])], seen[1]]
    assert answer(jailed, "import getpass; answer = getpass.getuser()") == policy.USER


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


# --- each runner is a separate user: what that keeps it from, and when there is none


AT_OTHERS = (
    "os.sched_setaffinity(pid, [0])",
    "os.kill(pid, 0)",
    "os.kill(pid, 19)",
    "os.setpriority(os.PRIO_PROCESS, pid, 19)",
    "resource.prlimit(pid, resource.RLIMIT_CPU, (1, 1))",
    "syscall(101, 16, pid, 0, 0)",
    "syscall(310, pid, 0, 0, 0, 0, 0)",
    "open(f'/proc/{pid}/environ', 'rb').read()",
    "open(f'/proc/{pid}/maps').read()",
    "open(f'/proc/{pid}/mem', 'rb').read(1)",
    "open(f'/proc/{pid}/comm', 'w').write('x')",
    "os.readlink(f'/proc/{pid}/fd/0')",
    "open(f'/proc/{pid}/oom_score_adj', 'w').write('1000')",
)


@pytest.mark.parametrize("attempt", AT_OTHERS)
@pytest.mark.parametrize("whom", ["judge", "reaper", "runner"])
def test_a_user_of_its_own_cannot_touch_other_processes(two_users, whom, attempt):
    one, other = two_users
    pid = {"judge": os.getpid(), "reaper": one._process.pid, "runner": other.pid}[whom]
    reply = ask(one, f"import os, resource; pid = {pid}; {attempt}")
    assert reply.get("errno") in REFUSED, reply


def test_a_user_of_its_own_reads_and_writes_in_its_folders_only(two_users):
    """In spite of the capability with which it passes closed folders, and of folders that are open to all."""
    one, other = two_users
    places = [answer(child, "import os; answer = [os.environ['HOME'], os.environ['TMPDIR']]") for child in two_users]
    answer(other, "import os; open(os.environ['TMPDIR'] + '/x', 'w').write('1'); os.chmod(os.environ['TMPDIR'], 0o777)")
    answer(one, "import os; open(os.environ['TMPDIR'] + '/x', 'w').write('1')")
    for path in (f"{places[1][1]}/x", "/etc/gshadow", str(Path.home() / ".bashrc"), str(ROOT / "README.md")):
        assert ask(one, f"open({path!r}).read()").get("errno") in REFUSED or not os.path.exists(path), path
    for path in (f"{places[1][1]}/y", "/tmp/y", "/var/tmp/y", "/dev/shm/y", f"{ROOT}/y", f"{sys.prefix}/y", "/usr/y"):
        assert ask(one, f"open({path!r}, 'w')").get("errno") in REFUSED, path


def test_what_it_may_read_is_there_also_for_those_who_ask_first(two_users):
    """access() sees the interpreter as open() does: else programs beside it seem to be missing."""
    code = f"import os, shutil; answer = [os.access({sys.executable!r}, os.X_OK), shutil.which({sys.executable!r})]"
    assert answer(two_users[0], code) == [True, sys.executable]


def test_the_judge_can_read_the_memory_of_another_user(two_users):
    """exec must leave it dumpable, else not even its own /proc is its."""
    child = two_users[0]
    text = "told to nobody else"
    address = answer(
        child, f"import ctypes; kept = ctypes.create_string_buffer({text!r}.encode()); answer = ctypes.addressof(kept)"
    )
    buffer = ctypes.create_string_buffer(len(text))
    local = struct.pack("=QQ", ctypes.addressof(buffer), len(text))
    remote = struct.pack("=QQ", address, len(text))
    assert ctypes.CDLL(None).process_vm_readv(child.pid, local, 1, remote, 1, 0) == len(text)
    assert buffer.raw == text.encode()
    assert os.stat(f"/proc/{child.pid}/environ").st_uid in policy.UIDS


PINS = """
#include <omp.h>
#include <sched.h>
#include <cstdio>
int main() {
    int narrow = 0;
#pragma omp parallel reduction(+ : narrow)
    {
        cpu_set_t set;
        sched_getaffinity(0, sizeof set, &set);
        narrow += CPU_COUNT(&set) == 1;
    }
    printf("%d of %d\\n", narrow, omp_get_max_threads());
}
"""


def test_a_user_of_its_own_can_compile_and_pin_its_threads(two_users):
    """By their numbers, as the C library and OpenMP do."""
    seen = answer(
        two_users[0],
        f"""
        import ctypes, os, subprocess, threading
        event = threading.Event()
        thread = threading.Thread(target=event.wait); thread.start()
        os.sched_setaffinity(thread.native_id, [min(os.sched_getaffinity(0))])
        with open("pins.cpp", "w") as file: file.write({PINS!r})
        subprocess.run(["g++", "-fopenmp", "pins.cpp", "-o", "pins"], check=True)
        bound = dict(os.environ, OMP_PROC_BIND="true", OMP_NUM_THREADS="2", OMP_PLACES="threads")
        said = subprocess.run(["./pins"], env=bound, capture_output=True, text=True)
        answer = [len(os.sched_getaffinity(thread.native_id)), said.stdout + said.stderr]
        event.set(); thread.join()
        """,
    )
    assert seen == [1, "2 of 2\n"]


def test_a_closed_folder_is_no_reason_to_share_a_user():
    """So that the tests of users of their own are not left out without a word."""
    needs("landlock")
    why = policy.offered()["uid"]
    if os.geteuid() != 0 or why.startswith(("uids", "root here", "other users cannot use /dev")):
        pytest.skip(why)
    assert why == ""


def test_the_probe_says_what_a_shared_user_costs(monkeypatch):
    monkeypatch.setattr(policy, "offered", lambda: {**dict.fromkeys(policy.MEASURES, ""), "uid": "not started as root"})
    assert policy.probe()["uid"] == "off: not started as root"


def test_two_leases_are_two_uids(monkeypatch):
    if os.geteuid() != 0:
        pytest.skip("needs root")
    monkeypatch.setattr(policy, "offered", lambda: dict.fromkeys(policy.MEASURES, ""))
    # The last ones: runners of other tests and judges have the first.
    monkeypatch.setattr(policy, "UIDS", policy.UIDS[-2:])
    with policy.user() as first, policy.user() as second:
        assert {first, second} == set(policy.UIDS)
        with pytest.raises(policy.SandboxError, match="in use"), policy.user():
            pass
    with policy.user() as again:
        assert again in policy.UIDS
