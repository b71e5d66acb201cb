"""cpu_avx512: weights to fp32 by shifts and a conversion from fp16, once for 8 tokens, in AVX-512 on all cores."""

from pathlib import Path

import torch
from task import Sizes, Weights, input_t, output_t, parts, unpack, unpack_expert

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


def prepare_expert(w13: Weights, w2: Weights) -> tuple[Weights, Sizes]:
    """Both matrices, as they are. ValueError as unpack_expert says. See problems/dsv4_forward/adapters/decode.py."""
    fmt, links = unpack_expert(w13, w2)
    return Weights(fmt, (w13.links[0], w2.links[0])), Sizes(0, fmt, links)


def expert(state: tuple[Weights, Sizes], limit: float, x: torch.Tensor, out: torch.Tensor) -> None:
    """Write out, bf16 (T, n), of x, bf16 (T, k); state: prepare_expert's. RuntimeError as custom_kernel."""
    weights, sizes = state
    between = x.new_empty(len(x), sizes.links[1][0][2])
    arguments = linear_links.arguments(weights, sizes._replace(tokens=len(x)), x, [[between], [out]], limit)
    LAUNCHER.check(LAUNCHER.function(*arguments))
