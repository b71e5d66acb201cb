"""Multiply many tokens by FP8 and NVFP4 matrices: both are written out in bf16, which is exact, for cuBLAS.

A matrix is written out in each call: 33.5 M weights are 86 MB of traffic, 20 us of an H200. Sums are fp32. The
interfaces and formulas are those of torch_ops/linear.py and experts.py.
"""

from ctypes import c_float, c_int, c_longlong, c_void_p
from pathlib import Path

import torch

from problems.common import build
from problems.dsv4_forward.kernels.arguments import Own, expect, pointer
from problems.dsv4_forward.torch_ops import linear
from problems.dsv4_forward.weights.linear import Linear

KINDS = {"fp8": 128, "nvfp4": 16}  # of matrices; rows and columns of a matrix are multiples of 128, or columns of 16


class Dense(Own):
    """The ops on one build. NotImplemented: activations that are not bf16, a matrix of another kind, or of other sizes
    than KINDS. ValueError: shapes.
    """

    SOURCE = Path(__file__).with_suffix(".cu")
    OPS = ("linear", "grouped_linear", "shared")

    def __init__(self, built: build.Artefact) -> None:
        p, i = c_void_p, c_int
        self._matrix = built.function("launch_matrix", p, p, p, c_longlong, i, i)
        self._tokens = built.function("launch_tokens", p, p, p, i, i, i)
        self._sums = built.function("launch_sums", p, p, p, p, i, i, i)
        self._gate = built.function("launch_gate", p, p, p, p, i, i, c_float)

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
            sums = self._product(x, w)
            code = self._sums(sums.data_ptr(), *_factors(w), out.data_ptr(), tokens, groups, w.n)
            build.check(code, "sums of a product")
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
        sums = self._product(x.unsqueeze(1), w13)
        between = torch.empty(len(x), 1, w2.k, dtype=x.dtype, device=x.device)
        code = self._gate(sums.data_ptr(), *_factors(w13), between.data_ptr(), len(x), w2.k, limit)
        build.check(code, "gate of an expert")
        return self.grouped_linear(between, w2, out.unsqueeze(1))

    def _product(self, x: torch.Tensor, w: Linear) -> torch.Tensor:
        """x: (N, G, k) -> fp32 (G, N, n), without the scales of a whole matrix."""
        values = x
        if w.quantise_input:
            values = torch.empty_like(x)
            by = None if w.kind == "fp8" else w.input_scale
            build.check(self._tokens(x.data_ptr(), pointer(by), values.data_ptr(), *x.shape), "activations")
        matrix = torch.empty(x.shape[1], w.n, w.k, dtype=x.dtype, device=x.device)
        codes, scales = w.weight.data_ptr(), w.scale.data_ptr()
        code = self._matrix(codes, scales, matrix.data_ptr(), x.shape[1] * w.n, w.k, int(w.kind == "fp8"))
        build.check(code, "a matrix in bf16")
        return linear.batched(values.transpose(0, 1), matrix)


def serves(x: torch.Tensor, w: Linear) -> bool:
    """Return whether the kernels multiply x by w."""
    if w.kind not in KINDS or x.dtype != torch.bfloat16 or not x.is_contiguous():
        return False
    rows = KINDS[w.kind] if w.kind == "fp8" else 4
    scales = [t for t in (w.scale, w.scale_2, w.input_scale) if t is not None]
    aligned = all(tensor.data_ptr() % 16 == 0 for tensor in (x, w.weight))
    whole = all(tensor.is_contiguous() for tensor in (w.weight, *scales))
    return aligned and whole and w.k % KINDS[w.kind] == w.n % rows == 0


def _factors(w: Linear) -> tuple[int | None, int | None]:
    """Where scale_2 and input_scale lie, by which the sums are still to be multiplied; None: there is none."""
    if w.kind == "fp8":
        return None, None
    return w.scale_2.data_ptr(), w.input_scale.data_ptr() if w.quantise_input else None
