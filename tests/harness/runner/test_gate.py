"""The clock on a CPU (harness/runner/gate.cpp) and its Freezer: what is stopped, what is read, what is noticed."""

import contextlib
import mmap
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from harness.runner import gate
from harness.runner.buffers import Page
from harness.sandbox import process
from harness.sandbox.process import GONE, LATE, WELL, Freezer, StopError
from problems.common import build
from tests.support import SUPPORT, comes

BYTES = 2**16  # of the memory that judge and runner share, as in support/gated.py
WORK_US = 20_000  # of a call that sleeps or spins, as there
QUIET_S = 0.05  # in which nobody may count
DISK_S = 1.0  # in which 128 MiB are on a disk
START_S = 20  # for a runner to be ready
TRIES = 10  # runners that write late: on a busy machine one may be without a processor just then
BESIDE = {"thread": 0, "threads": 0, "child": 1, "double_fork": 1, "clone_vm": 1, "alarm": 0}  # processes of each


class Gated:
    """A runner of support/gated.py under a reaper, and its clock."""

    def __init__(self, call: str, beside: str = "") -> None:
        self.page, self.fd = Page(), os.memfd_create("shared")
        os.ftruncate(self.fd, BYTES)
        self.memory = torch.frombuffer(mmap.mmap(self.fd, BYTES), dtype=torch.uint8)
        self.number = 0
        libraries = (gate.artefact().path, build.cpp(SUPPORT / "spinners.cpp").path)
        words = [*map(str, libraries), str(self.page._fd), str(self.fd), beside, call]
        argv = [sys.executable, "-S", str(SUPPORT / "gated.py"), *words]
        self._guarded = process.Guarded(argv, dict(os.environ), (self.page._fd, self.fd), None, None)
        self.freezer = Freezer(self._guarded.process.pid, self._guarded.pid)

    def ready(self, number: int = 1, limit_s: float = START_S) -> int:
        return gate.bindings().await_ready(self.page.address, number, self.freezer.pid, limit_s)

    def time(self, limit_s: float = 5.0, outputs: list[torch.Tensor] | None = None, stop: bool = True) -> gate.Reading:
        """One call, and the process stopped after it. outputs: None for what the runner notes, one tensor of half."""
        self.number += 1
        assert self.number > 1 or self.ready() == WELL
        if stop:
            self.freezer.stop()
        regions = [(0, BYTES // 2)] if outputs is None else [(part.data_ptr(), part.numel()) for part in outputs]
        reading, self.noted = gate.bindings().time(self.page.address, self.number, 0, self.freezer, limit_s, regions)
        return reading

    def ran_on(self) -> float:
        return gate.bindings().ran_on(*self.freezer)

    def counted(self) -> int:
        return int(self.memory[:8].view(torch.int64))

    def close(self) -> None:
        self._guarded.end()
        self.page.close()
        os.close(self.fd)


@contextlib.contextmanager
def gated(call="nothing", beside=""):
    runner = Gated(call, beside)
    try:
        yield runner
    finally:
        runner.close()


def counts_on(runner):
    before = runner.counted()
    return comes(lambda: runner.counted() != before, START_S)


@pytest.mark.parametrize("beside", BESIDE)
def test_what_is_stopped_stays_so_until_it_is_let_go_and_processes_left_behind_are_listed(beside):
    with gated(beside=beside) as runner:
        assert runner.ready() == WELL and counts_on(runner)
        for stop in (runner.freezer.stop, runner.time) * 2:
            stop()
            before = runner.counted()
            time.sleep(QUIET_S)
            assert runner.counted() == before and runner.ran_on() == 0
            assert len(runner.freezer.processes()) == BESIDE[beside]
            runner.freezer.resume()
            assert counts_on(runner)


@pytest.mark.slow
def test_who_waits_in_the_kernel_is_not_stopped_and_no_end_continues_the_stopped():
    with gated(beside="vfork") as runner:
        assert runner.ready() == WELL and counts_on(runner)
        with pytest.raises(StopError, match="still ran"):
            runner.freezer.stop()
    with gated(beside="orphan") as runner:
        assert runner.ready() == WELL
        runner.freezer.stop()
        before = runner.counted()
        time.sleep(DISK_S)
        assert runner.counted() == before and runner.ran_on() == 0


@pytest.mark.parametrize("stays", [True, False])
def test_what_runs_while_it_is_stopped_is_noticed(stays):
    """Before a call and after it. A foreign process continues the runner, which runs on, or stops again at once."""
    with gated(beside="thread") as runner:
        assert runner.ready() == WELL and counts_on(runner)
        runner.freezer.stop()
        threads = Path(f"/proc/{runner.freezer.pid}/task")
        for look in (runner.ran_on, lambda: runner.time(stop=False).ran_us, runner.ran_on):
            assert runner.ran_on() == 0
            os.kill(runner.freezer.pid, signal.SIGCONT)
            assert counts_on(runner)
            if not stays:
                os.kill(runner.freezer.pid, signal.SIGSTOP)
                while not all(b") T" in stat.read_bytes() for stat in threads.glob("*/stat")):
                    time.sleep(0.001)
            us = look()
            assert us > 0 and (us > 1e6 * START_S) == stays


@pytest.mark.parametrize(
    ("call", "rank", "least_us", "most_us"),
    [("nothing", 3, 0, 1000), ("sleeps", 0, WORK_US, 1.5 * WORK_US), ("spins", 0, WORK_US, 1.5 * WORK_US)],
)
def test_a_call_is_read_from_outside(call, rank, least_us, most_us):
    """rank: which of seven readings, the shortest first; a busy machine makes some of those with work longer."""
    with gated(call) as runner:
        times = []
        for _ in range(7):
            times.append(runner.time().call_us)
            runner.freezer.resume()
    assert sorted(times)[rank] > 0 and least_us <= sorted(times)[rank] < most_us


def test_time_while_it_is_stopped_is_not_counted():
    with gated("nothing") as runner:
        runner.ready()
        runner.freezer.stop()
        time.sleep(0.2)
        assert runner.time().call_us < 100_000


def test_what_was_written_in_time_is_no_change():
    with gated("writes") as runner:
        for _ in range(5):
            runner.memory.zero_()
            assert runner.time(outputs=[runner.memory]).changed == 0
            assert bool((runner.memory[BYTES // 2 :] == 1).all())
            runner.freezer.resume()


def test_nothing_is_written_after_a_call():
    with gated("late") as runner:
        reading = runner.time(outputs=[runner.memory[BYTES // 2 :]])
        before = runner.memory.clone()
        time.sleep(QUIET_S)
        assert reading.code == WELL and torch.equal(runner.memory, before)


# Each output gets as many looks: of words taken from all of them alike, one of 8192 is seen once in 128 calls.
LATE_IN = {
    "large": ("late", slice(BYTES // 2, None)),
    "word": ("late_tail", slice(-4, None)),
    "small": ("late_tail", slice(None, -8), slice(-8, None)),
    "nowhere": ("late_beside_nowhere",),  # beside a tensor that is not there
}


@pytest.mark.parametrize("parts", LATE_IN.values(), ids=LATE_IN)
def test_late_writes_are_seen_in_every_output(parts):
    assert any(changed(*parts) for _ in range(TRIES))


def test_what_is_fetched_is_what_was_looked_at():
    """What the runner notes after the judge has woken is of no use: the judge asks once for addresses and numbers."""
    with gated("late_elsewhere") as runner:
        runner.time()
        before, said = list(runner.noted), gate.bindings().noted()
        runner.freezer.resume()
        time.sleep(QUIET_S)
        assert runner.noted == before and before[0][1] == BYTES // 2
        assert gate.bindings().noted() == said


def changed(call, *parts):
    """Words that changed after "done", of parts of the memory, or of what the runner notes. Judge and runner have a
    processor each: a judge that is woken on that of the runner ends what it writes.
    """
    processors = sorted(os.sched_getaffinity(0))
    if len(processors) < 2:
        pytest.skip("with one processor nothing is written while the judge looks")
    with gated(call) as runner:
        assert runner.ready() == WELL
        os.sched_setaffinity(runner.freezer.pid, processors[1:2])
        os.sched_setaffinity(0, processors[:1])
        try:
            return runner.time(outputs=[runner.memory[part] for part in parts] or None).changed
        finally:
            os.sched_setaffinity(0, processors)


def test_who_does_not_end_or_is_not_ready_is_late():
    with gated("hangs") as runner:
        assert runner.time(limit_s=0.3).code == LATE
        assert runner.ready(7, limit_s=0.2) == LATE


def test_a_process_that_ends_is_gone():
    with gated("dies") as runner:
        before = time.monotonic()
        assert runner.time(limit_s=20).code == GONE
        assert time.monotonic() - before < 10
        with pytest.raises(StopError, match="gone"):
            runner.freezer.stop()


def test_a_page_and_its_memory_cannot_shrink():
    page = Page()
    with pytest.raises(PermissionError):
        os.ftruncate(page._fd, 0)
    page.close()


# --- what makes a CPU's caches cold


CACHE = gate.last_level_cache()  # of this machine, before other tests put a smaller one in its place


def test_what_makes_caches_cold_is_larger_than_each_and_read_by_every_processor():
    listed = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    sizes = [
        int(text[:-1]) * 2 ** {"K": 10, "M": 20}[text[-1]] for text in (file.read_text().strip() for file in listed)
    ]
    assert max([2**25, *sizes]) == CACHE
    assert gate.flush_bytes() == gate.FLUSH_FACTOR * gate.last_level_cache() and gate.FLUSH_FACTOR >= 3
    before = os.sched_getaffinity(0)
    memory = torch.ones(2**26, dtype=torch.uint8)
    gate.evict(memory)
    gate.read(memory, memory.numel(), 0)
    assert os.sched_getaffinity(0) == before
    threads = [Path(f"/proc/self/task/{tid}/status").read_text() for tid in os.listdir("/proc/self/task")]
    pinned = {line.split()[1] for text in threads for line in text.splitlines() if line.startswith("Cpus_allowed_list")}
    assert {str(cpu) for cpu in sorted(before)[1:]} <= pinned
