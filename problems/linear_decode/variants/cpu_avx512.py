"""cpu_avx512: weights to fp32 by shifts and a conversion from fp16, once for 8 tokens, in AVX-512 on all cores."""

from pathlib import Path

from task import input_t, output_t, parts, unpack

from problems.common import build, cpu, linear_links

TARGETS = ("cpu",)
CPU_FLAGS = ("avx512f", "avx512bw", "avx512vl", "f16c", "fma")  # as /proc/cpuinfo spells them
SOURCE = Path(__file__).with_suffix(".cpp")
LAUNCHER = cpu.Launcher(SOURCE, linear_links.ARGUMENTS, needs="AVX-512 (F, BW, VL)")


def compile_for(target: str) -> list[build.Artefact]:
    """Compile for `target`, "cpu"."""
    return [build.cpp(SOURCE)]


def custom_kernel(data: input_t) -> output_t:
    """Write data.outputs.out and return it. ValueError as unpack says; RuntimeError: this CPU cannot run it, a thread
    cannot start, or memory is short.
    """
    sizes, out = unpack(data), data.outputs.out
    LAUNCHER.check(LAUNCHER.function(*linear_links.arguments(data.weights, sizes, data.inputs.x, parts(out, sizes))))
    return out
