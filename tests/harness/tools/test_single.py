"""harness/tools/single.py, the process that profilers and sanitizers look into, on CPU."""

import json
import os

import pytest

from harness.sandbox.process import ROOT
from harness.tools import single
from tests.support import SUPPORT, forked

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
    lines = [
        "def custom_kernel(data):",
        "    import task",
        "    from utils import get_device",
        "    print(get_device(), task.__name__)",
    ]
    file.write_text("\n".join(lines))
    cases = [{"sizes": [3, 4], "scale": 1, "seed": 1}]
    command = ["-m", "harness.tools.single", folder, file, "cpu", json.dumps(cases)]
    done = forked.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=120)
    assert done.stdout.startswith("cpu "), done.stderr
