"""Whoever reads records gets complete ones only: of runs, and of files of the older flat kind."""

import json
from pathlib import Path

import pytest

from harness.judge import verdict
from harness.problem import folders
from harness.results import hashes, record, schema, text
from harness.results.status import STATUSES
from leaderboard import pages, report
from tests.support import ROOT, record_tables, write_files
from tests.support.hostile import HOSTILE, NAMES, UNPRINTABLE, brief
from tests.support.records import bench, full, line, run_line

DEEP = b"[" * 100_000
BROKEN = {
    "cut": b'{"schema": 1, "run',
    "a number": b"17",
    "deep": DEEP,
    "deep within": b'{"a": ' + DEEP,
    "no UTF-8": b'{"a": "\xff"}',
    "digits": b'{"schema": ' + b"1" * 10_000 + b"}",
    "long": b'{"a": "' + b"x" * record.LINE_BYTES + b'"}',
    "null": b"null",
    "NUL": b"\0\0\0",
}
WRONG = {
    "schema": [0, 5, "1", None, True, [], {}],
    "run_id": [1, "", None],
    "kind": ["trial", None, ["test"]],
    "problem": ["../../etc", "a/b", "..", ".hidden", "x" * 300, None, "a\0b"],
    "target": ["../x", None, 9, "sm999", "SM90"],
    "variant": [None, {}, "a/b"],
    "status": ["FINE", None, 0],
    "case": [[], "m=1", 5],
    "time": ["yesterday", None, 5, "2026-13-01T00:00:00Z", "0001-01-01T00:00:00Z", "2026-W01-1"],
    "samples_us": [5, [5], [["a"]], [[None]], {"a": 1}],
    "median_us": ["1", [], 1e300, True, float("nan"), float("inf")],
    "ci95_us": [[1], 5, ["a", "b"], [2.0, 1.0]],
    "baseline": ["yes", 1],
    "environment": [[], {"gpu": {}}],
    "clock": ["x", [], {"warnings": "no NVML"}, {"warnings": [5]}],
    "error": [5, {"rel": "x"}],
    "against": [5, {"ratio": "x"}, {"ci95": [1]}],
    "confirms": [[], {"paired": True}],
    "resources": [{}, [5], [None], [{"target": "../x"}], [{"registers": "x"}]],
    "commit": [5],
    "reason": [5, ["x"]],
    "attempt": ["1", 1.5, 0],
    "roofline_us": ["x", 0, -1.0],
    "ranking_by": [{}, "best"],
    "bytes": ["x", 2**70, -1],
    "flops": [float("-inf")],
}


RUN_ID = "20260101T000000-00000001"


def flat(*lines: dict | bytes) -> bytes:
    return b"".join((one if isinstance(one, bytes) else json.dumps(one).encode()) + b"\n" for one in lines)


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_a_broken_line_is_skipped_with_a_warning(broken):
    before, after = full("a", 1.0), full("b", 2.0)
    records, (complaint,) = record.parse(flat(*before, broken, *after), "box/p.jsonl")
    assert records == before + after and complaint.startswith("box/p.jsonl:4: skipped: ")
    assert len(complaint) < 400 and complaint.isprintable()
    run = (run_line(RUN_ID), {"kind": "outcome"}, broken, {"kind": "end"})
    records, (complaint,) = record.parse(flat(*run), "box/p/r.jsonl")
    assert records == [] and complaint.startswith("box/p/r.jsonl:3: skipped: ")


@pytest.mark.parametrize("end", ['{"schema": 1, "run', '{"a": {"b": 1}', "[", "\0\0"])
def test_a_torn_last_line_is_ignored(end):
    assert record.parse(flat(*full("a", 1.0)) + end.encode(), "f") == (full("a", 1.0), [])


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in WRONG.items() for value in values], ids=brief
)
def test_a_record_with_a_wrong_field_is_left_out(field, value):
    wrong = json.dumps(bench("a", 0, 20.0) | {field: value})
    records, complaints = record.parse(f"{wrong}\n{json.dumps(bench('b', 0, 20.0))}\n", "f")
    assert [one["variant"] for one in records] == ["b"] and len(complaints) == 1 and complaints[0].startswith("f:1: ")


def test_a_record_without_a_needed_field_is_left_out():
    for needed in (name for name, field in schema.FIELDS.items() if field.is_required()):
        wrong = {name: value for name, value in line("test", "a").items() if name != needed}
        records, (complaint,) = record.parse(json.dumps(wrong), "f")
        assert records == [] and needed in complaint


@pytest.mark.parametrize(
    ("was", "now", "said"),
    [
        ('"variant": "a"', '"variant": "a", "variant": "b"', "is there twice"),
        ('"variant": "a"', '"variant": "a", "extra": {"x": 1, "x": 1}', "is there twice"),
        ('"host_us": 6.0', '"host_us": 1e999', "must be finite"),
        ('"2026-', '"2999-', "must be a time in ISO 8601, of the years 1970 to 2199"),
    ],
)
def test_what_json_or_a_table_cannot_hold_is_no_record(was, now, said):
    found = json.dumps(bench("a", 0, 20.0))
    assert was in found
    records, (complaint,) = record.parse(found.replace(was, now), "f")
    assert records == [] and said in complaint


def test_what_a_record_may_say_and_leave_out(tmp_path):
    least = {"attempt": 1, "bytes": 0, "ci95_us": [1.0, 1.0], "roofline_us": None, "clock": {"warnings": ["no NVML"]}}
    for target in folders.TARGETS:
        for by in ("geom", "mean", "last"):
            record.checked(bench("a", 0, 1.0) | least | {"target": target, "ranking_by": by})
    records, _ = record.parse(json.dumps(line("test", "a", novelty=[1])), "f")
    assert records[0]["novelty"] == [1]
    assert record.parse("\n\n", "f") == ([], []) and record.read("box", "nothing", tmp_path) == []


def test_every_committed_record_is_one_of_todays_schema():
    for machine in pages.committed(report.MACHINES):
        for path in record.files(report.RESULTS / machine):
            found = record.contents_of(path, report.RESULTS)
            assert found.complaints == [] and found.ended and found.records
            assert {one["schema"] for one in found.records} == {schema.SCHEMA}


def test_a_result_takes_from_its_run_what_it_does_not_say():
    run = run_line(RUN_ID) | {"machine": "box", "arguments": {"mode": "leaderboard"}, "tests": []}
    known = full("a", 1.0, run=RUN_ID, schema=4, problem="p")[0]
    result = record.apart(run, known)
    assert record.joined(run, result) == known and not set(result) & schema.SHARED
    other = record.joined(run, result | {"variant": "b", "target": "cpu", "dirty": True, "clock": {"name": "x"}})
    assert "source_hash" not in other and other["dirty"] is True and other["target"] == "cpu"
    assert other["clock"] == {"name": "x", "cold": "buffers", "delivery": "shared buffers"}


def test_a_run_counts_when_it_has_begun_and_ended():
    run, result, end = run_line(RUN_ID), record.apart(run_line(RUN_ID), full("a", 1.0)[0]), {"kind": "end"}
    outcome, resumed = {"kind": "outcome"}, {"kind": "resumed"}
    for lines, count in (
        ((run, outcome, result), 0),
        ((run, outcome, result, end), 1),
        ((run, outcome, result, resumed, end), 0),  # the results of a process that was killed among them
        ((run, outcome, result, resumed, result, end), 1),
    ):
        records, complaints = record.parse(flat(*lines), "f")
        assert (len(records), complaints) == (count, [])
    for first in ({"kind": "run"}, run_line(RUN_ID) | {"schema": 3}, run_line(RUN_ID) | {"submissions": [5]}):
        records, complaints = record.parse(flat(first, {"kind": "outcome"}, result, {"kind": "end"}), "f")
        assert records == [] and len(complaints) == 4


def test_a_problems_files_are_of_three_kinds(tmp_path):
    names = ["p/latency.jsonl", "p.jsonl", f"p/{RUN_ID}.jsonl", "p/20260102T000000-00000001.jsonl"]
    (tmp_path / "folder.jsonl").mkdir()
    others = ["p[a]*.jsonl", "q.jsonl", f"pq/{RUN_ID}.jsonl", "judge/comparisons.jsonl", "p/notes.jsonl"]
    write_files(tmp_path, dict.fromkeys(names + others, ""))
    assert [str(path.relative_to(tmp_path)) for path in record.files(tmp_path, "p")] == names
    assert [path.name for path in record.files(tmp_path, "p[a]*")] == ["p[a]*.jsonl"]
    assert {pages.problem_of(path, tmp_path) for path in record.files(tmp_path)} == {"p", "q", "pq", "p[a]*"}


def shard(number: int, part: int, of: int = 2, set_: str = "abc") -> record.Contents:
    run = run_line(f"r{number}", shard={"part": part, "of": of, "set": set_})
    results = [one | {"run_id": f"r{number}"} for one in full("a", 1.0)[part - 1 :: of]]
    return record.Contents(Path(), run, results=results, ended=True)


def test_the_parts_of_a_run_get_one_run_id():
    open_ = shard(9, 2)
    open_.ended = False
    found = record.records_of([shard(1, 1), shard(2, 2, set_="x"), open_, shard(3, 2), shard(4, 2), shard(5, 1)])
    assert [one["run_id"] for one in found] == ["r1", "r1", "r2", "r1", "r4", "r4", "r4"]


def test_schema_page_and_verdicts_agree():
    schema.known(bench("a", 0, 1.0))
    with pytest.raises(ValueError, match="no field 'medain_us'"):
        schema.known(bench("a", 0, 1.0) | {"medain_us": 1.0})
    page = (ROOT / "docs" / "records.md").read_text(encoding="utf-8")
    assert record_tables.tables() in page, "paste in what `.venv/bin/python -m tests.support.record_tables` prints"
    assert set(STATUSES) == set(verdict.EXIT_CODES)


@pytest.mark.parametrize("value", [*HOSTILE, float("nan"), float("inf"), {1: {2: {3: b"x"}}}, object(), [[[[[[]]]]]]])
def test_plain_values_come_back_as_they_were_written(value):
    deep = value
    for _ in range(50):
        deep = [deep, {"x": deep}][-1:]
    for one in (value, deep):
        found = text.plain({"reason": one, "numbers": [1, 2.5, True, None]})
        said = json.dumps(found, allow_nan=False)
        assert record._sound(json.loads(said)) == found and found["numbers"] == [1, 2.5, True, None]
        assert len(said) < 200_000


def test_an_integer_that_no_reader_holds_is_text():
    assert text.plain([2**63, 10**5000, 2**62]) == ["about 2**64", "about 2**16610", 2**62]


def test_a_name_is_printable_and_of_one_file_and_a_source_of_any_name_has_a_hash(tmp_path):
    assert all(map(text.can_name, NAMES))
    assert not any(map(text.can_name, [*UNPRINTABLE, "", ".x", "a/b", "x" * 201]))
    (file := tmp_path / "a\udcffb.py").touch()
    assert len(hashes.source_hash([file])) == 16
