"""Multiply many tokens by FP8 and NVFP4 matrices: by their values in bf16 (Linear.bf16), which are exact, in cuBLAS.

The values are made at a matrix's first call and kept beside it, 2 bytes each. Sums are fp32. The interfaces and
formulas are those of torch_ops/linear.py and experts.py.
"""

from ctypes import c_float, c_int, c_void_p
from pathlib import Path

import torch

from problems.common import build
from problems.dsv4_forward.kernels.arguments import Own, expect, pointer
from problems.dsv4_forward.torch_ops import linear
from problems.dsv4_forward.weights.linear import Linear

BLOCK = {"fp8": 128, "nvfp4": 16}  # of activations: values that share a scale


class Dense(Own):
    """The ops on one build. NotImplemented: activations that are not bf16, a matrix of another kind, or whose columns
    are no multiple of BLOCK. ValueError: shapes.
    """

    SOURCE = Path(__file__).with_suffix(".cu")
    OPS = ("linear", "grouped_linear", "shared")

    def __init__(self, built: build.Artefact) -> None:
        p, i, f = c_void_p, c_int, c_float
        self._tokens = built.function("launch_tokens", p, p, p, i, i, i)
        self._gate = built.function("launch_gate", p, p, i, i, f, f)

    def linear(self, x: torch.Tensor, w: Linear, out: torch.Tensor) -> object:
        """Compute torch_ops linear.linear."""
        return self.grouped_linear(x.unsqueeze(1), w, out.unsqueeze(1))

    def grouped_linear(self, x: torch.Tensor, w: Linear, out: torch.Tensor) -> object:
        """Compute torch_ops linear.grouped_linear."""
        if not (serves(x, w) and out.dtype == torch.bfloat16):
            return NotImplemented
        tokens, groups = len(x), len(w.weight) if w.weight.dim() == 3 else 1
        expect("x", x, x.dtype, (tokens, groups, w.k))
        expect("out", out, out.dtype, (tokens, groups, w.n))
        if tokens:
            linear.scaled(self._values(x, w).transpose(0, 1), w, out.transpose(0, 1))
        return None

    def shared(self, x: torch.Tensor, w13: Linear, w2: Linear, limit: float, out: torch.Tensor) -> object:
        """Compute torch_ops experts.shared."""
        if not (serves(x, w13) and serves(x, w2) and out.dtype == torch.bfloat16):
            return NotImplemented
        expect("x", x, x.dtype, (len(x), w13.k))
        if w13.n != 2 * w2.k:
            raise ValueError(f"w13 must have twice as many rows as w2 has columns, got {w13.n} and {w2.k}")
        if not len(x):
            return None
        values = self._values(x.unsqueeze(1), w13)
        sums = linear.batched(values.transpose(0, 1), w13.bf16.view(1, w13.n, w13.k))
        between = torch.empty(len(x), 1, w2.k, dtype=x.dtype, device=x.device)
        code = self._gate(sums.data_ptr(), between.data_ptr(), len(x), w2.k, w13.host_factors[0], limit)
        build.check(code, "gate of an expert")
        return self.grouped_linear(between, w2, out.unsqueeze(1))

    def _values(self, x: torch.Tensor, w: Linear) -> torch.Tensor:
        """x, (N, G, k), as the activations' format has it, without the input scale of NVFP4."""
        if not w.quantise_input:
            return x
        values = torch.empty_like(x)
        by = None if w.kind == "fp8" else w.input_scale
        build.check(self._tokens(x.data_ptr(), pointer(by), values.data_ptr(), *x.shape), "activations")
        return values


def serves(x: torch.Tensor, w: Linear) -> bool:
    """Return whether the kernels multiply x by w."""
    if w.kind not in BLOCK or x.dtype != torch.bfloat16 or not x.is_contiguous():
        return False
    return x.data_ptr() % 16 == 0 and w.k % BLOCK[w.kind] == w.n % 4 == 0
