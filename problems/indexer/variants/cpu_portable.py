"""cpu_portable: keys as fp32 tiles, entries along vectors of four, a radix search: for CPUs without AVX-512."""

from pathlib import Path

from task import input_t, output_t, unpack

from problems.common import cpu

TARGETS = ("cpu",)
launch = cpu.Launcher(Path(__file__).with_suffix(".cpp"))
compile_for = launch.compile_for


def custom_kernel(data: input_t) -> output_t:
    """Write the chosen places into data.out, int32 (B, S, k), in the order of the entries, and return it.

    ValueError as unpack says, RuntimeError as the launcher: the table names no page for a visible entry.
    """
    *sizes, kind = unpack(data)
    launch(data, (*sizes, kind == "fp8", len(data.keys)))
    return data.out
