"""cpu_avx512: weights decoded to integers in registers, blocks as exact dots in AVX-512 VNNI, all cores."""

from pathlib import Path

from task import unpack_call, unpack_weights, validate

from problems.common import cpu, expert_groups

TARGETS = ("cpu",)
ONLY = {"activation": ("bf16", "nvfp4")}  # no MXFP4 weights
CPU_FLAGS = ("avx512f", "avx512bw", "avx512vl", "avx512_vnni")  # as /proc/cpuinfo spells them
LAUNCH = cpu.Launcher(Path(__file__).with_suffix(".cpp"), CPU_FLAGS)
EXPERTS = expert_groups.Experts(LAUNCH, unpack_weights, unpack_call, validate)

compile_for = LAUNCH.compile_for
prepare = EXPERTS.prepare
custom_kernel = EXPERTS.custom_kernel
