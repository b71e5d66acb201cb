"""cpu_portable: weights decoded by tables, once for 2 tokens, in GCC's vector types; for CPUs without AVX2."""

from pathlib import Path

from task import input_t, output_t, parts, unpack

from problems.common import build, cpu, linear_links

TARGETS = ("cpu",)
SOURCE = Path(__file__).with_suffix(".cpp")
LAUNCHER = cpu.Launcher(SOURCE, linear_links.ARGUMENTS)


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
