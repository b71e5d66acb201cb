"""cpu_avx512: weights to fp32 in registers, once for 8 tokens, in AVX-512 on all cores."""

from pathlib import Path

from task import parts, unpack, unpack_expert

from problems.common import cpu, linear_links

TARGETS = ("cpu",)
CPU_FLAGS = ("avx512f", "avx512bw", "avx512vl")  # as /proc/cpuinfo spells them
LINKS = linear_links.Links(cpu.Launcher(Path(__file__).with_suffix(".cpp"), CPU_FLAGS), unpack, parts, unpack_expert)

compile_for = LINKS.launch.compile_for
custom_kernel = LINKS.custom_kernel
prepare_expert, expert = LINKS.prepare_expert, LINKS.expert  # of the model's shared experts
