"""cpu_portable: plain C++, every block an exact integer dot product, all cores. For CPUs without AVX2."""

import functools
from collections.abc import Callable
from ctypes import c_int64, c_void_p
from pathlib import Path

from task import input_t, output_t, unpack

from problems.common import build

TARGETS = ("cpu",)
SOURCE = Path(__file__).with_suffix(".cpp")
ERRORS = {2: "the system refused a thread"}  # by the launcher's status


def compile_for(target: str) -> list[build.Artefact]:
    """Machine code for `target`, "cpu"."""
    return [build.cpp(SOURCE)]


@functools.cache
def _launcher() -> Callable[..., int]:
    """The compiled code; finding it anew costs 50 us a call."""
    return build.cpp(SOURCE).function("launch", *[c_void_p] * 5, *[c_int64] * 3)


def custom_kernel(data: input_t) -> output_t:
    """Write A b into data.c and return it. ValueError as unpack says; RuntimeError if a thread cannot start."""
    m, k, l = unpack(data)
    tensors = (data.a, data.b, data.sfa, data.sfb, data.c)
    if status := _launcher()(*[tensor.data_ptr() for tensor in tensors], m, k, l):
        raise RuntimeError(f"cpu_portable: {ERRORS[status]}")
    return data.c
