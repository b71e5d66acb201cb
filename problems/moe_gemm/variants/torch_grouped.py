"""torch_grouped: tokens in tiles of one expert, weights decoded and multiplied in torch. The baseline of the ratios."""

import torch
from task import FP8_GROUP, LIMIT, MX_BLOCK, Weights, input_t, output_t, unpack

from problems.common import fp8, nvfp4

TARGETS = ("cpu", "sm90", "sm100")
MOST_SLOTS = 128  # of a tile
AT_ONCE = 64  # tiles, each with its expert's weights in fp32: 4.3 GB for V4-Flash


def decoded(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """packed uint8 (n, m / 2), scales e4m3 (n, m / 16) or ue8m0 as uint8 (n, m / 32) -> fp32 (n, m), exactly, but for
    g.
    """
    if scales.dtype == torch.uint8:
        values = nvfp4.decode(packed).unflatten(-1, (-1, MX_BLOCK))
        return values.mul_(fp8.decode_ue8m0(scales).unsqueeze(-1)).flatten(-2)
    values = nvfp4.decode(packed).unflatten(-1, (-1, nvfp4.BLOCK))
    return values.mul_(scales.float().unsqueeze(-1)).flatten(-2)


def taken(activation: str, x: torch.Tensor, in_scale: torch.Tensor) -> torch.Tensor:
    """x: fp32 (c, b, m), in_scale: fp32 (c,) -> fp32 (c, b, m), as a product takes x."""
    if activation == "bf16":
        return x
    if activation == "fp8":
        return fp8.round_trip(x, FP8_GROUP)
    return nvfp4.round_trip(x, in_scale.view(-1, 1).expand(x.shape[:2]))


def experts(weights: Weights, e: torch.Tensor, x: torch.Tensor, routing: torch.Tensor) -> torch.Tensor:
    """fp32 (c, b, H), what experts e, int64 (c,), add to b slots each. x: bf16 (c, b, H), routing: fp32 (c, b, 1)."""
    # In fp32: torch rounds the output of bf16 products to bf16.
    x = taken(weights.activation, x.float(), weights.in_scale13[e])
    g13, g2 = (g[e].view(-1, 1, 1) for g in (weights.g13, weights.g2))
    gate, up = (x @ decoded(weights.w13[e], weights.s13[e]).mT).mul_(g13).chunk(2, -1)
    v = torch.nn.functional.silu(gate.clamp(max=LIMIT)).mul_(up.clamp(-LIMIT, LIMIT)).mul_(routing).bfloat16().float()
    v = taken(weights.activation, v, weights.in_scale2[e])
    return (v @ decoded(weights.w2[e], weights.s2[e]).mT).mul_(g2)


def tiles_of(ids: torch.Tensor, count: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots in tiles of one expert each. ids: int64 (S,); count: of experts; block: slots of a tile -> expert of each
    tile, int64 (n,), and its slots, int64 (n, block), S where it has none. n is the most that S ids can need: the host
    reads no id. Slots whose ids are no experts are in no tile.
    """
    total, device = ids.numel(), ids.device
    key = torch.where((ids >= 0) & (ids < count), ids, count)
    slots = torch.zeros(count + 1, dtype=torch.int64, device=device).scatter_add_(0, key, torch.ones_like(key))[:count]
    tiles = (slots + (block - 1)) // block
    last, first_slot = tiles.cumsum(0), slots.cumsum(0) - slots
    tile = torch.arange((total + min(count, total) * (block - 1)) // block, device=device)
    e = torch.searchsorted(last, tile, right=True).clamp_(max=count - 1)
    within = (tile - (last - tiles)[e]).unsqueeze(1) * block + torch.arange(block, device=device)
    place = (first_slot[e].unsqueeze(1) + within).clamp_(max=total - 1)
    there = (within < slots[e].unsqueeze(1)) & (tile < last[-1]).unsqueeze(1)
    return e, torch.where(there, key.argsort(stable=True)[place], total)


def custom_kernel(data: input_t) -> output_t:
    """Write into data.outputs.out and return it. ValueError as unpack says. A slot whose id is no expert adds 0."""
    sizes = unpack(data)
    weights, (x, ids, routing), (out,) = data
    total = ids.numel()
    if not total:
        return out
    block = min(MOST_SLOTS, 1 << ((total - 1) // sizes.experts).bit_length())
    e, slots = tiles_of(ids.flatten().long(), sizes.experts, block)
    parts = torch.zeros(total + 1, sizes.hidden, dtype=torch.float32, device=x.device)  # the last one is of no slot
    for i in range(0, len(e), AT_ONCE):
        mine = slots[i : i + AT_ONCE]
        there = mine.clamp(max=total - 1)
        added = experts(weights, e[i : i + AT_ONCE], x[there // sizes.topk], routing.view(-1, 1)[there])
        parts.index_copy_(0, mine.flatten(), added.flatten(0, 1))
    parts = parts[:total].view(sizes.tokens, sizes.topk, sizes.hidden)
    sums = parts[:, 0]
    for j in range(1, sizes.topk):
        sums.add_(parts[:, j])
    return out.copy_(sums)
