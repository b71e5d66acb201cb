"""cpu_avx512: tiles of entries as fp32 in the cache, both products as blocks of AVX-512 registers, all cores."""

from pathlib import Path

from task import input_t, output_t, unpack

from problems.common import cpu

TARGETS = ("cpu",)
CPU_FLAGS = ("avx512f", "avx512bw", "avx512vl")  # as /proc/cpuinfo spells them
launch = cpu.Launcher(Path(__file__).with_suffix(".cpp"), CPU_FLAGS)
compile_for = launch.compile_for


def custom_kernel(data: input_t) -> output_t:
    """Write data.out, bf16 (B, S, H, 512), and data.lse, fp32 (B, S, H), and return them.

    ValueError as unpack says, RuntimeError as the launcher: an index that counts is neither -1 nor an entry.
    """
    launch(data, (*unpack(data), len(data.window), len(data.compressed)))
    return data.out, data.lse
