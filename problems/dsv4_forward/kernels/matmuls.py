"""Compute products with plain bf16 matrices in one launch for all that get the same few tokens.

A token's bits do not depend on the others. Matrices are read as they lie in memory, and before the kernel ahead has
ended: no launch just ahead may write them. Products that it does not serve are torch's. The interface and formulas
are those of torch_ops/linear.py.
"""

from collections.abc import Sequence
from ctypes import POINTER, c_int, c_void_p
from pathlib import Path

import torch

from problems.common import build
from problems.dsv4_forward.kernels.arguments import KINDS, Own
from problems.dsv4_forward.torch_ops import linear

MOST_TOKENS, MOST_MATRICES = 32, 4  # as in the source
MOST_ROWS = 16384  # of a matrix: with more, as the head has, cuBLAS reads at the rate of the memory


class Matmuls(Own):
    """The op on one build."""

    SOURCE = Path(__file__).with_suffix(".cu")
    OPS = ("matmuls",)

    def __init__(self, built: build.Artefact) -> None:
        pointers, ints = POINTER(c_void_p), POINTER(c_int)
        self._matmuls = built.function("launch_matmuls", c_void_p, pointers, pointers, ints, ints, c_int, c_int, c_int)

    def matmuls(self, x: torch.Tensor, weights: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
        """Compute torch_ops linear.matmuls. ValueError as there."""
        served = []
        for weight, out in zip(weights, outs, strict=True):
            if serves(x, weight, out):
                served.append((weight, out))
            else:
                linear.matmul(x, weight, out)
        for start in range(0, len(served), MOST_MATRICES):
            self._launch(x, served[start : start + MOST_MATRICES])

    def _launch(self, x: torch.Tensor, served: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        count = len(served)
        matrices, outs = ((c_void_p * count)(*(pair[i].data_ptr() for pair in served)) for i in (0, 1))
        rows = (c_int * count)(*(len(weight) for weight, _ in served))
        bf16 = (c_int * count)(*(KINDS.index(out.dtype) for _, out in served))
        code = self._matmuls(x.data_ptr(), matrices, outs, rows, bf16, count, len(x), x.shape[1])
        build.check(code, "matmuls")


def serves(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether the kernel computes out = x @ weight^T."""
    few = x.dim() == weight.dim() == 2 and 1 <= len(x) <= MOST_TOKENS and len(weight) <= MOST_ROWS
    fitting = few and x.shape[1] == weight.shape[1] and tuple(out.shape) == (len(x), len(weight))
    plain = x.dtype == weight.dtype == torch.bfloat16 and out.dtype in KINDS
    whole = fitting and x.shape[1] % 8 == 0 and x.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0
    return plain and whole and all(tensor.is_contiguous() for tensor in (x, weight, out))
