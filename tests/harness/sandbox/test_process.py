"""A child process: limits on what it takes and sends, and what the kernel says of it."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.sandbox import policy, process, reaper
from harness.sandbox.process import Child, Died
from tests.support import comes
from tests.support.jails import DAEMON, LIMIT_S, REFUSED, ROOT, alive, answer, ask, gone, jail_in
from tests.support.marks import first


def test_closing_is_quick(tmp_path):
    jail = jail_in(tmp_path)
    times = []
    for _ in range(3):
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


WRITES = """
folder, kept = os.open(os.environ["TMPDIR"], os.O_RDONLY), []
for _ in range(depth):
    os.mkdir("n" * 250, 0o300, dir_fd=folder)
    folder = os.open("n" * 250, os.O_PATH, dir_fd=folder)
for n in range(10**7):
    with open(os.open(str(n), os.O_WRONLY | os.O_CREAT, dir_fd=folder), "wb") as file:
        file.write(bytes(size))
        if nameless:
            os.unlink(str(n), dir_fd=folder)
            kept.append(os.dup(file.fileno()))
"""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("depth, size, nameless = 0, 2**22, False", "bytes of files, the limit is 134,217,728"),
        ("depth, size, nameless = 0, 2**22, True", "bytes of files, the limit is 134,217,728"),
        ("depth, size, nameless = 1200, 2**22, False", "bytes of files, the limit is 134,217,728"),
        ("depth, size, nameless = 0, 0, False", "files, the limit is 3,000"),
    ],
    ids=["files", "without a name", "deep and closed to its owner", "many"],
)
def test_files_have_a_limit_in_sum(tmp_path, monkeypatch, words, said):
    monkeypatch.setattr(process, "FILES_LIMIT", {"-B1": 2**27, "--inodes": 3000})
    child = Child("jailed", jail=jail_in(tmp_path))
    with pytest.raises(Died, match=f"out of disk: has .* {said}") as died:
        ask(child, f"import os\n{words}\n{WRITES}")
    assert died.value.status == "RUNTIME_ERROR" and not alive(child.pid)
    reaper.remove_tree(str(tmp_path / "tmp"))


def test_a_child_cannot_fill_the_judge_with_descriptors(child):
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


def test_what_it_started_is_seen_and_threads_are_no_processes(jailed):
    assert jailed.processes() == []
    pid = answer(
        jailed,
        "import threading, subprocess\nevent = threading.Event()\n"
        "thread = threading.Thread(target=event.wait); thread.start()\n"
        "other = subprocess.Popen(['sleep', '60']); answer = other.pid",
    )
    assert jailed.processes() == [pid]
    answer(jailed, "event.set(); thread.join(); other.kill(); other.wait()")
    assert jailed.processes() == []


MAPS = "import mmap, os; kept = mmap.mmap({}, 2**26); kept.write(bytes(2**26))"
FILE = "import os; kept = open(os.environ['TMPDIR'] + '/f', 'wb'); kept.write(b'1' * 2**26); kept.flush(); "


@pytest.mark.parametrize(
    ("take", "counts"),
    [
        ("kept = bytearray(b'1') * 2**26", True),
        (MAPS.format(-1), True),
        (f"{FILE}os.unlink(kept.name)", True),
        (f"{MAPS.format('fds[0]')}; os.close(fds[0])", False),
    ],
    ids=["memory", "shared memory", "a nameless file", "what the judge shares"],
)
def test_private_bytes_count_what_a_child_keeps(child, take, counts):
    fd = os.memfd_create("buffer")
    os.ftruncate(fd, 2**26)
    before = child.private_bytes()
    child.send({"code": take}, () if counts else (fd,))
    reply, _ = child.receive(LIMIT_S)
    assert "answer" in reply, reply
    os.close(fd)
    assert 2**26 * counts <= child.private_bytes() - before < 2**26 * counts + 2**23


def test_a_hardened_process_is_closed_to_its_own_user(tmp_path, monkeypatch):
    """Two processes with equal rights and no other fence between them: one reads the other until that hardens."""
    monkeypatch.setattr(policy, "offered", lambda: dict.fromkeys(policy.MEASURES, "not here"))
    reader, holder = (Child("jailed", jail=jail_in(tmp_path / name)) for name in ("reader", "holder"))
    attempt = f"answer = len(open('/proc/{holder.pid}/environ', 'rb').read())"
    assert answer(reader, attempt) > 0
    answer(holder, "import ctypes; ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)")
    reply = ask(reader, attempt)
    reader.close()
    holder.close()
    assert reply.get("errno") in REFUSED, reply
    code = (
        "import ctypes; from harness.sandbox import process; process.harden(); "
        "print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == "0\n"


def test_a_program_that_cannot_be_executed_is_named_with_what_to_do(tmp_path):
    program = tmp_path / "python"
    program.write_text("")
    guarded = process.Guarded([str(program)], {}, (), None, None)
    with pytest.raises(policy.SandboxError, match=rf"{program}'. Make it, .* executable for the judge's user"):
        guarded.pid  # noqa: B018
    guarded.end()


# --- nothing of a child outlives the child, or the judge, however either ends


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
        number, name = (11, "SIGSEGV") if jail else (40, "signal 40")
        code, said = ("os._exit(0)", "status 0") if how == "exit" else (f"os.kill(os.getpid(), {number})", name)
        with pytest.raises(Died, match=said) as died:
            ask(child, code)
        assert died.value.status == "RUNTIME_ERROR"
    assert not any(map(alive, pids)), "it is over when the call returns"


def test_what_forks_on_and_on_is_ended(child, tmp_path):
    marker = str(tmp_path / "home")
    answer(child, FORKS)
    beat = Path(marker, "beat")
    assert comes(lambda: beat.exists() and beat.stat().st_size >= 50), "it did fork on and on"
    child.kill()
    size = beat.stat().st_size
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
from tests.support import comes
from tests.support.jails import DAEMON, answer, jail_in
child = process.Child("jailed", jail=jail_in(Path({place!r})))
print(answer(child, DAEMON), child.pid, child._process.pid, flush=True)
{then}
"""


ENDS = ["time.sleep(600)", "os._exit(1)", "os.kill(os.getpid(), 15)", "os.kill(os.getpid(), 11)"]


@pytest.mark.parametrize("then", first(ENDS, 2))
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


@pytest.mark.parametrize("moment_s", first([0.01, 0, 0.02, 0.05]))
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
    assert comes(lambda: not _with_environment(marker.encode()))


def _with_environment(text: bytes) -> list[int]:
    """The living processes in whose environment `text` stands."""
    found = []
    for submission in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if text in (submission / "environ").read_bytes() and alive(int(submission.name)):
                found.append(int(submission.name))
    return found


def test_the_guard_cannot_be_talked_out_of_it(child):
    """Polite signals do not end it, and when it is killed its child dies with it."""
    pids = [child._process.pid, child.pid]
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(pids[0], number)
    assert answer(child, "answer = 1") == 1 and alive(pids[0])
    os.kill(pids[0], signal.SIGKILL)
    assert gone(pids[1:])


def test_the_guard_and_the_jail_start_without_a_heavy_import():
    """They run once for every child; torch would take seconds, and json a third of a reaper's time."""
    code = (
        "import sys; sys.path.append('harness/sandbox'); import reaper, confine; "
        "print(sorted({'json', 'subprocess', 're', 'enum', 'torch', 'dataclasses'} & set(sys.modules)))"
    )
    command = [sys.executable, "-I", "-S", "-c", code]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout == "[]\n"
