"""cpu_portable: weights decoded to integers once for 16 slots, blocks as exact dots; for CPUs without AVX2."""

from pathlib import Path

from task import unpack_call, unpack_weights, validate

from problems.common import cpu, expert_groups

TARGETS = ("cpu",)
ONLY = {"activation": ("bf16", "nvfp4")}  # no MXFP4 weights
LAUNCH = cpu.Launcher(Path(__file__).with_suffix(".cpp"))
EXPERTS = expert_groups.Experts(LAUNCH, unpack_weights, unpack_call, validate)

compile_for = LAUNCH.compile_for
prepare = EXPERTS.prepare
custom_kernel = EXPERTS.custom_kernel
