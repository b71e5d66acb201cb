"""Run tests of kernels that are for a GPU in the model that executes PTX on the CPU (ptx_model)."""

import inspect
import shutil
from types import ModuleType

import pytest
import torch

from ptx_model import driver
from tests.support import forked

TARGET = "sm90"
# In a process of its own, since the model takes CUDA's place in the whole process.
SCRIPT = """
import torch
from tests.dsv4 import in_model
model = in_model.installed({processors})
import {module} as tests
in_model.call(tests, {calls}, model)
"""


def run(module: str, calls: list[tuple[str, dict]], processors: int | None = None) -> None:
    """Call test functions of `module` by name, with these arguments and the ops of its `kernel`, on CPU tensors.
    processors: multiprocessors of the GPU, as few as make blocks do several tiles.
    Without nvcc the test is skipped. AssertionError, with what the process said, if a call fails.
    """
    if not shutil.which("nvcc"):
        pytest.skip("needs nvcc")
    ran = forked.run(["-c", SCRIPT.format(module=module, calls=repr(calls), processors=processors)])
    assert ran.returncode == 0, ran.stderr[-3000:]


def installed(processors: int | None = None) -> driver.Driver:
    """The model in place of CUDA, with references that compute as on a CPU."""
    if processors:
        driver.MULTIPROCESSORS[TARGET] = processors
    model = driver.install(TARGET)
    torch.Tensor.is_cuda = property(lambda tensor: False)  # ty: ignore[invalid-assignment]
    torch.use_deterministic_algorithms(True)  # then memory that nothing has written is NaN
    return model


def call(tests: ModuleType, calls: list[tuple[str, dict]], model: driver.Driver) -> None:
    """In the process of the model."""
    tests.DEVICE = "cpu"  # ty: ignore[unresolved-attribute]
    ops = tests.kernel.ops(TARGET) if hasattr(tests, "kernel") else None
    for name, arguments in calls:
        test = getattr(tests, name)
        known = {name: ops for name in ("ops", "either") if name in inspect.signature(test).parameters}
        try:
            test(**known, **arguments)
        finally:
            model.check()  # names what went wrong in a kernel, in front of what came of it
