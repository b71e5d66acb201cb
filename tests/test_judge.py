"""The judge against submissions that crash, hang, flood, vanish or cheat: each gets its verdict and harms nothing."""

import json
import time
from pathlib import Path

import pytest

from harness import problem, process, record
from harness.phases import run_tests
from harness.session import Entrant, Session
from tests.fixtures import misbehaving

GEMV = problem.find("nvfp4_gemv")
SMALL = GEMV.tests[0]  # m = 16, k = 64


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Every misbehaving submission on two small cases, in one session; and what stood recorded before."""
    folder = tmp_path_factory.mktemp("misbehaving")
    entrants = []
    for name, (body, *_) in misbehaving.SUBMISSIONS.items():
        file = folder / f"{name}.py"
        file.write_text(misbehaving.HEAD.format(name=name) + body)
        entrants.append(Entrant(name, problem.entry(GEMV, file), "cpu"))
    # 1.5 GiB, so that the hoarder is stopped soon and harms no neighbour.
    patch = pytest.MonkeyPatch()
    patch.setattr(process, "MEMORY_SHARE", 1.5 * 2**30 / process.available_memory())
    with Session(GEMV, "cpu", timeout_s=6) as session:
        results = {}
        # Few at a time: each process is a Python with torch in it.
        for start in range(0, len(entrants), 4):
            results |= run_tests(
                session, entrants[start : start + 4], [SMALL, GEMV.tests[2]], lambda *_: None, lambda _: None
            )
    patch.undo()
    return results


@pytest.mark.parametrize("name", misbehaving.SUBMISSIONS)
def test_verdict(outcomes, name):
    """Both cases get a verdict: the run goes on after the first."""
    _, wanted, reason = misbehaving.SUBMISSIONS[name]
    wanted = (wanted,) if isinstance(wanted, str) else wanted
    assert len(outcomes[name]) == 2
    for outcome in outcomes[name]:
        assert outcome.status in wanted, outcome
        assert reason in outcome.reason, outcome


def test_an_honest_neighbour_is_untouched(outcomes):
    assert [o.status for o in outcomes["honest"]] == ["PASSED", "PASSED"]
    assert outcomes["honest"][0].us > 0


def test_nothing_survives_a_hang(outcomes):
    """The process groups of the killed runners are gone."""
    left = [p for p in Path("/proc").glob("[0-9]*") if b"harness.runner" in _command(p)]
    deadline = time.monotonic() + 5
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left = [p for p in Path("/proc").glob("[0-9]*") if b"harness.runner" in _command(p)]
    assert not left


def _command(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""


def test_records_are_appended_and_a_torn_line_is_closed(tmp_path):
    """What stands is never rewritten, and what a killed writer left does not swallow the next record."""
    file = record.append("box", "p", [{"a": 1}], tmp_path)
    with open(file, "a") as torn:
        torn.write('{"a": 2, "rea')
    record.append("box", "p", [{"a": 3}, {"a": 4}], tmp_path)
    lines = file.read_text().splitlines()
    assert lines[1] == '{"a": 2, "rea'
    assert [json.loads(lines[i]) for i in (0, 2, 3)] == [{"a": 1}, {"a": 3}, {"a": 4}]


def test_a_record_holds_no_nan(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        record.append("box", "p", [{"a": float("nan")}], tmp_path)
