"""sm90_cute: CuTe DSL; mma.sync on weights decoded in registers, one kernel for both products, tokens as their N."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import cutlass
import torch
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, cute
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu.warp import MmaF16BF16Op
from cutlass.cutlass_dsl import dsl_user_op
from task import LIMIT, Weights, input_t, output_t, unpack_call, unpack_weights

from problems.common import build, nvfp4
from problems.common.cute_dsl import check_target, cubin, mul_bf16x2, pack_bf16x2, pointers, prmt

TARGETS = ("sm90", "sm100")
REQUIRES = ("cutlass",)

# A unit: 32 rows by 64 columns of a matrix, no larger than as it came. Lane 4 g + c of a warp owns, of rows
# 4 g + 2 q + r of the unit, the 16 columns from 16 c on: a block, with one scale. q, r: 0 or 1.
#   words 128 q + 4 lane + 2 half + r    eight codes: row 4 g + 2 q + r, columns 16 c + 8 half on
#   byte 2 q + r of word 256 + lane      that row's scale
# Rows 2 q, 2 q + 1 of a lane are rows g and g + 8 of product q of the instruction; k = 2 c, 2 c + 1, 2 c + 8, 2 c + 9
# of step j are columns 16 c + 4 j on, of weights and tokens alike. So a lane's tokens are 32 bytes in one piece, and
# its sums are of 4 neighbouring rows. In w13 gate row i is row 2 i, up row i is row 2 i + 1: a lane has both.
UNIT_ROWS, UNIT_COLUMNS = 32, 64
UNIT_CHUNKS = 72  # of 16 bytes: 2 x 32 of codes, 8 of scales
UNIT_BYTES = 16 * UNIT_CHUNKS
# A code is a sign and a magnitude of 3 bits. Of the 4 codes in each half of a word, codes 0 to 2 are where a shift puts
# them at bf16's sign, low exponent and high mantissa bits, CODES; code 3 has the bits that are left.
SIGN_AT, SIZE_AT = (15, 12, 9, 14), (6, 3, 0, None)  # lowest bit; code 3 has its size in bits 11, 10 and 13
CODES = -0x7E3F7E40  # 0x81C081C0
LAST_SIGN, LAST_HIGH, LAST_LOW = -0x7FFF8000, 0x01800180, 0x00400040
# So placed, a code is its value times 2^-126, also where bf16 is subnormal; a scale byte b is made bf16 of the scale
# times 2^118, by 16 b + SCALE_BASE. Their product is exact, and 2^8 too small.
SCALE_BASE = 0x75807580
REST = 256.0

NUM_THREADS = 256
WARPS = NUM_THREADS // 32
NUM_STAGES = 4  # of shared memory; a power of two
TOKEN_COLUMNS = 64  # tokens times units of columns of a stage
TOKEN_CHUNKS = 8 * TOKEN_COLUMNS  # of 16 bytes, 8 KiB
ROUTE_THREADS = 1024
COMBINE_THREADS = 128
EXPERTS = 4096  # counted in shared memory; more where there are more
EXPERTS_MAX = 32768
MULTIPROCESSORS = 132  # of an H200
LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Plan:
    """How a CTA's 8 warps share a tile. Every field is a compile-time constant of the kernel."""

    tokens: int  # of one expert
    row_units: int  # units of rows that a warp has

    @property
    def depth(self) -> int:
        """Warps that have the same rows, and divide the columns."""
        return TOKEN_COLUMNS // self.tokens

    @property
    def row_warps(self) -> int:
        return WARPS // self.depth

    @property
    def rows(self) -> int:
        """Of a CTA."""
        return UNIT_ROWS * self.row_units * self.row_warps

    def row_blocks(self, rows: int) -> int:
        return -(-rows // self.rows)

    def blocks(self, slots: int, experts: int) -> int:
        """The most blocks of tokens there can be: every expert that is hit begins one."""
        hit = min(experts, slots)
        return (slots + hit * (self.tokens - 1)) // self.tokens


# Up to how many slots an expert on average -> plan. Many rows a warp save reads of tokens, many tokens save decoding.
# The limits come from counting instructions and bytes: most experts that are hit should need one tile.
PLANS = (
    (3.0, Plan(8, 1)),
    (10.0, Plan(16, 1)),
    (28.0, Plan(32, 1)),
    (float("inf"), Plan(64, 2)),
)


@functools.cache
def plan_for(slots: int, experts: int, rows: int) -> Plan:
    """rows: 2 I. Fewer tokens a tile where CTAs would be too few for the GPU, at the price of decoding again."""
    at = next(i for i, (limit, _) in enumerate(PLANS) if slots / experts <= limit)
    while at and PLANS[at][1].blocks(slots, experts) * PLANS[at][1].row_blocks(rows) < MULTIPROCESSORS // 2:
        at -= 1
    return PLANS[at][1]


# ---------------------------------------------------------------- weights


class State(NamedTuple):
    """What prepare makes of task.Weights; R, C: units of rows and of columns.

    units13, units2    int32 (E, R, C, 288)
    factor13, factor2  fp32 (E,), of the products of units with tokens as they are multiplied
    """

    units13: torch.Tensor
    units2: torch.Tensor
    factor13: torch.Tensor
    factor2: torch.Tensor
    in_scale13: torch.Tensor
    in_scale2: torch.Tensor
    activation: str


def prepare(weights: Weights) -> State:
    """The weights in units, an expert at a time, so that little else is held. ValueError as unpack_weights says."""
    experts, hidden, inner, activation = unpack_weights(weights)
    shapes = (2 * inner, hidden), (hidden, inner)
    units13, units2 = (
        torch.empty(
            experts,
            rows // UNIT_ROWS,
            columns // UNIT_COLUMNS,
            UNIT_BYTES // 4,
            dtype=torch.int32,
            device=weights.w13.device,
        )
        for rows, columns in shapes
    )
    for e in range(experts):
        gate_and_up = (t[e].view(torch.uint8).unflatten(0, (2, inner)).transpose(0, 1) for t in weights[:2])
        units13[e] = in_units(*(t.flatten(0, 1) for t in gate_and_up))
        units2[e] = in_units(weights.w2[e], weights.s2[e].view(torch.uint8))
    factor13, factor2 = weights.g13 * REST, weights.g2 * REST
    if activation == "nvfp4":
        factor13, factor2 = factor13 * weights.in_scale13, factor2 * weights.in_scale2
    return State(units13, units2, factor13, factor2, weights.in_scale13.clone(), weights.in_scale2.clone(), activation)


def in_units(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """packed uint8 (n, m / 2), scales uint8 (n, m / 16) -> int32 (n / 32, m / 64, 288)."""
    words_of, scale_of = tables(str(packed.device))
    place = torch.arange(0, 1024, 256, dtype=torch.int32, device=packed.device)
    byte = packed.reshape(-1, 4).int() + place
    words = words_of.index_select(0, byte.view(-1)).view(byte.shape).sum(1, dtype=torch.int32)  # no bit is in two
    words = words.view(*scales.shape, 2) * (scales != 0).unsqueeze(-1)  # scales of zero have no byte
    scale = scale_of.index_select(0, scales.reshape(-1).int())
    n, m = scales.shape[0] // UNIT_ROWS, scales.shape[1] // 4
    # (u, g, q, r, column unit, c, half) -> (u, column unit, q, g, c, half, r), and without half (..., g, c, q, r)
    words = words.view(n, 8, 2, 2, m, 4, 2).permute(0, 4, 2, 1, 5, 6, 3).reshape(n, m, 256)
    scale = scale.view(n, 8, 2, 2, m, 4).permute(0, 4, 1, 5, 2, 3).reshape(n, m, 128).view(torch.int32)
    return torch.cat([words, scale], 2)


@functools.cache
def tables(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 (4 * 256,): the bits of a word of a unit that byte j of eight codes sets; uint8 (256,): the byte of an e4m3
    scale, its value's exponent + 10 and 3 bits of mantissa. A zero's is 0.
    """

    def bits(code: int, pair: int) -> int:
        sign, size = code >> 3, code & 7
        if SIZE_AT[pair] is None:
            return sign << SIGN_AT[pair] | (size & 1) << 13 | size >> 1 << 10
        return sign << SIGN_AT[pair] | size << SIZE_AT[pair]

    def scale(byte: int) -> int:
        exponent, mantissa = byte >> 3 & 15, byte & 7
        if exponent:
            return exponent + 3 << 3 | mantissa
        top = mantissa.bit_length()  # e4m3's subnormals become normal
        return top << 3 | mantissa << 4 - top & 7 if mantissa else 0

    words = [bits(byte & 15, j) | bits(byte >> 4, j) << 16 for j in range(4) for byte in range(256)]
    signed = [word - (word >> 31 << 32) for word in words]
    return (
        torch.tensor(signed, dtype=torch.int32, device=device),
        torch.tensor([scale(byte) for byte in range(256)], dtype=torch.uint8, device=device),
    )


def quantised(x: torch.Tensor, in_scale: torch.Tensor) -> torch.Tensor:
    """x: fp32 (..., m), in_scale: fp32 (...) -> bf16 (..., m): x quantised, without in_scale. That is exact in bf16."""
    codes, scales = nvfp4.encode(x, in_scale)
    values = nvfp4.decode(codes).unflatten(-1, (-1, nvfp4.BLOCK)).mul_(scales.float().unsqueeze(-1))
    return values.flatten(-2).bfloat16()


# ---------------------------------------------------------------- device helpers


@dsl_user_op
def fetch(shared: Int32, address: Int64, count: int, wanted: cutlass.Boolean, *, loc=None, ip=None) -> None:
    """Begin to copy `count` bytes (4 or 16) from global to shared memory if `wanted`, else to write zeros there."""
    size = cutlass.select_(wanted, Int32(count), Int32(0))
    values = [
        Int32(shared).ir_value(loc=loc, ip=ip),
        Int64(address).ir_value(loc=loc, ip=ip),
        Int32(size).ir_value(loc=loc, ip=ip),
    ]
    cache = "cg" if count == 16 else "ca"
    text = f"cp.async.{cache}.shared.global [$0], [$1], {count}, $2;"
    llvm.inline_asm(None, values, text, "r,l,r,~{memory}", has_side_effects=True, loc=loc, ip=ip)


def decode(word: Int32, scale: Int32) -> tuple[Int32, ...]:
    """A word of eight codes and their scale, twice bf16 -> four pairs of bf16, in the order of the columns."""
    last = ((word << 1) & LAST_SIGN) | ((word >> 3) & LAST_HIGH) | ((word >> 7) & LAST_LOW)
    places = word & CODES, (word << 3) & CODES, (word << 6) & CODES, last
    return tuple(mul_bf16x2(pair, scale) for pair in places)


def swiglu(gate: Float32, up: Float32, routing: Float32) -> Float32:
    """silu(min(gate, LIMIT)) * clip(up) * routing."""
    gate = cute.arch.fmin(gate, Float32(LIMIT))
    up = cute.arch.fmax(cute.arch.fmin(up, Float32(LIMIT)), Float32(-LIMIT))
    # 2^infinity is infinity, and its inverse 0: very negative gates give -0.
    return gate * cute.arch.rcp_approx(1.0 + cute.math.exp2(-LOG2_E * gate, fastmath=True)) * up * routing


def divided(a: Int32, b: Int32) -> Int32:
    """a // b for a >= 0 and b > 0, without what signs would cost."""
    return Int32(Uint32(a) // Uint32(b))


# ---------------------------------------------------------------- routing


@cute.jit
def count_slots(ids: cute.Tensor, counts: cute.Tensor, experts: Int32, thread: Int32):
    """counts[e] = slots of expert e. Ids that are no experts count nowhere."""
    for e in cutlass.range(thread, experts, ROUTE_THREADS, unroll=1):
        counts[e] = Int32(0)
    cute.arch.sync_threads()
    for slot in cutlass.range(thread, cute.size(ids), ROUTE_THREADS, unroll=4):
        expert = ids[slot]
        if (expert >= 0) & (expert < experts):
            cute.arch.atomic_add(counts.iterator + expert, Int32(1))
    cute.arch.sync_threads()


@cute.kernel
def route(
    ids: cute.Tensor, order: cute.Tensor, blocks: cute.Tensor, experts: Int32, tokens: Int32, room: cutlass.Constexpr
):
    """One CTA. Slots t * k + j sorted by expert, and cut into blocks of at most `tokens`.

    ids int32 (S,); order int32 (S,), at the end undefined where ids were no experts
    blocks int32 (4, B): expert, where in `order` it begins, and how many slots; expert is -1 where no block is left
    Which slot of an expert comes first is left to chance: no result depends on it.
    """
    thread, _, _ = cute.arch.thread_idx()
    lane, warp = thread % 32, cute.arch.make_warp_uniform(thread // 32)
    cute.arch.griddepcontrol_launch_dependents()
    memory = cutlass.memory.SmemAllocator()
    counts = memory.allocate_tensor(Int32, cute.make_layout(room), byte_alignment=16)
    sums = memory.allocate_tensor(Int32, cute.make_layout((2, ROUTE_THREADS // 32)), byte_alignment=16)
    count_slots(ids, counts, experts, thread)

    first_slot, first_block = Int32(0), Int32(0)
    for base in cutlass.range(0, experts, ROUTE_THREADS, unroll=1):
        expert = base + thread
        mine = Int32(0)
        if expert < experts:
            mine = counts[expert]
        cut = divided(mine + tokens - 1, tokens)
        slots, parts = mine, cut  # become sums over lanes 0 to this one
        for i in cutlass.range_constexpr(5):
            more_slots = cute.arch.shuffle_sync_up(slots, 1 << i)
            more_parts = cute.arch.shuffle_sync_up(parts, 1 << i)
            slots += cutlass.select_(lane >= 1 << i, more_slots, Int32(0))
            parts += cutlass.select_(lane >= 1 << i, more_parts, Int32(0))
        if lane == 31:
            sums[0, warp], sums[1, warp] = slots, parts
        cute.arch.sync_threads()
        of_warp = sums[0, lane], sums[1, lane]
        before = [cute.arch.warp_reduction_sum(cutlass.select_(lane < warp, v, Int32(0))) for v in of_warp]
        slot = first_slot + before[0] + slots - mine
        block = first_block + before[1] + parts - cut
        if expert < experts:
            counts[expert] = slot
        for i in cutlass.range(cut, unroll=1):
            blocks[0, block + i] = expert
            blocks[1, block + i] = slot + i * tokens
            blocks[2, block + i] = cutlass.min(mine - i * tokens, tokens)
        first_slot += cute.arch.warp_reduction_sum(of_warp[0])
        first_block += cute.arch.warp_reduction_sum(of_warp[1])
        cute.arch.sync_threads()

    for block in cutlass.range(first_block + thread, blocks.shape[1], ROUTE_THREADS, unroll=1):
        blocks[0, block] = Int32(-1)
    for slot in cutlass.range(thread, cute.size(ids), ROUTE_THREADS, unroll=4):
        expert = ids[slot]
        if (expert >= 0) & (expert < experts):
            order[cute.arch.atomic_add(counts.iterator + expert, Int32(1))] = slot


# ---------------------------------------------------------------- product


@dataclass(frozen=True)
class Columns:
    """The units of columns that a CTA goes through, `depth` in a turn. Those past the end become zeros, so that nothing
    else has to know of an end.
    """

    count: Int32
    depth: int

    def at(self, turn: Int32, unit: Int32) -> tuple:
        """-> the number of a unit of a turn, at most the last one's, and whether there is such a unit."""
        at = turn * self.depth + unit
        return Int64(cutlass.min(at, self.count - 1)), at < self.count


@dataclass(frozen=True)
class TokenCopies:
    """The chunks of tokens that a thread copies for each stage."""

    chunks: tuple  # address in stage 0, source in the row's first unit, which unit of a turn, if there is such a token
    columns: Columns

    def begin(self, turn: Int32, stage: Int32) -> None:
        for shared, source, unit, counts in self.chunks:
            column, known = self.columns.at(turn, unit)
            fetch(shared + stage * (16 * TOKEN_CHUNKS), source + 128 * column, 16, counts & known)


@dataclass(frozen=True)
class UnitCopies:
    """A lane's part of the units of its warp. No other lane reads it."""

    units: tuple  # address in stage 0, source in the first unit of columns
    unit: Int32  # which of a turn
    columns: Columns

    def begin(self, turn: Int32, stage: Int32) -> None:
        column, known = self.columns.at(turn, self.unit)
        lane = cute.arch.lane_idx()
        for shared, source in self.units:
            to = shared + stage * (WARPS * len(self.units) * UNIT_BYTES)
            for start, size in ((0, 16), (512, 16), (1024, 4)):
                address = source + UNIT_BYTES * column + start + size * Int64(lane)
                fetch(to + start + size * lane, address, size, known)


@dataclass(frozen=True)
class Place:
    """Lane 4 g + c of a warp whose units of rows begin at `unit`."""

    g: Int32
    c: Int32
    unit: Int32

    def token(self, n: int, b: int) -> Int32:
        """Of the tile, for registers b and 2 + b of the n-th product."""
        return 8 * n + 2 * self.c + b


def mma_stage(
    codes: cute.Tensor, scales: cute.Tensor, tokens: cute.Tensor, sums: cute.Tensor, place: Place, first: Int32
) -> None:
    """sums += units times tokens, over 64 columns.

    codes int32 (4, 64 chunks, units of rows), scales int32 (32 lanes, units of rows), as in units
    tokens int32 (4, chunks); first: the chunk where the 64 columns of the tokens begin, 8 chunks a token
    sums fp32 (4, 2 groups of 16 rows for each unit, 1, tokens / 8)
    """
    units = codes.shape[2]
    lane = 4 * place.g + place.c
    mma = cute.make_mma_atom(MmaF16BF16Op(BFloat16, Float32, (16, 8, 16)))
    raw = cute.make_rmem_tensor((4, 2, units), Int32)
    scale = cute.make_rmem_tensor((4, units), Int32)
    weights = cute.make_rmem_tensor((4, 2 * units, 2), Int32)  # register, group, step
    values = cute.make_rmem_tensor((2, 1, 2), Int32)  # register, group of tokens, step
    a, b = cute.recast_tensor(weights, BFloat16), cute.recast_tensor(values, BFloat16)
    for u in range(units):
        four = scales[lane, u]
        for i in range(4):
            scale[i, u] = prmt(four, 0, 0x4040 | i | i << 8) * 16 + SCALE_BASE
        for q in range(2):
            cute.autovec_copy(codes[None, 32 * q + lane, u], raw[None, q, u])
    for half in range(2):
        for u in range(units):
            for q in range(2):
                for r in range(2):
                    pairs = decode(raw[2 * half + r, q, u], scale[2 * q + r, u])
                    for i, pair in enumerate(pairs):
                        weights[r + 2 * (i % 2), 2 * u + q, i // 2] = pair
        for n in range(sums.shape[3]):
            # Odd tokens have their chunks in pairs exchanged: 8 lanes then read 8 different groups of banks.
            at = first + 8 * (8 * n + place.g) + ((2 * place.c + half) ^ (place.g & 1))
            cute.autovec_copy(tokens[None, at], cute.make_tensor(values.iterator, cute.make_layout(4)))
            for step in range(2):
                part = sums[None, None, None, n]
                cute.gemm(mma, part, a[None, None, step], b[None, None, step], part)


def token_copies(
    memory: cute.Tensor, x: cute.Pointer, slots: cute.Tensor, repeats: Int32, columns: Int32, thread: Int32, plan: Plan
) -> tuple:
    """TokenCopies.chunks. A unit's tokens are 8 chunks each; neighbouring threads read a row of x."""
    found = []
    count = cute.size(slots)
    for i in range(TOKEN_CHUNKS // NUM_THREADS):
        at = thread + i * NUM_THREADS
        token, unit, chunk = at // (8 * plan.depth), at // 8 % plan.depth, at % 8
        row = divided(slots[cutlass.min(token, count - 1)], repeats)
        source = x.toint() + Int64(row) * Int64(128 * columns) + Int64(16 * chunk)
        to = (unit * plan.tokens + token) * 8 + (chunk ^ (token & 1))
        found.append((memory.iterator.toint() + 16 * to, source, unit, token < count))
    return tuple(found)


def unit_copies(
    memory: cute.Tensor,
    units: Int64,
    before: Int64,
    unit: Int32,
    row_units: Int32,
    columns: Int32,
    warp: Int32,
    own: int,
) -> tuple:
    """UnitCopies.units. before: units of rows of experts before. Warps past the last row repeat it, and write none."""
    found = []
    for u in range(own):
        row = before + cutlass.min(unit + u, row_units - 1)
        found.append((memory.iterator.toint() + (warp * own + u) * UNIT_BYTES, units + row * columns * UNIT_BYTES))
    return tuple(found)


@cute.jit
def add_depths(sums: cute.Tensor, memory: cute.Tensor, warp: Int32, lane: Int32, plan: cutlass.Constexpr):
    """sums of the first row_warps warps += those of the others with the same rows, in order.

    memory fp32 (32, warps behind the first ones, registers)
    """
    cute.arch.cp_async_wait_group(0)  # zeros past the end may still be on their way to this memory
    cute.arch.sync_threads()
    if warp >= plan.row_warps:
        for i in cutlass.range_constexpr(cute.size(sums)):
            memory[lane, warp - plan.row_warps, i] = sums[i]
    cute.arch.sync_threads()
    if warp < plan.row_warps:
        for d in cutlass.range_constexpr(plan.depth - 1):
            for i in cutlass.range_constexpr(cute.size(sums)):
                sums[i] += memory[lane, warp + d * plan.row_warps, i]


@cute.jit
def write_sums(
    sums: cute.Tensor,
    place: Place,
    slots: cute.Tensor,
    count: Int32,
    factor: Float32,
    routing: cute.Tensor,
    result: cute.Tensor,
    row_units: cutlass.Constexpr,
    first: cutlass.Constexpr,
):
    """The first product's sums become v, two values of bf16 a word, the second's are written as they are.

    slots int32 (count,); result int32 (8 units of rows, S) or fp32 (4, 8 units of rows, S)
    """
    four = cute.make_rmem_tensor((4,), Float32)
    for n in cutlass.range_constexpr(sums.shape[3]):
        for b in cutlass.range_constexpr(2):
            token = place.token(n, b)
            if token < count:
                slot = slots[token]
                for u in cutlass.range_constexpr(row_units):
                    for i in cutlass.range_constexpr(4):
                        four[i] = sums[2 * (i % 2) + b, 2 * u + i // 2, 0, n] * factor
                    at = 8 * (place.unit + u) + place.g
                    if cutlass.const_expr(first):
                        weight = routing[slot]
                        result[at, slot] = pack_bf16x2(
                            swiglu(four[0], four[1], weight), swiglu(four[2], four[3], weight)
                        )
                    else:
                        cute.autovec_copy(four, result[None, at, slot])


@cute.jit
def gemm_block(
    units: cute.Pointer,
    x: cute.Pointer,
    order: cute.Tensor,
    expert: Int32,
    start: Int32,
    count: Int32,
    row_block: Int32,
    factor: Float32,
    routing: cute.Tensor,
    result: cute.Tensor,
    row_units: Int32,
    columns: Int32,
    repeats: Int32,
    plan: cutlass.Constexpr,
    first: cutlass.Constexpr,
):
    """One CTA's tile, see gemm."""
    thread, _, _ = cute.arch.thread_idx()
    lane, warp = thread % 32, cute.arch.make_warp_uniform(thread // 32)
    group, depth = warp % plan.row_warps, warp // plan.row_warps
    own = plan.row_units
    unit = (row_block * plan.row_warps + group) * own
    place = Place(lane // 4, lane % 4, unit)
    slots = cute.make_tensor(order.iterator + start, cute.make_layout(count))

    memory = cutlass.memory.SmemAllocator()
    smem_b = memory.allocate_tensor(Int32, cute.make_layout((4, TOKEN_CHUNKS, NUM_STAGES)), byte_alignment=128)
    shape = (4, UNIT_CHUNKS, own, WARPS, NUM_STAGES)
    smem_a = memory.allocate_tensor(Int32, cute.make_layout(shape), byte_alignment=128)
    flat = cute.make_tensor(smem_a.iterator, cute.make_layout((4 * UNIT_CHUNKS, own, WARPS, NUM_STAGES)))

    sums = cute.make_rmem_tensor((4, 2 * own, 1, plan.tokens // 8), Float32)
    sums.fill(0.0)
    turns = Columns(columns, plan.depth)
    before = Int64(expert) * row_units
    units_in = UnitCopies(unit_copies(smem_a, units.toint(), before, unit, row_units, columns, warp, own), depth, turns)
    for stage in cutlass.range_constexpr(NUM_STAGES - 1):
        units_in.begin(Int32(stage), Int32(stage))
    # Behind them: which tokens these are has to be read first.
    tokens_in = TokenCopies(token_copies(smem_b, x, slots, repeats, columns, thread, plan), turns)
    for stage in cutlass.range_constexpr(NUM_STAGES - 1):
        tokens_in.begin(Int32(stage), Int32(stage))
        cute.arch.cp_async_commit_group()
    for turn in cutlass.range(cute.ceil_div(columns, plan.depth), unroll=1):
        cute.arch.cp_async_wait_group(NUM_STAGES - 2)
        cute.arch.sync_threads()  # all have this stage's tokens, and are done with the stage that is filled next
        units_in.begin(turn + NUM_STAGES - 1, (turn + NUM_STAGES - 1) % NUM_STAGES)
        tokens_in.begin(turn + NUM_STAGES - 1, (turn + NUM_STAGES - 1) % NUM_STAGES)
        cute.arch.cp_async_commit_group()
        stage = turn % NUM_STAGES
        scales = cute.domain_offset((256, 0), flat[None, None, warp, stage])
        mma_stage(
            smem_a[None, None, None, warp, stage],
            scales,
            smem_b[None, None, stage],
            sums,
            place,
            depth * (8 * plan.tokens),
        )
    if cutlass.const_expr(plan.depth > 1):
        layout = cute.make_layout((32, WARPS - plan.row_warps, cute.size(sums)))
        free = cute.make_tensor(cute.recast_ptr(smem_a.iterator, dtype=Float32), layout)
        add_depths(sums, free, warp, lane, plan)
    if (warp < plan.row_warps) & (unit < row_units):
        write_sums(sums, place, slots, count, factor, routing, result, own, first)


@cute.kernel
def gemm(
    units: cute.Pointer,
    factors: cute.Tensor,
    x: cute.Pointer,
    order: cute.Tensor,
    blocks: cute.Tensor,
    routing: cute.Tensor,
    result: cute.Tensor,
    row_units: Int32,
    columns: Int32,
    repeats: Int32,
    row_blocks: Int32,
    plan: cutlass.Constexpr,
    first: cutlass.Constexpr,
):
    """One CTA: plan.rows rows of an expert's matrix for one block of tokens, as route made them.

    units    (E, row_units, columns) of UNIT_BYTES    factors fp32 (E,)    routing fp32 (S,), of the first product
    x        bf16 rows of 64 * columns; that of slot s is row s // repeats
    result   by slot, see write_sums
    CTAs with the same tokens are neighbours: they run at about the same time, and then those of the expert's next ones.
    """
    cta, _, _ = cute.arch.block_idx()
    block = divided(cta, row_blocks)
    cute.arch.griddepcontrol_launch_dependents()
    cute.arch.griddepcontrol_wait()  # by all, also those without work: the next kernel's wait must mean the first, too
    expert = blocks[0, block]
    if expert >= 0:
        gemm_block(
            units,
            x,
            order,
            expert,
            blocks[1, block],
            blocks[2, block],
            cta - block * row_blocks,
            factors[expert],
            routing,
            result,
            row_units,
            columns,
            repeats,
            plan,
            first,
        )


@cute.kernel
def combine(parts: cute.Tensor, out: cute.Tensor, topk: Int32):
    """One CTA: some columns of one token. out[t] = the sum of its slots, in their order.

    parts fp32 (4, H / 4, S), out int32 (2 words, H / 4, T)
    """
    thread, _, _ = cute.arch.thread_idx()
    token, column, _ = cute.arch.block_idx()
    at = column * COMBINE_THREADS + thread
    cute.arch.griddepcontrol_wait()
    if at < out.shape[1]:
        total = cute.make_rmem_tensor((4,), Float32)
        part = cute.make_rmem_tensor((4,), Float32)
        words = cute.make_rmem_tensor((2,), Int32)
        cute.autovec_copy(parts[None, at, token * topk], total)
        for j in cutlass.range(1, topk, unroll=5):
            cute.autovec_copy(parts[None, at, token * topk + j], part)
            for i in cutlass.range_constexpr(4):
                total[i] += part[i]
        for i in cutlass.range_constexpr(2):
            words[i] = pack_bf16x2(total[2 * i], total[2 * i + 1])
        cute.autovec_copy(words, out[None, at, token])


# ---------------------------------------------------------------- launches


def rows_of(at: cute.Pointer, vector: int, count: Int32, rows: Int32) -> cute.Tensor:
    """(vector, count, rows), contiguous; a vector moves at once."""
    stride = (1, vector, cute.assume(vector * Int64(count), divby=vector))
    return cute.make_tensor(at, cute.make_layout((vector, count, rows), stride=stride))


@cute.jit
def begin(
    units: cute.Pointer,
    factors: cute.Pointer,
    x: cute.Pointer,
    ids: cute.Pointer,
    routing: cute.Pointer,
    order: cute.Pointer,
    blocks: cute.Pointer,
    v: cute.Pointer,
    experts: Int32,
    slots: Int32,
    most_blocks: Int32,
    hidden: Int32,
    inner: Int32,
    repeats: Int32,
    plan: cutlass.Constexpr,
    room: cutlass.Constexpr,
):
    """Routing and the first product. v bf16 (S, I), by slot."""
    id_list, sorted_slots = (cute.make_tensor(at, cute.make_layout(slots)) for at in (ids, order))
    block_list = cute.make_tensor(blocks, cute.make_layout((4, most_blocks)))
    route(id_list, sorted_slots, block_list, experts, Int32(plan.tokens), room).launch(
        grid=(1, 1, 1), block=(ROUTE_THREADS, 1, 1)
    )
    row_blocks = cute.ceil_div(2 * inner, plan.rows)
    wide = inner // 2
    words = cute.make_tensor(v, cute.make_layout((wide, slots), stride=(1, Int64(wide))))
    gemm(
        units,
        cute.make_tensor(factors, cute.make_layout(experts)),
        x,
        sorted_slots,
        block_list,
        cute.make_tensor(routing, cute.make_layout(slots)),
        words,
        inner // 16,
        hidden // UNIT_COLUMNS,
        repeats,
        row_blocks,
        plan,
        True,
    ).launch(grid=(row_blocks * most_blocks, 1, 1), block=(NUM_THREADS, 1, 1), use_pdl=True)


@cute.jit
def finish(
    units: cute.Pointer,
    factors: cute.Pointer,
    v: cute.Pointer,
    order: cute.Pointer,
    blocks: cute.Pointer,
    parts: cute.Pointer,
    out: cute.Pointer,
    experts: Int32,
    tokens: Int32,
    topk: Int32,
    most_blocks: Int32,
    hidden: Int32,
    inner: Int32,
    plan: cutlass.Constexpr,
):
    """The second product, and the sum over the slots of a token. parts fp32 (S, H), by slot."""
    slots = tokens * topk
    sorted_slots = cute.make_tensor(order, cute.make_layout(slots))
    block_list = cute.make_tensor(blocks, cute.make_layout((4, most_blocks)))
    sums = rows_of(parts, 4, hidden // 4, slots)
    row_blocks = cute.ceil_div(hidden, plan.rows)
    all_factors = cute.make_tensor(factors, cute.make_layout(experts))
    gemm(
        units,
        all_factors,
        v,
        sorted_slots,
        block_list,
        all_factors,
        sums,
        hidden // UNIT_ROWS,
        inner // UNIT_COLUMNS,
        Int32(1),
        row_blocks,
        plan,
        False,
    ).launch(grid=(row_blocks * most_blocks, 1, 1), block=(NUM_THREADS, 1, 1), use_pdl=True)
    combine(sums, rows_of(out, 2, hidden // 4, tokens), topk).launch(
        grid=(tokens, cute.ceil_div(hidden, 4 * COMBINE_THREADS), 1), block=(COMBINE_THREADS, 1, 1), use_pdl=True
    )


BEGIN_VIEWS = ((Int32, 16), (Float32, 4), (Int32, 16), (Int32, 4), (Float32, 4), (Int32, 4), (Int32, 16), (Int32, 16))
FINISH_VIEWS = ((Int32, 16), (Float32, 4), (Int32, 16), (Int32, 4), (Int32, 16), (Float32, 16), (Int32, 8))


@functools.cache
def begin_compiled(plan: Plan, room: int, options: str = ""):
    """For any sizes, called with the pointers, then the integers of `begin`. room: of the experts' counts."""
    return cute.compile(
        begin, *pointers(BEGIN_VIEWS, [0] * 8), *(Int32(1) for _ in range(6)), plan, room, options=options
    )


@functools.cache
def finish_compiled(plan: Plan, options: str = ""):
    """For any sizes, called with the pointers, then the integers of `finish`."""
    return cute.compile(finish, *pointers(FINISH_VIEWS, [0] * 7), *(Int32(1) for _ in range(6)), plan, options=options)


def compile_for(target: str) -> list[build.Artefact]:
    """Compile for `target`, without a GPU: two cubins a plan, ptxas' report as log.

    RuntimeError unless CUTE_DSL_ARCH, which the DSL reads when it is first imported, says the same architecture.
    """
    check_target(target, TARGETS)
    found = []
    for _, plan in PLANS:
        name = f"{Path(__file__).stem}-{target}-n{plan.tokens}u{plan.row_units}"
        found.append(cubin(functools.partial(begin_compiled, plan, EXPERTS), f"{name}-begin", target))
        found.append(cubin(functools.partial(finish_compiled, plan), f"{name}-finish", target))
    return found


def custom_kernel(data: input_t) -> output_t:
    """Write data.outputs.out, bf16 (T, H), and return it. data.weights is what prepare returned. ValueError as
    unpack_call says, or if data is not on a GPU with the weights. Slots whose ids are no experts are left out: what
    their tokens get is undefined.
    """
    state, (x, ids, routing), (out,) = data
    experts, hidden, inner = len(state.units13), UNIT_COLUMNS * state.units13.shape[2], 16 * state.units13.shape[1]
    tokens, topk = unpack_call(data.inputs, data.outputs, hidden)
    if not x.is_cuda or x.device != state.units13.device:
        raise ValueError(f"data must be on a GPU with the weights, got {x.device} and {state.units13.device}")
    if topk > experts:
        raise ValueError(f"topk_ids must have at most {experts} columns, the experts, got {topk}")
    if experts > EXPERTS_MAX:
        raise ValueError(f"experts must be at most {EXPERTS_MAX}, got {experts}")
    slots = tokens * topk
    plan = plan_for(slots, experts, 2 * inner)
    room = max(EXPERTS, 1 << (experts - 1).bit_length())
    most_blocks = plan.blocks(slots, experts)
    v = torch.empty(slots, inner, dtype=torch.bfloat16, device=x.device)
    parts = torch.empty(slots, hidden, dtype=torch.float32, device=x.device)
    lists = torch.empty(4 * most_blocks + slots, dtype=torch.int32, device=x.device)
    blocks, order = lists.data_ptr(), lists.data_ptr() + 16 * most_blocks
    taken, repeats = x, topk
    if state.activation == "nvfp4":
        known = ids.clamp(0, experts - 1).long()
        taken, repeats = quantised(x.float().unsqueeze(1).expand(-1, topk, -1), state.in_scale13[known]), 1
    begin_compiled(plan, room)(
        *pointers(
            BEGIN_VIEWS,
            [
                state.units13.data_ptr(),
                state.factor13.data_ptr(),
                taken.data_ptr(),
                ids.data_ptr(),
                routing.data_ptr(),
                order,
                blocks,
                v.data_ptr(),
            ],
        ),
        experts,
        slots,
        most_blocks,
        hidden,
        inner,
        repeats,
    )
    if state.activation == "nvfp4":
        v = quantised(v.float(), state.in_scale2[known].flatten())
    finish_compiled(plan)(
        *pointers(
            FINISH_VIEWS,
            [
                state.units2.data_ptr(),
                state.factor2.data_ptr(),
                v.data_ptr(),
                order,
                blocks,
                parts.data_ptr(),
                out.data_ptr(),
            ],
        ),
        experts,
        tokens,
        topk,
        most_blocks,
        hidden,
        inner,
    )
    return out
