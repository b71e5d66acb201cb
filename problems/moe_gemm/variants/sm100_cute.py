"""sm100_cute: CuTe DSL; tcgen05 products of FP4 with FP4, SwiGLU and FP4 in the epilogue; never run on a GPU."""

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import cutlass
import torch
from cutlass import BFloat16, Float32, Int16, Int32, Int64, Uint8, Uint32, cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op
from task import LIMIT, Weights, input_t, output_t, unpack_call, unpack_weights

from problems.common import build
from problems.common.cute_dsl import bits_to_float, check_target, cubin, e4m3_pair, pack_bf16x2, pointers

TARGETS = ("sm100",)
REQUIRES = ("cutlass",)
ONLY = {"activation": "nvfp4"}  # the instruction multiplies FP4 with FP4

# A unit: 128 rows of weights, or up to 128 tokens, by 64 values along K, which is K of one instruction.
#   byte 256 (r / 8) + 128 (k / 32) + 16 (r % 8) + (k % 32) / 2    the code of row r, value k, low nibble first
#   byte 32 rows + 16 (r % 32) + 4 (r / 32) + k / 16                its scale, e4m3; always room for 128 rows
# The codes are core matrices of 8 rows by 16 bytes without a swizzle, the scales are what tcgen05.cp spreads over
# tensor memory. Units lie in the order in which a block reads them: a step of the ring is one bulk copy of weights and
# one of tokens, without tensor maps, and nothing is padded along K.
UNIT_K, UNIT_ROWS = 64, 128
BLOCK = 16  # values that share a scale
SCALE_BYTES = 512
WEIGHT_UNIT = UNIT_ROWS * UNIT_K // 2 + SCALE_BYTES  # bytes, 4608
STEP_UNITS = 4  # of a step of the ring: 18 KiB of weights
# Rows 32 q + 16 h + i of a tile of w13 are gate (h = 0) or up (h = 1) of inner value 64 t + 16 q + i: a warp of the
# epilogue has both, for whole blocks of 16, and a tile makes one unit of v.
INNER_ROWS = UNIT_ROWS // 2

EPILOGUE_WARPS, MMA_WARP, COPY_WARP = 4, 4, 5
NUM_THREADS = 32 * (COPY_WARP + 1)
EPILOGUE_THREADS = 32 * EPILOGUE_WARPS
CHUNK = 16  # columns of the accumulator that the epilogue loads at once
ACCUMULATORS = 2  # so that the epilogue of a tile runs during the next one's products
SMEM_BYTES, SMEM_OTHER = 232_448, 8_192  # of a block; what barriers, a unit of v and tokens' weights need at most
TMEM_COLUMNS = 512
ROUTE_THREADS = 1024
QUANTISE_THREADS = 256
COMBINE_THREADS = 128
EXPERTS = 4096  # counted in shared memory; more where there are more
EXPERTS_MAX = 32_768
FULL, LARGEST = 6.0, 448.0  # of e2m1 and of e4m3
LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Plan:
    """The most tokens of a tile, N of the instruction. A compile-time constant of the kernels."""

    tokens: int

    def __post_init__(self) -> None:
        """ValueError where the instruction, shared memory or tensor memory would not do."""
        if self.tokens % 16 or not 16 <= self.tokens <= 128:
            raise ValueError(f"tokens must be a multiple of 16 from 16 to 128, got {self.tokens}")
        if self.stages * self.stage_bytes + SMEM_OTHER > SMEM_BYTES or self.stages < 2:
            raise ValueError(f"{self.stages} stages of {self.stage_bytes} bytes do not fit in {SMEM_BYTES}")
        if self.scales_b + 4 * STEP_UNITS > self.columns or self.columns > TMEM_COLUMNS:
            raise ValueError(f"tensor memory must hold {self.scales_b + 4 * STEP_UNITS} columns, got {self.columns}")

    @property
    def token_unit(self) -> int:
        """Bytes of a unit of tokens."""
        return self.tokens * UNIT_K // 2 + SCALE_BYTES

    @property
    def stage_bytes(self) -> int:
        return STEP_UNITS * (WEIGHT_UNIT + self.token_unit)

    @property
    def stages(self) -> int:
        return (SMEM_BYTES - SMEM_OTHER) // self.stage_bytes

    # Tensor memory: two accumulators, then the scales of a step, 4 columns a unit.

    @property
    def scales_a(self) -> int:
        return ACCUMULATORS * self.tokens

    @property
    def scales_b(self) -> int:
        return self.scales_a + 4 * STEP_UNITS

    @property
    def columns(self) -> int:
        """To allocate: a power of two, at least 32."""
        return max(32, 1 << (self.scales_b + 4 * STEP_UNITS - 1).bit_length())

    @property
    def instruction(self) -> int:
        """The instruction descriptor: e2m1 times e2m1, both K-major, scales e4m3, 128 rows."""
        return 1 << 7 | 1 << 10 | self.tokens // 8 << 17 | UNIT_ROWS // 16 << 24

    def blocks(self, slots: int, experts: int) -> int:
        """The most blocks of tokens there can be: every expert that is hit begins one."""
        hit = min(experts, slots)
        return (slots + hit * (self.tokens - 1)) // self.tokens


PLANS = tuple(Plan(tokens) for tokens in (16, 32, 64, 128))


@functools.cache
def plan_for(slots: int, experts: int) -> Plan:
    """The smallest plan whose tiles hold nearly every expert's slots: three deviations above their mean."""
    mean = slots / experts
    wanted = mean + 3 * math.sqrt(mean) if experts > 1 else mean
    return next((plan for plan in PLANS if plan.tokens >= wanted), PLANS[-1])


# ---------------------------------------------------------------- weights


class State(NamedTuple):
    """What prepare makes of task.Weights.

    units13            uint8 (E, I / 64, H / 64, WEIGHT_UNIT)
    units2             uint8 (E, ceil(H / 128), I / 64, WEIGHT_UNIT)
    factor13, factor2  fp32 (E,), g * in_scale: of the sums of codes times scales
    """

    units13: torch.Tensor
    units2: torch.Tensor
    factor13: torch.Tensor
    factor2: torch.Tensor
    in_scale13: torch.Tensor
    in_scale2: torch.Tensor


def prepare(weights: Weights) -> State:
    """The weights in units, an expert at a time, so that little else is held. ValueError as unpack_weights says, or if
    activation is "bf16": the instruction multiplies FP4 with FP4.
    """
    experts, hidden, inner, activation = unpack_weights(weights)
    if activation != "nvfp4":
        raise ValueError(f"activation must be 'nvfp4' for products of FP4 with FP4, got {activation!r}")
    row_blocks = -(-hidden // UNIT_ROWS)
    device = weights.w13.device
    units13 = torch.empty(experts, inner // INNER_ROWS, hidden // UNIT_K, WEIGHT_UNIT, dtype=torch.uint8, device=device)
    units2 = torch.empty(experts, row_blocks, inner // UNIT_K, WEIGHT_UNIT, dtype=torch.uint8, device=device)
    pad = (0, 0, 0, UNIT_ROWS * row_blocks - hidden)
    for e in range(experts):
        in_units(*(in_tiles(t[e].view(torch.uint8)) for t in weights[:2]), units13[e])
        padded = (torch.nn.functional.pad(t[e].view(torch.uint8), pad) for t in (weights.w2, weights.s2))
        in_units(*padded, units2[e])
    return State(
        units13,
        units2,
        weights.g13 * weights.in_scale13,
        weights.g2 * weights.in_scale2,
        weights.in_scale13.clone(),
        weights.in_scale2.clone(),
    )


def in_tiles(rows: torch.Tensor) -> torch.Tensor:
    """Rows (2 I, m) of an expert's w13, gate, then up -> (2 I, m) in the order of tiles."""
    _, m = rows.shape
    return rows.view(2, -1, BLOCK, m).transpose(0, 1).reshape(-1, m)


def in_units(codes: torch.Tensor, scales: torch.Tensor, units: torch.Tensor) -> None:
    """Write codes uint8 (128 R, K / 2) and scales uint8 (128 R, K / 16) to units uint8 (R, K / 64, WEIGHT_UNIT)."""
    r, k, _ = units.shape
    # (R, row / 8, row % 8, unit, half, 16 bytes) and (R, row / 32, row % 32, unit, block)
    units[..., :-SCALE_BYTES] = codes.view(r, 16, 8, k, 2, 16).permute(0, 3, 1, 4, 2, 5).reshape(r, k, -1)
    units[..., -SCALE_BYTES:] = scales.view(r, 4, 32, k, 4).permute(0, 3, 2, 1, 4).reshape(r, k, -1)


# ---------------------------------------------------------------- instructions


@dsl_user_op
def ptx(text: str, constraints: str, *values: object, loc=None, ip=None) -> None:
    """Instructions with effects that the compiler does not know. values: Int32 or Int64."""
    operands = [v.ir_value(loc=loc, ip=ip) for v in values]  # ty: ignore[unresolved-attribute]
    clobbers = f"{constraints},~{{memory}}" if constraints else "~{memory}"
    llvm.inline_asm(None, operands, text, clobbers, has_side_effects=True, loc=loc, ip=ip)


def load_bulk(to: Int32, source: Int64, size: Int32, barrier: Int32) -> None:
    """Begin to copy `size` bytes to shared memory. The mbarrier at `barrier` counts them."""
    text = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];"
    ptx(text, "r,l,r,r", to, source, size, barrier)


def store_bulk(to: Int64, source: Int32, size: Int32) -> None:
    """Begin to copy `size` bytes from shared memory, as a separate group."""
    text = "cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], $2; cp.async.bulk.commit_group;"
    ptx(text, "l,r,r", to, source, size)


def descriptor(rows_on: int) -> int:
    """That of a K-major operand without a swizzle at address 0. rows_on: bytes from 8 rows to the next 8; 128 bytes on
    are the next 16 bytes along K. Bit 46 is there in every one.
    """
    return 1 << 46 | rows_on >> 4 << 32 | 128 >> 4 << 16


def matrix(address: Int32, rows_on: int) -> Int64:
    """The same at `address` in shared memory."""
    return Int64(descriptor(rows_on)) | Int64(address >> 4)


def spread_scales(column: Int32, address: Int32) -> None:
    """Begin to copy 512 bytes of scales to 4 columns of tensor memory, four times, for each quarter of its lanes."""
    ptx("tcgen05.cp.cta_group::1.32x128b.warpx4 [$0], $1;", "r,l", column, matrix(address, 128))


def multiply(to: Int32, a: Int32, b: Int32, scales_a: Int32, scales_b: Int32, form: int, adds: Int32) -> None:
    """Begin the product of one unit of weights with one of tokens. adds: 0 overwrites what is in tensor memory."""
    text = """{
        .reg .pred p;
        setp.ne.b32 p, $6, 0;
        tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.scale_vec::4X [$0], $1, $2, $3, [$4], [$5], p;
    }"""
    ptx(text, "r,l,l,r,r,r,r", to, matrix(a, 256), matrix(b, 256), Int32(form), scales_a, scales_b, adds)


def commit(barrier: Int32) -> None:
    """Arrive at the mbarrier when all that this thread has asked of the tensor core so far is done."""
    ptx("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [$0];", "r", barrier)


def before_others() -> None:
    """Order this thread's accesses of tensor memory before a barrier."""
    ptx("tcgen05.fence::before_thread_sync;", "")


def after_others() -> None:
    """Order this thread's accesses of tensor memory, and its products, behind a barrier."""
    ptx("tcgen05.fence::after_thread_sync;", "")


@dsl_user_op
def accumulated(column: Int32, *, loc=None, ip=None) -> tuple[Float32, ...]:
    """CHUNK columns of this thread's lane of tensor memory. The wait is in the same statement, ahead of any use."""
    names = ", ".join(f"${i}" for i in range(CHUNK))
    text = f"tcgen05.ld.sync.aligned.32x32b.x{CHUNK}.b32 {{{names}}}, [${CHUNK}];\n\ttcgen05.wait::ld.sync.aligned;"
    result = llvm.StructType.get_literal([T.f32()] * CHUNK)
    constraints = ",".join(["=f"] * CHUNK) + ",r,~{memory}"
    values = [Int32(column).ir_value(loc=loc, ip=ip)]
    found = llvm.inline_asm(result, values, text, constraints, has_side_effects=True, loc=loc, ip=ip)
    return tuple(Float32(llvm.extractvalue(T.f32(), found, [i], loc=loc, ip=ip)) for i in range(CHUNK))


@dsl_user_op
def divided_by(a: Float32, b: Float32, *, loc=None, ip=None) -> Float32:
    """a / b, rounded to nearest."""
    values = [Float32(v).ir_value(loc=loc, ip=ip) for v in (a, b)]
    return Float32(llvm.inline_asm(T.f32(), values, "div.rn.f32 $0, $1, $2;", "=f,f,f", loc=loc, ip=ip))


@dsl_user_op
def e4m3_byte(value: Float32, *, loc=None, ip=None) -> Int16:
    """The nearest e4m3, at most 448, of a value that is not negative."""
    values = [Float32(value).ir_value(loc=loc, ip=ip)]
    text = "cvt.rn.satfinite.e4m3x2.f32 $0, 0f00000000, $1;"
    return Int16(llvm.inline_asm(T.i16(), values, text, "=h,f", loc=loc, ip=ip))


@dsl_user_op
def e2m1_codes(*numbers: Float32, loc=None, ip=None) -> Int32:
    """The nearest e2m1 codes of up to eight values, at most 6, the first one lowest."""
    padded = [*numbers, *(Float32(0.0) for _ in range(8 - len(numbers)))]
    values = [Float32(v).ir_value(loc=loc, ip=ip) for v in padded]
    text = """{
        .reg .b8 byte0, byte1, byte2, byte3;
        cvt.rn.satfinite.e2m1x2.f32 byte0, $2, $1;
        cvt.rn.satfinite.e2m1x2.f32 byte1, $4, $3;
        cvt.rn.satfinite.e2m1x2.f32 byte2, $6, $5;
        cvt.rn.satfinite.e2m1x2.f32 byte3, $8, $7;
        mov.b32 $0, {byte0, byte1, byte2, byte3};
    }"""
    return Int32(llvm.inline_asm(T.i32(), values, text, "=r" + ",f" * 8, loc=loc, ip=ip))


# ---------------------------------------------------------------- device helpers


def scale_of(largest: Float32) -> tuple[Int16, Float32]:
    """The scale of a block as a byte, and what its values are divided by: infinity where the scale is 0, which gives
    codes of 0. largest: of the block's magnitudes, over in_scale. As nvfp4.encode does it.
    """
    byte = e4m3_byte(cute.arch.fmin(divided_by(largest, Float32(FULL)), Float32(LARGEST)))
    scale = e4m3_pair(byte)[0]
    return byte, cutlass.select_(scale > 0.0, scale, Float32(float("inf")))


def magnitude(value: Float32) -> Float32:
    return cute.arch.fmax(value, -value)


def swiglu(gate: Float32, up: Float32, routing: Float32) -> Float32:
    """silu(min(gate, LIMIT)) * clip(up) * routing."""
    gate = cute.arch.fmin(gate, Float32(LIMIT))
    up = cute.arch.fmax(cute.arch.fmin(up, Float32(LIMIT)), Float32(-LIMIT))
    # 2^infinity is infinity, and its inverse 0: very negative gates give -0.
    return gate * cute.arch.rcp_approx(1.0 + cute.math.exp2(-LOG2_E * gate, fastmath=True)) * up * routing


def divided(a: Int32, b: Int32) -> Int32:
    """a // b for a >= 0 and b > 0, without what signs would cost."""
    return Int32(Uint32(a) // Uint32(b))


@dataclass(frozen=True)
class Units:
    """Units of tokens in memory, to write to.

    codes   int32 (2 words, 2 blocks of 16, 8 rows, 2, N / 8, units, blocks)
    scales  uint8 (4, 4, 32 rows, units, blocks)
    """

    codes: cute.Tensor
    scales: cute.Tensor

    def block_codes(self, n: Int32, k_block: Int32, unit: Int32, block: Int32) -> cute.Tensor:
        """The 2 words of token n's 16 values, block k_block of the unit."""
        return self.codes[None, k_block % 2, n % 8, k_block // 2, n // 8, unit, block]

    def block_scale(self, n: Int32, k_block: Int32, unit: Int32, block: Int32) -> tuple:
        """Where its scale is."""
        return k_block, n // 32, n % 32, unit, block


def units_at(words: cute.Pointer, bytes_: cute.Pointer, units: Int32, blocks: Int32, plan: Plan) -> Units:
    """Both pointers are to the first unit."""
    size = Int64(plan.token_unit)
    codes = cute.make_layout(
        (2, 2, 8, 2, plan.tokens // 8, units, blocks),
        stride=(1, 2, 4, 32, 64, plan.token_unit // 4, cute.assume(size // 4 * units, divby=32)),
    )
    scales = cute.make_layout((4, 4, 32, units, blocks), stride=(1, 4, 16, plan.token_unit, size * units))
    return Units(cute.make_tensor(words, codes), cute.make_tensor(bytes_ + (plan.token_unit - SCALE_BYTES), scales))


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
    ids: cute.Tensor,
    order: cute.Tensor,
    blocks: cute.Tensor,
    experts: Int32,
    tokens: cutlass.Constexpr,
    room: cutlass.Constexpr,
):
    """One CTA. Slots t * k + j sorted by expert, and cut into blocks of at most `tokens`.

    ids int32 (S,), -1 for no expert; order int32 (S,), at the end undefined where there were such
    blocks int32 (4, B): expert, where in `order` it begins, how many slots; blocks[3, 0] is how many blocks there are
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
        cut = divided(mine + (tokens - 1), Int32(tokens))
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
            blocks[2, block + i] = cutlass.min(mine - i * tokens, Int32(tokens))
        first_slot += cute.arch.warp_reduction_sum(of_warp[0])
        first_block += cute.arch.warp_reduction_sum(of_warp[1])
        cute.arch.sync_threads()

    if thread == 0:
        blocks[3, 0] = first_block
    for slot in cutlass.range(thread, cute.size(ids), ROUTE_THREADS, unroll=4):
        expert = ids[slot]
        if (expert >= 0) & (expert < experts):
            order[cute.arch.atomic_add(counts.iterator + expert, Int32(1))] = slot


# ---------------------------------------------------------------- tokens


@cute.kernel
def quantise(
    x: cute.Tensor,
    in_scales: cute.Tensor,
    order: cute.Tensor,
    blocks: cute.Tensor,
    words: cute.Pointer,
    bytes_: cute.Pointer,
    topk: Int32,
    plan: cutlass.Constexpr,
):
    """One CTA: STEP_UNITS units of the tokens of one block, quantised with in_scale of their expert.

    x int32 (8 words, H / 16, T), bf16 pairs; words, bytes_: the units of tokens (B, H / 64), written
    Rows of a unit past the block's tokens keep what memory held: they only make columns that nothing reads.
    """
    thread, _, _ = cute.arch.thread_idx()
    block, part, _ = cute.arch.block_idx()
    cute.arch.griddepcontrol_launch_dependents()
    cute.arch.griddepcontrol_wait()
    k_blocks = x.shape[1]
    units = units_at(words, bytes_, k_blocks // 4, blocks.shape[1], plan)
    pairs = cute.make_rmem_tensor((8,), Int32)
    values = cute.make_rmem_tensor((16,), Float32)
    codes = cute.make_rmem_tensor((2,), Int32)
    if block < blocks[3, 0]:
        start, count = blocks[1, block], blocks[2, block]
        in_scale = in_scales[blocks[0, block]]
        for item in cutlass.range(thread, 4 * STEP_UNITS * count, QUANTISE_THREADS, unroll=1):
            n, at = item // (4 * STEP_UNITS), part * (4 * STEP_UNITS) + item % (4 * STEP_UNITS)
            if at < k_blocks:
                cute.autovec_copy(x[None, at, divided(order[start + n], topk)], pairs)
                largest = Float32(0.0)
                for i in cutlass.range_constexpr(16):
                    word = pairs[i // 2]
                    bits = (word << 16) if cutlass.const_expr(i % 2 == 0) else (word & -0x10000)
                    values[i] = divided_by(bits_to_float(bits), in_scale)
                    largest = cute.arch.fmax(largest, magnitude(values[i]))
                byte, scale = scale_of(largest)
                for i in cutlass.range_constexpr(2):
                    codes[i] = e2m1_codes(*(divided_by(values[8 * i + j], scale) for j in range(8)))
                unit, k_block = at // 4, at % 4
                cute.autovec_copy(codes, units.block_codes(n, k_block, unit, block))
                units.scales[units.block_scale(n, k_block, unit, block)] = Uint8(byte)


# ---------------------------------------------------------------- products


class Shared(NamedTuple):
    """Addresses in shared memory, and the first column of tensor memory."""

    stages: Int32  # of plan.stage_bytes: units of weights, then units of tokens
    full: cute.Pointer  # plan.stages mbarriers: a stage has been copied
    empty: cute.Pointer  # its products are done
    ready: cute.Pointer  # ACCUMULATORS: a tile's sums are complete
    taken: cute.Pointer  # the epilogue has loaded them
    tensor: Int32


class Work(NamedTuple):
    """What the tiles are: those of a block of tokens, `row_blocks`, come one after the other."""

    blocks: cute.Tensor
    units: Int32  # along K
    row_blocks: Int32
    tiles: Int32
    first: Int32  # of this CTA
    step: Int32  # to its next one


def address(pointer: cute.Pointer) -> Int32:
    return Int32(pointer.toint())


def steps_of(units: Int32) -> Int32:
    return divided(units + (STEP_UNITS - 1), Int32(STEP_UNITS))


def after(stage: Int32, parity: Int32, count: int) -> tuple[Int32, Int32]:
    """The next stage of a ring, and the parity that its barrier is waited for with."""
    wraps = stage == count - 1
    return cutlass.select_(wraps, Int32(0), stage + 1), cutlass.select_(wraps, parity ^ 1, parity)


@cute.jit
def produce(shared: Shared, work: Work, weights: Int64, tokens: Int64, plan: cutlass.Constexpr):
    """One thread: copy each step of each tile into the ring."""
    stage, parity = Int32(0), Int32(0)
    steps = steps_of(work.units)
    for tile in cutlass.range(work.first, work.tiles, work.step, unroll=1):
        block = divided(tile, work.row_blocks)
        row_block = tile - block * work.row_blocks
        rows = Int64(work.blocks[0, block]) * work.row_blocks + row_block
        weights_at = weights + rows * work.units * WEIGHT_UNIT
        tokens_at = tokens + Int64(block) * work.units * plan.token_unit
        for step in cutlass.range(steps, unroll=1):
            count = cutlass.min(work.units - step * STEP_UNITS, Int32(STEP_UNITS))
            cute.arch.mbarrier_wait(shared.empty + stage, parity ^ 1)
            size_a, size_b = count * WEIGHT_UNIT, count * plan.token_unit
            cute.arch.mbarrier_arrive_and_expect_tx(shared.full + stage, size_a + size_b)
            to, barrier = shared.stages + stage * plan.stage_bytes, address(shared.full + stage)
            load_bulk(to, weights_at, size_a, barrier)
            load_bulk(to + STEP_UNITS * WEIGHT_UNIT, tokens_at, size_b, barrier)
            weights_at += STEP_UNITS * WEIGHT_UNIT
            tokens_at += STEP_UNITS * plan.token_unit
            stage, parity = after(stage, parity, plan.stages)


@cute.jit
def multiply_all(shared: Shared, work: Work, plan: cutlass.Constexpr):
    """One thread: for each unit in the ring spread its scales and issue its product. Both run in the order of issue, so
    the scales' columns are used again by the next step without a wait.
    """
    stage, parity = Int32(0), Int32(0)
    turn, turn_parity = Int32(0), Int32(0)
    steps = steps_of(work.units)
    for _ in cutlass.range(work.first, work.tiles, work.step, unroll=1):
        cute.arch.mbarrier_wait(shared.taken + turn, turn_parity ^ 1)
        after_others()
        to = shared.tensor + turn * plan.tokens
        for step in cutlass.range(steps, unroll=1):
            count = work.units - step * STEP_UNITS
            cute.arch.mbarrier_wait(shared.full + stage, parity)
            after_others()
            weights = shared.stages + stage * plan.stage_bytes
            tokens = weights + STEP_UNITS * WEIGHT_UNIT
            for u in cutlass.range_constexpr(STEP_UNITS):
                if u < count:
                    a, b = weights + u * WEIGHT_UNIT, tokens + u * plan.token_unit
                    scales_a = shared.tensor + (plan.scales_a + 4 * u)
                    scales_b = shared.tensor + (plan.scales_b + 4 * u)
                    spread_scales(scales_a, a + (WEIGHT_UNIT - SCALE_BYTES))
                    spread_scales(scales_b, b + (plan.token_unit - SCALE_BYTES))
                    multiply(to, a, b, scales_a, scales_b, plan.instruction, step + u)
            commit(address(shared.empty + stage))
            stage, parity = after(stage, parity, plan.stages)
        commit(address(shared.ready + turn))
        turn, turn_parity = after(turn, turn_parity, ACCUMULATORS)


@cute.jit
def make_v(
    sums: tuple,
    n: Int32,
    factor: Float32,
    in_scale: Float32,
    routing: cute.Tensor,
    place: Units,
):
    """SwiGLU and FP4 of CHUNK columns from n on; lanes 0 to 15 of a warp have gate, the others up, of 16 inner values.

    Of each two columns they exchange one, so that lanes 0 to 15 make the first token's block and the others the
    second's. place: the unit of v that this tile makes.
    """
    thread, _, _ = cute.arch.thread_idx()
    lane, warp = thread % 32, cute.arch.make_warp_uniform(thread // 32)
    upper = lane >= 16
    for pair in cutlass.range_constexpr(CHUNK // 2):
        first, second = sums[2 * pair] * factor, sums[2 * pair + 1] * factor
        kept = cutlass.select_(upper, second, first)
        got = cute.arch.shuffle_sync_bfly(cutlass.select_(upper, first, second), 16)
        token = n + 2 * pair + cutlass.select_(upper, Int32(1), Int32(0))
        gate, up = cutlass.select_(upper, got, kept), cutlass.select_(upper, kept, got)
        value = divided_by(swiglu(gate, up, routing[token]).to(BFloat16).to(Float32), in_scale)
        largest = magnitude(value)
        for i in cutlass.range_constexpr(4):
            largest = cute.arch.fmax(largest, cute.arch.shuffle_sync_bfly(largest, 1 << i))
        byte, scale = scale_of(largest)
        code = e2m1_codes(divided_by(value, scale)) << (4 * (lane % 8))
        for i in cutlass.range_constexpr(3):
            code = code | cute.arch.shuffle_sync_bfly(code, 1 << i)
        words = place.block_codes(token, warp, Int32(0), Int32(0))
        if lane % 8 == 0:
            words[lane % 16 // 8] = code
        if lane % 16 == 0:
            place.scales[place.block_scale(token, warp, Int32(0), Int32(0))] = Uint8(byte)


@cute.jit
def wait_for_stores(thread: Int32, read: cutlass.Constexpr):
    """The thread that stores waits until all it has stored is written, or at least has been read."""
    if thread == 0:
        cute.arch.cp_async_bulk_wait_group(0, read=read)


@cute.jit
def finish_tiles(
    shared: Shared,
    work: Work,
    order: cute.Tensor,
    factors: cute.Tensor,
    in_scales: cute.Tensor,
    routing: cute.Tensor,
    sums_out: cute.Tensor,
    v: Int64,
    plan: cutlass.Constexpr,
    first: cutlass.Constexpr,
):
    """Four warps: the sums of a tile become a unit of v, of the first product, or parts of out.

    A lane is a row of the tile, a column a token.
    """
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(thread // 32)
    memory = cutlass.memory.SmemAllocator()
    slots = memory.allocate_tensor(Int32, cute.make_layout((plan.tokens, 2)), byte_alignment=16)
    weights = memory.allocate_tensor(Float32, cute.make_layout((plan.tokens, 2)), byte_alignment=16)
    unit = memory.allocate_tensor(Int32, cute.make_layout(plan.token_unit // 4), byte_alignment=128)
    place = units_at(unit.iterator, cute.recast_ptr(unit.iterator, dtype=Uint8), Int32(1), Int32(1), plan)
    if cutlass.const_expr(first):
        for i in cutlass.range(thread, plan.token_unit // 4, EPILOGUE_THREADS, unroll=1):
            unit[i] = Int32(0)  # scales past the tokens are stored too
    lanes = shared.tensor + (warp << 21)  # 32 lanes a warp
    turn, turn_parity = Int32(0), Int32(0)
    for tile in cutlass.range(work.first, work.tiles, work.step, unroll=1):
        block = divided(tile, work.row_blocks)
        row_block = tile - block * work.row_blocks
        expert, start, count = work.blocks[0, block], work.blocks[1, block], work.blocks[2, block]
        # Of two tiles in turn: who writes these has met all who read those before the last.
        if thread < plan.tokens:
            slot = order[start + cutlass.min(thread, count - 1)]
            slots[thread, turn] = slot
            if cutlass.const_expr(first):
                weights[thread, turn] = routing[slot]
        wait_for_stores(thread, True)
        cute.arch.barrier(barrier_id=1, number_of_threads=EPILOGUE_THREADS)
        factor, in_scale = factors[expert], in_scales[expert]
        cute.arch.mbarrier_wait(shared.ready + turn, turn_parity)
        after_others()
        for n in cutlass.range(0, plan.tokens, CHUNK, unroll=1):
            if n < count:
                columns = accumulated(lanes + (turn * plan.tokens + n))
                if cutlass.const_expr(first):
                    make_v(columns, n, factor, in_scale, weights[None, turn], place)
                else:
                    row = row_block * UNIT_ROWS + thread
                    if row < sums_out.shape[0]:
                        for i in cutlass.range_constexpr(CHUNK):
                            if n + i < count:
                                sums_out[row, slots[n + i, turn]] = columns[i] * factor
        before_others()
        cute.arch.mbarrier_arrive(shared.taken + turn)
        if cutlass.const_expr(first):
            cute.arch.fence_view_async_shared()
            cute.arch.barrier(barrier_id=1, number_of_threads=EPILOGUE_THREADS)
            if thread == 0:
                to = v + tile * Int64(plan.token_unit)
                store_bulk(to, address(unit.iterator), Int32(plan.token_unit))
        turn, turn_parity = after(turn, turn_parity, ACCUMULATORS)
    wait_for_stores(thread, False)


@cute.kernel
def multiply_experts(
    weights: cute.Pointer,
    tokens: cute.Pointer,
    blocks: cute.Tensor,
    order: cute.Tensor,
    factors: cute.Tensor,
    in_scales: cute.Tensor,
    routing: cute.Tensor,
    sums_out: cute.Tensor,
    v: cute.Pointer,
    units: Int32,
    row_blocks: Int32,
    plan: cutlass.Constexpr,
    first: cutlass.Constexpr,
):
    """Tiles of 128 rows of an expert's matrix by a block of its tokens, each over all of K. CTAs stay.

    weights    units (E, row_blocks, units)       tokens   units of plan.tokens (B, units)
    factors    fp32 (E,), of sums                 routing  fp32 (S,), in_scales fp32 (E,) of v, for the first product
    v          units of plan.tokens (B, row_blocks), what the first product writes: the tokens of the second
    sums_out   fp32 (H, S), by slot, what the second writes
    """
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    ctas, _, _ = cute.arch.grid_dim()
    warp = cute.arch.make_warp_uniform(thread // 32)
    cute.arch.griddepcontrol_launch_dependents()
    memory = cutlass.memory.SmemAllocator()
    ring = memory.allocate_tensor(Int32, cute.make_layout(plan.stages * plan.stage_bytes // 4), byte_alignment=128)
    barriers = memory.allocate_tensor(Int64, cute.make_layout(2 * plan.stages + 2 * ACCUMULATORS), byte_alignment=8)
    column = memory.allocate_tensor(Int32, cute.make_layout(1), byte_alignment=16)
    full, ready = barriers.iterator, barriers.iterator + 2 * plan.stages
    empty, taken = full + plan.stages, ready + ACCUMULATORS
    if warp == MMA_WARP:
        cute.arch.alloc_tmem(plan.columns, column.iterator)
        cute.arch.relinquish_tmem_alloc_permit()
    if thread == 0:
        for i in cutlass.range_constexpr(2 * plan.stages + ACCUMULATORS):
            cute.arch.mbarrier_init(full + i, 1)
        for i in cutlass.range_constexpr(ACCUMULATORS):
            cute.arch.mbarrier_init(taken + i, EPILOGUE_THREADS)
        cute.arch.mbarrier_init_fence()
    before_others()
    cute.arch.sync_threads()
    after_others()
    cute.arch.griddepcontrol_wait()  # by all, also those without work: the next kernel's wait must mean this one's, too
    shared = Shared(address(ring.iterator), full, empty, ready, taken, column[0])
    work = Work(blocks, units, row_blocks, blocks[3, 0] * row_blocks, cta, ctas)
    if warp == COPY_WARP:
        with cute.arch.elect_one():
            produce(shared, work, weights.toint(), tokens.toint(), plan)
    if warp == MMA_WARP:
        with cute.arch.elect_one():
            multiply_all(shared, work, plan)
    cute.arch.sync_warp()  # the lanes that had nothing to do are ahead of the elected ones
    if warp < EPILOGUE_WARPS:
        finish_tiles(shared, work, order, factors, in_scales, routing, sums_out, v.toint(), plan, first)
    before_others()
    cute.arch.sync_threads()
    after_others()
    if warp == MMA_WARP:
        start = cute.arch.retrieve_tmem_ptr(Float32, 16, column.iterator)
        cute.arch.dealloc_tmem(start, plan.columns)


@cute.kernel
def combine(parts: cute.Tensor, ids: cute.Tensor, out: cute.Tensor, topk: Int32, experts: Int32):
    """One CTA: some columns of one token. out[t] = the sum of its slots, in their order, but for those of no expert.

    parts fp32 (4, H / 4, S), of such slots what memory held; ids int32 (S,), out int32 (2 words, H / 4, T)
    """
    thread, _, _ = cute.arch.thread_idx()
    token, column, _ = cute.arch.block_idx()
    at = column * COMBINE_THREADS + thread
    cute.arch.griddepcontrol_wait()
    if at < out.shape[1]:
        total = cute.make_rmem_tensor((4,), Float32)
        part = cute.make_rmem_tensor((4,), Float32)
        words = cute.make_rmem_tensor((2,), Int32)
        total.fill(0.0)
        for slot in cutlass.range(token * topk, token * topk + topk, unroll=6):
            cute.autovec_copy(parts[None, at, slot], part)  # in any case, so that no load waits for an id
            for i in cutlass.range_constexpr(4):
                total[i] += cutlass.select_((ids[slot] >= 0) & (ids[slot] < experts), part[i], Float32(0.0))
        for i in cutlass.range_constexpr(2):
            words[i] = pack_bf16x2(total[2 * i], total[2 * i + 1])
        cute.autovec_copy(words, out[None, at, token])


# ---------------------------------------------------------------- launches


def rows_of(at: cute.Pointer, vector: int, count: Int32, rows: Int32) -> cute.Tensor:
    """(vector, count, rows), contiguous; a vector moves at once."""
    stride = (1, vector, cute.assume(vector * Int64(count), divby=vector))
    return cute.make_tensor(at, cute.make_layout((vector, count, rows), stride=stride))


def list_of(at: cute.Pointer, count: Int32) -> cute.Tensor:
    return cute.make_tensor(at, cute.make_layout(count))


@cute.jit
def launch(
    units13: cute.Pointer,
    units2: cute.Pointer,
    factor13: cute.Pointer,
    factor2: cute.Pointer,
    in_scale13: cute.Pointer,
    in_scale2: cute.Pointer,
    x: cute.Pointer,
    ids: cute.Pointer,
    routing: cute.Pointer,
    out: cute.Pointer,
    order: cute.Pointer,
    blocks: cute.Pointer,
    taken_words: cute.Pointer,
    taken_bytes: cute.Pointer,
    v: cute.Pointer,
    parts: cute.Pointer,
    experts: Int32,
    tokens: Int32,
    topk: Int32,
    hidden: Int32,
    inner: Int32,
    most_blocks: Int32,
    ctas: Int32,
    plan: cutlass.Constexpr,
    room: cutlass.Constexpr,
):
    """Route, quantise x, the first product, the second, and the sum over the slots of a token. ctas: of the GPU.

    taken_words and taken_bytes are both units of tokens (B, H / 64), v those of (B, I / 64), parts fp32 (S, H).
    """
    slots = tokens * topk
    id_list, sorted_slots, routing_list = (list_of(at, slots) for at in (ids, order, routing))
    factors13, factors2, in_scales13, in_scales2 = (
        list_of(at, experts) for at in (factor13, factor2, in_scale13, in_scale2)
    )
    block_list = cute.make_tensor(blocks, cute.make_layout((4, most_blocks)))
    route(id_list, sorted_slots, block_list, experts, plan.tokens, room).launch(
        grid=(1, 1, 1), block=(ROUTE_THREADS, 1, 1)
    )
    quantise(
        rows_of(x, 8, hidden // BLOCK, tokens),
        in_scales13,
        sorted_slots,
        block_list,
        taken_words,
        taken_bytes,
        topk,
        plan,
    ).launch(
        grid=(most_blocks, cute.ceil_div(hidden, UNIT_K * STEP_UNITS), 1),
        block=(QUANTISE_THREADS, 1, 1),
        use_pdl=True,
    )
    sums = cute.make_tensor(parts, cute.make_layout((hidden, slots), stride=(1, Int64(hidden))))
    inner_blocks, row_blocks = inner // INNER_ROWS, cute.ceil_div(hidden, UNIT_ROWS)
    multiply_experts(
        units13,
        taken_words,
        block_list,
        sorted_slots,
        factors13,
        in_scales2,
        routing_list,
        sums,
        v,
        hidden // UNIT_K,
        inner_blocks,
        plan,
        True,
    ).launch(grid=(cutlass.min(ctas, most_blocks * inner_blocks), 1, 1), block=(NUM_THREADS, 1, 1), use_pdl=True)
    multiply_experts(
        units2,
        v,
        block_list,
        sorted_slots,
        factors2,
        in_scales2,
        routing_list,
        sums,
        v,
        inner // UNIT_K,
        row_blocks,
        plan,
        False,
    ).launch(grid=(cutlass.min(ctas, most_blocks * row_blocks), 1, 1), block=(NUM_THREADS, 1, 1), use_pdl=True)
    results = rows_of(out, 2, hidden // 4, tokens)
    combine(rows_of(parts, 4, hidden // 4, slots), id_list, results, topk, experts).launch(
        grid=(tokens, cute.ceil_div(hidden, 4 * COMBINE_THREADS), 1), block=(COMBINE_THREADS, 1, 1), use_pdl=True
    )


# units13, units2, factor13, factor2, in_scale13, in_scale2, x, ids, routing, out, order, blocks, taken (twice), v,
# parts: dtype, alignment in bytes.
VIEWS = (
    (Int32, 16),
    (Int32, 16),
    (Float32, 4),
    (Float32, 4),
    (Float32, 4),
    (Float32, 4),
    (Int32, 16),
    (Int32, 4),
    (Float32, 4),
    (Int32, 8),
    (Int32, 4),
    (Int32, 16),
    (Int32, 16),
    (Uint8, 16),
    (Int32, 16),
    (Float32, 16),
)


@functools.cache
def compiled(plan: Plan, room: int, options: str = ""):
    """For any sizes, called with the pointers, then the integers of `launch`. room: of the experts' counts."""
    integers = (Int32(1) for _ in range(7))
    return cute.compile(launch, *pointers(VIEWS, [0] * len(VIEWS)), *integers, plan, room, options=options)


def compile_for(target: str) -> list[build.Artefact]:
    """Compile for `target`, without a GPU: a cubin for each plan, ptxas' report as log.

    RuntimeError unless CUTE_DSL_ARCH, which the DSL reads when it is first imported, says the same architecture.
    """
    check_target(target, TARGETS)
    stem = f"{Path(__file__).stem}-{target}"
    return [cubin(functools.partial(compiled, plan, EXPERTS), f"{stem}-n{plan.tokens}", target) for plan in PLANS]


def custom_kernel(data: input_t) -> output_t:
    """Write data.outputs.out, bf16 (T, H), and return it. data.weights is what prepare returned. ValueError as
    unpack_call says, or if data is not on a GPU with the weights. Slots whose ids are no experts add nothing.
    """
    state, (x, ids, routing), (out,) = data
    experts, hidden, inner = len(state.units13), UNIT_K * state.units13.shape[2], INNER_ROWS * state.units13.shape[1]
    tokens, topk = unpack_call(data.inputs, data.outputs, hidden)
    if not x.is_cuda or x.device != state.units13.device:
        raise ValueError(f"data must be on a GPU with the weights, got {x.device} and {state.units13.device}")
    if topk > experts:
        raise ValueError(f"topk_ids must have at most {experts} columns, the experts, got {topk}")
    if experts > EXPERTS_MAX:
        raise ValueError(f"experts must be at most {EXPERTS_MAX}, got {experts}")
    slots = tokens * topk
    plan = plan_for(slots, experts)
    room = max(EXPERTS, 1 << (experts - 1).bit_length())
    most_blocks = plan.blocks(slots, experts)
    order = torch.empty(slots, dtype=torch.int32, device=x.device)
    blocks = torch.empty(most_blocks, 4, dtype=torch.int32, device=x.device)
    taken, v = (
        torch.empty(most_blocks, k // UNIT_K, plan.token_unit, dtype=torch.uint8, device=x.device)
        for k in (hidden, inner)
    )
    parts = torch.empty(slots, hidden, dtype=torch.float32, device=x.device)
    tensors = (*state, x, ids, routing, out, order, blocks, taken, taken, v, parts)
    ctas = torch.cuda.get_device_properties(x.device).multi_processor_count
    compiled(plan, room)(
        *pointers(VIEWS, [t.data_ptr() for t in tensors]), experts, tokens, topk, hidden, inner, most_blocks, ctas
    )
    return out
