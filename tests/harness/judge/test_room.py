"""A folder with large data is judged with fewer processes, then fewer buffers, or refused before the run."""

import pytest

from harness.judge import phases, room
from harness.judge.handle import RunnerHandle
from harness.judge.room import GIB, Footprint, Room, choose
from harness.judge.session import Session
from harness.problem import folders
from harness.problem.folders import UsageError
from tests.support import SUPPORT

H200 = 139 * GIB
MOST = Room(1, 3)


@pytest.mark.parametrize(
    ("buffer", "working", "most", "wanted"),
    [
        (1, 1, MOST, MOST),
        (15, 15, MOST, Room(1, 2)),
        (24, 8, MOST, Room(1, 1)),
        (3, 5, Room(4, 3), Room(4, 3)),
        (15, 15, Room(4, 3), Room(1, 2)),
    ],
)
def test_submissions_go_before_buffers(buffer, working, most, wanted):
    found = Footprint("n=1", buffer * GIB, working * GIB, H200)
    assert choose([found], most, paired=False) == wanted
    assert found.needed(wanted.handles, wanted.buffers) <= room.SHARE * H200


def test_the_largest_case_decides():
    small, large = Footprint("n=1", GIB, GIB, H200), Footprint("n=2", 24 * GIB, 16 * GIB, H200)
    assert choose([small, large, small], MOST, paired=False) == Room(1, 1)


def test_a_pair_stays_together():
    assert choose([Footprint("n=1", 10 * GIB, 8 * GIB, H200)], Room(2, 3), paired=True) == Room(2, 2)


def test_what_never_fits_is_refused_with_the_figure():
    with pytest.raises(UsageError, match=r"n=9: a run takes about 2\d\d GiB .*may take 125 of 139 GiB: leave"):
        choose([Footprint("n=1", GIB, GIB, H200), Footprint("n=9", 48 * GIB, 40 * GIB, H200)], MOST, paired=False)


@pytest.mark.parametrize("share", [0.9, 1e-6])
def test_a_benchmark_is_planned_so(monkeypatch, share):
    monkeypatch.setattr(room, "SHARE", share)
    found = folders.find(str(SUPPORT / "gpu_mode" / "large_output"))
    handle = RunnerHandle("right", folders.submission(found, found.folder / "submission.py"), "cpu")
    how = phases.Counts(processes=1, samples=1, warmups=0, buffers=2, extra=6)
    with Session(found, "cpu") as session:
        arguments = (session, [handle], list(found.benchmarks["cpu"]), lambda _: None)
        if share < 0.1:
            with pytest.raises(UsageError, match="a run takes about"):
                phases.run_benchmarks(*arguments, how)
        else:
            times, _ = phases.run_benchmarks(*arguments, how)
            assert not times["right"][0].failure
