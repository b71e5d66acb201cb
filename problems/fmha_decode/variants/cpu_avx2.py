"""cpu_avx2: tiles of entries as fp32 in the cache, both products as blocks of AVX2 registers, all cores."""

import functools
from collections.abc import Callable
from ctypes import c_int64, c_void_p
from pathlib import Path

from task import input_t, output_t, unpack

from problems.common import build

TARGETS = ("cpu",)
CPU_FLAGS = ("avx2", "fma", "f16c")  # as /proc/cpuinfo spells them
SOURCE = Path(__file__).with_suffix(".cpp")
Pointers, Numbers = c_void_p * 10, c_int64 * 9  # of the tensors; of the sizes and of the pages of both caches
ERRORS = {
    1: "this CPU lacks AVX2, FMA or F16C", 2: "the system refused a thread", 3: "the system refused memory",
    4: "an index is outside the pages",
}  # fmt: skip


def compile_for(target: str) -> list[build.Artefact]:
    """Machine code for `target`, "cpu"."""
    return [build.cpp(SOURCE)]


@functools.cache
def _launcher() -> Callable[..., int]:
    """The compiled code; finding it anew costs 50 us a call."""
    return build.cpp(SOURCE).function("launch", Pointers, Numbers)


def custom_kernel(data: input_t) -> output_t:
    """Write data.out and data.lse and return them. ValueError as unpack says; RuntimeError where this CPU cannot run
    it, or an index that counts is neither -1 nor an entry.
    """
    numbers = Numbers(*unpack(data), data.window.shape[0], data.compressed.shape[0])
    if status := _launcher()(Pointers(*[tensor.data_ptr() for tensor in data]), numbers):
        raise RuntimeError(f"cpu_avx2: {ERRORS[status]}")
    return data.out, data.lse
