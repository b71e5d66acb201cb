"""The functions of the CPU variants of linear_decode, and the arguments of their launcher (variants/cpu_linear.h)."""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from problems.common.cpu import Launcher

FORMATS = ("fp8", "nvfp4", "bf16")  # in the order of the enumeration there
Shapes = Sequence[Sequence[tuple[int, int, int]]]  # (G, n, k) of each matrix, by link


@dataclass(frozen=True)
class Links:
    """The functions of a variant. unpack, parts, unpack_expert: those of linear_decode's task."""

    launch: Launcher
    unpack: Callable[[Any], Any]
    parts: Callable[[torch.Tensor, Any], Sequence[Sequence[torch.Tensor]]]
    unpack_expert: Callable[[Any, Any], tuple[str, Shapes]]

    def custom_kernel(self, data: Any) -> torch.Tensor:
        """Write data.outputs.out and return it. ValueError as unpack says, RuntimeError as the launcher."""
        sizes, out = self.unpack(data), data.outputs.out
        self._run(data.weights, sizes.links, data.inputs.x, self.parts(out, sizes))
        return out

    def prepare_expert(self, w13: Any, w2: Any) -> tuple[Any, Shapes]:
        """Both matrices, as they are, with their shapes. ValueError as unpack_expert says. See
        problems/linear_decode/in_model.py.
        """
        _, shapes = self.unpack_expert(w13, w2)
        return w13._replace(links=(*w13.links, *w2.links)), shapes

    def expert(self, state: tuple[Any, Shapes], limit: float, x: torch.Tensor, out: torch.Tensor) -> None:
        """Write out, bf16 (T, n), of x, bf16 (T, k); state: prepare_expert's. RuntimeError as the launcher."""
        weights, shapes = state
        between = x.new_empty(len(x), shapes[1][0][2])
        self._run(weights, shapes, x, [[between], [out]], limit)

    def _run(
        self,
        weights: Any,
        shapes: Shapes,
        x: torch.Tensor,
        parts: Sequence[Sequence[torch.Tensor]],
        limit: float | None = None,
    ) -> None:
        """parts: the outputs, as task.parts gives them. limit: None, or that of the SwiGLU of the first link's output,
        whose first half are the gates; parts then have the result.
        """
        tensors: list[torch.Tensor | None] = [x]
        gate = 0 if limit is None else struct.unpack("I", struct.pack("f", limit))[0]  # of fp32 the bits
        numbers = [FORMATS.index(weights.format), len(x), len(shapes), *map(len, shapes)]
        for link, sizes, given in zip(weights.links, shapes, parts, strict=True):
            for matrix, shape, out in zip(link, sizes, given, strict=True):
                tensors += (matrix.codes, matrix.scales, matrix.factor, matrix.input_scale, out)
                numbers += (*shape, matrix.quantise, gate)
            gate = 0
        self.launch(tensors, numbers)
