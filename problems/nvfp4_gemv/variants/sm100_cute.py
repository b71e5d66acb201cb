"""sm100_cute: sm90_cute with the native e2m1 conversion and half2 block dots, x held as fp16; compiled, not yet run."""

import functools
from dataclasses import dataclass
from pathlib import Path

import cutlass
from cutlass import Float8E4M3FN, Float16, Float32, Int16, Int32, Int64, cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op
from task import BENCHMARKS, input_t, output_t, unpack

from problems.common import build
from problems.common.cute_dsl import check_target, cubin, e4m3_pair, load_no_allocate, pointers, prefetch_l2, vector

TARGETS = ("sm100",)
REQUIRES = ("cutlass",)

LANES = 32
BLOCK = 16  # elements that share a scale
CHUNK = 2 * BLOCK  # elements of one 16-byte access: two blocks, so two neighbouring scale bytes
ALIGN = 16  # bytes, of one access
X_CHUNKS = 512  # chunks of x decoded at a time: 36 KiB of shared memory, and all of x up to k = 16384


@dataclass(frozen=True)
class Plan:
    """How the rows of one batch are spread. Every field is a compile-time constant of the kernel."""

    warps: int  # a CTA
    rows: int  # a warp works on at once, one 16-byte access a lane of each in flight
    prefetch: int  # steps of A (32 chunks of each row) that a warp asks L2 for while x is decoded

    def __post_init__(self) -> None:
        """ValueError where the kernel's indexing would not hold."""
        if not 1 <= self.warps <= 32 or not 1 <= self.rows <= LANES:  # lane r stores row r
            raise ValueError(f"warps must be 1 to 32 and rows 1 to {LANES}, got {self}")

    def tile(self) -> int:
        """Rows a CTA works on at once."""
        return self.warps * self.rows


# (m, k, l) -> plan and CTAs a batch: one CTA for nearly each of 148 multiprocessors, many warps in each; not measured.
PLANS = {
    (7168, 16384, 1): (Plan(warps=25, rows=2, prefetch=2), 144),
    (4096, 7168, 8): (Plan(warps=29, rows=2, prefetch=2), 18),
    (7168, 2048, 4): (Plan(warps=25, rows=2, prefetch=1), 36),
}
DEFAULT = Plan(warps=8, rows=2, prefetch=2)  # one tile a CTA
FEW_ROWS = Plan(warps=8, rows=1, prefetch=2)  # likewise, where m is below DEFAULT.rows


def plan_for(m: int, k: int, l: int) -> tuple[Plan, int]:
    """-> (plan, CTAs a batch) for a shape. The plan's rows are at most m."""
    plan = DEFAULT if m >= DEFAULT.rows else FEW_ROWS
    return PLANS.get((m, k, l)) or (plan, -(-m // plan.tile()))


@dsl_user_op
def eight_values(word: Int32, *, loc=None, ip=None) -> tuple[Int32, ...]:
    """The 8 codes of `word` as 4 pairs of fp16, lower element in the lower half. Exact; an sm_100a instruction."""
    text = """{
        .reg .b8 byte0, byte1, byte2, byte3;
        mov.b32 {byte0, byte1, byte2, byte3}, $4;
        cvt.rn.f16x2.e2m1x2 $0, byte0;
        cvt.rn.f16x2.e2m1x2 $1, byte1;
        cvt.rn.f16x2.e2m1x2 $2, byte2;
        cvt.rn.f16x2.e2m1x2 $3, byte3;
    }"""
    result = llvm.StructType.get_literal([T.i32()] * 4)
    pairs = llvm.inline_asm(result, [Int32(word).ir_value(loc=loc, ip=ip)], text, "=r,=r,=r,=r,r", loc=loc, ip=ip)
    return tuple(Int32(llvm.extractvalue(T.i32(), pairs, [i], loc=loc, ip=ip)) for i in range(4))


@dsl_user_op
def multiply_add(left: Int32, right: Int32, total: Int32, *, loc=None, ip=None) -> Int32:
    """left * right + total for pairs of fp16."""
    values = [Int32(v).ir_value(loc=loc, ip=ip) for v in (left, right, total)]
    return Int32(llvm.inline_asm(T.i32(), values, "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", loc=loc, ip=ip))


@dsl_user_op
def pair_sum(pair: Int32, *, loc=None, ip=None) -> Float32:
    """The sum, in fp32, of a pair of fp16."""
    text = """{
        .reg .b16 low, high;
        .reg .f32 left, right;
        mov.b32 {low, high}, $1;
        cvt.f32.f16 left, low;
        cvt.f32.f16 right, high;
        add.rn.f32 $0, left, right;
    }"""
    return Float32(llvm.inline_asm(T.f32(), [Int32(pair).ir_value(loc=loc, ip=ip)], text, "=f,r", loc=loc, ip=ip))


@cute.kernel
def gemv(
    a: cute.Tensor,
    b: cute.Tensor,
    sfa: cute.Tensor,
    sfb: cute.Tensor,
    c: cute.Tensor,
    plan: cutlass.Constexpr,
):
    """c = A b for one batch a grid row.  A warp takes `rows` rows, a lane one chunk of each in a step of 32 chunks.

    a    int32 (4 words, chunks, m, l), 8 codes a word    sfa  int16 (chunks, m, l), 2 scales each
    b    int32 (2 words, blocks, l)                       sfb  e4m3 (blocks, l)
    c    fp16 (m, l); m is at least plan.rows
    Chunks past the end of a row read its last chunk and meet zeros of x. Warps past the last row repeat the last
    rows, and write the same bits there. So no access to A is conditional.
    """
    thread, _, _ = cute.arch.thread_idx()
    first_tile, batch, _ = cute.arch.block_idx()
    tile_stride, _, _ = cute.arch.grid_dim()
    lane = cute.arch.lane_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    threads = plan.warps * LANES
    chunks, m = a.shape[1], a.shape[2]
    passes = cute.ceil_div(chunks, X_CHUNKS)
    tiles = cute.ceil_div(m, plan.tile())

    # x as fp16, 4 quarters of a chunk (8 values, half a block, each) in separate planes: neighbouring lanes then
    # read neighbouring 16 bytes. meta: sfb of the two blocks of a chunk.
    smem = cutlass.utils.SmemAllocator()
    planes = cute.make_layout((4, 4, X_CHUNKS), stride=(1, 4 * X_CHUNKS, 4))
    x = smem.allocate_tensor(Int32, planes, byte_alignment=ALIGN)
    meta = smem.allocate_tensor(Float32, cute.make_layout((2, X_CHUNKS)), byte_alignment=ALIGN)

    words = cute.make_rmem_tensor((4, plan.rows), Int32)
    scales = cute.make_rmem_tensor((plan.rows,), Int16)
    x_words = cute.make_rmem_tensor((4, 4), Int32)
    x_meta = cute.make_rmem_tensor((2,), Float32)
    acc = cute.make_rmem_tensor((plan.rows,), Float32)
    shares = -(-2 * X_CHUNKS // threads)  # blocks of x that a thread decodes
    raw = cute.make_rmem_tensor((2, shares), Int32)
    raw_scale = cute.make_rmem_tensor((shares,), Float32)
    decoded = cute.make_rmem_tensor((4,), Int32)

    for tile in cutlass.range(first_tile, tiles, tile_stride):
        # The rows of a warp are one address and a uniform stride: an address each would cost 4 registers a row.
        row = cutlass.min((tile * plan.warps + warp) * plan.rows, m - plan.rows)
        codes = cute.domain_offset((0, 0, row), a[None, None, None, batch])
        code_scales = cute.domain_offset((0, row), sfa[None, None, batch])
        acc.fill(0.0)
        for k_pass in cutlass.range(passes):
            base = k_pass * X_CHUNKS
            here = cutlass.min(chunks - base, Int32(X_CHUNKS))  # chunks of this pass
            steps = cute.ceil_div(here, LANES)
            if tile == first_tile or passes > 1:
                cute.arch.sync_threads()  # the last pass has been read
                # The loads of x first, then the prefetch of A, then the decoding: the longest wait starts soonest.
                for i in cutlass.range_constexpr(shares):
                    block = thread + i * threads
                    if block < 2 * here:
                        source = b[None, 2 * base + block, batch]
                        cute.autovec_copy(vector(source, 2, "a block of b"), raw[None, i])
                        raw_scale[i] = sfb[2 * base + block, batch].to(Float32)
                    else:
                        raw[None, i].fill(0)
                        raw_scale[i] = Float32(0.0)
                for i in cutlass.range_constexpr(plan.prefetch):
                    at = base + cutlass.min(i * LANES + lane, here - 1)
                    for r in cutlass.range_constexpr(plan.rows):
                        prefetch_l2(cute.domain_offset((0, at, 0), codes)[None, 0, r].iterator.toint())
                for i in cutlass.range_constexpr(shares):
                    block = thread + i * threads
                    if block < 2 * LANES * steps:
                        chunk, half = block // 2, block % 2
                        for j in cutlass.range_constexpr(2):
                            pairs = eight_values(raw[j, i])
                            for p in cutlass.range_constexpr(4):
                                decoded[p] = pairs[p]
                            cute.autovec_copy(decoded, vector(x[None, 2 * half + j, chunk], 4, "half a block of x"))
                        meta[half, chunk] = raw_scale[i]
                cute.arch.sync_threads()

            for step in cutlass.range(steps):
                chunk = step * LANES + lane
                at = base + cutlass.min(chunk, here - 1)
                chunk_codes = cute.domain_offset((0, at, 0), codes)[None, 0, None]
                chunk_scales = cute.domain_offset((at, 0), code_scales)[0, None]
                for r in cutlass.range_constexpr(plan.rows):
                    chunk_words = load_no_allocate(vector(chunk_codes[None, r], 4, "a chunk of a").iterator.toint())
                    for i in cutlass.range_constexpr(4):
                        words[i, r] = chunk_words[i]
                for r in cutlass.range_constexpr(plan.rows):
                    scales[r] = chunk_scales[r]
                for h in cutlass.range_constexpr(4):
                    cute.autovec_copy(vector(x[None, h, chunk], 4, "half a block of x"), x_words[None, h])
                cute.autovec_copy(vector(meta[None, chunk], 2, "the scales of a chunk"), x_meta)
                for r in cutlass.range_constexpr(plan.rows):
                    sfa_values = e4m3_pair(scales[r])
                    for h in cutlass.range_constexpr(2):
                        # Exact: each half sums 8 products, multiples of 1/4 of at most 36, so 288 in quarters is
                        # 1152 < 2^11. The two halves together may need 12 bits, so they meet in fp32.
                        dot = Int32(0)
                        for j in cutlass.range_constexpr(2):
                            pairs = eight_values(words[2 * h + j, r])
                            for p in cutlass.range_constexpr(4):
                                dot = multiply_add(pairs[p], x_words[p, 2 * h + j], dot)
                        acc[r] += pair_sum(dot) * (sfa_values[h] * x_meta[h])

        for r in cutlass.range_constexpr(plan.rows):
            acc[r] = cute.arch.warp_reduction_sum(acc[r])
        for r in cutlass.range_constexpr(plan.rows):
            if lane == r:
                c[row + r, batch] = acc[r].to(Float16)


@cute.jit
def launch(
    a: cute.Pointer,
    b: cute.Pointer,
    sfa: cute.Pointer,
    sfb: cute.Pointer,
    c: cute.Pointer,
    m: Int32,
    k: Int32,
    l: Int32,
    ctas: Int32,
    plan: cutlass.Constexpr,
):
    """Views of the tensors of task.Data, and the launch. Only batch and row strides need 64 bits; b and sfb are stored
    with 128 rows a batch. The divisors are what keeps a chunk aligned in every row: k is a multiple of CHUNK.
    """
    chunks, blocks = k // CHUNK, k // BLOCK
    wide = Int64(chunks)
    row = cute.assume(4 * wide, divby=4)
    batch = cute.assume(4 * wide * m, divby=4)
    codes = cute.make_tensor(a, cute.make_layout((4, chunks, m, l), stride=(1, 4, row, batch)))
    vectors = cute.make_tensor(b, cute.make_layout((2, blocks, l), stride=(1, 2, cute.assume(4 * 128 * wide, divby=4))))
    a_scales = cute.make_tensor(sfa, cute.make_layout((chunks, m, l), stride=(1, wide, wide * m)))
    b_scales = cute.make_tensor(sfb, cute.make_layout((blocks, l), stride=(1, 2 * 128 * wide)))
    out = cute.make_tensor(c, cute.make_layout((m, l)))
    gemv(codes, vectors, a_scales, b_scales, out, plan).launch(grid=(ctas, l, 1), block=(plan.warps * LANES, 1, 1))


# Of the pointer arguments of `launch`: dtype, alignment in bytes.
VIEWS = ((Int32, ALIGN), (Int32, ALIGN), (Int16, 2), (Float8E4M3FN, 1), (Float16, 2))


@functools.cache
def compiled(plan: Plan, options: str = ""):
    """The kernel for `plan`, for any m, k and l; called with five pointers, then m, k, l and CTAs a batch."""
    return cute.compile(launch, *pointers(VIEWS, [0] * 5), *(Int32(1) for _ in range(4)), plan, options=options)


def compile_for(target: str) -> list[build.Artefact]:
    """Compile for `target`, without a GPU: a cubin for each plan of the benchmark shapes, ptxas' report as log.

    RuntimeError unless CUTE_DSL_ARCH, which the DSL reads when it is first imported, says the same architecture.
    """
    check_target(target, TARGETS)
    plans = dict.fromkeys(plan_for(c.m, c.k, c.l)[0] for c in BENCHMARKS)
    stem = f"{Path(__file__).stem}-{target}"
    return [
        cubin(functools.partial(compiled, plan), f"{stem}-w{plan.warps}r{plan.rows}p{plan.prefetch}", target)
        for plan in plans
    ]


def custom_kernel(data: input_t) -> output_t:
    """Write A b into data.c, fp16 (m, 1, l), and return it. ValueError as unpack says, or if data is not on a GPU."""
    m, k, l = unpack(data)
    if not data.c.is_cuda:
        raise ValueError(f"data must be on a GPU, got {data.c.device}")
    plan, ctas = plan_for(m, k, l)
    tensors = (data.a, data.b, data.sfa, data.sfb, data.c)
    compiled(plan)(*pointers(VIEWS, [t.data_ptr() for t in tensors]), m, k, l, ctas)
    return data.c
