"""torch_grouped: tokens sorted by expert, weights decoded and multiplied in plain torch. The baseline of the ratios."""

from typing import NamedTuple

import torch
from task import LIMIT, Weights, input_t, output_t, unpack

from problems.common import nvfp4

TARGETS = ("cpu", "sm90", "sm100")


class Matrix(NamedTuple):
    """One plain matrix, as prepare_linear got it."""

    packed: torch.Tensor
    scales: torch.Tensor
    g: torch.Tensor
    in_scale: torch.Tensor | None


def compile_for(target: str) -> list:
    """Nothing to compile."""
    return []


def decoded(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """packed uint8 (n, m / 2), scales e4m3 (n, m / 16) -> fp32 (n, m), exactly, but for g."""
    values = nvfp4.decode(packed).unflatten(-1, (-1, nvfp4.BLOCK))
    return values.mul_(scales.float().unsqueeze(-1)).flatten(-2)


def expert(weights: Weights, e: int, x: torch.Tensor, routing: torch.Tensor) -> torch.Tensor:
    """fp32 (n, H), what expert e adds to its tokens. x: bf16 (n, H), routing: fp32 (n, 1)."""
    quantised = weights.activation == "nvfp4"
    # In fp32: torch rounds the output of bf16 products to bf16.
    x = nvfp4.round_trip(x.float(), weights.in_scale13[e].expand(len(x))) if quantised else x.float()
    gate, up = (x @ decoded(weights.w13[e], weights.s13[e]).T).mul_(weights.g13[e]).chunk(2, 1)
    v = torch.nn.functional.silu(gate.clamp(max=LIMIT)).mul_(up.clamp(-LIMIT, LIMIT)).mul_(routing).bfloat16().float()
    if quantised:
        v = nvfp4.round_trip(v, weights.in_scale2[e].expand(len(v)))
    return (v @ decoded(weights.w2[e], weights.s2[e]).T).mul_(weights.g2[e])


def custom_kernel(data: input_t) -> output_t:
    """Write into data.outputs.out and return it. ValueError as unpack says, and for ids that are no experts. Reads the
    experts' token counts on the host.
    """
    sizes = unpack(data)
    weights, (x, ids, routing), (out,) = data
    flat = ids.flatten().long()
    order = flat.argsort(stable=True)  # slots t * k + j, by expert
    hit, counts = flat[order].unique_consecutive(return_counts=True)
    parts = torch.empty(flat.numel(), sizes.hidden, dtype=torch.float32, device=x.device)
    rows = order // sizes.topk
    start = 0
    for e, count in zip(hit.tolist(), counts.tolist(), strict=True):
        if not 0 <= e < sizes.experts:
            raise ValueError(f"topk_ids must be 0 to {sizes.experts - 1}, got {e}")
        mine = slice(start, start + count)
        parts[order[mine]] = expert(weights, e, x[rows[mine]], routing.view(-1, 1)[order[mine]])
        start += count
    parts = parts.view(sizes.tokens, sizes.topk, sizes.hidden)
    total = parts[:, 0]
    for j in range(1, sizes.topk):
        total.add_(parts[:, j])
    return out.copy_(total)


def prepare_linear(
    packed: torch.Tensor, scales: torch.Tensor, g: torch.Tensor, in_scale: torch.Tensor | None
) -> Matrix:
    """One NVFP4 matrix, for `linear`; copies nothing. packed: uint8 (n, k / 2); scales: e4m3 (n, k / 16); g: fp32 ();
    in_scale: fp32 (), or None: inputs stay as they are. ValueError, naming the tensor, where one is not that.
    """
    n, k = packed.shape[0], 2 * packed.shape[-1]
    for name, tensor, dtype, shape in (
        ("packed", packed, torch.uint8, (n, k // 2)),
        ("scales", scales, torch.float8_e4m3fn, (n, k // nvfp4.BLOCK)),
        ("g", g, torch.float32, ()),
        ("in_scale", in_scale, torch.float32, ()),
    ):
        if tensor is not None and (tensor.dtype != dtype or tensor.shape != shape):
            raise ValueError(f"{name} must be {dtype} {shape}, got {tensor.dtype} {tuple(tensor.shape)}")
    if n % 64 or k % 64:
        raise ValueError(f"packed must have n and k in multiples of 64, got n={n} k={k}")
    return Matrix(packed, scales, g, in_scale)


def linear(matrix: Matrix, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write x w^T into out, rounded once, and return it. x: bf16 (T, k); out: bf16 (T, n)."""
    n, k = matrix.packed.shape[0], 2 * matrix.packed.shape[1]
    for name, tensor, shape in (("x", x, (len(x), k)), ("out", out, (len(x), n))):
        if tensor.dtype != torch.bfloat16 or tensor.shape != shape or not tensor.is_contiguous():
            raise ValueError(f"{name} must be bf16 {shape}, contiguous, got {tensor.dtype} {tuple(tensor.shape)}")
    values = x.float()
    if matrix.in_scale is not None:
        values = nvfp4.round_trip(values, matrix.in_scale.expand(len(x)))
    return out.copy_((values @ decoded(matrix.packed, matrix.scales).T).mul_(matrix.g))
