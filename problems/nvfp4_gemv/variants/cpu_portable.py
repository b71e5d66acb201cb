"""cpu_portable: plain C++, every block an exact integer dot product, all cores. For CPUs without AVX2."""

from pathlib import Path

from task import input_t, output_t, unpack

from problems.common import cpu

TARGETS = ("cpu",)
launch = cpu.Launcher(Path(__file__).with_suffix(".cpp"))
compile_for = launch.compile_for


def custom_kernel(data: input_t) -> output_t:
    """Write A b into data.c, fp16 (m, 1, l), and return it. ValueError as unpack says, RuntimeError as the launcher."""
    launch((data.a, data.b, data.sfa, data.sfb, data.c), unpack(data))
    return data.c
