"""cpu_avx2: weights decoded to integers, blocks as exact dots of 16-bit pairs in AVX2, all cores."""

import functools
from collections.abc import Callable
from ctypes import c_int64, c_void_p
from pathlib import Path
from typing import NamedTuple

import torch
from task import Weights, input_t, output_t, unpack_call, unpack_weights, validate

from problems.common import build

TARGETS = ("cpu",)
CPU_FLAGS = ("avx2", "fma", "f16c")  # as /proc/cpuinfo spells them
SOURCE = Path(__file__).with_suffix(".cpp")
Pointers, Numbers = c_void_p * 12, c_int64 * 6  # as Problem in cpu_problem.h takes them
BAD_ID = 4
ERRORS = {
    1: "this CPU lacks AVX2, FMA or F16C", 2: "the system refused a thread", 3: "the system refused memory",
}  # fmt: skip


class Prepared(NamedTuple):
    """Weights in groups of 16 rows: of a group every row's first 8 codes, then every row's next 8, and scales
    likewise. With w13's groups of gate and up in turns, a task reads what lies together.

    w13  int32 (E, I / 16, 2, H / 8, 16), s13 uint8 (E, I / 16, 2, H / 16, 16), w2 int32 (E, H / 16, I / 8, 16),
    s2   uint8 (E, H / 16, I / 16, 16), the others as in Weights
    """

    w13: torch.Tensor
    s13: torch.Tensor
    g13: torch.Tensor
    in_scale13: torch.Tensor
    w2: torch.Tensor
    s2: torch.Tensor
    g2: torch.Tensor
    in_scale2: torch.Tensor
    activation: str


def compile_for(target: str) -> list[build.Artefact]:
    """Machine code for `target`, "cpu"."""
    return [build.cpp(SOURCE)]


@functools.cache
def _launcher() -> Callable[..., int]:
    """The compiled code; finding it anew costs 50 us a call."""
    return build.cpp(SOURCE).function("launch", Pointers, Numbers)


def prepare(weights: Weights) -> Prepared:
    """A copy of the weights in another order, of the same size. ValueError as unpack_weights says."""
    e, h, i, activation = unpack_weights(weights)
    w13 = weights.w13.view(torch.int32).view(e, 2, i // 16, 16, h // 8).permute(0, 2, 1, 4, 3).contiguous()
    s13 = weights.s13.view(torch.uint8).view(e, 2, i // 16, 16, h // 16).permute(0, 2, 1, 4, 3).contiguous()
    w2 = weights.w2.view(torch.int32).view(e, h // 16, 16, i // 8).mT.contiguous()
    s2 = weights.s2.view(torch.uint8).view(e, h // 16, 16, i // 16).mT.contiguous()
    return Prepared(w13, s13, weights.g13, weights.in_scale13, w2, s2, weights.g2, weights.in_scale2, activation)


def custom_kernel(data: input_t) -> output_t:
    """Write data.outputs.out and return it; data.weights is what prepare made. ValueError as unpack_call says, and for
    ids that are no experts; RuntimeError where this CPU cannot run it.
    """
    weights, inputs, outputs = data
    experts, inner, hidden = len(weights.w13), 16 * weights.w13.shape[1], 8 * weights.w13.shape[3]
    tokens, topk = unpack_call(inputs, outputs, hidden)
    if topk > experts:
        raise ValueError(f"topk_ids must have at most {experts} columns, the experts, got {topk}")
    if inputs.x.device != weights.w13.device:
        raise ValueError(f"x must be on the weights' {weights.w13.device}, got {inputs.x.device}")
    pointers = Pointers(*[tensor.data_ptr() for tensor in (*weights[:8], *inputs, *outputs)])
    numbers = Numbers(tokens, experts, topk, hidden, inner, weights.activation == "nvfp4")
    status = _launcher()(pointers, numbers)
    if status == BAD_ID:
        validate(inputs, experts)  # says which
    if status:
        raise RuntimeError(f"cpu_avx2: {ERRORS[status]}")
    return outputs.out
