"""What the judge has written stays: the file of records. What it makes of submissions is in test_exploits.py."""

import json

import pytest

from harness.results import record
from tests.support.records import bench, full


def test_records_are_appended_and_a_torn_line_is_closed(tmp_path):
    """What is there is never rewritten, and what a killed writer left does not swallow the next record."""
    first, *rest = full("a", 1.0)
    file = record.append("box", "p", [first], tmp_path)
    with open(file, "a") as torn:
        torn.write('{"a": 2, "rea')
    record.append("box", "p", rest, tmp_path)
    lines = file.read_text().splitlines()
    assert lines[1] == '{"a": 2, "rea'
    assert [json.loads(lines[i]) for i in (0, 2, 3)] == [first, *rest]


def test_a_record_holds_no_nan(tmp_path):
    with pytest.raises(ValueError, match="finite"):
        record.append("box", "p", [bench("a", 0, 1.0) | {"novelty": float("nan")}], tmp_path)
