"""Records from elsewhere: each one arrives once, whoever merges it, and however often."""

import json
import threading

import pytest

from harness.results import merge, record
from tests.support.records import bench, full


def lines_of(results):
    return [json.loads(line) for line in (results / "box" / "p.jsonl").read_text().splitlines()]


@pytest.fixture
def source(tmp_path):
    return tmp_path / "elsewhere"


@pytest.fixture
def results(tmp_path):
    return tmp_path / "here"


def test_what_is_there_is_not_added_again(source, results):
    first, *rest = full("a", 1.0)
    record.append("box", "p", [first, *rest], source)
    record.append("box", "p", [first], results)
    assert merge.merge(source, results) == (len(rest), [])
    assert merge.merge(source, results) == (0, [])
    assert lines_of(results) == [first, *rest]


def test_a_line_counts_as_often_as_it_is_there(source, results):
    """Two equal test cases of a problem make two equal lines."""
    one = bench("a", 0, 1.0)
    record.append("box", "p", [one, one, one], source)
    record.append("box", "p", [one], results)
    assert merge.merge(source, results)[0] == 2
    assert lines_of(results) == [one] * 3


def test_a_record_is_the_same_however_its_json_is_written(source, results):
    one = bench("a", 0, 1.0)
    record.append("box", "p", [one], results)
    (source / "box").mkdir(parents=True)
    (source / "box" / "p.jsonl").write_text(json.dumps(dict(reversed(one.items())), indent=None) + " \n")
    assert merge.merge(source, results) == (0, [])


def test_many_at_once_add_each_record_once(source, results):
    records = [bench("a", n % 3, 1.0 + n) for n in range(40)]
    record.append("box", "p", records, source)
    workers = [threading.Thread(target=merge.merge, args=(source, results)) for _ in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert lines_of(results) == records


def test_a_torn_end_is_left_for_the_next_time_and_a_bad_line_is_named(source, results):
    one, other = full("a", 1.0)[:2]
    file = record.append("box", "p", [one], source)
    with open(file, "a") as torn:
        torn.write('{"no": "record"}\n' + json.dumps(other)[:50])
    added, complaints = merge.merge(source, results)
    assert added == 1 and len(complaints) == 1 and "p.jsonl:2: not a record" in complaints[0]
    with open(file, "a") as torn:
        torn.write(json.dumps(other)[50:] + "\n")
    assert merge.merge(source, results)[0] == 1
    assert lines_of(results) == [one, other]


def test_journals_and_other_files_are_no_records(source, results):
    (source / "box").mkdir(parents=True)
    (source / "code.jsonl").write_text("{}\n")
    (source / "box" / f"p.20260101T000000-00000000{record.PARTIAL}").write_text("{}\n")
    assert merge.merge(source, results) == (0, []) and not results.exists()


def test_the_command_says_how_many_were_new(source, results, monkeypatch, capsys):
    monkeypatch.setattr(record, "RESULTS", results)
    record.append("box", "p", full("a", 1.0), source)
    assert merge.main([str(source)]) == 0 and "new records" in capsys.readouterr().out
    assert merge.main([]) == 2 and "FOLDER must be" in capsys.readouterr().err
