"""cpu_avx512: blocks as exact integer dots in AVX-512 VNNI, two runs of rows side by side, all cores."""

from pathlib import Path

from task import input_t, output_t, unpack

from problems.common import cpu

TARGETS = ("cpu",)
CPU_FLAGS = ("avx512f", "avx512bw", "avx512vl", "avx512_vnni", "f16c")  # as /proc/cpuinfo spells them
launch = cpu.Launcher(Path(__file__).with_suffix(".cpp"), CPU_FLAGS)
compile_for = launch.compile_for


def custom_kernel(data: input_t) -> output_t:
    """Write A b into data.c, fp16 (m, 1, l), and return it. ValueError as unpack says, RuntimeError as the launcher."""
    launch((data.a, data.b, data.sfa, data.sfb, data.c), unpack(data))
    return data.c
