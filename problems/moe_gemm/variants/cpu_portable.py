"""cpu_portable: weights decoded by tables, once for 16 slots, in GCC's vector types; for CPUs without AVX2."""

from pathlib import Path

from task import Weights, input_t, output_t, unpack_call, unpack_weights, validate

from problems.common import build, cpu, expert_groups

TARGETS = ("cpu",)
SOURCE = Path(__file__).with_suffix(".cpp")
LAUNCHER = cpu.Launcher(SOURCE, (expert_groups.POINTERS, expert_groups.NUMBERS))


def compile_for(target: str) -> list[build.Artefact]:
    """Compile for `target`, "cpu"."""
    return [build.cpp(SOURCE)]


def prepare(weights: Weights) -> expert_groups.ExpertGroups:
    """Return a copy of the weights in groups of 16 rows, of the same size. ValueError as unpack_weights says."""
    experts, hidden, inner, _ = unpack_weights(weights)
    return expert_groups.group(weights, experts, hidden, inner)


def custom_kernel(data: input_t) -> output_t:
    """Write data.outputs.out, bf16 (T, H), and return it; data.weights is what prepare returned.

    ValueError as unpack_call says, and for ids that are no experts; RuntimeError: this CPU cannot run it, a thread
    cannot start, or memory is short.
    """
    weights, inputs, outputs = data
    experts, hidden, _ = weights.sizes
    unpack_call(inputs, outputs, hidden)
    status = LAUNCHER.function(*weights.arguments(inputs, outputs))
    if status == cpu.BAD_INDEX:
        validate(inputs, experts)  # says which
    LAUNCHER.check(status)
    return outputs.out
