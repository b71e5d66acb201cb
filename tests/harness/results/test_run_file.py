"""The file of a run: what was written stays, one process holds it, and the disk may fail at any time."""

import errno
import fcntl
import os
import resource
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from harness.results import record
from harness.results.run_file import RunFile
from tests.support import ROOT, json_lines
from tests.support.records import bench, full, run_line

RUN_ID = "20260101T000000-00000001"


pytestmark = pytest.mark.usefixtures("results")


def begun(run_id: str = RUN_ID, **more) -> RunFile:
    return RunFile.begin(run_line(run_id, **more))


def filled() -> RunFile:
    found = begun()
    for number in range(3):
        found.write("outcome", number=number, reason="x" * 50)
    return found


def reopened(path: Path) -> RunFile:
    return RunFile.reopen(path, lambda line: None)


def records(variant: str = "a", **more) -> list[dict]:
    return full(variant, 1.0, run=RUN_ID, schema=4, problem="p", **more)


def test_without_work_there_is_no_file_and_what_is_no_record_is_not_written(results):
    found = begun()
    found.close()
    assert not found.resumable and not results.exists()
    found = filled()
    before = found.contents.path.read_bytes()
    for wrong in ({"median_us": "soon"}, {"novelty": float("nan")}):
        with pytest.raises(ValueError, match=r"median_us: |finite"):
            found.finish([*records(), bench("b", 0, 1.0) | wrong], 0)
    assert found.contents.path.read_bytes() == before and found.resumable


def test_results_come_back_as_the_records_that_they_were():
    found, mine = filled(), records() + records("other", source_hash="def")
    mine[0]["clock"] = {**mine[0]["clock"], "name": "another clock", "warnings": ["late"]}
    mine[1]["dirty"] = True
    assert record.read("box", "p") == [] and found.resumable
    found.finish(mine, 0)
    assert record.read("box", "p") == mine and not found.resumable
    lines = json_lines(found.contents.path)
    assert [line["kind"] for line in lines] == ["run"] + ["outcome"] * 3 + ["benchmark"] * 6 + ["end"]
    assert lines[-1]["exit_code"] == 0 and lines[4]["clock"] == {"name": "another clock", "warnings": ["late"]}
    assert not set(lines[4]) & {"environment", "commit", "run_id", "source_hash", "problem", "schema"}, "said before"


def test_it_can_be_cut_anywhere_and_goes_on():
    """Whatever a kill leaves of the file: whole lines stay, and a torn one is no line and harms none behind it."""
    source = filled()
    source.finish(records(), 0)
    path, whole = source.contents.path, source.contents.path.read_bytes()
    for cut in range(whole.index(b"\n") + 1, len(whole) - 1, 13):
        path.write_bytes(whole[:cut])
        assert record.read("box", "p") == [], "it has not ended"
        again = reopened(path)
        again.write("resumed")
        work = again.contents.work
        assert work[:-1] == source.contents.work[: whole[:cut].count(b"\n") - 1] and work[-1]["kind"] == "resumed"
        again.finish(records(reason="again"), 0)
        assert record.read("box", "p") == records(reason="again"), "each result once"
        assert path.read_bytes().startswith(whole[: whole[:cut].rfind(b"\n") + 1])


def test_reopening_alone_changes_nothing():
    source = filled()
    source.close()
    path = source.contents.path
    path.write_bytes(held := path.read_bytes() + b'{"kind": "outc')
    found = reopened(path)
    found.close()
    assert found.resumable and found.contents.complaints == [] and path.read_bytes() == held


HOLDS = """import sys
from pathlib import Path
from harness.results import record
from tests.harness.results.test_run_file import begun
record.RESULTS = Path(sys.argv[1])
found = begun()
found.write('outcome')
print(found.contents.path, flush=True)
sys.stdin.read()
"""


def test_a_living_process_holds_its_file_and_a_dead_one_does_not():
    command = [sys.executable, "-c", HOLDS, str(record.RESULTS)]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, text=True)
    path = Path(other.stdout.readline().strip())
    with pytest.raises(BlockingIOError):
        reopened(path)
    other.kill()
    other.communicate()
    assert len(reopened(path).contents.work) == 1


@pytest.mark.parametrize(
    ("name", "error", "part"), [("write", errno.ENOSPC, 0), ("write", errno.EDQUOT, 40), ("fsync", errno.EIO, 0)]
)
def test_what_cannot_be_written_leaves_nothing_of_its_line(monkeypatch, results, name, error, part):
    """os.`name` fails; a write takes `part` bytes before."""
    found = filled()
    path, real = found.contents.path, getattr(os, name)
    before = path.read_bytes()
    taken = [lambda fd, data: real(fd, bytes(data)[:part])] if part else []

    def fail(*given: object) -> int:
        if taken:
            return taken.pop()(*given)
        raise OSError(error, os.strerror(error))

    with monkeypatch.context() as patch:
        patch.setattr(os, name, fail)
        with pytest.raises(record.StorageError, match=f"{os.strerror(error)}: {path}"):
            found.write("outcome")
        with pytest.raises(record.StorageError):
            found.finish(records(), 0)
        with pytest.raises(record.StorageError):
            begun("20260101T000000-00000002").write("outcome")
    assert path.read_bytes() == before and [*results.rglob("*.jsonl")] == [path]
    found.finish(records(), 0)
    assert record.read("box", "p") == records()


def test_a_limit_on_file_sizes_is_an_error_with_help():
    found = filled()
    before, limits = found.contents.path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 100, limits[1]))
    try:
        with pytest.raises(record.StorageError, match="ulimit -f"):
            found.finish(records(), 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert found.contents.path.read_bytes() == before


def test_a_file_system_without_locks_is_an_error(monkeypatch, results):
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))))
    with pytest.raises(record.StorageError, match="No locks available"):
        begun().write("outcome")
    assert not [*results.rglob("*.jsonl")]


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/nothing"])
def test_a_folder_that_cannot_be_is_an_error(monkeypatch, tmp_path, place):
    (tmp_path / "file").touch()
    monkeypatch.setattr(record, "RESULTS", tmp_path / place)
    with pytest.raises(record.StorageError, match=str(tmp_path / place)):
        begun().write("outcome")
    assert record.read("box", "p") == []
    if place.startswith("file"):
        with pytest.raises(record.StorageError, match=r"Not a directory: .*/file.*/box \(a folder is wanted"):
            record.see_writable("box")
