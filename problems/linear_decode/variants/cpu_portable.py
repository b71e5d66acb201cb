"""cpu_portable: weights decoded by tables, once for 2 tokens, in GCC's vector types; for CPUs without AVX2."""

from pathlib import Path

from task import parts, unpack, unpack_expert

from problems.common import cpu, linear_links

TARGETS = ("cpu",)
LINKS = linear_links.Links(cpu.Launcher(Path(__file__).with_suffix(".cpp")), unpack, parts, unpack_expert)

compile_for = LINKS.launch.compile_for
custom_kernel = LINKS.custom_kernel
prepare_expert, expert = LINKS.prepare_expert, LINKS.expert  # of the model's shared experts
