"""torch_grouped: tokens sorted by expert, weights decoded and multiplied in plain torch. The baseline of the ratios."""

import torch
from task import LIMIT, Weights, input_t, output_t, unpack

from problems.common import nvfp4

TARGETS = ("cpu", "sm90", "sm100")


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
