"""Experts and NVFP4 matrices for tests of moe_gemm in the model, and how near two results are."""

import dataclasses
import math

import torch

from problems.common import load
from problems.dsv4_forward.weights.linear import Linear
from tests.dsv4 import linears

FOLDER = load.PROBLEMS / "moe_gemm"
TASK, REFERENCE, MOE = (load.module(FOLDER, name) for name in ("task", "reference", "in_model"))
GROUPED = load.variant("moe_gemm", "torch_grouped")
# With the clamp that the problem has, and more experts than are chosen.
SMALL = dataclasses.replace(linears.SMALL, n_routed_experts=8, num_experts_per_tok=2, swiglu_limit=TASK.LIMIT)
ROUNDED = 2.0**-8  # largest relative error of bf16: all that a row may be off by if nothing falls on another side


def call(tokens: int, size: int, topk: int, hidden: int, inner: int, activation: str, content: str = "plain") -> tuple:
    """Arguments of the op experts but for its output."""
    case = {
        **vars(TASK.Case(tokens, size, topk, hidden, inner, activation, "uniform", content, tokens)),
        "device": "cpu",
    }
    made, (given, _) = REFERENCE.generate_weights(**case), REFERENCE.generate_input(**case)
    quantised = activation == "nvfp4"
    w13 = Linear("nvfp4", made.w13, made.s13, made.g13, made.in_scale13, quantised, "layers.0.ffn.experts.w13")
    w2 = Linear("nvfp4", made.w2, made.s2, made.g2, made.in_scale2, quantised, "layers.0.ffn.experts.w2")
    return *given, w13, w2, TASK.LIMIT


def calls(*layers: tuple[Linear, Linear], module: object = GROUPED) -> object:
    return MOE.make_calls(module, [MOE.prepare(module, *both) for both in layers])


def run(op: object, arguments: tuple, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    out = torch.full(arguments[0].shape, math.nan, dtype=dtype)
    assert op(*arguments, out) is not NotImplemented
    return out


def left(op: object, arguments: tuple, dtype: torch.dtype = torch.bfloat16) -> bool:
    """Whether the op says that it does not serve the call, and writes nothing."""
    out = torch.full(arguments[0].shape, math.nan, dtype=dtype)
    return op(*arguments, out) is NotImplemented and bool(out.isnan().all())


def apart(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    got, want = got.float().flatten(0, -2), want.float().flatten(0, -2)
    return (got - want).norm(dim=1) / want.norm(dim=1)


def close(got: torch.Tensor, want: torch.Tensor, activation: str) -> None:
    """Both round the intermediate to bf16 and quantise what comes of it; `want` is fp32, `got` is rounded once more.
    fp32 sums in another order put an intermediate value here and there on another side, in rows that are few.
    """
    error = apart(got, want)
    assert float(error.median()) <= ROUNDED
    row, whole = (TASK.NVFP4_ROW_RTOL, TASK.NVFP4_RTOL) if activation == "nvfp4" else (1.1 * ROUNDED, 1.1 * ROUNDED)
    assert float(error.max()) <= row and float((got - want).norm() / want.norm()) <= whole


def inputs(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7)).bfloat16()


class Raises:
    """In the place of a variant, shows that it was called."""

    @staticmethod
    def custom_kernel(_):
        raise AssertionError("called")
