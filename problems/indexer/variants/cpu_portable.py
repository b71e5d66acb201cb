"""cpu_portable: keys as fp32 tiles, entries along vectors of four, a radix search: for CPUs without AVX-512."""

from ctypes import c_int64, c_void_p
from pathlib import Path

from task import input_t, output_t, unpack

from problems.common import build, cpu

TARGETS = ("cpu",)
SOURCE = Path(__file__).with_suffix(".cpp")
Pointers, Numbers = c_void_p * 6, c_int64 * 8  # of the tensors; of the sizes, and of the pages
LAUNCHER = cpu.Launcher(SOURCE, (Pointers, Numbers))


def compile_for(target: str) -> list[build.Artefact]:
    """Compile for `target`, "cpu"."""
    return [build.cpp(SOURCE)]


def custom_kernel(data: input_t) -> output_t:
    """Write the chosen places into data.out, int32 (B, S, k), in the order of the entries, and return it.

    ValueError as unpack says; RuntimeError: this CPU cannot run it, a thread cannot start, memory is short, or the
    table names no page for a visible entry.
    """
    *sizes, kind = unpack(data)
    numbers = Numbers(*sizes, kind == "fp8", len(data.keys))
    LAUNCHER.check(LAUNCHER.function(Pointers(*[tensor.data_ptr() for tensor in data]), numbers))
    return data.out
