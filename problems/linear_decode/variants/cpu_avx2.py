"""cpu_avx2: weights to fp32 in registers, once for 4 tokens, in AVX2 on all cores."""

from pathlib import Path

from task import parts, unpack, unpack_expert

from problems.common import cpu, linear_links

TARGETS = ("cpu",)
CPU_FLAGS = ("avx2", "fma", "f16c")  # as /proc/cpuinfo spells them
LINKS = linear_links.Links(cpu.Launcher(Path(__file__).with_suffix(".cpp"), CPU_FLAGS), unpack, parts, unpack_expert)

compile_for = LINKS.launch.compile_for
custom_kernel = LINKS.custom_kernel
prepare_expert, expert = LINKS.prepare_expert, LINKS.expert  # of the model's shared experts
