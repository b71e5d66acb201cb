"""A jailed child can reach nothing but what it was given, and nothing of a child outlives it, or the judge."""

import contextlib
import ctypes
import errno
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.sandbox import confine, policy, process
from harness.sandbox.policy import Jail
from harness.sandbox.process import Child, Died
from tests.support import SUPPORT

ROOT = process.ROOT
SECRET = "held by the judge"
LIMIT_S = 60
REFUSED = (errno.EPERM, errno.EACCES)
WRONG = next((ROOT / "problems" / "nvfp4_gemv" / "wrong").glob("*.py"))
MAKEFILE = str(ROOT / "Makefile")
PLAIN_PATH = {"PATH": "/usr/bin:/bin"}
SYSTEM_PYTHON = "/usr/bin/python3"


def jail_in(place: Path, **options: object) -> Jail:
    """A jail with folders in `place`, and the module `jailed` (tests/support/jailed.py) as its code."""
    folders = [place / name for name in ("code", "home", "tmp", "cache")]
    for folder in folders:
        folder.mkdir(parents=True)
    (folders[0] / "harness" / "runner").mkdir(parents=True)
    for name in ("harness/__init__.py", "harness/runner/wire.py"):
        shutil.copy(ROOT / name, folders[0] / name)
    shutil.copy(SUPPORT / "jailed.py", folders[0])
    return Jail(*folders, **options)


def ask(child: Child, code: str, limit_s: float = LIMIT_S) -> dict:
    return child.request({"code": textwrap.dedent(code)}, limit_s)[0]


def answer(child: Child, code: str) -> object:
    reply = ask(child, code)
    assert "answer" in reply, reply
    return reply["answer"]


@contextlib.contextmanager
def child_of_its_own_user(**options: object) -> Iterator[Child]:
    """A jailed child that no other process shares its user with."""
    if why := policy.offered()["uid"]:
        pytest.skip(f"no user of its own is to be had here: {why}")
    with policy.user() as uid, tempfile.TemporaryDirectory() as base:
        os.chmod(base, 0o711)
        jail = jail_in(Path(base), uid=uid, **options)
        for folder in (jail.home, jail.tmp, jail.cache):
            os.chown(folder, uid, uid)
        child = Child("jailed", jail=jail)
        try:
            yield child
        finally:
            child.close()


@pytest.fixture(scope="module", params=["a user of its own", "the judge's user"])
def jailed(request, tmp_path_factory):
    if request.param == "a user of its own":
        with child_of_its_own_user() as child:
            yield child
        return
    child = Child("jailed", jail=jail_in(tmp_path_factory.mktemp("jail")))
    yield child
    child.close()


@pytest.fixture(scope="module")
def open_child():
    """A child of the judge's own, without a jail: it stands for the checker."""
    child = Child("tests.support.jailed")
    yield child
    child.close()


def needs(*measures: str) -> None:
    for name in measures:
        if why := policy.offered()[name]:
            pytest.skip(f"{name} is not to be had here: {why}")


# What a submission could try, by what stops it. {parent}, {checker}: their pids.
ATTEMPTS = {
    "list the checkout": ("landlock", f"import os; os.listdir({str(ROOT)!r})"),
    "read the judge": ("landlock", f"open({str(ROOT / 'harness' / 'run.py')!r}).read()"),
    "read a reference": ("landlock", f"open({str(ROOT / 'problems/nvfp4_gemv/reference.py')!r}).read()"),
    "write into the checkout": ("landlock", f"open({str(ROOT / 'planted')!r}, 'w')"),
    "append to a record": ("landlock", f"open({str(ROOT / 'README.md')!r}, 'a')"),
    "write beside its folder": ("landlock", "open({home!r} + '/../planted', 'w')"),
    "write in the common temporary folder": ("landlock", "open('/tmp/planted-by-a-test', 'w')"),
    "leave shared memory": ("landlock", "open('/dev/shm/planted-by-a-test', 'w')"),
    "change its own code": ("landlock", "open({code!r} + '/harness/wire.py', 'a')"),
    "replace its own code": ("landlock", "import os; os.rename({code!r} + '/harness', {tmp!r} + '/harness')"),
    "read root's password file": ("landlock", "open('/etc/shadow').read()"),
    "read the users' file": ("landlock", "open('/etc/passwd').read()"),
    "read the file of hosts": ("landlock", "open('/etc/hosts').read()"),
    "read a wrong submission": ("landlock", f"open({str(WRONG)!r}).read()"),
    "read a test": ("landlock", f"open({str(ROOT / 'tests' / 'conftest.py')!r}).read()"),
    "list the records": ("landlock", f"import os; os.listdir({str(ROOT / 'leaderboard')!r})"),
    "list what lies beside the checkout": ("landlock", f"import os; os.listdir({str(ROOT.parent)!r})"),
    "list the judge's home": ("landlock", f"import os; os.listdir({str(Path.home())!r})"),
    "list the common temporary folder": ("landlock", "import os; os.listdir('/tmp')"),
    "read a temporary file of another process": ("landlock", "open({listening!r} + '.txt').read()"),
    "list the kernel's traces": ("landlock", "import os; os.listdir('/sys/kernel/debug')"),
    "read the parent's memory": ("landlock", "open('/proc/{parent}/mem', 'rb').read(1)"),
    "read the parent's environment": ("landlock", "open('/proc/{parent}/environ', 'rb').read()"),
    "map the parent": ("landlock", "open('/proc/{parent}/maps').read()"),
    "read the first process's environment": ("landlock", "open('/proc/1/environ', 'rb').read()"),
    "map the first process": ("landlock", "open('/proc/1/maps').read()"),
    "look at the parent's files": ("landlock", "import os; os.readlink('/proc/{parent}/fd/0')"),
    "read the checker's memory": ("landlock", "open('/proc/{checker}/mem', 'rb').read(1)"),
    "read the checker's environment": ("landlock", "open('/proc/{checker}/environ', 'rb').read()"),
    "map the checker": ("landlock", "open('/proc/{checker}/maps').read()"),
    "enter by the parent's root": ("landlock", "import os; os.listdir('/proc/{parent}/root/')"),
    "signal the parent": ("", "import os; os.kill({parent}, 0)"),
    "signal its reaper": ("", "import os; os.kill(os.getppid(), 0)"),
    "signal everybody": ("", "import os; os.kill(-1, 0)"),
    "signal the checker": ("scope", "import os; os.kill({checker}, 0)"),
    "signal the checker by descriptor": (
        "scope", "import os, signal; signal.pidfd_send_signal(os.pidfd_open({checker}), 0)"),
    "trace the parent": ("seccomp", "syscall(101, 16, {parent}, 0, 0)"),
    "be traced": ("seccomp", "syscall(101, 0, 0, 0, 0)"),
    "read memory across": ("seccomp", "syscall(310, {checker}, 0, 0, 0, 0, 0)"),
    "take a descriptor across": ("seccomp", "import os; syscall(438, os.pidfd_open({checker}), 0, 0)"),
    "open an internet socket": ("network", "import socket; socket.socket()"),
    "open an internet socket of the sixth version": (
        "network", "import socket; socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)"),
    "open a packet socket": ("network", "import socket; socket.socket(17, socket.SOCK_RAW)"),
    "open a socket to the host": ("network", "import socket; socket.socket(40, socket.SOCK_STREAM)"),
    "connect to a service by its path": (
        "network", "import socket; socket.socket(socket.AF_UNIX).connect({listening!r})"),
    "connect to a service by its name": (
        "network", "import socket; socket.socket(socket.AF_UNIX).connect('\\0kernel-judge-test')"),
    "hold memory that nobody counts": ("memfd", "import os; os.memfd_create('x')"),
    "take System V shared memory": ("seccomp", "syscall(29, 0, 4096, 0o1600)"),
    "open a message queue": ("seccomp", "syscall(240, b'/x', 0o102, 0o600, 0)"),
    "set up a ring of calls": ("seccomp", "syscall(425, 8, bytes(120))"),
    "count events": ("seccomp", "syscall(298, bytes(128), 0, -1, -1, 0)"),
    "load a program into the kernel": ("seccomp", "syscall(321, 0, bytes(128), 128)"),
    "use the kernel's keys": ("seccomp", "syscall(250, 0, -3, 0, 0, 0)"),
    "catch page faults": ("seccomp", "syscall(323, 1)"),
    "leave its namespaces": ("seccomp", "syscall(272, 0x10000000)"),
    "fork into another namespace": ("seccomp", "syscall(56, 0x10000011, 0, 0, 0, 0)"),
    "mount": ("seccomp", "syscall(165, b'none', b'/tmp', b'tmpfs', 0, 0)"),
    "change its root": ("seccomp", "import os; os.chroot('/')"),
    "set the parent's limits": ("seccomp", "syscall(302, {parent}, 7, 0, bytes(16))"),
    "set the checker's priority": ("seccomp", "import os; os.setpriority(os.PRIO_PROCESS, {checker}, 19)"),
    "pin the checker": ("seccomp", "import os; os.sched_setaffinity({checker}, [0])"),
    "pin the parent": ("seccomp", "import os; os.sched_setaffinity({parent}, [0])"),
    "make the checker a background process": ("seccomp", "syscall(144, {checker}, 5, bytes(4))"),
    "change who may read a file of the checkout": ("seccomp", f"import os; os.chmod({MAKEFILE!r}, 0o644)"),
    "change a time in the checkout": ("seccomp", f"import os; os.utime({MAKEFILE!r})"),
    "give a file away": ("seccomp", f"import os; os.chown({MAKEFILE!r}, 1, 1)"),
    "mark a file": ("seccomp", f"import os; os.setxattr({MAKEFILE!r}, 'user.x', b'1')"),
    "become root": ("", "import os; os.setgroups([0])"),
    "set the clock": ("", "import time; time.clock_settime(time.CLOCK_REALTIME, time.time())"),
}  # fmt: skip


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
        by_name.bind("\0kernel-judge-test")
        by_name.listen()
        place = Path(answer(jailed, "import os; answer = os.environ['HOME']")).parent
        code = code.format(
            parent=os.getpid(), checker=open_child.pid, listening=path, home=str(place / "home"),
            tmp=str(place / "tmp"), code=str(place / "code"),
        )  # fmt: skip
        reply = ask(jailed, code)
    assert reply.get("errno") in REFUSED, reply


OPEN_TOO = (
    "list the checkout", "read the judge", "open an internet socket", "connect to a service by its path",
    "hold memory that nobody counts", "signal the parent", "change a time in the checkout",
    "set the checker's priority", "pin the checker", "read the users' file", "read a temporary file of another process",
    "list what lies beside the checkout", "list the judge's home",
)  # fmt: skip


@pytest.mark.parametrize("what", OPEN_TOO)
def test_an_unjailed_child_can(open_child, tmp_path, what):
    """So that the refusals above are the jail's."""
    path = str(tmp_path / "listening")
    Path(f"{path}.txt").write_text(SECRET)
    with socket.socket(socket.AF_UNIX) as by_path:
        by_path.bind(path)
        by_path.listen()
        other = subprocess.Popen(["sleep", "60"])
        try:
            reply = ask(open_child, ATTEMPTS[what][1].format(parent=os.getpid(), checker=other.pid, listening=path))
        finally:
            other.kill()
            other.wait()
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
    "/etc/passwd": "root:", "/etc/shadow": "root:", "/etc/group": "root:", str(WRONG): "custom_kernel",
    str(ROOT / "problems" / "nvfp4_gemv" / "reference.py"): "torch", str(ROOT / "tests" / "conftest.py"): "pytest",
}  # fmt: skip


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
    needs("capabilities", "seccomp")
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


def test_the_environment_is_made_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("A_TOKEN", SECRET)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("CUDA_CACHE_PATH", "/elsewhere")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT), str(ROOT.parent), "/"]))
    jail = jail_in(tmp_path / "jail")
    child = Child("jailed", {"ADDED": "yes"}, jail)
    seen = answer(child, "import os, sys; answer = [dict(os.environ), sys.path]")
    child.close()
    environment, path = seen
    assert environment["USER"] == environment["LOGNAME"] == policy.USER
    assert environment["TORCHINDUCTOR_COMPILE_THREADS"] == "1"
    assert SECRET not in str(environment) and "OMP_NUM_THREADS" not in environment
    assert environment["CUDA_VISIBLE_DEVICES"] == "0" and environment["ADDED"] == "yes"
    assert environment["PYTHONPATH"] == os.pathsep.join([str(jail.code), str(tmp_path)])
    private = [key for key, value in environment.items() if value.startswith(str(tmp_path / "jail"))]
    assert {"HOME", "TMPDIR", "KERNEL_BUILD_DIR", "CUDA_CACHE_PATH", "XDG_CACHE_HOME"} < set(private)
    assert environment["HUMMING_CACHE_DIR"].startswith(str(jail.cache)), "what a compile step keeps"
    assert str(ROOT) not in path and "" not in path


def test_no_other_descriptor_is_inherited(tmp_path):
    """Standard input, output and error, and its socket; the lowest free one is the one that lists them."""
    child = Child("jailed", jail=jail_in(tmp_path))
    seen = answer(child, "import os; answer = [sorted(map(int, os.listdir('/proc/self/fd'))), sock.fileno()]")
    child.close()
    assert seen == [[0, 1, 2, *sorted([3, seen[1]])], seen[1]]


@pytest.mark.parametrize("measure", policy.MEASURES)
def test_each_measure_can_be_left_out_alone(tmp_path, measure):
    jail = jail_in(tmp_path, without=frozenset({measure}))
    assert measure not in jail.measures()
    child = Child("jailed", jail=jail)
    assert answer(child, "answer = 6 * 7") == 42
    child.close()


@pytest.mark.parametrize(
    ("left_out", "lifts"),
    [("landlock", "read the judge"), ("seccomp", "open an internet socket"), ("network", "open an internet socket"),
     ("memfd", "hold memory that nobody counts")],
)  # fmt: skip
def test_a_measure_left_out_lifts_what_it_stopped(tmp_path, left_out, lifts):
    needs(left_out)
    jail = jail_in(tmp_path, without=frozenset({left_out}))
    assert left_out not in jail.measures()
    child = Child("jailed", jail=jail)
    reply = ask(child, ATTEMPTS[lifts][1])
    child.close()
    assert "answer" in reply, reply


@pytest.mark.parametrize("target", ["parent", "reaper"])
@pytest.mark.parametrize("call", ["os.kill(pid, 0)", "os.kill(-os.getpgid(pid), 0)", "syscall(234, pid, pid, 0)"])
def test_without_scopes_the_judge_is_protected_by_name(tmp_path, target, call):
    """As on a kernel whose Landlock does not govern signals."""
    needs("seccomp")
    child = Child("jailed", jail=jail_in(tmp_path, without=frozenset({"scope"})))
    pid = os.getpid() if target == "parent" else child._process.pid
    reply = ask(child, f"import os; pid = {pid}; {call}")
    child.close()
    assert reply.get("errno") in REFUSED, reply


def test_a_jail_that_cannot_be_made_is_the_judges_fault(tmp_path):
    """Not a verdict on the submission, and nothing runs half confined."""
    jail = jail_in(tmp_path)
    shutil.rmtree(jail.home)
    child = Child("jailed", jail=jail)
    with pytest.raises(policy.SandboxError, match="home"):
        child.request({"code": "answer = 1"}, LIMIT_S)
    child.kill()


def test_the_probe_says_on_or_why_not():
    found = policy.probe()
    assert set(policy.MEASURES) < set(found) and all(isinstance(value, str) for value in found.values())
    assert all(found[name].startswith(("on", "off: ")) and found[name] != "off: " for name in policy.MEASURES)
    shown = subprocess.run(
        [sys.executable, "-m", "harness.sandbox", "--probe"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert set(json.loads(shown.stdout)) == set(found)


def test_the_probe_without_landlock_and_filter(monkeypatch):
    def missing() -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(confine, "landlock_abi", missing)
    monkeypatch.setattr(confine, "seccomp_available", missing)
    policy.offered.cache_clear()
    try:
        found = policy.probe()
    finally:
        policy.offered.cache_clear()
    assert all(found[name].startswith("off: ") for name in ("landlock", "tcp", "scope", "seccomp", "network", "memfd"))
    assert "can signal" in found["reaper"] or found["uid"].startswith("on")


def test_who_it_is_needs_no_file_of_users(jailed):
    assert answer(jailed, "import getpass; answer = getpass.getuser()") == policy.USER


def test_of_homes_only_the_folders_that_are_named_may_be_read(tmp_path, monkeypatch):
    """A variable that names a home folder, or one above it, opens neither."""
    home = tmp_path / "home" / "me"
    for folder in ("bin", "modules", ".ssh"):
        (home / folder).mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    above = [str(home), str(home.parent), "/", str(Path("~root").expanduser()), str(ROOT.parent)]
    monkeypatch.setenv("PATH", os.pathsep.join([*above, str(home / "bin"), os.environ["PATH"]]))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*above, str(home / "modules")]))
    monkeypatch.setenv("LD_LIBRARY_PATH", os.pathsep.join(above))
    monkeypatch.setattr(sys, "path", [*above, *sys.path])
    paths = [Path(path) for path in policy.read_paths()]
    assert policy.python_path() == [str(home / "modules")] and policy.library_path() == []
    assert [path for path in paths if tmp_path in path.parents] == [home / "modules", home / "bin"]
    readable = [*above[:2], str(home / ".ssh"), str(ROOT.parent), str(Path("~root/.ssh").expanduser())]
    assert not [path for path in paths if any(path == Path(x) or path in Path(x).parents for x in readable)]


def test_the_checkout_is_cut_out_of_what_may_be_read(monkeypatch):
    for path in (ROOT, ROOT.parent, ROOT / "harness", Path("/")):
        monkeypatch.setattr(sys, "path", [str(path), *sys.path])
    monkeypatch.setenv("PATH", os.pathsep.join([str(ROOT), str(ROOT.parent), os.environ["PATH"]]))
    paths = [Path(path) for path in policy.read_paths()]
    inside = [path for path in paths if ROOT in path.parents]
    assert not [path for path in paths if path == ROOT or path in ROOT.parents]
    assert not [path for path in inside if path.relative_to(ROOT).parts[0] in policy.SECRET]
    prefix = Path(sys.prefix).resolve()
    assert [path for path in paths if prefix == path or path in prefix.parents]
    assert not [path for path in paths if path.parent == ROOT.parent and path not in (prefix, *prefix.parents)]


# ---- users of their own


@pytest.fixture(scope="module")
def two_users():
    with child_of_its_own_user() as first, child_of_its_own_user() as second:
        yield first, second


AT_OTHERS = (
    "os.sched_setaffinity(pid, [0])", "os.kill(pid, 0)", "os.kill(pid, 19)", "os.setpriority(os.PRIO_PROCESS, pid, 19)",
    "resource.prlimit(pid, resource.RLIMIT_CPU, (1, 1))", "syscall(101, 16, pid, 0, 0)",
    "syscall(310, pid, 0, 0, 0, 0, 0)", "open(f'/proc/{pid}/environ', 'rb').read()", "open(f'/proc/{pid}/maps').read()",
    "open(f'/proc/{pid}/mem', 'rb').read(1)", "open(f'/proc/{pid}/comm', 'w').write('x')",
    "os.readlink(f'/proc/{pid}/fd/0')",
    "open(f'/proc/{pid}/oom_score_adj', 'w').write('1000')",
)  # fmt: skip


@pytest.mark.parametrize("attempt", AT_OTHERS)
@pytest.mark.parametrize("whom", ["judge", "reaper", "runner"])
def test_a_user_of_its_own_cannot_touch_other_processes(two_users, whom, attempt):
    one, other = two_users
    pid = {"judge": os.getpid(), "reaper": one._process.pid, "runner": other.pid}[whom]
    reply = ask(one, f"import os, resource; pid = {pid}; {attempt}")
    assert reply.get("errno") in REFUSED, reply


@pytest.mark.parametrize("attempt", AT_OTHERS[:5])
def test_the_user_is_what_keeps_it_from_them(attempt):
    """Also where the filter and Landlock's scopes are no help."""
    options = {"without": frozenset({"seccomp", "scope"})}
    with child_of_its_own_user(**options) as one, child_of_its_own_user(**options) as other:
        for pid in (os.getpid(), other.pid):
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


def test_runners_of_one_user_cannot_pin_each_other(tmp_path):
    """As where the judge is not root. One without the filter can."""
    needs("seccomp")
    options = {"one": {}, "other": {}, "unfiltered": {"without": frozenset({"seccomp"})}}
    one, other, unfiltered = (Child("jailed", jail=jail_in(tmp_path / n, **o)) for n, o in options.items())
    attempt = f"import os; os.sched_setaffinity({other.pid}, os.sched_getaffinity(0))"
    replies = [ask(child, attempt) for child in (one, unfiltered)]
    for child in (one, other, unfiltered):
        child.close()
    assert replies[0].get("errno") in REFUSED and "answer" in replies[1], replies


def test_the_judge_can_read_the_memory_of_another_user(two_users):
    """exec must leave it dumpable, else not even its own /proc is its."""
    child = two_users[0]
    text = "told to nobody else"
    address = answer(child, f"import ctypes; kept = ctypes.create_string_buffer({text!r}.encode()); "
                     "answer = ctypes.addressof(kept)")  # fmt: skip
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


def test_without_landlock_none_passes_closed_folders(monkeypatch):
    if policy.offered()["uid"] or not policy.passing():
        pytest.skip("users of their own need no help here")
    with policy.user(frozenset({"landlock"})) as uid:
        assert uid is None
    jail = Jail(*[Path("/nowhere")] * 4, uid=policy.UIDS[0], without=frozenset({"landlock"}))
    assert "uid" not in jail.measures() and jail.orders()["uid"] is None


def test_the_probe_says_what_a_shared_user_costs(monkeypatch):
    monkeypatch.setattr(policy, "offered", lambda: {**dict.fromkeys(policy.MEASURES, ""), "uid": "not started as root"})
    assert policy.probe()["uid"] == "off: not started as root; pinning of other threads is refused"


def other_user(python: str) -> list[str]:
    if os.geteuid() != 0 or not os.access(python, os.X_OK):
        pytest.skip("needs root and a system-wide Python")
    command = [python, "-m", "harness.sandbox"]
    result = subprocess.run([*command, "--probe"], cwd=ROOT, capture_output=True, text=True, env=PLAIN_PATH)
    if result.returncode or not json.loads(result.stdout)["uid"].startswith("on"):
        pytest.skip(f"no user of its own here: {result.stdout}{result.stderr}")
    return command


@pytest.mark.parametrize("python", [SYSTEM_PYTHON, sys.executable], ids=["open to all", "the tests' own"])
def test_started_as_root_each_runner_is_a_user_of_its_own(python):
    """Whether other users can come to the interpreter or not."""
    command = other_user(python)
    # Both are alive at once, for long enough that neither could have had the other's.
    code = (
        "import os, time; print(*os.getresuid(), *os.getresgid(), os.getgroups(), flush=True); "
        "place = os.environ['TMPDIR'] + '/x'; open(place, 'w').close(); os.chmod(place, 0o755); time.sleep(2)"
    )
    runs = [
        subprocess.Popen(
            [*command, "--try", python, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True, env=PLAIN_PATH
        )
        for _ in range(2)
    ]
    seen = [run.communicate(timeout=LIMIT_S)[0].split() for run in runs]
    uids = [int(words[0]) for words in seen]
    assert [run.returncode for run in runs] == [0, 0]
    assert all(words[:6] == [words[0]] * 6 and words[6] == "[]" for words in seen)
    assert uids[0] != uids[1] and set(uids) <= set(policy.UIDS)


def test_two_leases_are_two_uids(monkeypatch):
    if os.geteuid() != 0:
        pytest.skip("needs root")
    monkeypatch.setattr(policy, "offered", lambda: dict.fromkeys(policy.MEASURES, ""))
    monkeypatch.setattr(policy, "UIDS", policy.UIDS[:2])
    with policy.user() as first, policy.user() as second:
        assert {first, second} == set(policy.UIDS)
        with pytest.raises(policy.SandboxError, match="in use"), policy.user():
            pass
    with policy.user() as again:
        assert again in policy.UIDS


# ---- nothing is left

DAEMON = """
import os, time
told, tell = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.setsid()
        os.write(tell, str(os.getpid()).encode())
        os.closerange(0, 64)
        while True:
            time.sleep(1)
    os._exit(0)
os.wait()
answer = int(os.read(told, 32))
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def gone(pids: list[int], limit_s: float = 10) -> bool:
    deadline = time.monotonic() + limit_s
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not any(map(alive, pids))


@pytest.mark.parametrize("jail", [True, False], ids=["jailed", "unjailed"])
@pytest.mark.parametrize("how", ["close", "kill", "exit", "crash", "hang"])
def test_a_daemon_dies_with_its_child(tmp_path, how, jail):
    """It has forked twice and leads a session of its own; the child ends in each of the ways there are."""
    child = Child("jailed" if jail else "tests.support.jailed", jail=jail_in(tmp_path) if jail else None)
    daemon = answer(child, DAEMON)
    pids = [daemon, child.pid, child._process.pid]
    assert all(map(alive, pids)) and os.getsid(daemon) not in (os.getsid(child.pid), os.getsid(0))
    if how == "close":
        child.close()
    elif how == "kill":
        child.kill()
    elif how == "hang":
        with pytest.raises(Died) as died:
            ask(child, "import time; time.sleep(600)", limit_s=0.2)
        assert died.value.status == "TIMEOUT"
    else:
        code, said = ("os._exit(3)", "status 3") if how == "exit" else ("os.kill(os.getpid(), 11)", "SIGSEGV")
        with pytest.raises(Died, match=said) as died:
            ask(child, code)
        assert died.value.status == "RUNTIME_ERROR"
    assert not any(map(alive, pids)), "it is over when the call returns"


def test_what_forks_on_and_on_is_ended(tmp_path):
    child = Child("jailed", jail=jail_in(tmp_path))
    marker = str(tmp_path / "home")
    answer(child, FORKS)
    beat = Path(marker, "beat")
    deadline = time.monotonic() + 10
    while (not beat.exists() or beat.stat().st_size < 50) and time.monotonic() < deadline:
        time.sleep(0.01)
    child.kill()
    size = beat.stat().st_size
    assert size >= 50, "it did fork on and on"
    assert not _with_environment(marker.encode())
    time.sleep(0.1)
    assert beat.stat().st_size == size, "not even a successor lives"


FORKS = """
import os, time
if os.fork() == 0:
    sock.close()
    os.setsid()
    end = time.monotonic() + 30
    while time.monotonic() < end:  # each makes its successor and ends: nobody's list of them is ever complete
        if os.fork():
            os._exit(0)
        with open("beat", "a") as file: file.write("x")
        time.sleep(0.002)
"""

PARENT = """
import os, sys, time
sys.path[:0] = [{root!r}]
from pathlib import Path
from harness.sandbox import process
from tests.harness.sandbox.test_sandbox import DAEMON, answer, jail_in
child = process.Child("jailed", jail=jail_in(Path({place!r})))
print(answer(child, DAEMON), child.pid, child._process.pid, flush=True)
{then}
"""


@pytest.mark.parametrize(
    "then", ["time.sleep(600)", "os._exit(1)", "os.kill(os.getpid(), 15)", "os.kill(os.getpid(), 11)"]
)
def test_nothing_outlives_the_judge(tmp_path, then):
    """kill -9, a plain exit without clearing up, a signal that ends it, a crash."""
    script = PARENT.format(root=str(ROOT), place=str(tmp_path / "jail"), then=then)
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    pids = list(map(int, parent.stdout.readline().split()))
    assert len(pids) == 3
    if "sleep" in then:
        assert all(map(alive, pids))
        parent.kill()
    parent.wait(timeout=LIMIT_S)
    parent.stdout.close()
    assert gone(pids)


@pytest.mark.parametrize("moment_s", [0, 0.01, 0.02, 0.05])
def test_a_judge_killed_while_it_starts_a_child_leaves_nothing(tmp_path, moment_s):
    """The reaper learns what to start from the judge, and ends if that ends first."""
    script = PARENT.format(root=str(ROOT), place=str(tmp_path / "jail"), then="")
    timer = f"import threading; threading.Timer({moment_s}, os.kill, (os.getpid(), 9)).start()"
    start = "child = process.Child"
    script = script.replace(start, f"print(os.getpid(), flush=True); {timer}\n{start}")
    script = script.replace("print(answer", "time.sleep(60); print(answer")
    # LANG is what judge, reaper and child have in common.
    marker = f"C.UTF-8@{os.getpid()}-{time.monotonic_ns()}"
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, "LANG": marker}
    )
    assert int(parent.stdout.readline()) == parent.pid
    assert parent.wait(timeout=LIMIT_S) == -signal.SIGKILL
    parent.stdout.close()
    deadline = time.monotonic() + 10
    while _with_environment(marker.encode()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _with_environment(marker.encode())


def _with_environment(text: bytes) -> list[int]:
    """The living processes in whose environment `text` stands."""
    found = []
    for submission in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if text in (submission / "environ").read_bytes() and alive(int(submission.name)):
                found.append(int(submission.name))
    return found


def test_the_guard_cannot_be_talked_out_of_it(tmp_path):
    """Polite signals do not end it, and when it is killed its child dies with it."""
    child = Child("jailed", jail=jail_in(tmp_path))
    pids = [child._process.pid, child.pid]
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(pids[0], number)
    assert answer(child, "answer = 1") == 1 and alive(pids[0])
    os.kill(pids[0], signal.SIGKILL)
    assert gone(pids[1:])
    child.kill()


def test_closing_is_quick(tmp_path):
    jail = jail_in(tmp_path)
    times = []
    for _ in range(5):
        child = Child("jailed", jail=jail)
        answer(child, "answer = 1")
        start = time.monotonic()
        child.close()
        times.append(time.monotonic() - start)
    assert min(times) < 0.2


def test_memory_of_everything_it_started_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "MEMORY_SHARE", 2**28 / process.available_memory())
    child = Child("jailed", jail=jail_in(tmp_path))
    hoard = "import time; x = bytearray(b'1') * 2**29; time.sleep(60)"
    with pytest.raises(Died, match="out of memory") as died:
        ask(child, f"import subprocess, sys; subprocess.run([sys.executable, '-c', {hoard!r}])")
    assert died.value.status == "RUNTIME_ERROR"


def test_a_child_cannot_fill_the_judge_with_descriptors(tmp_path):
    child = Child("jailed", jail=jail_in(tmp_path))
    answer(child, "answer = 1")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(Died, match="40 descriptors"):
        ask(child, "wire.send(sock, {}, (0,) * 40)")
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_child_that_reads_nothing_does_not_hold_the_judge_up(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "SEND_LIMIT_S", 0.3)
    child = Child("jailed", jail=jail_in(tmp_path))
    child.send({"code": "import time; time.sleep(600)"})
    with pytest.raises(Died, match="broke its connection"):
        for _ in range(100):
            child.send({"code": "#" * 2**16})
    assert not alive(child.pid)


# ---- what the kernel says of a child


def test_what_it_started_is_seen_and_threads_are_no_processes(jailed):
    assert jailed.processes() == []
    pid = answer(jailed, "import threading, subprocess\nevent = threading.Event()\n"
                 "thread = threading.Thread(target=event.wait); thread.start()\n"
                 "other = subprocess.Popen(['sleep', '60']); answer = other.pid")  # fmt: skip
    assert jailed.processes() == [pid]
    answer(jailed, "event.set(); thread.join(); other.kill(); other.wait()")
    assert jailed.processes() == []


def test_a_daemon_is_seen(tmp_path):
    child = Child("jailed", jail=jail_in(tmp_path))
    daemon = answer(child, DAEMON)
    assert child.processes() == [daemon]
    child.kill()
    assert not alive(daemon)


@pytest.mark.parametrize(
    "take",
    ["kept = bytearray(b'1') * 2**26", "import mmap; kept = mmap.mmap(-1, 2**26); kept.write(bytes(2**26))",
     "import os; kept = open(os.environ['TMPDIR'] + '/f', 'wb'); kept.write(b'1' * 2**26); kept.flush(); "
     "os.unlink(kept.name)"],
    ids=["memory", "shared memory", "a nameless file"],
)  # fmt: skip
def test_private_bytes_count_what_a_child_keeps(tmp_path, take):
    child = Child("jailed", jail=jail_in(tmp_path))
    answer(child, "answer = 1")
    before = child.private_bytes()
    answer(child, take)
    grown = child.private_bytes() - before
    child.close()
    assert 2**26 <= grown < 2**26 + 2**23


def test_private_bytes_leave_out_what_the_judge_shares(tmp_path):
    fd = os.memfd_create("buffer")
    os.ftruncate(fd, 2**26)
    child = Child("jailed", jail=jail_in(tmp_path))
    answer(child, "answer = 1")
    before = child.private_bytes()
    code = "import mmap, os; kept = mmap.mmap(fds[0], 2**26); os.close(fds[0]); kept.write(bytes(2**26))"
    child.send({"code": code}, (fd,))
    reply, _ = child.receive(LIMIT_S)
    assert "answer" in reply, reply
    grown = child.private_bytes() - before
    child.close()
    os.close(fd)
    assert grown < 2**23


def test_a_hardened_process_is_closed_to_its_own_user(tmp_path):
    """Two processes with equal rights and no other fence between them: one reads the other until that hardens."""
    options = {"without": frozenset({"landlock", "seccomp"})}
    reader, holder = (Child("jailed", jail=jail_in(tmp_path / name, **options)) for name in ("reader", "holder"))
    confine = tmp_path / "holder" / "code" / "harness" / "sandbox"
    confine.mkdir()
    shutil.copy(ROOT / "harness" / "sandbox" / "confine.py", confine)
    attempt = f"answer = len(open('/proc/{holder.pid}/environ', 'rb').read())"
    assert answer(reader, attempt) > 0
    answer(holder, "from harness.sandbox import confine; confine.prctl('dumpable', 0)")
    reply = ask(reader, attempt)
    reader.close()
    holder.close()
    assert reply.get("errno") in REFUSED, reply


def test_harden_is_that():
    code = (
        "import ctypes; from harness.sandbox import process; process.harden(); "
        "print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == "0\n"


# ---- the filter's program


def run_program(program: bytes, number: int, arguments: tuple[int, ...], arch: int = 0xC000003E) -> int:
    """What a seccomp program returns for a system call, by the kernel's definition of its few instructions."""
    data = struct.pack("=iIQ6Q", number, arch, 0, *arguments)
    code = [struct.unpack_from("=HBBI", program, at) for at in range(0, len(program), 8)]
    at = accumulator = 0
    while True:
        op, yes, no, k = code[at]
        at += 1
        if op == 0x20:
            accumulator = struct.unpack_from("=I", data, k)[0]
        elif op == 0x54:
            accumulator &= k
        elif op == 0x06:
            return k
        else:
            test = {0x15: accumulator == k, 0x35: accumulator >= k, 0x45: bool(accumulator & k)}[op]
            at += yes if test else no


def refused(rules: list, number: int, arguments: tuple[int, ...]) -> int:
    """The error that the first rule which holds gives, 0 if none does: the meaning of a rule, once more."""
    for wanted, error, conditions in rules:
        if wanted == number and all(_holds(test, arguments[i] & 0xFFFFFFFF, value) for i, test, value in conditions):
            return error
    return 0


def _holds(test: str, low: int, value: int | tuple[int, int]) -> bool:
    if test == "masked":
        return low & value[0] == value[1]
    return {"is": low == value, "not": low != value, "any": low & value != 0}[test]


PARENT_PID = os.getppid()
ORDERS = [
    {"measures": list(policy.MEASURES), "uid": None, "abi": 7, "parent": PARENT_PID},
    {"measures": list(policy.MEASURES), "uid": 60600, "abi": 7, "parent": PARENT_PID},
    {"measures": ["seccomp"], "uid": None, "abi": 2, "parent": PARENT_PID},
]
VALUES = st.one_of(
    st.integers(0, 2**64 - 1), st.integers(0, 2000),
    st.sampled_from([0, 1, 2, 16, 2**32 - 1, 2**32 - os.getpgid(0), 0x10000011, os.O_TRUNC, os.O_TRUNC | os.O_RDWR]),
    st.sampled_from([os.getpid(), PARENT_PID]),
)  # fmt: skip


@given(st.sampled_from(ORDERS), st.integers(0, 480), st.tuples(*[VALUES] * 6))
def test_the_program_does_what_the_rules_say(orders, number, arguments):
    rules = confine._rules(orders, os.getpid())
    result = run_program(confine.assemble(rules), number, arguments)
    error = refused(rules, number, arguments)
    assert result == (0x00050000 | error if error else 0x7FFF0000)


@pytest.mark.parametrize(("number", "arch"), [(0x40000000 | 1, 0xC000003E), (0, 0x40000003), (0, 0xC00000B7)])
def test_other_kinds_of_calls_are_refused(number, arch):
    """The x32 and the 32-bit numbers of the same calls would pass by the list."""
    program = confine.assemble(confine._rules(ORDERS[0], os.getpid()))
    assert run_program(program, number, (0,) * 6, arch) == 0x00050000 | errno.ENOSYS


def test_what_an_old_landlock_lets_through_is_filtered():
    """Before its third version Landlock does not know truncation, before its sixth not signals."""
    rules = confine._rules({**ORDERS[0], "measures": ["seccomp", "landlock"], "abi": 2}, os.getpid())
    program = confine.assemble(rules)
    refuse, allow = 0x00050000 | errno.EPERM, 0x7FFF0000
    everybody = 2**32 - 1  # -1, as an int
    assert run_program(program, 76, (0,) * 6) == refuse  # truncate
    assert run_program(program, 257, (0, 0, os.O_TRUNC, 0, 0, 0)) == refuse  # open to read, and truncate
    assert run_program(program, 257, (0, 0, os.O_TRUNC | os.O_WRONLY, 0, 0, 0)) == allow  # Landlock sees this one
    assert run_program(program, 257, (0, 0, os.O_RDONLY, 0, 0, 0)) == allow
    assert run_program(program, 62, (PARENT_PID, 9, 0, 0, 0, 0)) == refuse
    assert run_program(program, 62, (everybody, 9, 0, 0, 0, 0)) == refuse
    assert run_program(program, 62, (os.getpid() + PARENT_PID, 9, 0, 0, 0, 0)) == allow


def test_the_guard_and_the_jail_start_without_a_heavy_import():
    """They run once for every child; torch would take seconds, and json a third of a reaper's time."""
    code = (
        "import sys; sys.path.append('harness/sandbox'); import reaper, confine; "
        "print(sorted({'json', 'subprocess', 're', 'enum', 'torch', 'dataclasses'} & set(sys.modules)))"
    )
    command = [sys.executable, "-I", "-S", "-c", code]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout == "[]\n"
