"""Nothing of a child outlives the child, or the judge, however either ends."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.sandbox.process import Child, Died
from tests.support.jails import DAEMON, LIMIT_S, ROOT, alive, answer, ask, gone, jail_in


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
    deadline = time.monotonic() + 60
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
from tests.support.jails import DAEMON, answer, jail_in
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
    deadline = time.monotonic() + 60
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


def test_the_guard_and_the_jail_start_without_a_heavy_import():
    """They run once for every child; torch would take seconds, and json a third of a reaper's time."""
    code = (
        "import sys; sys.path.append('harness/sandbox'); import reaper, confine; "
        "print(sorted({'json', 'subprocess', 're', 'enum', 'torch', 'dataclasses'} & set(sys.modules)))"
    )
    command = [sys.executable, "-I", "-S", "-c", code]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout == "[]\n"
