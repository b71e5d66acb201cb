"""What a submission keeps of weights on a GPU is what free memory does not explain by the judge's own weights."""

from types import SimpleNamespace

from harness.judge import prepared, replies
from harness.judge.handle import RunnerHandle, RunnerProcess
from harness.judge.outcome import Outcome
from harness.judge.prepared import Size

GIB = 2**30


class Driver:
    """Device memory of a checker and one runner. late: what the checker freed is free when the runner unmaps it."""

    def __init__(self, late: bool) -> None:
        self.late, self.free, self.buffer, self.unmapped, self.state = late, 100 * GIB, 0, 0, 0

    def hold(self, size: int) -> None:
        if self.late:
            self.unmapped += self.buffer
        else:
            self.free += self.buffer
        self.buffer, self.free = size, self.free - size

    def prepare(self, state: int) -> None:
        self.free += self.unmapped + self.state - state
        self.unmapped, self.state = 0, state


class Handle(RunnerHandle):
    """A handle whose runner replaces nothing."""

    def tampering(self) -> None:
        return None


def held(
    monkeypatch, driver: Driver, sizes: list[tuple[int, int]]
) -> tuple[RunnerHandle, RunnerProcess, Outcome | None]:
    """A runner that gets weights of these sizes, one after the other, and keeps as much of each as is said."""
    size, state = 0, 0

    class Checker:
        device = "cuda"

        def request(self, message, failing):
            assert message["op"] == "hold"
            driver.hold(size)
            return {"buffer": {"sizes": {"device": size, "host": 0}}, "spec": None, "bytes": size}, []

    monkeypatch.setattr(prepared, "measure", lambda handle, heap=False: Size(driver.free, 0))
    process = RunnerProcess("one", SimpleNamespace(), None, Checker(), 1.0)
    process.hand_over = lambda *_: driver.prepare(state) or replies.Prepared(prepared=True)
    handle = Handle("one", SimpleNamespace(baseline=False), "sm90", process=process)
    fault = None
    for number, (size, state) in enumerate(sizes, start=1):  # noqa: B007  read by the functions above
        fault = prepared.hold(handle, number)
        if fault:
            break
        if number == 1:
            assert prepared.begin(handle) is None
    return handle, process, fault


def test_what_is_kept_is_the_state_alone(monkeypatch):
    sizes = [(1, 1), *[(4 * GIB, 4 * GIB)] * 6, (14 * GIB, 14 * GIB), (4 * GIB, 4 * GIB)]
    for late in (False, True):
        handle, process, fault = held(monkeypatch, Driver(late), sizes)
        assert fault is None, (late, fault)
        assert process.device_grown == 4 * GIB - 1 and handle.audit.kept_bytes == 14 * GIB - 1


def test_a_second_state_is_too_much_whatever_came_before(monkeypatch):
    for late in (False, True):
        for before in (0, 1, 7):
            sizes = [(1, 1), *[(4 * GIB, 4 * GIB)] * before, (4 * GIB, 8 * GIB)]
            _, _, fault = held(monkeypatch, Driver(late), sizes)
            assert fault and fault.status == "RULE_BROKEN" and "8192 MiB more are held" in fault.reason, (late, before)
