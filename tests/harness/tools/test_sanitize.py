"""The verb sanitize with a script in place of compute-sanitizer: what is said where it is not clean."""

import json
import os

import pytest

from harness.judge.verdict import Result
from harness.problem import folders
from harness.problem.folders import UsageError, submission
from harness.sandbox.process import ROOT
from harness.tools import modes, single
from tests.support import SUPPORT, VECTOR_ADD, forked, script

CLEAN = "ERROR SUMMARY: 0 errors"


@pytest.fixture
def sanitized(tmp_path, monkeypatch, capsys):
    """A function of the script's text: the faults, and what was printed."""
    file = tmp_path / "mine.py"
    file.write_text("def custom_kernel(data):\n    return data.z\n")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    found = folders.find(str(VECTOR_ADD))

    def run(text: str) -> tuple[list[str], str]:
        script(tmp_path / "compute-sanitizer", text)
        judged = [Result(submission(found, file), "sm90")]
        return modes.sanitize(found, judged, list(found.tests), "sm90", lambda _: None), capsys.readouterr().out

    return run


def test_what_was_called_is_clean_of_each_tool(sanitized):
    """What was not called, as where the submission calls exit(0), is not."""
    faults, said = sanitized(f"echo '{single.DONE}' >&2; echo '========= {CLEAN}'; echo \"$@\" > $0.arguments")
    assert faults == [] and said.count("clean on ") == 2
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


# --- the process that profilers and sanitizers look into


LINEAR = SUPPORT / "problems" / "linear"
SUBMISSION = """
import torch
from task import Data, Weights

def prepare(weights):
    assert type(weights) is Weights
    return weights.w.t().contiguous()

def custom_kernel(data):
    assert type(data) is Data and data.weights.shape == (data.inputs.x.numel(), data.outputs.y.numel())
    torch.mv(data.weights.t(), data.inputs.x, out=data.outputs.y)
    print("called", *data.weights.shape)
    return data.outputs.y
"""


def test_a_problem_with_weights_is_called_on_what_prepare_made(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(SUBMISSION)
    cases = [{"m": 65, "k": 129, "seed": 1}, {"m": 3, "k": 2, "seed": 2}]
    command = ["-m", "harness.tools.single", LINEAR, file, "cpu", json.dumps(cases)]
    done = forked.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=120)
    assert done.stdout.splitlines() == ["called 129 65", "called 2 3"], done.stderr
    assert done.stderr.splitlines()[-1] == single.DONE
    file.write_text(SUBMISSION.replace("return data.outputs.y", "raise SystemExit(0)"))
    assert single.DONE not in forked.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=120).stderr


@pytest.mark.slow
def test_files_of_a_folder_from_elsewhere_are_found(tmp_path):
    """Also ../utils.py, which task.yml lists, and task.py imported within a function."""
    folder = SUPPORT / "gpu_mode" / "vectoradd"
    file = tmp_path / "mine.py"
    file.write_text(
        "def custom_kernel(data):\n    import task\n    from utils import get_device\n"
        "    print(get_device(), task.__name__)\n"
    )
    cases = [{"sizes": [3, 4], "scale": 1, "seed": 1}]
    command = ["-m", "harness.tools.single", folder, file, "cpu", json.dumps(cases)]
    done = forked.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=120)
    assert done.stdout.startswith("cpu "), done.stderr
