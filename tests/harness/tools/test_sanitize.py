"""The verb sanitize with a script in place of compute-sanitizer: what is said where it is not clean."""

import os

import pytest

from harness.judge.verdict import Result
from harness.problem import folders
from harness.problem.folders import UsageError, submission
from harness.tools import modes, single
from tests.support import SUPPORT

PROBLEM = SUPPORT / "problems" / "vector_add"
CLEAN = "ERROR SUMMARY: 0 errors"


@pytest.fixture
def sanitized(tmp_path, monkeypatch, capsys):
    """A function of the script's text: the faults, and what was printed."""
    tools, file = tmp_path / "bin", tmp_path / "mine.py"
    tools.mkdir()
    file.write_text("def custom_kernel(data):\n    return data.z\n")
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    found = folders.find(str(PROBLEM))

    def run(script: str) -> tuple[list[str], str]:
        tool = tools / "compute-sanitizer"
        tool.write_text(f"#!/bin/bash\n{script}\n")
        tool.chmod(0o755)
        judged = [Result(submission(found, file), "sm90")]
        faults = modes.sanitize(found, judged, list(found.tests), "sm90", lambda _: None)
        return faults, capsys.readouterr().out

    return run


def test_what_is_clean_is_said_of_each_tool(sanitized):
    faults, said = sanitized(f"echo '{single.DONE}' >&2; echo '========= {CLEAN}'; echo \"$@\" > $0.arguments")
    assert faults == [] and said.count("clean on ") == 2


def test_what_was_not_called_is_not_clean(sanitized):
    """As where the submission calls exit(0)."""
    faults, said = sanitized(f"echo '========= {CLEAN}'")
    assert faults[0] == "mine memcheck: its process ended with status 0 before the last case was called"
    assert "clean on " not in said


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo '========= ERROR SUMMARY: 3 errors'; exit 66", "the tool found errors"),
        (f"echo '========= {CLEAN}'; exit 1", "exit status 1"),
        ("echo '========= Error: no instrumented API call'", "the tool printed no summary without errors"),
        ("kill -9 $$", "exit status -9"),
        ("printf 'not \\xff UTF-8'; exit 4", "exit status 4"),
    ],
)
def test_the_reason_and_the_last_lines_are_shown(sanitized, script, reason):
    faults, said = sanitized(f"for i in $(seq 60); do echo line $i; done\n{script}")
    assert len(faults) == 2 and faults[0].startswith(f"mine memcheck: {reason}") and faults[0] in said
    assert "line 50\n" in said and "line 10\n" not in said


def test_a_tool_that_does_not_end_is_said_with_what_it_had_printed(sanitized, monkeypatch, capsys):
    monkeypatch.setattr(modes, "TOOL_LIMIT_S", 0.5)
    with pytest.raises(UsageError, match=r"memcheck was not done after 0\.5 s$"):
        sanitized("echo begun; exec sleep 5")
    assert capsys.readouterr().out == "begun\n"
