"""The functions of the CPU variants of moe_gemm, and the weights as they read them: NVFP4 in groups of 16 rows."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from problems.common import cpu


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


@dataclass(frozen=True)
class Experts:
    """The functions of a variant. unpack_weights, unpack_call, validate: those of moe_gemm's task."""

    launch: cpu.Launcher
    unpack_weights: Callable[[Any], tuple[int, int, int, str]]
    unpack_call: Callable[[Any, Any, int], Any]
    validate: Callable[[Any, int], None]

    def prepare(self, weights: Any) -> ExpertGroups:
        """Return a copy of the weights in groups of 16 rows, of the same size. ValueError as unpack_weights says."""
        experts, hidden, inner, _ = self.unpack_weights(weights)
        return group(weights, experts, hidden, inner)

    def custom_kernel(self, data: Any) -> torch.Tensor:
        """Write data.outputs.out, bf16 (T, H), and return it; data.weights is what prepare returned.

        ValueError as unpack_call says, and for ids that are neither experts nor -1; RuntimeError as the launcher.
        """
        weights, inputs, outputs = data
        experts, hidden, inner = weights.sizes
        self.unpack_call(inputs, outputs, hidden)
        tokens, topk = inputs.topk_ids.shape
        if topk > experts:
            raise ValueError(f"topk_ids must have at most {experts} columns, the experts, got {topk}")
        if inputs.x.device != weights.w13.device:
            raise ValueError(f"x must be on the weights' {weights.w13.device}, got {inputs.x.device}")
        quantised = weights.activation == "nvfp4"
        try:
            self.launch((*weights[:8], *inputs, *outputs), (tokens, experts, topk, hidden, inner, quantised))
        except cpu.BadIndex:
            self.validate(inputs, experts)  # says which
            raise
        return outputs.out


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
