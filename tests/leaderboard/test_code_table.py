"""The table of machine code: what is added to it, once, and what becomes of a source that cannot be had."""

import contextlib
import json

import pytest

from harness.tools import history
from leaderboard import code_table, provenance, report
from tests.support.records import full, write


@pytest.fixture
def results(monkeypatch, tmp_path):
    """Records of schema 2 and 3; sources whose machine code is known from their hash alone."""
    monkeypatch.setattr(provenance, "source_hash", lambda problem, variant: None if variant == "gone" else "now")
    monkeypatch.setattr(history, "commit_of", lambda source: source.commit.ljust(40, "0"))
    monkeypatch.setattr(history, "exported", lambda commit: contextlib.nullcontext(commit))
    monkeypatch.setattr(history, "hashes", lambda source, root: (f"{source.hash}+" if source.hash else "now", "p"))
    monkeypatch.setattr(history, "compiled", lambda source, root: ("x" * 16, "nvcc"))
    old = full("sm90_a", 1.0, schema=2, source_hash="old", commit="0123456", run="r0")
    write(tmp_path, "box", old + full("sm90_b", 1.0, source_hash="now") + full("gone", 1.0, source_hash="old"))
    return tmp_path


def table(results) -> list[dict]:
    file = results / provenance.FILE
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_sources_of_records_and_of_the_checkout_are_added_once(results, capsys):
    assert code_table.main(["--results", str(results)]) == 0
    found = table(results)
    assert [(one["variant"], one["recorded"], one["source_hash"]) for one in found] == [
        ("sm90_a", "old", "old+"),
        ("sm90_b", "now", "now+"),
        ("gone", "old", "old+"),
        ("sm90_a", "now", "now"),
    ]
    assert {one["code_hash"] for one in found} == {"x" * 16} and found[0]["commit"] == "0123456".ljust(40, "0")
    before = (results / provenance.FILE).read_bytes()
    assert code_table.main(["--results", str(results)]) == 0 and (results / provenance.FILE).read_bytes() == before
    write(results, "box", full("sm90_a", 1.0, source_hash="new", run="r1", minute=5))
    assert code_table.main(["--results", str(results)]) == 0
    assert (results / provenance.FILE).read_bytes().startswith(before) and len(table(results)) == 5


def test_by_default_it_takes_the_listed_machines_alone(results, monkeypatch, tmp_path):
    """Records of others stay local; the table is committed."""
    (tmp_path / "machines.txt").write_text("listed\n")
    monkeypatch.setattr(report, "RESULTS", results)
    monkeypatch.setattr(report, "MACHINES", tmp_path / "machines.txt")
    assert code_table.main([]) == 0 and table(results) == []
    write(results, "listed", full("sm90_c", 1.0, source_hash="now"))
    assert code_table.main([]) == 0 and [one["variant"] for one in table(results)] == ["sm90_c"]


def test_results_that_are_not_there_are_one_line(tmp_path, capsys):
    assert code_table.main(["--results", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err == f"code_table.py: --results: no folder {tmp_path / 'none'}\n"


def test_equal_sources_are_compiled_once(results, monkeypatch):
    write(results, "box", full("sm90_a", 1.0, schema=2, source_hash="old", commit="fedcba9", run="r1"))
    asked = []
    monkeypatch.setattr(history, "compiled", lambda source, root: asked.append(source) or ("x" * 16, "nvcc"))
    assert code_table.main(["--results", str(results)]) == 0
    assert len([one for one in asked if one.variant == "sm90_a" and one.hash]) == 1
    assert len([one for one in table(results) if one["recorded"] == "old" and one["variant"] == "sm90_a"]) == 2


@pytest.mark.parametrize(
    ("error", "status"), [(history.CodeError("it does not compile"), 1), (history.UnknownSourceError("no commit"), 0)]
)
def test_a_source_that_cannot_be_had_is_named_and_left_out(results, monkeypatch, capsys, error, status):
    def fail(source):
        raise error

    monkeypatch.setattr(history, "commit_of", fail)
    assert code_table.main(["--results", str(results)]) == status
    assert [one["variant"] for one in table(results)] == ["sm90_a"]  # the checkout's
    assert f"nvfp4_gemv/sm90_a for sm90 at 0123456: {error}" in capsys.readouterr().err
