"""sm90_triton: the Triton kernels that one would write first: tokens sorted by expert, weights decoded in registers.

Five kernels a call: routing tables, gate and up with the clamped SwiGLU behind them, down into fp32 by slot, and a sum
over a token's slots. (A slot is t * k + j.) A program of a product owns some rows of one expert's weights and a tile of
its slots, and the slots are the columns of tl.dot, so that few of them waste little. Weights go from codes to bf16
anew for each tile. "nvfp4" and "fp8" quantise the slots' values in separate kernels before either product; MXFP4
weights are read as NVFP4, with scales that prepare makes.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
import triton.language as tl
from task import BENCHMARKS, FP8_GROUP, LIMIT, Sizes, Weights, input_t, output_t, unpack_call, unpack_weights
from triton.compiler import ASTSource

from problems.common import build, nvfp4
from problems.common.triton_dsl import cubin

TARGETS = ("sm90", "sm100")
REQUIRES = ("triton",)

BUSY = 264  # programs that occupy an H200's 132 SMs twice
CHUNK = 1024  # slots that the routing kernel looks at in a step
TILES = 32  # entries of the list of tiles that it writes in a step
COLUMNS = 1024  # of a program that quantises or sums up

# A code's sign, exponent and mantissa in the places of a bf16 stand for 2^-126 of its value, and the scale brings back
# 2^118: 2^126 would not fit a scale of 448. The rest is left to the factor of the whole sum, in fp32.
SCALE_UP = tl.constexpr(2.0**118)
REST = tl.constexpr(2.0**8)
ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: added to an fp32 under 2^22 and taken off again, it rounds to nearest


@dataclass(frozen=True)
class Product:
    """Launch of one product: rows of weights (of gate and up each), values along the sum in a step, loads ahead."""

    rows: int
    step: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Plan:
    """slots: of a tile. tiles: the most that there can be."""

    slots: int
    tiles: int
    up: Product
    down: Product


@triton.jit
def _route(
    ids,
    tiles,
    firsts,
    ends,
    order,
    S,
    E,
    LIST,
    SLOTS: tl.constexpr,
    EP: tl.constexpr,
    CHUNK: tl.constexpr,
    TILES: tl.constexpr,
):
    """Program e < E writes expert e's slots, ascending, behind those of the experts before it, and where they end:
    order int32 (S,), ends int32 (E,). Program E lists the tiles: their experts, -1 behind the last, and the places in
    `order` where they begin: tiles, firsts int32 (LIST,). Slots with a bad id are in none. EP: E as a power of two.
    """
    e = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    if e < E:
        before = tl.zeros((CHUNK,), tl.int32)
        mine = tl.zeros((CHUNK,), tl.int32)
        for start in range(0, S, CHUNK):
            slot = start + lane
            chosen = tl.load(ids + slot, mask=slot < S, other=-1)
            before += ((chosen >= 0) & (chosen < e)).to(tl.int32)
            mine += (chosen == e).to(tl.int32)
        place = tl.sum(before)
        count = tl.sum(mine)
        tl.store(ends + e, place + count)
        if count > 0:
            for start in range(0, S, CHUNK):
                slot = start + lane
                chosen = tl.load(ids + slot, mask=slot < S, other=-1)
                hit = (chosen == e).to(tl.int32)
                tl.store(order + place + tl.cumsum(hit) - 1, slot, mask=hit > 0)
                place += tl.sum(hit)
    else:
        counts = tl.zeros((EP,), tl.int32)
        for start in range(0, S, CHUNK):
            slot = start + lane
            chosen = tl.load(ids + slot, mask=slot < S, other=-1)
            good = (chosen >= 0) & (chosen < E)
            counts += tl.histogram(tl.where(good, chosen, 0), EP, mask=good)
        begin = tl.cumsum(counts) - counts
        many = (counts + SLOTS - 1) // SLOTS
        upto = tl.cumsum(many)
        total = tl.sum(many)
        expert = tl.arange(0, EP)
        for start in range(0, LIST, TILES):
            tile = start + tl.arange(0, TILES)
            owner = tl.sum((upto[None, :] <= tile[:, None]).to(tl.int32), 1)
            of_owner = begin[None, :] + (tile[:, None] - (upto - many)[None, :]) * SLOTS
            first = tl.sum(tl.where(expert[None, :] == owner[:, None], of_owner, 0), 1)
            tl.store(tiles + tile, tl.where(tile < total, owner, -1), mask=tile < LIST)
            tl.store(firsts + tile, first, mask=tile < LIST)


@triton.jit
def _quantise(x, ids, in_scale, out, N, E, TOPK: tl.constexpr, COLUMNS: tl.constexpr):
    """out bf16 (S, N): code * scale of the values that slot s takes, row s // TOPK of x, bf16. The same bits as
    nvfp4.encode gives; bf16 holds the product exactly, and in_scale is left to the sum. Program (slot, columns).
    """
    slot = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    e = tl.load(ids + slot)
    by = tl.load(in_scale + e, mask=(e >= 0) & (e < E), other=1.0)
    value = tl.load(x + slot // TOPK * N + column, mask=column < N, other=0.0).to(tl.float32)
    value = tl.reshape(tl.div_rn(value, tl.zeros_like(value) + by), (COLUMNS // 16, 16))
    largest = tl.max(tl.abs(value), 1)
    wanted = tl.minimum(tl.div_rn(largest, tl.full((COLUMNS // 16,), 6.0, tl.float32)), 448.0)
    scale = wanted.to(tl.float8e4nv).to(tl.float32)
    divisor = tl.where(scale == 0, float("inf"), scale)
    value = tl.div_rn(value, tl.broadcast_to(divisor[:, None], (COLUMNS // 16, 16)))
    value = tl.minimum(tl.maximum(value, -6.0), 6.0)
    # Values of e2m1 are half of a power of two apart, from the one at or below |value| on, at least 1.
    power = (tl.maximum(tl.abs(value), 1.0).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    doubled = tl.div_rn(value * 2, power)
    code = ((doubled + ROUND) - ROUND) * power * 0.5
    result = tl.reshape(code * scale[:, None], (COLUMNS,))
    tl.store(out + slot * N + column, result.to(tl.bfloat16), mask=column < N)


@triton.jit
def _quantise_fp8(x, out, N, TOPK: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """out bf16 (S, N): what fp8.round_trip makes of the values that slot s takes. As _quantise."""
    slot = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    value = tl.load(x + slot // TOPK * N + column, mask=column < N, other=0.0).to(tl.float32)
    value = tl.reshape(value, (COLUMNS // GROUP, GROUP))
    largest = tl.maximum(tl.max(tl.abs(value), 1), 1e-4)
    wanted = tl.div_rn(largest, tl.full((COLUMNS // GROUP,), 448.0, tl.float32)).to(tl.int32, bitcast=True)
    scale = ((wanted + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)  # a power of two
    scale = tl.broadcast_to(scale[:, None], (COLUMNS // GROUP, GROUP))
    result = tl.reshape(tl.div_rn(value, scale).to(tl.float8e4nv).to(tl.float32) * scale, (COLUMNS,))
    tl.store(out + slot * N + column, result.to(tl.bfloat16), mask=column < N)


@triton.jit
def _weights(codes, scales, ROWS: tl.constexpr, STEP: tl.constexpr):
    """codes: uint8 (ROWS, STEP / 2), scales: e4m3 bytes (ROWS, STEP / 16) -> bf16 (ROWS, STEP), code * scale / REST."""
    two = codes.to(tl.uint16)
    low = ((two & 0x07) << 6) | ((two & 0x08) << 12)
    high = ((two & 0x70) << 2) | ((two & 0x80) << 8)
    value = tl.join(low, high).to(tl.bfloat16, bitcast=True)
    scale = (scales.to(tl.float8e4nv, bitcast=True).to(tl.float32) * SCALE_UP).to(tl.bfloat16)
    return tl.reshape(tl.reshape(value, (ROWS, STEP // 16, 16)) * scale[:, :, None], (ROWS, STEP))


@triton.jit
def _gate_up(
    x,
    w13,
    s13,
    g13,
    in_scale,
    routing,
    tiles,
    firsts,
    ends,
    order,
    v,
    H,
    H2,
    H16,
    I,
    TOPK: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    LIMIT: tl.constexpr,
    QUANTISED: tl.constexpr,
):
    """v bf16 (S, I) of a tile's slots, ROWS of it. x: bf16, a row for TOPK slots. Program (rows, tile)."""
    e = tl.load(tiles + tl.program_id(1))
    if e < 0:
        return
    place = tl.load(firsts + tl.program_id(1)) + tl.arange(0, SLOTS)
    there = place < tl.load(ends + e)
    slot = tl.load(order + place, mask=there, other=0).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    along = tl.arange(0, STEP)
    values = x + (slot // TOPK * H)[:, None] + along[None, :]
    gate_row = e.to(tl.int64) * (2 * I) + row
    gate_codes = w13 + (gate_row * H2)[:, None] + tl.arange(0, STEP // 2)[None, :]
    gate_scales = s13 + (gate_row * H16)[:, None] + tl.arange(0, STEP // 16)[None, :]
    to_up = I.to(tl.int64)
    gate = tl.zeros((ROWS, SLOTS), tl.float32)
    up = tl.zeros((ROWS, SLOTS), tl.float32)
    for _ in range(0, H, STEP):
        taken = tl.trans(tl.load(values, mask=there[:, None], other=0.0))
        gate = tl.dot(_weights(tl.load(gate_codes), tl.load(gate_scales), ROWS, STEP), taken, gate)
        up_codes = tl.load(gate_codes + to_up * H2)
        up = tl.dot(_weights(up_codes, tl.load(gate_scales + to_up * H16), ROWS, STEP), taken, up)
        values += STEP
        gate_codes += STEP // 2
        gate_scales += STEP // 16
    factor = tl.load(g13 + e) * REST
    if QUANTISED:
        factor *= tl.load(in_scale + e)
    gate = tl.minimum(gate * factor, LIMIT)
    up = tl.minimum(tl.maximum(up * factor, -LIMIT), LIMIT)
    weight = tl.load(routing + slot, mask=there, other=0.0)
    result = gate / (1 + tl.exp(-gate)) * up * weight[None, :]
    pointers = v + (slot * I)[:, None] + row[None, :]
    tl.store(pointers, tl.trans(result).to(tl.bfloat16), mask=there[:, None])


@triton.jit
def _down(
    v,
    w2,
    s2,
    g2,
    in_scale,
    tiles,
    firsts,
    ends,
    order,
    parts,
    H,
    I,
    I2,
    I16,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    QUANTISED: tl.constexpr,
):
    """parts fp32 (S, H) of a tile's slots, ROWS of it. v: bf16 (S, I). Program (rows, tile)."""
    e = tl.load(tiles + tl.program_id(1))
    if e < 0:
        return
    place = tl.load(firsts + tl.program_id(1)) + tl.arange(0, SLOTS)
    there = place < tl.load(ends + e)
    slot = tl.load(order + place, mask=there, other=0).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    values = v + (slot * I)[:, None] + tl.arange(0, STEP)[None, :]
    of_expert = e.to(tl.int64) * H + row
    codes = w2 + (of_expert * I2)[:, None] + tl.arange(0, STEP // 2)[None, :]
    scales = s2 + (of_expert * I16)[:, None] + tl.arange(0, STEP // 16)[None, :]
    total = tl.zeros((ROWS, SLOTS), tl.float32)
    for _ in range(0, I, STEP):
        taken = tl.trans(tl.load(values, mask=there[:, None], other=0.0))
        total = tl.dot(_weights(tl.load(codes), tl.load(scales), ROWS, STEP), taken, total)
        values += STEP
        codes += STEP // 2
        scales += STEP // 16
    factor = tl.load(g2 + e) * REST
    if QUANTISED:
        factor *= tl.load(in_scale + e)
    pointers = parts + (slot * H)[:, None] + row[None, :]
    tl.store(pointers, tl.trans(total * factor), mask=there[:, None])


@triton.jit
def _combine(parts, ids, out, H, E, TOPK: tl.constexpr, COLUMNS: tl.constexpr):
    """out bf16 (T, H): a token's TOPK rows of parts, fp32 (T TOPK, H), in their order, but for those with a bad id,
    which nothing has written. Program (token, columns).
    """
    slot = tl.program_id(0).to(tl.int64) * TOPK
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for j in tl.static_range(TOPK):
        e = tl.load(ids + slot + j)
        part = tl.load(parts + (slot + j) * H + column, mask=column < H, other=0.0)  # waits for no id
        total += tl.where((e >= 0) & (e < E), part, 0.0)
    tl.store(out + tl.program_id(0).to(tl.int64) * H + column, total.to(tl.bfloat16), mask=column < H)


def plan(sizes: Sizes) -> Plan:
    """Choose by shapes only: a tile holds the slots of most experts when all are chosen alike, up to 128."""
    slots = sizes.tokens * sizes.topk
    hit = sizes.experts * (1 - (1 - sizes.topk / sizes.experts) ** sizes.tokens)  # experts, expected
    each = slots / hit
    spread = 2 * each**0.5 if sizes.topk < sizes.experts else 0  # twice the standard deviation; a tile more is dear
    tile = min(max(16, triton.next_power_of_2(math.ceil(each + spread))), 128)
    used = hit * math.ceil(each / tile)
    experts = min(sizes.experts, slots)
    tiles = (slots + experts * (tile - 1)) // tile  # all full but for one of each expert
    up = _product(sizes.inner, sizes.hidden, tile, used, 64)  # of each of two
    return Plan(tile, tiles, up, _product(sizes.hidden, sizes.inner, tile, used, 128))


def _product(rows: int, length: int, tile: int, tiles: float, most: int) -> Product:
    """As many rows a program, up to `most`, as divide them and leave BUSY programs; 64 are a wgmma's."""
    step = 128 if length % 128 == 0 else 64
    fitting = [r for r in (128, 64, 32, 16) if r <= most and rows % r == 0]
    count = next((r for r in fitting if rows // r * tiles >= BUSY), fitting[-1])
    return Product(count, step, 8 if tile == 128 else 4, 3 if tile == 128 else 4)


def prepare(weights: Weights) -> Weights:
    """The weights themselves, MXFP4 with NVFP4's scales. ValueError as unpack_weights says."""
    unpack_weights(weights)
    if weights.activation != "fp8":
        return weights
    (s13, g13), (s2, g2) = map(nvfp4.scales_of_mxfp4, (weights.s13, weights.s2))
    return weights._replace(s13=s13, g13=g13, s2=s2, g2=g2)


def custom_kernel(data: input_t) -> output_t:
    """Write data.outputs.out, bf16 (T, H), and return it; data.weights is what prepare returned. ValueError as
    unpack_call says.
    """
    weights, (x, ids, routing), (out,) = data
    experts, hidden, inner = len(weights.w13), 2 * weights.w13.shape[2], 2 * weights.w2.shape[2]
    tokens, topk = unpack_call(data.inputs, data.outputs, hidden)
    sizes = Sizes(tokens, experts, topk, hidden, inner, weights.activation)
    slots, how, quantised = tokens * topk, plan(sizes), sizes.activation != "bf16"
    by_in_scale = sizes.activation == "nvfp4"
    tables = torch.empty(2 * how.tiles + experts + slots, dtype=torch.int32, device=x.device)
    lists = tables.split([how.tiles, how.tiles, experts, slots])  # tiles, firsts, ends, order
    v = x.new_empty(slots, inner)
    parts = x.new_empty(slots, hidden, dtype=torch.float32)
    w13 = weights.w13, weights.s13.view(torch.uint8), weights.g13, weights.in_scale13
    w2 = weights.w2, weights.s2.view(torch.uint8), weights.g2, weights.in_scale2
    _route[(experts + 1,)](ids, *lists, slots, experts, how.tiles, **route_constants(sizes, how))

    def quantise(values: torch.Tensor, width: int, in_scale: torch.Tensor, topk: int, result: torch.Tensor) -> None:
        grid = (slots, triton.cdiv(width, COLUMNS))
        if not by_in_scale:
            _quantise_fp8[grid](values, result, width, TOPK=topk, COLUMNS=COLUMNS, GROUP=FP8_GROUP)
            return
        _quantise[grid](values, ids, in_scale, result, width, experts, TOPK=topk, COLUMNS=COLUMNS)

    taken, each = x, sizes.topk
    if quantised:
        taken, each = x.new_empty(slots, hidden), 1
        quantise(x, hidden, weights.in_scale13, sizes.topk, taken)
    _gate_up[(inner // how.up.rows, how.tiles)](
        taken,
        *w13,
        routing,
        *lists,
        v,
        hidden,
        hidden // 2,
        hidden // 16,
        inner,
        TOPK=each,
        LIMIT=LIMIT,
        **product_constants(how, how.up, by_in_scale),
        num_warps=how.up.warps,
        num_stages=how.up.stages,
    )
    if quantised:
        quantise(v, inner, weights.in_scale2, 1, v)
    _down[(hidden // how.down.rows, how.tiles)](
        v,
        *w2,
        *lists,
        parts,
        hidden,
        inner,
        inner // 2,
        inner // 16,
        **product_constants(how, how.down, by_in_scale),
        num_warps=how.down.warps,
        num_stages=how.down.stages,
    )
    grid = (sizes.tokens, triton.cdiv(hidden, COLUMNS))
    _combine[grid](parts, ids, out, hidden, experts, TOPK=sizes.topk, COLUMNS=COLUMNS)
    return out


def route_constants(sizes: Sizes, how: Plan) -> dict:
    return {"SLOTS": how.slots, "EP": triton.next_power_of_2(max(sizes.experts, 2)), "CHUNK": CHUNK, "TILES": TILES}


def product_constants(how: Plan, product: Product, quantised: bool) -> dict:
    return {"SLOTS": how.slots, "ROWS": product.rows, "STEP": product.step, "QUANTISED": quantised}


def compile_for(target: str) -> list[build.Artefact]:
    """Compile for `target`, without a GPU: all kernels for each shape of the benchmarks, and the quantiser."""
    if target not in TARGETS:
        raise ValueError(f"target must be one of {TARGETS}, got {target!r}")
    made = {}
    for case in BENCHMARKS:
        sizes = Sizes(case.tokens, case.experts, case.topk, case.hidden, case.inner, case.activation)
        how = plan(sizes)
        up, down = (product_constants(how, product, False) for product in (how.up, how.down))
        for kernel, constant, warps, stages in (
            (_route, route_constants(sizes, how), 4, 3),
            (_gate_up, up | {"TOPK": sizes.topk, "LIMIT": LIMIT}, how.up.warps, how.up.stages),
            (_down, down, how.down.warps, how.down.stages),
            (_combine, {"TOPK": sizes.topk, "COLUMNS": COLUMNS}, 4, 3),
            (_quantise, {"TOPK": sizes.topk, "COLUMNS": COLUMNS}, 4, 3),
            (_quantise_fp8, {"TOPK": sizes.topk, "COLUMNS": COLUMNS, "GROUP": FP8_GROUP}, 4, 3),
        ):
            made[f"{kernel.__name__} {constant} {warps} {stages}"] = kernel, constant, warps, stages
    return [_cubin(*what, target) for what in made.values()]


_TYPES = {
    "x": "*bf16",
    "v": "*bf16",
    "out": "*bf16",
    "w13": "*u8",
    "s13": "*u8",
    "w2": "*u8",
    "s2": "*u8",
    **dict.fromkeys(("g13", "g2", "in_scale", "routing", "parts"), "*fp32"),
    **dict.fromkeys(("ids", "tiles", "firsts", "ends", "order"), "*i32"),
}


def _cubin(kernel: object, constant: dict, warps: int, stages: int, target: str) -> build.Artefact:
    """Compile one kernel with these constants."""
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constant else _TYPES.get(n, "i32") for n in names}
    constexprs = {(i,): constant[n] for i, n in enumerate(names) if n in constant}
    # The benchmarks' tensors and sizes: the tables are parts of one, and only the first is known to be aligned.
    aligned = {n for n, kind in signature.items() if kind.startswith("*")} - {"firsts", "ends", "order"}
    aligned |= {"H", "H2", "H16", "I", "I2", "I16", "N"} & signature.keys()
    hints = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in aligned}
    source = ASTSource(kernel, signature, constexprs, hints)
    return cubin(source, {"num_warps": warps, "num_stages": stages}, Path(__file__).stem, target)
