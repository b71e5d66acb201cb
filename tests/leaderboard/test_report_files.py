"""What the leaderboard says of folders and files that have no records."""

import pytest

from harness.results import record
from tests.leaderboard.test_report import said
from tests.support.records import full, line, write


@pytest.mark.parametrize("more", [[], ["--check"], ["--machine", "box"]])
def test_results_that_are_not_there_are_one_line(capsys, tmp_path, more):
    none = tmp_path / "none"
    assert said(capsys, "--results", none, *more) == (2, "", f"leaderboard/report.py: --results: no folder {none}\n")


@pytest.mark.parametrize("tail", ["", "[\n", "17\n{}\n"])
def test_a_machine_whose_file_has_no_record_is_not_said_to_have_some(capsys, tmp_path, tail):
    write(tmp_path, "box", [], tail)
    code, out, _ = said(capsys, "--results", tmp_path, "--machine", "box")
    assert code == 0 and out.startswith("no records on box: run ")
    write(tmp_path, "other", full("a", 1.0))
    code, out, _ = said(capsys, "--results", tmp_path, "--machine", "box")
    assert code == 0 and out.startswith("no records on box (there are some on: other): run ")
    _, out, _ = said(capsys, "--results", tmp_path, "--machine", "box", "moe_gemm")
    assert out.startswith("no records of moe_gemm on box: run ")


def test_a_target_that_is_none_makes_no_board(capsys, tmp_path):
    write(tmp_path, "box", full("a", 1.0, target="sm999"))
    code, out, err = said(capsys, "--results", tmp_path)
    assert code == 0 and out.startswith("no records: run ") and err.count(": skipped: target: ") == 3


def test_of_many_bad_lines_the_first_are_named_and_the_others_counted(capsys, tmp_path):
    write(tmp_path, "box", [line("test", "a", schema=99)] * 1000)
    write(tmp_path, "other", [line("test", "a", schema=99)] * record.MOST)
    _, _, err = said(capsys, "--results", tmp_path)
    lines = err.splitlines()
    assert (
        lines[record.MOST] == "warning: ... and 995 more in box/nvfp4_gemv.jsonl" and len(lines) == 2 * record.MOST + 1
    )
