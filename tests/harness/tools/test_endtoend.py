"""A problem's own check: when a run begins with it, the verb check, and what follows from how it ends."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from harness import __main__ as command
from harness import invocation, run
from harness.problem.folders import UsageError
from harness.results import environment, output
from harness.sandbox import process
from harness.tools import modes
from problems.common import load
from tests.support import json_lines, write_files
from tests.support.recorded import SOURCE, TASK

# It says what it got in a file, so that a test need not look through what it prints.
CHECK = '''"""A check."""
import json
import os
import signal
import sys
from pathlib import Path

def main(argv):
    Path(__file__).with_suffix(".json").write_text(json.dumps(argv))
    print("checking end to end")
    end = argv[argv.index("--end") + 1] if "--end" in argv else os.environ.get("END", "0")
    if end == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if end.startswith("exec "):
        exec(end[5:])
    return int(end) if end.isdigit() else 0

'''
SUBMISSION = SOURCE.format(name="gated")
ON = "went on"  # what a run says here that judges, or profiles


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Iterator[Path]:
    """A checkout with one problem, gated, that has a check; nothing is judged in it."""
    before = set(sys.modules)
    files = {"task.py": TASK, "check.py": CHECK, "submission.py": SUBMISSION, "reference.py": "", "../__init__.py": ""}
    made = write_files(tmp_path / "problems" / "gated", files)
    monkeypatch.setattr(load, "PROBLEMS", made.parent)
    monkeypatch.setattr(process, "ROOT", tmp_path)

    for owner, name in ((invocation.Run, "_begin"), (invocation.Run, "_judge"), (modes, "profile")):
        monkeypatch.setattr(owner, name, Mock(side_effect=UsageError(ON)))
    for name in ("_resume", "_tell_files"):
        monkeypatch.setattr(invocation.Run, name, lambda _: None)
    yield made
    for name in set(sys.modules) - before:
        if name.startswith("problems."):
            del sys.modules[name]


def ran(*words: str) -> int:
    return run.main(["gated", "--device", "cpu", *words])


def checked(*words: str) -> int:
    """The exit code of the verb with these words for the check."""
    return command.main(["check", "gated", "--device", "cpu", *words])


def got(folder: Path) -> list[str] | None:
    """The arguments of the check, None where it did not run."""
    file = folder / "check.json"
    return json_lines(file)[0] if file.is_file() else None


def test_it_comes_first_and_what_it_prints_is_shown(folder, capfd):
    assert ran("--mode", "test") == output.USAGE_EXIT
    out, err = capfd.readouterr()
    words = (environment.line(), "checking end to end", "gated, end to end: PASSED")
    assert sorted(map(out.index, words)) == [out.index(word) for word in words]
    assert ON in err and got(folder) == ["--device", "cpu"]


@pytest.mark.parametrize(
    ("arguments", "runs"),
    [
        ([], True),
        (["--mode", "leaderboard"], True),
        (["--mode", "test", "--case", "n=1"], True),
        (["--mode", "benchmark"], False),
        (["--mode", "profile"], False),
    ],
)
def test_modes_that_it_belongs_to(folder, capfd, arguments, runs):
    assert ran(*arguments) == output.USAGE_EXIT and ON in capfd.readouterr().err
    assert (got(folder) is not None) == runs


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--mode", "test", "--case", "tiny nonsense"], 2, "--case must match a test case of gated (n=1"),
        (["--variant", "a", "--against", "b"], 7, "--against: nothing was compared, b: made for sm100, this run is on"),
        (["--against", "none.py"], 2, "--against must be a Python file, found none at none.py"),
    ],
)
def test_options_that_are_wrong_are_refused_before_it(folder, capfd, arguments, code, said):
    write_files(folder / "variants", {"a.py": SUBMISSION, "b.py": SUBMISSION.replace("cpu", "sm100")})
    assert ran(*arguments) == code
    assert said in capfd.readouterr().err and got(folder) is None


def test_a_file_from_elsewhere_is_not_its_business(folder, tmp_path, capfd):
    (tmp_path / "mine.py").write_text(SUBMISSION)
    assert ran("--submission", str(tmp_path / "mine.py")) == output.USAGE_EXIT
    out, err = capfd.readouterr()
    assert "note: check.py says nothing of files from elsewhere" in out and ON in err and got(folder) is None


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("1", 1, "INCORRECT (exit status 1); nothing else is judged"),
        ("3", 1, "INCORRECT (exit status 3)"),
        ("killed", 1, "INCORRECT (killed by signal 9)"),
        ("2", 2, "checking end to end"),
        # Only a main that has returned passes.
        ("exec os._exit(0)", 1, "ended with status 0 before its main returned"),
        ("exec sys.exit(0)", 1, "ended with status 0 before its main returned"),
        ("exec import ctypes; ctypes.CDLL(None).exit(0)", 1, "ended with status 0 before its main returned"),
    ],
)
def test_a_check_that_does_not_pass_ends_the_run(folder, capfd, monkeypatch, end, code, said):
    monkeypatch.setenv("END", end)
    assert ran("--mode", "test") == code
    out, err = capfd.readouterr()
    assert said in out and ON not in err


PARSING = '''"""A check."""
import argparse

def main(argv):
    parser = argparse.ArgumentParser("check.py", allow_abbrev=False)
    parser.add_argument("--device")
    parser.parse_args(argv)
    print("checking end to end")
    return 0

'''


def test_a_parser_in_it_refuses_and_helps(folder, capfd):
    (folder / "check.py").write_text(PARSING)
    assert checked("--wrong") == output.USAGE_EXIT
    out, err = capfd.readouterr()
    assert "check.py: error: unrecognized arguments: --wrong" in err and "end to end" not in out and ON not in err
    assert ran("--mode", "test") == output.USAGE_EXIT and "end to end: PASSED" in capfd.readouterr().out
    assert checked("--", "--help") == 0  # nothing is checked, and nothing judged
    out, err = capfd.readouterr()
    assert "usage: check.py" in out and "end to end" not in out and ON not in err


def test_what_it_prints_stays_out_of_a_quiet_run_and_its_exception_is_shown(folder, capfd):
    assert checked("--quiet") == 0
    assert capfd.readouterr().out.strip() == "gated, end to end: PASSED"
    (folder / "check.py").write_text("import math\n\nmath.no_such_name\n")
    assert checked() == 1
    out, err = capfd.readouterr()
    assert "no_such_name" in err and "end to end: INCORRECT" in out


def test_its_options_reach_it_as_they_are(folder, capfd):
    (folder / "submission.py").unlink()  # it is not asked for
    words = ["--word=a b", "--end", "0", "--word", "-1"]
    assert command.main(["check", "gated", *words[:3], "--device", "cpu", *words[3:]]) == 0
    assert ON not in capfd.readouterr().err and got(folder) == [*words, "--device", "cpu"]


def test_a_problem_without_one_and_a_folder_elsewhere_are_named(folder, capfd, tmp_path):
    write_files(folder.parent / "plain", {"task.py": TASK})
    assert command.main(["check", "plain", "--device", "cpu"]) == output.USAGE_EXIT
    assert "plain has no check.py" in capfd.readouterr().err
    os.rename(folder, tmp_path / "gated")
    assert run.main([str(tmp_path / "gated"), "--device", "cpu"]) == output.USAGE_EXIT
    assert "runs as problems.gated.check: its folder must stand in" in capfd.readouterr().err
