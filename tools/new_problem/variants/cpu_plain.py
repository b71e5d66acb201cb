"""cpu_plain: one dot product a row, the rows shared by all cores. The start: as short as it gets."""

from ctypes import c_int64, c_void_p
from pathlib import Path

from task import input_t, output_t, unpack

from problems.common import build, cpu

TARGETS = ("cpu",)
SOURCE = Path(__file__).with_suffix(".cpp")
LAUNCHER = cpu.Launcher(SOURCE, (c_void_p,) * 3 + (c_int64,) * 2)


def compile_for(target: str) -> list[build.Artefact]:
    """Compile for `target`, "cpu"."""
    return [build.cpp(SOURCE)]


def custom_kernel(data: input_t) -> output_t:
    """Write W x into data.y, fp32 (m,), and return it. ValueError as unpack says; RuntimeError: no thread starts."""
    m, k = unpack(data)
    LAUNCHER.check(LAUNCHER.function(*[tensor.data_ptr() for tensor in data], m, k))
    return data.y
