"""cpu_avx2: weights decoded to integers, blocks as exact dots of 16-bit pairs in AVX2, all cores."""

from pathlib import Path

from task import unpack_call, unpack_weights, validate

from problems.common import cpu, expert_groups

TARGETS = ("cpu",)
ONLY = {"activation": ("bf16", "nvfp4")}  # no MXFP4 weights
CPU_FLAGS = ("avx2", "fma", "f16c")  # as /proc/cpuinfo spells them
LAUNCH = cpu.Launcher(Path(__file__).with_suffix(".cpp"), CPU_FLAGS)
EXPERTS = expert_groups.Experts(LAUNCH, unpack_weights, unpack_call, validate)

compile_for = LAUNCH.compile_for
prepare = EXPERTS.prepare
custom_kernel = EXPERTS.custom_kernel
