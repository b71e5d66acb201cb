"""What a submission keeps of weights on a GPU is what free memory does not explain by the judge's own weights."""

from harness.judge import replies, session
from harness.judge.session import Session
from harness.judge.submission import RunnerHandle

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


class Child:
    def __init__(self) -> None:
        self.killed = False

    def kill(self) -> None:
        self.killed = True


def held(driver: Driver, sizes: list[tuple[int, int]]) -> tuple[RunnerHandle, session.Outcome | None]:
    """A runner that gets weights of these sizes, one after the other, and keeps as much of each as is said."""
    judge = object.__new__(Session)
    judge.device, judge._split, judge._weights = "cuda", True, 0
    size, state = 0, 0

    class Checker:
        def request(self, message, limit_s):
            assert message["op"] == "hold"
            driver.hold(size)
            return {"buffer": {"sizes": {"device": size, "host": 0}}, "spec": None, "bytes": size}, []

    judge._checker = Checker()
    judge._hand_over = lambda *args: driver.prepare(state) or replies.Prepared(prepared=True)
    judge._tampered = lambda handle: None
    judge.measure = lambda handle: (driver.free, 0)
    handle = RunnerHandle("one", object(), "sm90")
    handle.child = Child()
    fault = None
    for number, now in enumerate(sizes):
        size, state = now
        judge._weights += 1
        fault = judge._hold(handle)
        if fault:
            break
        if number == 0:
            handle.host_base, handle.device_grown = 0, 0  # as baseline() does
    return handle, fault


def test_what_is_kept_is_the_state_alone():
    for late in (False, True):
        handle, fault = held(
            Driver(late), [(1, 1), *[(4 * GIB, 4 * GIB)] * 6, (14 * GIB, 14 * GIB), (4 * GIB, 4 * GIB)]
        )
        assert fault is None, (late, fault)
        assert handle.device_grown == 4 * GIB - 1 and handle.audit.kept_bytes == 14 * GIB - 1


def test_a_second_state_is_too_much_whatever_came_before():
    for late in (False, True):
        for before in (0, 1, 7):
            sizes = [(1, 1), *[(4 * GIB, 4 * GIB)] * before, (4 * GIB, 8 * GIB)]
            handle, fault = held(Driver(late), sizes)
            assert fault and fault.status == "RULE_BROKEN" and "8192 MiB more are held" in fault.reason, (late, before)
