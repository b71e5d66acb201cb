"""Records are appended whole or not at all, and a line that is none harms no reader."""

import errno
import json
import os
import resource
import shutil
import subprocess
import sys

import pytest

from harness.judge import verdict
from harness.problem import folders
from harness.results import record, schema
from tests.support import ROOT
from tests.support.hostile import HOSTILE, NAMES, UNPRINTABLE, brief
from tests.support.records import bench, full, line

DEEP = "[" * 100_000
BROKEN = {
    "cut": '{"schema": 1, "run',
    "a number": "17",
    "deep": DEEP,
    "deep within": '{"a": ' + DEEP,
    "no UTF-8": b'{"a": "\xff"}',
    "digits": '{"schema": ' + "1" * 10_000 + "}",
    "long": '{"a": "' + "x" * record.LINE_BYTES + '"}',
    "null": "null",
    "NUL": "\0\0\0",
}
WRONG = {
    "schema": [0, 4, "1", None, True, [], {}],
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


@pytest.fixture(autouse=True)
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results")
    return tmp_path / "results"


# --- reading


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_a_broken_line_costs_that_line_alone(broken, results):
    before, after = full("a", 1.0), full("b", 2.0)
    path = record.append("box", "p", before)
    with path.open("ab") as file:
        file.write((broken if isinstance(broken, bytes) else broken.encode()) + b"\n")
    data = path.read_bytes()
    record.append("box", "p", after)
    assert path.read_bytes().startswith(data) and record.read("box", "p") == before + after
    _, (complaint,) = record.reading("box", "p")
    assert complaint.startswith("box/p.jsonl:4: not a record (") and complaint.endswith(f"): {record.LEFT_OUT}")
    assert len(complaint) < 400 and complaint.isprintable()


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in WRONG.items() for value in values], ids=brief
)
def test_a_record_with_a_wrong_field_is_left_out(field, value):
    wrong = json.dumps(bench("a", 0, 20.0) | {field: value})
    right = json.dumps(bench("b", 0, 20.0))
    records, complaints = record.parse(f"{wrong}\n{right}\n", "f")
    assert [one["variant"] for one in records] == ["b"] and len(complaints) == 1 and complaints[0].startswith("f:1: ")


@pytest.mark.parametrize("field", [name for name, field in schema.FIELDS.items() if field.is_required()])
def test_a_record_without_a_needed_field_is_left_out(field):
    wrong = line("test", "a")
    del wrong[field]
    records, (complaint,) = record.parse(json.dumps(wrong), "f")
    assert records == [] and field in complaint


@pytest.mark.parametrize("year", ["1969", "2200", "2999"])
def test_a_time_of_another_year_is_told_which_years_there_are(year):
    _, (complaint,) = record.parse(json.dumps(line("test", "a", time=f"{year}-01-02T03:04:05Z")), "f")
    assert "must be a time in ISO 8601, of the years 1970 to 2199" in complaint


@pytest.mark.parametrize("twice", ['"variant": "a", "variant": "b"', '"extra": {"x": 1, "x": 1}'])
def test_a_line_with_a_key_twice_is_no_record(twice):
    found = json.dumps(line("test", "a"))
    records, (complaint,) = record.parse(found[:-1] + ", " + twice + "}", "f")
    assert records == [] and "is there twice" in complaint


def test_the_least_that_a_record_may_say():
    least = {"attempt": 1, "bytes": 0, "ci95_us": [1.0, 1.0], "roofline_us": None, "clock": {"warnings": ["no NVML"]}}
    for target in folders.TARGETS:
        for by in ("geom", "mean", "last"):
            record.checked(bench("a", 0, 1.0) | least | {"target": target, "ranking_by": by})


def test_a_number_beyond_floats_is_no_number():
    found = json.dumps(bench("a", 0, 20.0)).replace('"host_us": 6.0', '"host_us": 1e999')
    records, (complaint,) = record.parse(found, "f")
    assert records == [] and "must be finite" in complaint


@pytest.mark.parametrize("said", HOSTILE, ids=brief)
def test_hostile_text_is_text(said):
    (found,), complaints = record.parse(json.dumps(line("test", "a", status="INCORRECT", reason=said)), "f")
    assert complaints == [] and len(found["reason"].encode()) >= len(said)


def test_unknown_keys_are_kept_and_no_lines_are_no_records():
    records, _ = record.parse(json.dumps(line("test", "a", novelty=[1])), "f")
    assert records[0]["novelty"] == [1]
    assert record.parse("\n\n", "f") == ([], []) and record.reading("box", "nothing") == ([], [])


def test_every_committed_record_is_one_and_reads_as_it_was_written():
    """Also those of older schemas: by other names, but with all that they hold."""
    folder = ROOT / "leaderboard" / "results"
    files = [*folder.glob("*/*.jsonl"), *folder.glob("*/*/latency.jsonl")]
    assert files
    for file in files:
        data = file.read_bytes()
        records, complaints = record.parse(data, file.name)
        raw = [json.loads(line) for line in data.splitlines()]
        assert complaints == [] and len(records) == len(raw)
        for was, now in zip(raw, records, strict=True):
            if was["kind"] == "latency":
                was = {name: was[name] for name in ("time", "bytes", "kernels", "checks", "environment", "commit")}
            for name, value in was.items():
                if name == "clock":
                    assert list(value.values()) == list(now["clock"].values())
                else:
                    assert now[schema.OLD_NAMES.get(name, name)] == value


def test_a_latency_record_of_schema_1_has_its_times_in_us():
    old = {
        "schema": 1,
        "kind": "latency",
        "problem": "model",
        "time": "2026-01-02T03:04:05Z",
        "config": "small",
        "format": "bf16",
        "batch": 8,
        "context": 512,
        "kernels": {},
        "eager_ms": 9.0,
        "graph_ms": 4.0,
        "floor_ms": float("nan"),
        "eager_launches": 78,
        "graph_launches": 77,
        "checks": {"same": False, "wait": ""},
        "ok": False,
        "commit": "",
        "novelty": 1,
    }
    (found,), complaints = record.parse(json.dumps(old), "f")
    assert complaints == [] and found["case"] == {"config": "small", "format": "bf16", "batch": 8, "context": 512}
    assert (found["median_us"], found["eager_us"], found["sol_us"]) == (4000.0, 9000.0, None)
    assert found["launches"] == {"eager": 78, "graph": 77} and found["novelty"] == 1
    assert (found["status"], found["reason"], found["variant"]) == ("INVALID_MEASUREMENT", "same", "composed")
    _, (complaint,) = record.parse(json.dumps(old | {"graph_ms": "4"}), "f")
    assert "median_us: " in complaint


# --- what is written


def test_what_is_no_record_is_not_appended(results):
    with pytest.raises(ValueError, match="median_us: "):
        record.append("box", "p", [*full("a", 1.0), bench("b", 0, 1.0) | {"median_us": "soon"}])
    assert not results.exists()


def test_a_field_that_the_schema_lacks_is_not_written():
    schema.see_known(bench("a", 0, 1.0))
    with pytest.raises(ValueError, match="no field 'medain_us'"):
        schema.see_known(bench("a", 0, 1.0) | {"medain_us": 1.0})


def test_the_page_on_records_has_the_schemas_tables():
    page = (ROOT / "docs" / "records.md").read_text(encoding="utf-8")
    assert schema.tables() in page, "paste in what `.venv/bin/python -m harness.results.schema` prints"


@pytest.mark.parametrize("value", [*HOSTILE, float("nan"), float("inf"), {1: {2: {3: b"x"}}}, object(), [[[[[[]]]]]]])
def test_plain_values_come_back_as_they_were_written(value):
    deep = value
    for _ in range(50):
        deep = [deep, {"x": deep}][-1:]
    for one in (value, deep):
        found = record.plain({"reason": one, "numbers": [1, 2.5, True, None]})
        said = json.dumps(found, allow_nan=False)
        assert record._sound(json.loads(said)) == found and found["numbers"] == [1, 2.5, True, None]
        assert len(said) < 200_000


def test_an_integer_that_no_reader_holds_is_text():
    assert record.plain([2**63, 10**5000, 2**62]) == ["about 2**64", "about 2**16610", 2**62]


def test_the_gravest_verdict_is_of_those_that_a_record_can_have():
    assert set(schema.STATUSES) == set(verdict.EXIT_CODES)


@pytest.mark.parametrize("name", NAMES, ids=brief)
def test_a_printable_name_is_one(name):
    assert record.can_name(name)


@pytest.mark.parametrize("name", [*UNPRINTABLE, "", ".x", "a/b", "x" * 201], ids=brief)
def test_another_is_none(name):
    assert not record.can_name(name)


def test_a_source_of_any_name_has_a_hash(tmp_path):
    file = tmp_path / "a\udcffb.py"
    file.write_text("")
    assert len(record.source_hash([file])) == 16


# --- trouble with the disk


def failing(monkeypatch, name: str, error: int, after: int = 0, part: int = 0) -> None:
    """os.`name` fails with `error` from call number `after` on; a write takes `part` bytes of the first that fails."""
    real, calls = getattr(os, name), []

    def fail(fd: int, *more: object) -> int:
        calls.append(fd)
        if len(calls) == after + 1 and part:
            return real(fd, bytes(more[0])[:part])
        if len(calls) > after:
            raise OSError(error, os.strerror(error))
        return real(fd, *more)

    monkeypatch.setattr(os, name, fail)


@pytest.mark.parametrize("part", [0, 1, 40])
@pytest.mark.parametrize(("name", "error"), [("write", errno.ENOSPC), ("fsync", errno.EIO), ("write", errno.EDQUOT)])
def test_what_cannot_be_written_leaves_nothing_of_its_line(monkeypatch, name, error, part):
    path = record.append("box", "p", full("a", 1.0))
    before = path.read_bytes()
    with monkeypatch.context() as patch:
        failing(patch, name, error, after=1, part=part if name == "write" else 0)
        with pytest.raises(record.StorageError, match=f"{os.strerror(error)}: {path}"):
            record.append("box", "p", full("b", 1.0))
    kept = path.read_bytes()
    assert kept.startswith(before) and kept.endswith(b"\n") and kept.count(b"\n") == 4  # one was written whole
    record.append("box", "p", full("c", 1.0))
    records, complaints = record.reading("box", "p")
    assert [one["variant"] for one in records] == [*"aaabccc"] and complaints == []


def test_a_part_that_cannot_be_taken_back_is_closed_by_the_next_writer(monkeypatch):
    path = record.append("box", "p", full("a", 1.0))
    with monkeypatch.context() as patch:
        failing(patch, "write", errno.ENOSPC, part=40)
        failing(patch, "ftruncate", errno.EIO)
        with pytest.raises(record.StorageError):
            record.append("box", "p", full("b", 1.0))
    assert not path.read_bytes().endswith(b"\n")
    record.append("box", "p", full("c", 1.0))
    records, complaints = record.reading("box", "p")
    assert [one["variant"] for one in records] == [*"aaaccc"] and len(complaints) == 1


def test_a_limit_on_file_sizes_is_an_error_with_help():
    path = record.append("box", "p", full("a", 1.0))
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 100, limits[1]))
    try:
        with pytest.raises(record.StorageError, match="ulimit -f"):
            record.append("box", "p", full("b", 1.0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("mount"), reason="needs root and mount")
def test_a_full_and_a_read_only_file_system(results):
    """In a mount namespace of its own, which goes with the process."""
    results.mkdir()
    script = f"""
import subprocess, sys
from pathlib import Path
from harness.results import record, schema
from tests.support.records import full
record.RESULTS = Path({str(results)!r})
def mount(options):
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(record.RESULTS)], check=True)
mount("size=12k")
count = 0
try:
    while True:
        record.append("box", "p", full("a", 1.0)[:1])
        count += 1
except record.StorageError as error:
    print(error)
assert 1 < count == len(record.read("box", "p")), count
mount("remount,size=1m")
record.append("box", "p", full("b", 1.0))
records, complaints = record.reading("box", "p")
assert len(records) == count + 3 and not complaints
mount("ro")
for what in (lambda: record.see_writable("box"), lambda: record.append("box", "p", full("a", 1.0))):
    try:
        what()
    except record.StorageError as error:
        print(error)
"""
    command = ["unshare", "--mount", sys.executable, "-c", script]
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("no mount namespaces here")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    full_, *read_only = done.stdout.splitlines()
    assert full_ == f"No space left on device: {results}/box/p.jsonl (free some space)"
    assert len(read_only) == 2 and all("Read-only file system" in said for said in read_only)


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/nothing"])
def test_a_folder_that_cannot_be_is_an_error(monkeypatch, tmp_path, place):
    (tmp_path / "file").touch()
    monkeypatch.setattr(record, "RESULTS", tmp_path / place)
    with pytest.raises(record.StorageError, match=str(tmp_path / place)):
        record.append("box", "p", full("a", 1.0))
    assert record.reading("box", "p") == ([], [])
    if place.startswith("file"):
        with pytest.raises(record.StorageError, match=r"Not a directory: .*/file \(a folder is wanted"):
            record.see_writable("box")


def test_a_new_folder_in_a_writable_one_can_be(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "RESULTS", tmp_path / "new" / "newer")
    record.see_writable("box")
    assert not (tmp_path / "new").exists()
