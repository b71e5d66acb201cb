"""cpu_avx2: blocks as exact integer dots in AVX2, two runs of rows side by side, all cores."""

from ctypes import c_int64, c_void_p
from pathlib import Path

from task import input_t, output_t, unpack

from problems.common import build, cpu

TARGETS = ("cpu",)
CPU_FLAGS = ("avx2", "fma", "f16c")  # as /proc/cpuinfo spells them
SOURCE = Path(__file__).with_suffix(".cpp")
LAUNCHER = cpu.Launcher(SOURCE, (c_void_p,) * 5 + (c_int64,) * 3, needs="AVX2, FMA or F16C")


def compile_for(target: str) -> list[build.Artefact]:
    """Compile for `target`, "cpu"."""
    return [build.cpp(SOURCE)]


def custom_kernel(data: input_t) -> output_t:
    """Write A b into data.c, fp16 (m, 1, l), and return it.

    ValueError as unpack says; RuntimeError: this CPU cannot run it, or a thread cannot start.
    """
    m, k, l = unpack(data)
    tensors = (data.a, data.b, data.sfa, data.sfb, data.c)
    LAUNCHER.check(LAUNCHER.function(*[tensor.data_ptr() for tensor in tensors], m, k, l))
    return data.c
