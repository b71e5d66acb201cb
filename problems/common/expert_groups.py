"""Lay out the NVFP4 weights of experts in groups of 16 rows, as the CPU variants of moe_gemm read them."""

import ctypes
from typing import Any, NamedTuple

import torch

POINTERS, NUMBERS = ctypes.c_void_p * 12, ctypes.c_int64 * 6  # a launcher's arguments: tensors, sizes


class ExpertGroups(NamedTuple):
    """Of a group every row's first 8 codes, then every row's next 8, and scales likewise. w13's groups of gate and up
    take turns, so that a task reads what lies together.

    w13  int32 (E, I / 16, 2, H / 8, 16), s13 uint8 (E, I / 16, 2, H / 16, 16), w2 int32 (E, H / 16, I / 8, 16),
    s2   uint8 (E, H / 16, I / 16, 16); g13, g2, in_scale13, in_scale2 fp32 (E,), as given
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

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(E, H, I)."""
        return len(self.w13), 8 * self.w13.shape[3], 16 * self.w13.shape[1]

    def arguments(self, inputs: Any, outputs: Any) -> tuple[ctypes.Array, ctypes.Array]:
        """Return the tensors and the sizes for a launcher. inputs, outputs: moe_gemm's task.Inputs and task.Outputs.

        ValueError: x is on another device than the weights, or topk_ids has more columns than there are experts.
        """
        experts, hidden, inner = self.sizes
        tokens, topk = inputs.topk_ids.shape
        if topk > experts:
            raise ValueError(f"topk_ids must have at most {experts} columns, the experts, got {topk}")
        if inputs.x.device != self.w13.device:
            raise ValueError(f"x must be on the weights' {self.w13.device}, got {inputs.x.device}")
        weights: tuple[Any, ...] = self[:8]
        pointers = [tensor.data_ptr() for tensor in (*weights, *inputs, *outputs)]
        return POINTERS(*pointers), NUMBERS(tokens, experts, topk, hidden, inner, self.activation == "nvfp4")


def group(weights: Any, experts: int, hidden: int, inner: int) -> ExpertGroups:
    """Return a copy of `weights`, moe_gemm's task.Weights, of the same size and in another order.

    w13 uint8 (E, 2 I, H / 2), s13 e4m3 (E, 2 I, H / 16), w2 uint8 (E, H, I / 2), s2 e4m3 (E, H, I / 16), contiguous.
    """
    e, h, i = experts, hidden, inner
    w13 = weights.w13.view(torch.int32).view(e, 2, i // 16, 16, h // 8).permute(0, 2, 1, 4, 3).contiguous()
    s13 = weights.s13.view(torch.uint8).view(e, 2, i // 16, 16, h // 16).permute(0, 2, 1, 4, 3).contiguous()
    w2 = weights.w2.view(torch.int32).view(e, h // 16, 16, i // 8).mT.contiguous()
    s2 = weights.s2.view(torch.uint8).view(e, h // 16, 16, i // 16).mT.contiguous()
    return ExpertGroups(
        w13, s13, weights.g13, weights.in_scale13, w2, s2, weights.g2, weights.in_scale2, weights.activation
    )
