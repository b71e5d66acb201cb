"""Run tests of kernels that are for a GPU in the model that executes PTX on the CPU (problems/common/ptx_model).

.venv/bin/python -m tests.dsv4.in_model tests.dsv4.test_router_kernel '[["test_route", {"tokens": 1, ...}]]'
"""

import functools
import importlib
import inspect
import json
import subprocess
import sys
from collections.abc import Callable

from tests.support import ROOT

TARGET = "sm90"


def run(module: str, calls: list[tuple[str, dict]]) -> None:
    """Call test functions of `module` by name, with these arguments and the ops of its `kernel`, in another process:
    the model takes CUDA's place in the whole process. AssertionError, with what it said, if one fails.
    """
    command = [sys.executable, "-m", "tests.dsv4.in_model", module, json.dumps(calls)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]


def _main(module: str, calls: str) -> None:
    from problems.common.ptx_model import driver

    model = driver.install(TARGET)
    import torch

    torch.Tensor.is_cuda = property(lambda tensor: False)  # the references compute as on a CPU
    tests = importlib.import_module(module)
    tests.DEVICE = "cpu"
    ops = {name: _checked(op, model) for name, op in tests.kernel.ops(TARGET).items()}
    for name, arguments in json.loads(calls):
        test = getattr(tests, name)
        known = {"ops": ops} if "ops" in inspect.signature(test).parameters else {}
        test(**known, **{key: getattr(torch, str(value), value) for key, value in arguments.items()})


def _checked(op: Callable[..., None], model: object) -> Callable[..., None]:
    @functools.wraps(op)
    def call(*arguments: object, **named: object) -> None:
        try:
            op(*arguments, **named)
        finally:
            model.check()

    return call


if __name__ == "__main__":
    _main(*sys.argv[1:])
