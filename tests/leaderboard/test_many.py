"""A report over ten thousand records. How long one takes is printed; no clock decides about the test."""

import datetime
import json
import time
from pathlib import Path

import pytest

from harness.results import record
from leaderboard import report
from tests.support import ROOT

MACHINE = ROOT / "leaderboard" / "results" / "nvidia-h200"
COUNT = 10_000


def write(folder: Path) -> int:
    """Write the committed records again and again, each time as later runs, into FOLDER/box. -> how many."""
    folder = folder / "box"
    folder.mkdir(parents=True)
    problems = {record.problem_of(file, MACHINE) for file in record.files(MACHINE)}
    known = {f"{name}.jsonl": record.read(MACHINE.name, name, MACHINE.parent) for name in sorted(problems)}
    written, day = 0, 0
    while written < COUNT:
        for name, records in known.items():
            with (folder / name).open("a") as file:
                for one in records:
                    at = datetime.datetime.fromisoformat(one["time"]) + datetime.timedelta(days=day)
                    later = {"time": at.isoformat(), "run_id": f"{one['run_id']}-{day}"}
                    file.write(json.dumps(one | later) + "\n")
            written += len(records)
        day += 1
    return written


@pytest.mark.slow
@pytest.mark.parametrize("form", ["terminal", "markdown", "csv"])
def test_ten_thousand_records_make_a_report(capsys, tmp_path, form):
    count = write(tmp_path)
    start = time.perf_counter()
    assert report.main(["--results", str(tmp_path), "--format", form]) == 0
    taken = time.perf_counter() - start
    out, err = capsys.readouterr()
    assert count >= COUNT and err == "" and "sm90_dp4a" in out and "sm90_grouped" in out
    with capsys.disabled():
        print(f"\n{count} records, {form}: {taken:.2f} s")
