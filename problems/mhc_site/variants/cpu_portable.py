"""cpu_portable: plain C++ in vectors of four, each chunk of columns summed by itself, all cores. For any CPU."""

from ctypes import c_int64, c_void_p
from pathlib import Path

from task import Data, addend_bytes, input_t, output_t, unpack

from problems.common import build, cpu

TARGETS = ("cpu",)
SOURCE = Path(__file__).with_suffix(".cpp")
POINTERS = c_void_p * len(Data._fields)
LAUNCHER = cpu.Launcher(SOURCE, (POINTERS, *[c_int64] * 4))


def compile_for(target: str) -> list[build.Artefact]:
    """Compile for `target`, "cpu"."""
    return [build.cpp(SOURCE)]


def custom_kernel(data: input_t) -> output_t:
    """Write the four outputs and return them.

    ValueError as unpack says; RuntimeError: this CPU cannot run it, a thread cannot start, or memory is short.
    """
    sizes = *unpack(data), *addend_bytes(data)
    LAUNCHER.check(LAUNCHER.function(POINTERS(*[tensor.data_ptr() for tensor in data]), *sizes))
    return data.new_copies, data.out, data.new_post, data.new_comb
