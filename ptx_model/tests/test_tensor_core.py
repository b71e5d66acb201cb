"""The model's tcgen05: products from shared memory in both majors and with scales, and what it refuses."""

import numpy as np
import pytest

import ptx_model
from ptx_model import formats
from ptx_model.tensor_map import swizzled
from ptx_model.tests import kernels

SHARED = 102_400
N = 32
VERSION = 1 << 46
NO_SCALES = (np.zeros(512, np.uint8),) * 2


def bf16(rng, rows, k):
    """-> (bits, values): small integers, whose sums are exact."""
    values = rng.integers(-4, 5, (rows, k)).astype(np.float32)
    return formats.to_bf16(values), values


def k_major(bits, swizzle):
    """uint16 (rows, k) in groups of 8 rows, whose rows have `swizzle` bytes."""
    rows, k = bits.shape
    raw = np.zeros(rows * swizzle, np.uint8)
    row, at = np.arange(rows)[:, None], np.arange(2 * k)[None, :]
    raw[swizzled(row * swizzle + at, swizzle)] = np.ascontiguousarray(bits).view(np.uint8)
    return raw


def plain(bits):
    """K-major without a swizzle: core matrices of 8 rows of 16 bytes, k next, then rows."""
    rows, k = bits.shape
    return np.ascontiguousarray(bits.reshape(rows // 8, 8, k // 8, 8).transpose(0, 2, 1, 3)).view(np.uint8).reshape(-1)


def mn_major(bits):
    """MN-major with a swizzle of 128 bytes: a line has 64 rows of one k; 8 lines, then the next 8 k, then 64 rows."""
    rows, k = bits.shape
    raw = np.zeros(rows * k * 2, np.uint8)
    row, depth = np.arange(rows)[:, None], np.arange(k)[None, :]
    at = row // 64 * (k * 128) + depth * 128 + row % 64 * 2
    two = np.ascontiguousarray(bits).view(np.uint8).reshape(rows, k, 2)
    for byte in range(2):
        raw[swizzled(at, 128) + byte] = two[:, :, byte]
    return raw


def idesc(rows, columns, a_mn=0, b_mn=0):
    return 1 << 4 | 1 << 7 | 1 << 10 | a_mn << 15 | b_mn << 16 | columns // 8 << 17 | rows // 16 << 24


def multiply(text, a, b, policy="lazy", scales=NO_SCALES):
    out = np.full((128, N), np.nan, np.float32)
    ptx_model.run(text, "k", 1, 128, (a, b, *scales, out, a.nbytes, b.nbytes), SHARED, policy=policy, cluster=1)
    return out


SW128 = VERSION | 64 << 32 | 2 << 61
NONE = VERSION | 16 << 32 | 8 << 16  # 256 bytes to the next 8 rows, 128 to the next 16 bytes of k


@pytest.mark.parametrize("policy", ptx_model.POLICIES)
def test_a_product_of_bf16_is_that_of_the_matrices(policy):
    rng = np.random.default_rng(1)
    (a, left), (b, right) = bf16(rng, 128, 16), bf16(rng, N, 16)
    text = kernels.gemm(str(SW128), str(SW128), idesc(128, N), N)
    out = multiply(text, k_major(a, 128), k_major(b, 128), policy)
    assert np.array_equal(out, left @ right.T)


def test_operands_without_a_swizzle():
    rng = np.random.default_rng(2)
    (a, left), (b, right) = bf16(rng, 128, 16), bf16(rng, N, 16)
    out = multiply(kernels.gemm(str(NONE), str(NONE), idesc(128, N), N), plain(a), plain(b))
    assert np.array_equal(out, left @ right.T)


def test_an_operand_whose_rows_are_contiguous():
    rng = np.random.default_rng(3)
    (a, left), (b, right) = bf16(rng, 128, 16), bf16(rng, N, 16)
    mn = VERSION | 64 << 32 | 16 * 128 // 16 << 16 | 2 << 61  # 8 k are 1024 bytes, 64 rows 2048
    text = kernels.gemm(str(mn), str(SW128), idesc(128, N, a_mn=1), N)
    assert np.array_equal(multiply(text, mn_major(a), k_major(b, 128)), left @ right.T)


def test_a_product_with_block_scales():
    rng = np.random.default_rng(4)
    codes = [rng.integers(0, 16, (rows, 64), np.uint8) for rows in (128, N)]
    bits = [rng.integers(0x30, 0x48, (128, 4)).astype(np.uint8) for _ in range(2)]
    packed = [np.ascontiguousarray(c[:, 0::2] | c[:, 1::2] << 4).view(np.uint16) for c in codes]
    # One 512-byte block of scales: row r at 16 * (r % 32) + 4 * (r // 32).
    blocks = [np.ascontiguousarray(s.reshape(4, 32, 4).transpose(1, 0, 2)).reshape(-1) for s in bits]
    word = 1 << 7 | 1 << 10 | N // 8 << 17 | 128 // 16 << 24
    text = kernels.gemm(str(SW128), str(SW128), word, N, kind="mxf4nvf4", scales=True)
    out = multiply(text, k_major(packed[0], 128), k_major(packed[1], 128), "lazy", blocks)
    left, right = (
        formats.E2M1[c].astype(np.float64) * np.repeat(formats.E4M3[s[: len(c)]], 16, 1)
        for c, s in zip(codes, bits, strict=True)
    )
    assert np.array_equal(out, (left @ right.T).astype(np.float32))


# Each thread puts a row of A, 8 words, into tensor memory, 384 columns on, ahead of the product.
ROW_TO_TENSOR = """
ld.param.u64 %rd8, [p0]; cvta.to.global.u64 %rd8, %rd8; mul.wide.u32 %rd9, %r60, 32; add.u64 %rd8, %rd8, %rd9;
ld.global.v4.b32 {%r42, %r43, %r44, %r45}, [%rd8]; ld.global.v4.b32 {%r46, %r47, %r48, %r49}, [%rd8+16];
shl.b32 %r41, %r61, 21; add.u32 %r50, %r20, %r41; add.u32 %r50, %r50, 384;
tcgen05.st.sync.aligned.32x32b.x8.b32 [%r50], {%r42, %r43, %r44, %r45, %r46, %r47, %r48, %r49};
tcgen05.wait::st.sync.aligned; tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync;
add.u32 %r51, %r20, 384;
"""


@pytest.mark.parametrize("policy", ["eager", "lazy", "random"])
def test_a_product_with_a_from_tensor_memory(policy):
    rng = np.random.default_rng(6)
    (a, left), (b, right) = bf16(rng, 128, 16), bf16(rng, N, 16)
    text = kernels.gemm(str(SW128), str(SW128), idesc(128, N), N)
    text = text.replace("@!%p1 bra DONE;", ROW_TO_TENSOR + "@!%p1 bra DONE;")
    text = text.replace("[%r20], %rd4, %rd5", "[%r20], [%r51], %rd5")
    out = multiply(text, np.ascontiguousarray(a), k_major(b, 128), policy)
    assert np.array_equal(out, left @ right.T)


@pytest.mark.parametrize(("shape", "each"), [("16x128b", 2), ("16x256b", 4)])
def test_fragments_of_16_lanes_are_those_of_mma(shape, each):
    """Word 512 * lane + column at each place; a warp reads both halves of its lanes, 16 columns from column 8 on."""
    times = 16 * 16 // 32 // each
    registers = [f"%r{i}" for i in range(30, 30 + each * times)]
    stores = "".join(
        f"mov.b32 %r25, {c}; add.u32 %r25, %r25, %r24; add.u32 %r26, %r23, {c};\n"
        "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r26], {%r25};\n"
        for c in range(32)
    )
    reads = "".join(
        f"add.u32 %r26, %r23, {(half << 20) + 8};\n"
        f"tcgen05.ld.sync.aligned.{shape}.x{times}.b32 {{{', '.join(registers)}}}, [%r26];\n"
        "tcgen05.wait::ld.sync.aligned;\n"
        + "".join(f"st.global.b32 [%rd1+{4 * (half * 8 + i)}], {r};\n" for i, r in enumerate(registers))
        for half in (0, 1)
    )
    body = f"""
mov.u32 %r1, %tid.x; shr.u32 %r2, %r1, 5; setp.eq.u32 %p0, %r2, 0; mov.u32 %r0, buf;
@%p0 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r0], 32;
bar.sync 0; ld.shared.u32 %r20, [%r0]; shl.b32 %r22, %r2, 21; add.u32 %r23, %r20, %r22; mul.lo.u32 %r24, %r1, 512;
ld.param.u64 %rd1, [p0]; mul.wide.u32 %rd2, %r1, 64; add.u64 %rd1, %rd1, %rd2;
{stores} tcgen05.wait::st.sync.aligned;
{reads} bar.sync 0;
@%p0 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r20, 32;"""
    out = np.zeros((128, 2, 8), np.uint32)
    ptx_model.run(kernels.entry("u64", body, 64), "k", 1, 128, (out,))
    thread, half, i = np.indices(out.shape)
    if each == 2:  # of 8 rows of 4 words, the lower 8 rows next
        row, column = thread % 32 // 4 + 8 * (i % 2), 4 * (i // 2) + thread % 4
    else:  # of 8 rows of 8 words, two a thread, the lower 8 rows next
        row, column = thread % 32 // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + thread % 4 * 2 + i % 2
    assert np.array_equal(out, 512 * (thread // 32 * 32 + 16 * half + row) + 8 + column)


def faulty(change, **options):
    """The fault of a product whose PTX is changed."""
    rng = np.random.default_rng(5)
    (a, _), (b, _) = bf16(rng, 128, 16), bf16(rng, N, 16)
    text = kernels.gemm(str(SW128), str(SW128), idesc(128, N), N, **options)
    changed = change(text)
    assert changed != text or options
    with pytest.raises(ptx_model.Fault) as caught:
        multiply(changed, k_major(a, 128), k_major(b, 128))
    return caught.value


def without(part):
    return lambda text: text.replace(part, "", 1)


def test_sums_that_nothing_has_written_are_a_fault():
    assert faulty(lambda text: text, accumulate=1).kind == "unwritten"


def test_a_product_that_does_not_wait_for_its_copies_is_a_race():
    assert faulty(without("@!%p15 bra FULL;")).kind == "race"


def test_a_load_that_does_not_wait_for_the_product_is_found():
    assert faulty(without("@!%p15 bra OVER;")).kind in ("race", "unwritten")


def test_a_missing_commit_is_a_deadlock_that_names_the_barrier():
    fault = faulty(without("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r12];"))
    assert fault.kind == "deadlock" and "1 of 1 arrivals" in fault.where and "PTX line" in fault.where


def test_tensor_memory_that_is_not_freed_is_a_fault():
    assert faulty(without("@%p0 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r20, 512;")).kind == "tensor memory"


def test_lanes_of_another_warp_are_refused():
    assert faulty(lambda text: text.replace("shl.b32 %r41, %r61, 21;", "mov.b32 %r41, 0;")).kind == "tensor memory"


def test_a_descriptor_without_its_version_is_refused():
    assert faulty(lambda text: text.replace(str(SW128), str(SW128 & ~VERSION))).kind == "descriptor"


@pytest.mark.parametrize(
    "line",
    [
        "tcgen05.shift.cta_group::1.down [%r20];",
        "tcgen05.cp.cta_group::1.128x256b [%r20], %rd5;",
        "tcgen05.cp.cta_group::1.32x128b [%r20], %rd5;",
        "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.scale_vec::2X [%r20], %rd4, %rd5, %r7, [%r8], [%r9], %p3;",
        "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale [%r20], %rd4, %rd5, %r7, [%r8], [%r9], %p3;",
        "tcgen05.mma.cta_group::1.kind::tf32 [%r20], %rd4, %rd5, %r7, %p3;",
        "tcgen05.mma.cta_group::1.kind::i8 [%r20], %rd4, %rd5, %r7, %p3;",
        "tcgen05.mma.sp.cta_group::1.kind::f16 [%r20], %rd4, %rd5, [%r8], %r7, %p3;",
        "tcgen05.ld.sync.aligned.16x64b.x1.b32 {%r30}, [%r20];",
        "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r0], [%r2];",
    ],
)
def test_an_instruction_that_the_model_lacks_is_an_error(line):
    assert faulty(lambda text: text.replace("tcgen05.wait::ld.sync.aligned;", line, 1)).kind == "not modelled"
