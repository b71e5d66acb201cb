"""What belongs to a row of a board: its warnings, whether its source is the checkout's, and whether its problem is."""

import pytest

from leaderboard import board, provenance, tables
from problems.common import build, load
from tests.leaderboard.test_board import EXPECTED, one, rows
from tests.support import write_files
from tests.support.records import CLOCK, full


def test_a_warning_of_one_variant_is_at_its_row_only():
    warned = full("b", 1.2)
    for number, record in enumerate(warned[1:], 1):
        record["clock"] = CLOCK | {"warnings": [f"{number} calls have no score: the judge's clock saw them", "no NVML"]}
    found = one(full("a", 1.1) + warned + full("c", 1.3))
    said = "3 calls have no score: the judge's clock saw them (in 2 of 3 cases)"
    assert rows(found)["b"].notes == [said, "no NVML (in 2 of 3 cases)"]
    assert rows(found)["a"].notes == rows(found)["c"].notes == found.notes == []
    assert not any("no score" in line or "NVML" in line for line in tables.facts(found) + tables.notes(found))


@pytest.mark.parametrize("dirty", [None, 0, 1, 2])
def test_one_record_with_uncommitted_changes_is_said_of_its_run(dirty):
    """Whichever of the run's records it is."""
    records = full("a", 1.1)
    for number, record in enumerate(records):
        record["dirty"] = number == dirty
    (said,) = [line for line in tables.facts(one(records)) if line.startswith("Run: ")]
    assert said.endswith("commit 0123456789ab" + (" with uncommitted changes" if dirty is not None else ""))


def in_checkout(monkeypatch, source: str | None = "new", problem: str | None = "p") -> None:
    """The checkout's variants have the hash `source`, its problems `problem`."""
    monkeypatch.setattr(provenance, "source_hash", lambda *_: source)
    monkeypatch.setattr(provenance, "problem_hash", lambda _: problem)


@pytest.mark.parametrize(
    ("record", "others", "state"),
    [
        ({"source_hash": "new"}, [], provenance.MATCH),
        ({"source_hash": "old"}, [{"code_hash": "x"}], provenance.CHANGED),
        ({"source_hash": "old", "code_hash": "x"}, [], provenance.CHANGED),
        ({"source_hash": "old", "code_hash": "x"}, [{"code_hash": "x"}], provenance.SAME_CODE),
        ({"source_hash": "old", "code_hash": "x"}, [{"code_hash": "y"}], provenance.CHANGED),
        ({"source_hash": "old", "code_hash": "x"}, [{"code_hash": "x", "target": "sm100"}], provenance.CHANGED),
        ({"source_hash": None, "code_hash": "x"}, [{"code_hash": "x"}], provenance.CHANGED),
    ],
)
def test_a_row_says_whether_its_source_is_the_checkouts(monkeypatch, record, others, state):
    in_checkout(monkeypatch)
    records = full("a", 1.1, **record) + full("b", 1.2, source_hash="new")
    known = [line | {"source_hash": "new"} | other for line in full("a", 1.0) for other in others]
    (found,) = board.build(records, "box", EXPECTED, provenance.Provenance(records + known))
    assert (rows(found)["a"].source, rows(found)["b"].source) == (state, provenance.MATCH)


def test_a_row_whose_problem_has_changed_says_so_and_one_of_other_code_says_that(monkeypatch):
    in_checkout(monkeypatch)
    now = {"source_hash": "new"}
    records = full("a", 1.1, problem_hash="q", **now) + full("b", 1.2, problem_hash="p", **now) + full("c", 1.3, **now)
    (found,) = board.build(records + full("d", 1.4, problem_hash="q"), "box", EXPECTED, provenance.Provenance())
    states = [provenance.PROBLEM_CHANGED, provenance.MATCH, provenance.MATCH, provenance.CHANGED]
    assert [rows(found)[name].source for name in "abcd"] == states
    assert [row[-1] for row in tables.leaders([found]).rows] == [provenance.PROBLEM_CHANGED]
    assert provenance.OTHER_PROBLEM in tables.standing(found).remarks[0]


FILES = {  # `a` includes a shared header that includes another, `b` imports a shared module
    "common/deep.cuh": "// 1\n",
    "common/shared.cuh": '#include "deep.cuh"\n',
    "common/helper.py": "x = 1\n",
    "p/task.py": "x = 1\n",
    "p/variants/a.py": "",
    "p/variants/a.cu": '#include "shared.cuh"\n',
    "p/variants/b.py": "from problems.common import helper\n",
}


@pytest.mark.parametrize(("changed", "other"), [("common/deep.cuh", "a"), ("common/helper.py", "b")])
def test_a_change_of_what_is_shared_marks_the_variants_that_use_it(tmp_path, monkeypatch, changed, other):
    """And one that the checkout lacks has changed."""
    monkeypatch.setattr(build, "COMMON", write_files(tmp_path, FILES) / "common")
    monkeypatch.setattr(load, "PROBLEMS", tmp_path)
    hashes = {name: provenance.source_hash(tmp_path / "p", name) for name in "ab"}
    records = [one for name, value in hashes.items() for one in full(name, 1.0, problem="p", source_hash=value)]
    (tmp_path / changed).write_text("changed = 1\n" if changed.endswith(".py") else "// changed\n")
    provenance.source_hash.cache_clear()
    (found,) = board.build(records + full("c", 2.0, problem="p"), "box", {}, provenance.Provenance())
    states = {name: row.source for name, row in rows(found).items()}
    assert states == {name: provenance.CHANGED if name in (other, "c") else provenance.MATCH for name in "abc"}
