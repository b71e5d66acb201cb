"""Run tests of kernels that are for a GPU in the model that executes PTX on the CPU (ptx_model)."""

import inspect
import shutil
from collections.abc import Callable, Sequence
from types import ModuleType

import pytest
import torch

from ptx_model import driver
from ptx_model.tools import check
from tests.support import forked
from tests.support.marks import first

TARGET = "sm90"
DEVICE = "cuda"  # of tensors here and in the test modules, which each have this name; `call` says another
# In a process of its own, since the model takes CUDA's place in the whole process.
SCRIPT = """
import torch
from tests.dsv4 import in_model
model = in_model.installed({processors})
import {module} as tests
in_model.call(tests, {calls}, model, {orders})
"""


def run(
    module: str, calls: list[tuple[str, dict]], processors: int | None = None, orders: Sequence[check.Order] = ()
) -> None:
    """Call test functions of `module` by name, with these arguments and the ops of its `kernel`, on CPU tensors.
    processors: multiprocessors of the GPU, as few as make blocks do several tiles. orders: of asynchronous work.
    Without nvcc the test is skipped. AssertionError, with what the process said, if a call fails.
    """
    if not shutil.which("nvcc"):
        pytest.skip("needs nvcc")
    known = [(one.policy, one.poison, one.multiprocessors) for one in orders]
    ran = forked.run(["-c", SCRIPT.format(module=module, calls=repr(calls), processors=processors, orders=known)])
    assert ran.returncode == 0, ran.stderr[-3000:]


def test_of(module: str, short: list[tuple[str, dict]], *long: list[tuple[str, dict]]) -> Callable:
    """A test of `module` that makes these calls in the model, the long ones in slow runs."""

    @pytest.mark.parametrize("calls", first([short, *long]), ids=["short", "long"][: 1 + len(long)])
    def test(calls: list[tuple[str, dict]]) -> None:
        run(module, calls)

    return test


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def draw_uneven(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Rows of very different size."""
    gen = torch.Generator().manual_seed(seed)
    sizes = torch.rand(*shape[:-1], 1, generator=gen).mul(12).sub(6).exp2()
    return (torch.randn(shape, generator=gen) * sizes).to(DEVICE, dtype)


def installed(processors: int | None = None) -> driver.Driver:
    """The model in place of CUDA, with references that compute as on a CPU."""
    if processors:
        driver.MULTIPROCESSORS[TARGET] = processors
    model = driver.install(TARGET)
    torch.Tensor.is_cuda = property(lambda tensor: False)  # ty: ignore[invalid-assignment]
    torch.use_deterministic_algorithms(True)  # then memory that nothing has written is NaN
    return model


def call(tests: ModuleType, calls: list[tuple[str, dict]], model: driver.Driver, orders: Sequence[tuple] = ()) -> None:
    """In the process of the model. The module's `edit`, if it has one, changes what kernels are."""
    global DEVICE
    DEVICE = tests.DEVICE = "cpu"  # ty: ignore[unresolved-attribute]
    model.edit = getattr(tests, "edit", None)
    ops = tests.kernel.ops(TARGET) if hasattr(tests, "kernel") else None
    for order in orders or [(model.policy, model.poison)]:
        model.set_order(*order)
        for name, arguments in calls:
            test = getattr(tests, name)
            known = {name: ops for name in ("ops", "either") if name in inspect.signature(test).parameters}
            try:
                test(**known, **arguments)
            finally:
                model.check()  # names what went wrong in a kernel, in front of what came of it
