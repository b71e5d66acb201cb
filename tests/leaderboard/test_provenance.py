"""What belongs to a row of a board: its warnings, whether its source is the checkout's, and whether its problem is."""

import json
from pathlib import Path

import pytest

from harness.results import schema
from leaderboard import board, provenance, tables
from problems.common import build, load
from tests.leaderboard.test_board import EXPECTED, one, rows
from tests.support.records import CLOCK, full


def test_a_warning_of_one_variant_is_at_its_row_only():
    warned = full("b", 1.2)
    for number, record in enumerate(warned[1:], 1):
        record["clock"] = CLOCK | {"warnings": [f"host-bound: {number} of 60 calls", "no NVML"]}
    found = one(full("a", 1.1) + warned + full("c", 1.3))
    assert rows(found)["b"].notes == [
        "warning in 2 of 3 cases, the largest: host-bound: 2 of 60 calls",
        "warning in 2 of 3 cases: no NVML",
    ]
    assert rows(found)["a"].notes == rows(found)["c"].notes == found.notes == []
    assert not any("host-bound" in line or "NVML" in line for line in tables.facts(found) + tables.notes(found))


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


def of_code(source: str, code: str | None, **more) -> dict:
    """A line of code.jsonl about `a`."""
    return {
        "problem": "nvfp4_gemv",
        "variant": "a",
        "target": "sm90",
        "recorded": source,
        "source_hash": source,
        "problem_hash": "p",
        "code_hash": code,
        "compiler": "nvcc",
        "commit": "0123456789abcdef0",
    } | more


@pytest.mark.parametrize(
    ("record", "lines", "state"),
    [
        ({"source_hash": "new"}, [], provenance.MATCH),
        ({"source_hash": "old"}, [], provenance.STALE),
        ({"source_hash": "old"}, [of_code("old", "x"), of_code("new", "x")], provenance.SAME_CODE),
        ({"source_hash": "old"}, [of_code("old", "x"), of_code("new", "y")], provenance.STALE),
        ({"source_hash": "old", "code_hash": "x"}, [of_code("new", "x")], provenance.SAME_CODE),
        ({"source_hash": "old", "code_hash": "x"}, [of_code("new", None)], provenance.STALE),
        ({"source_hash": "old"}, [of_code("old", None), of_code("new", None)], provenance.STALE),
        ({"source_hash": "old"}, [of_code("old", "x", target="sm100"), of_code("new", "x")], provenance.STALE),
        # Records of schema 1 and 2: their hash leaves out what is shared, which a line about their commit knows.
        ({"source_hash": "own", "schema": 2}, [], provenance.STALE),
        ({"source_hash": "new", "schema": 2}, [], provenance.STALE),
        ({"source_hash": "own", "schema": 2}, [of_code("new", "x", recorded="own")], provenance.MATCH),
        ({"source_hash": "own", "schema": 2}, [of_code("old", "x", recorded="own")], provenance.STALE),
        (
            {"source_hash": "own", "schema": 2},
            [of_code("old", "x", recorded="own"), of_code("new", "x", recorded="own", commit="f")],
            provenance.SAME_CODE,
        ),
        ({"source_hash": None}, [of_code("new", "x")], provenance.STALE),
    ],
)
def test_a_row_says_whether_its_source_is_the_checkouts(monkeypatch, record, lines, state):
    in_checkout(monkeypatch)
    records = full("a", 1.1, **record) + full("b", 1.2, source_hash="new")
    (found,) = board.build(records, "box", EXPECTED, provenance.Provenance(lines, records))
    assert (rows(found)["a"].source, rows(found)["b"].source) == (state, provenance.MATCH)
    header, table = tables.standing(found)
    assert table[0][header.index("source")] == state


def test_a_variant_that_the_checkout_lacks_is_stale():
    (found,) = board.build(full("no_such_variant", 1.1), "box", EXPECTED, provenance.Provenance())
    assert rows(found)["no_such_variant"].source == provenance.STALE


def test_a_row_of_another_version_of_the_problem_is_marked(monkeypatch):
    in_checkout(monkeypatch)
    changed, same = full("a", 1.1, problem_hash="q"), full("b", 1.2, problem_hash="p")
    found = one(changed + same + full("c", 1.3))
    assert provenance.PROBLEM_CHANGED in rows(found)["a"].notes
    assert rows(found)["b"].notes == rows(found)["c"].notes == found.notes == []
    found = one(changed)
    assert found.notes == [f"All rows: {provenance.PROBLEM_CHANGED}."] and rows(found)["a"].notes == []


@pytest.fixture
def tree(tmp_path, monkeypatch) -> Path:
    """A folder of problems: `a` includes a shared header that includes another, `b` imports a shared module."""
    files = {
        "common/deep.cuh": "// 1\n",
        "common/shared.cuh": '#include "deep.cuh"\n',
        "common/other.cuh": "// 1\n",
        "common/helper.py": "from problems.common import deeper\n",
        "common/deeper.py": "x = 1\n",
        "p/task.py": "x = 1\n",
        "p/variants/a.py": "",
        "p/variants/a.cu": '#include "shared.cuh"\n',
        "p/variants/b.py": "from problems.common.helper import deeper\n",
        "p/variants/c.py": "",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(build, "COMMON", tmp_path / "common")
    monkeypatch.setattr(load, "PROBLEMS", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "stale"),
    [
        ("common/shared.cuh", "a"),
        ("common/deep.cuh", "a"),
        ("common/other.cuh", ""),
        ("common/helper.py", "b"),
        ("common/deeper.py", "b"),
        ("p/variants/a.cu", "a"),
        ("p/variants/c.py", "c"),
    ],
)
def test_a_change_of_what_is_shared_marks_the_variants_that_use_it(tree, changed, stale):
    def hashes() -> dict[str, str]:
        provenance._source_hash.cache_clear()
        return {name: provenance.source_hash("p", name) for name in "abc"}

    records = [one for name, value in hashes().items() for one in full(name, 1.0, problem="p", source_hash=value)]
    (tree / changed).write_text("changed = 1\n" if changed.endswith(".py") else "// changed\n")
    hashes()
    (found,) = board.build(records, "box", {}, provenance.Provenance())
    states = {name: row.source for name, row in rows(found).items()}
    assert states == {name: provenance.STALE if name in stale else provenance.MATCH for name in "abc"}


def test_a_line_of_code_that_is_none_is_named_and_left_out(tmp_path):
    good = of_code("old", "x", novelty=1)
    bad = [of_code("old", "x") | {"commit": 5}, {key: good[key] for key in good if key != "compiler"}, 17]
    (tmp_path / provenance.FILE).write_text("\n".join(map(json.dumps, [*bad, good])) + "\n[")
    lines, complaints = provenance.read(tmp_path)
    assert lines == [good] and [said.partition(": ")[0] for said in complaints] == [
        f"code.jsonl:{n}" for n in (1, 2, 3, 5)
    ]
    assert provenance.read(tmp_path / "none") == ([], [])


def test_the_committed_table_is_whole():
    lines, complaints = provenance.read(load.PROBLEMS.parent / "leaderboard" / "results")
    assert lines and complaints == []
    for line in lines:
        assert set(line) == set(schema.Code.model_fields) and (line["code_hash"] is None) == (line["compiler"] is None)
