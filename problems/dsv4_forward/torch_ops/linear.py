"""Products of activations with weight matrices, in torch.

Quantised weights are dequantised on each call. The kinds of weights are those of weights/linear.py.
"""

from collections.abc import Sequence

import torch

from problems.common import fp8, nvfp4
from problems.dsv4_forward.torch_ops import norm
from problems.dsv4_forward.weights.linear import Linear, form

ACTIVATION_GROUP = 128  # values of a token that share a scale before an fp8 or mxfp4 product
MANY = 1024  # tokens for whom a product a group costs less than one of all and a pass over its sums


def input_values(x: torch.Tensor, w: Linear) -> torch.Tensor:
    """Return x as w's format feeds it to a product. x: fp32 or bf16 (..., k), before k w's leading axes.

    fp8, mxfp4: fp32 values of e4m3 with a ue8m0 scale a 128; nvfp4: fp32 values of groups of 16 with w.input_scale.
    Plain, or without quantise_input: x itself.
    """
    if w.kind == "plain" or not w.quantise_input:
        return x
    if w.kind == "nvfp4":
        return nvfp4.round_trip(x.float(), w.input_scale)
    return fp8.round_trip(x.float(), ACTIVATION_GROUP)


def linear(x: torch.Tensor, w: Linear, out: torch.Tensor) -> None:
    """Write out = x @ W^T.  x: fp32 or bf16 (N, k); w: without leading axes; out: fp32 or bf16 (N, n), not x.

    Plain: matmul. Quantised: an fp32 product of input_values and the weight's values, rounded once.
    """
    if w.kind == "plain":
        return matmul(x, w.weight, out)
    _check_axes(w.weight, 2, w.name)
    _check(x, (w.k,), out, (w.n,), w.name)
    _multiply(input_values(x, w).float(), w.dequantise(), out)


def grouped_linear(x: torch.Tensor, w: Linear, out: torch.Tensor) -> None:
    """Write out[:, g] = x[:, g] @ W[g]^T.  x: fp32 or bf16 (N, G, k); w: one leading axis G; out: fp32 or bf16 (N, G,
    n).

    Precision as in linear.
    """
    _check_axes(w.weight, 3, w.name)
    groups = len(w.weight)
    _check(x, (groups, w.k), out, (groups, w.n), w.name)
    if w.kind == "plain" and x.is_cuda and out.dtype == torch.float32 and x.dtype == w.weight.dtype == torch.bfloat16:
        out.transpose(0, 1).copy_(batched(x.transpose(0, 1), w.weight))
        return
    if w.kind == "plain":
        a, b = _operands(x, w.weight, out.dtype)
    else:
        a, b = input_values(x, w).float(), w.dequantise()
    _multiply(a.transpose(0, 1), b, out.transpose(0, 1))


def matmul(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Write out = x @ weight^T for plain weights.  x: (N, k); weight: (n, k); out: (N, n), not x; each fp32 or bf16.

    fp32 out: the exact values of x and weight, multiplied and added in fp32. bf16 out: x is rounded to the weight's
    dtype, sums are in fp32 and rounded once (on CUDA where allow_bf16_reduced_precision_reduction is off).
    """
    _check_axes(weight, 2, "weight")
    _check(x, (weight.shape[1],), out, (weight.shape[0],), "weight")
    if x.is_cuda and out.dtype == torch.float32 and x.dtype == weight.dtype == torch.bfloat16:
        torch.mm(x, weight.T, out_dtype=torch.float32, out=out)
        return
    a, b = _operands(x, weight, out.dtype)
    _multiply(a, b, out)


def batched(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x @ weight^T in fp32, (G, N, n): x bf16 (G, N, k), weight bf16 (G, n, k). Products and sums are fp32."""
    if x.is_cuda:
        return torch.bmm(x, weight.mT, out_dtype=torch.float32)
    return torch.bmm(x.float(), weight.float().mT)


def scaled(x: torch.Tensor, w: Linear, out: torch.Tensor) -> None:
    """Write out[g] = factors[g] * x[g] @ bf16[g]^T, with these of w; bf16 (G, N, n), of any strides but the last, 1.

    x: bf16 (G, N, k). Sums and their products with factors are fp32, rounded once. On a GPU the product multiplies by
    the factor too, group by group where factors differ and tokens are many.
    """
    weight, factors = w.bf16.view(-1, w.n, w.k), w.host_factors
    if not x.is_cuda or (len(factors) > 1 and x.shape[1] < MANY):
        torch.mul(batched(x, weight), w.factors.view(-1, 1, 1), out=out)
        return
    options = torch.backends.cuda.matmul
    before = options.allow_bf16_reduced_precision_reduction
    options.allow_bf16_reduced_precision_reduction = False  # else parts of a sum are rounded too
    try:
        if len(factors) == 1:
            torch.baddbmm(out, x, weight.mT, beta=0, alpha=factors[0], out=out)
        else:
            for group, factor in enumerate(factors):
                torch.addmm(out[group], x[group], weight[group].mT, beta=0, alpha=factor, out=out[group])
    finally:
        options.allow_bf16_reduced_precision_reduction = before


def matmuls(x: torch.Tensor, weights: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
    """Write outs[i] = x @ weights[i]^T, each as matmul. ValueError: another number of outs, or as matmul."""
    for weight, out in zip(weights, outs, strict=True):
        matmul(x, weight, out)


def two_linears(
    x: torch.Tensor, first: Linear, second: Linear, first_out: torch.Tensor, second_out: torch.Tensor
) -> None:
    """Do linear(x, first, first_out) and linear(x, second, second_out). ValueError as linear."""
    linear(x, first, first_out)
    linear(x, second, second_out)


def norm_linears(
    x: torch.Tensor, weight: torch.Tensor, eps: float, matrices: Sequence[Linear], outs: Sequence[torch.Tensor]
) -> None:
    """Do rms_norm(x, weight, eps, normed), of the dtype of x, and linear(normed, matrices[i], outs[i]) for each i.
    ValueError: another number of outs, or as these.
    """
    normed = torch.empty_like(x)
    norm.rms_norm(x, weight, eps, normed)
    for matrix, out in zip(matrices, outs, strict=True):
        linear(normed, matrix, out)


def _operands(x: torch.Tensor, weight: torch.Tensor, out: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x and a plain weight in the dtype that their product is taken in."""
    dtype = torch.float32 if out == torch.float32 else weight.dtype
    return x.to(dtype), weight.to(dtype)


def _multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """out = a @ b^T over the last two axes, straight into `out` where its dtype is that of the operands."""
    if out.dtype == a.dtype:
        torch.matmul(a, b.mT, out=out)
    else:
        out.copy_(torch.matmul(a, b.mT))


def _check_axes(weight: torch.Tensor, axes: int, name: str) -> None:
    if weight.dim() != axes:
        raise ValueError(f"{name or 'w'}: weight must have {axes} axes here, got {form(weight)}")


def _check(x: torch.Tensor, inner: tuple[int, ...], out: torch.Tensor, outer: tuple[int, ...], name: str) -> None:
    """ValueError unless x is (N, *inner) and out (N, *outer)."""
    if tuple(x.shape[1:]) != inner:
        raise ValueError(f"{name or 'w'}: x must be (N, {', '.join(map(str, inner))}), got {tuple(x.shape)}")
    if tuple(out.shape) != (len(x), *outer):
        raise ValueError(f"{name or 'w'}: out must be {(len(x), *outer)}, got {tuple(out.shape)}")
