"""cpu_avx512: blocks as exact integer dots in AVX-512 VNNI, two runs of rows side by side, all cores."""

import functools
from collections.abc import Callable
from ctypes import c_int64, c_void_p
from pathlib import Path

from task import input_t, output_t, unpack

from problems.common import build

TARGETS = ("cpu",)
CPU_FLAGS = ("avx512f", "avx512bw", "avx512vl", "avx512_vnni", "f16c")  # as /proc/cpuinfo spells them
SOURCE = Path(__file__).with_suffix(".cpp")
ERRORS = {1: "this CPU lacks AVX-512 (F, BW, VL) or VNNI", 2: "the system refused a thread"}  # by the launcher's status


def compile_for(target: str) -> list[build.Artefact]:
    """Machine code for `target`, "cpu"."""
    return [build.cpp(SOURCE)]


@functools.cache
def _launcher() -> Callable[..., int]:
    """The compiled code; finding it anew costs 50 us a call."""
    return build.cpp(SOURCE).function("launch", *[c_void_p] * 5, *[c_int64] * 3)


def custom_kernel(data: input_t) -> output_t:
    """Write A b into data.c and return it. ValueError as unpack says; RuntimeError where this CPU cannot run it."""
    m, k, l = unpack(data)
    tensors = (data.a, data.b, data.sfa, data.sfb, data.c)
    if status := _launcher()(*[tensor.data_ptr() for tensor in tensors], m, k, l):
        raise RuntimeError(f"cpu_avx512: {ERRORS[status]}")
    return data.c
