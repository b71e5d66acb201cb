"""Where the time of a submission on a CPU is spent: by thread, by function if perf is there, and which loops g++
vectorised.

The submission runs in its sandbox as in any call. Threads are read from /proc, and perf attaches, from outside.
"""

import contextlib
import os
import re
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from harness.judge import replies
from harness.judge.handle import RunnerHandle
from harness.judge.limits import COMPILE_LIMIT_S
from harness.judge.outcome import Outcome
from harness.judge.session import Session
from harness.results import text

SECONDS = 1.5  # of calls that are looked at: perf takes some 1,500 samples a processor
LINES = 12  # of a list
NAME = 80  # characters of a function's name
PERF_HZ = 997  # no divisor of what a kernel may do regularly
PERF_LIMIT_S = 60
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_LOOP = re.compile(r"^(?!/usr/)(\S+?):(\d+):\d+: optimized: (.+)$", re.MULTILINE)


def calls(session: Session, handle: RunnerHandle) -> list[str] | Outcome:
    """Return the time of each thread, and of each function, over calls on the present content; or the failure."""
    pid = handle.running.child.pid
    message = {"op": "repeat", "seconds": SECONDS, "baseline": handle.baseline}
    with tempfile.TemporaryDirectory() as folder:
        with perf(pid, Path(folder, "perf.data")) as unseen:
            before, begin = threads(pid), time.monotonic()
            reply = session.ask_runner(handle, replies.Repeated, message, 2 * COMPILE_LIMIT_S)
            wall_s = time.monotonic() - begin
            after = {} if isinstance(reply, Outcome) else threads(pid)
        if isinstance(reply, Outcome):
            return reply
        return [*by_thread(before, after, wall_s, reply.calls), *by_function(Path(folder, "perf.data"), unseen)]


def loops(session: Session, handle: RunnerHandle) -> list[str]:
    """Return which loops of the submission's C++ g++ vectorised."""
    message = {"op": "report", "target": "cpu"}
    reply = session.ask_runner(handle, replies.Profiled, message, 2 * COMPILE_LIMIT_S)
    if isinstance(reply, Outcome):
        return [f"no compiler's report: {reply.reason}"]
    return by_loop(reply.table)


def threads(pid: int) -> dict[int, tuple[str, float]]:
    """Return (name, seconds of processor time) of each living thread of a process; under 0 that of all, ended ones
    included.
    """
    found = {0: _spent(Path(f"/proc/{pid}/stat"))}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found[int(task.name)] = _spent(task / "stat")
    return found


def _spent(stat: Path) -> tuple[str, float]:
    name, _, fields = stat.read_text(errors="replace").partition("(")[2].rpartition(")")
    user, system = fields.split()[11:13]
    return name, (int(user) + int(system)) * _TICK_S


def by_thread(before: dict, after: dict, wall_s: float, calls: int) -> list[str]:
    """Return lines: the processor time of all threads between two readings of `threads`, and of each."""
    spent = {tid: (name, s - before.get(tid, ("", 0.0))[1]) for tid, (name, s) in after.items()}
    _, whole = spent.pop(0)
    rows = sorted(((s, tid, name) for tid, (name, s) in spent.items() if s > 0), reverse=True)
    ended = whole - sum(s for s, *_ in rows)
    lines = [f"{calls} calls in {wall_s:.2f} s: {whole:.2f} s of processor time, {whole / wall_s:.2f} processors busy"]
    lines += [f"  thread {tid} {text.line(name):<16}{s:>8.2f} s {s / wall_s:>5.0%}" for s, tid, name in rows[:LINES]]
    if rows[LINES:]:
        lines.append(f"  {len(rows) - LINES} more threads        {sum(s for s, *_ in rows[LINES:]):>8.2f} s")
    if ended > _TICK_S:
        lines.append(f"  threads that ended           {ended:>8.2f} s {ended / wall_s:>5.0%}")
    return lines


@contextlib.contextmanager
def perf(pid: int, file: Path) -> Iterator[list[str]]:
    """Within: perf samples the process into `file`. Yield what is to be said if it cannot, empty if it does."""
    tool = shutil.which("perf")
    if tool is None:
        yield ["no time by function: perf is not on PATH (Debian: apt install linux-perf)"]
        return
    control, ours = os.pipe(), os.pipe()
    try:
        command = [
            tool,
            "record",
            "-q",
            "-F",
            str(PERF_HZ),
            "-D",
            "-1",
            f"--control=fd:{control[0]},{ours[1]}",
            "-p",
            str(pid),
            "-o",
            str(file),
        ]
        sampler = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, pass_fds=(control[0], ours[1])
        )
        os.write(control[1], b"enable\n")
        ready = False
        end = time.monotonic() + PERF_LIMIT_S
        while not ready and sampler.poll() is None and time.monotonic() < end:
            ready = bool(select.select([ours[0]], [], [], 0.05)[0])
        unseen: list[str] = []
        try:
            yield unseen
        finally:
            with contextlib.suppress(ProcessLookupError):
                sampler.send_signal(signal.SIGINT)
            try:
                said, _ = sampler.communicate(timeout=PERF_LIMIT_S)
            except subprocess.TimeoutExpired:
                sampler.kill()
                said, _ = sampler.communicate()
            if not ready:
                why = (said.strip().splitlines() or ["it did not start"])[0]
                unseen.append(f"no time by function: perf failed: {text.line(why)}")
    finally:
        for end_of_pipe in (*control, *ours):
            os.close(end_of_pipe)


def by_function(file: Path, unseen: list[str]) -> list[str]:
    """Return lines: the functions that took most samples in perf's file."""
    if unseen:
        return unseen
    command = ["perf", "report", "-i", str(file), "--stdio", "-q", "--sort", "dso,symbol", "--percent-limit", "0.5"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=PERF_LIMIT_S)
    except subprocess.TimeoutExpired:
        return ["no time by function: perf report takes too long"]
    found = (re.match(r"\s*(\d+\.\d+%)\s+(\S+)\s+\[.\] (.*?)(?:\s+-)*\s*$", line) for line in done.stdout.splitlines())
    rows = [
        f"  {share:>6}  {file:<24} {text.line(name, NAME)}" for share, file, name in (f.groups() for f in found if f)
    ]
    if not rows:
        return [f"no time by function: {text.first_line(done.stderr) or 'perf took no sample'}"]
    return ["by function, from perf:", *rows[:LINES]]


def by_loop(log: str) -> list[str]:
    """Return lines: the loops that g++'s log names, without those of the toolchain's headers."""
    found = Counter((Path(file).name, int(line), what) for file, line, what in _LOOP.findall(log))
    if not found:
        return ["g++ vectorised no loop of it, or it has no C++ source"]
    rows = [
        f"  {file}:{line}: {what}" + (f" ({n} times)" if n > 1 else "")
        for (file, line, what), n in sorted(found.items())
    ]
    more = [f"  ... and {len(rows) - 2 * LINES} more"] if len(rows) > 2 * LINES else []
    return ["vectorised by g++:", *rows[: 2 * LINES], *more]
