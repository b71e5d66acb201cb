"""Write to the hc copies in CUDA what a sublayer returned as two addends, in one launch.

The interface and formulas are those of torch_ops/chains.py and mhc.py.
"""

from collections.abc import Callable
from ctypes import c_int, c_void_p
from pathlib import Path

import torch

from problems.common import build

TARGETS = ("sm90", "sm100")
OPS = ("mhc_post_sum",)
SOURCE = Path(__file__).with_suffix(".cu")
HC_MULT = 4
KINDS = (torch.float32, torch.bfloat16)


def compile_for(target: str) -> list[build.Artefact]:
    """Compile for `target`, without a GPU."""
    return [build.cuda(SOURCE, target)]


def ops(target: str) -> dict[str, Callable[..., None]]:
    """Build and load the kernels, under build.capturable() for a graph. -> by op. BuildError as build.cuda."""
    made = Copies(build.cuda(SOURCE, target))
    return {name: getattr(made, name) for name in OPS}


class Copies:
    """The ops on one build. ValueError, in each: a tensor that is not contiguous, or of another dtype or shape."""

    def __init__(self, built: build.Artefact) -> None:
        self._spread_sum = built.function("launch_spread_sum", *[c_void_p] * 6, *[c_int] * 5)

    def mhc_post_sum(
        self, first: torch.Tensor, second: torch.Tensor, copies: torch.Tensor, post: torch.Tensor, comb: torch.Tensor,
        out: torch.Tensor,
    ) -> None:  # fmt: skip
        """Compute chains.mhc_post_sum; 4 copies."""
        if copies.dim() != 3 or copies.shape[1] != HC_MULT:
            raise ValueError(f"copies must be (N, {HC_MULT}, d), got {tuple(copies.shape)}")
        (tokens, n, d), fp32 = copies.shape, torch.float32
        for name, tensor in (("first", first), ("second", second), ("copies", copies)):
            if tensor.dtype not in KINDS:
                raise ValueError(f"{name} must be fp32 or bf16, got {tensor.dtype}")
        for name, tensor, dtype, shape in (
            ("first", first, first.dtype, (tokens, d)), ("second", second, second.dtype, (tokens, d)),
            ("copies", copies, copies.dtype, (tokens, n, d)), ("out", out, copies.dtype, (tokens, n, d)),
            ("post", post, fp32, (tokens, n)), ("comb", comb, fp32, (tokens, n, n)),
        ):  # fmt: skip
            _expect(name, tensor, dtype, shape)
        if tokens:
            pointers = (tensor.data_ptr() for tensor in (first, second, copies, post, comb, out))
            kinds = (KINDS.index(tensor.dtype) for tensor in (first, second, copies))
            build.check(self._spread_sum(*pointers, tokens, d, *kinds), "mhc_post_sum")


def _expect(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous():
        came = f"{tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}"
        raise ValueError(f"{name} must be {dtype} {shape}, contiguous, got {came}")
