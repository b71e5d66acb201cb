"""The model's machine: threads that part, shared memory, barriers, copies with tensor maps, clusters, products."""

import numpy as np
import pytest

import ptx_model
from ptx_model import formats, races
from ptx_model.tensor_map import TensorMap, swizzled
from ptx_model.tests import kernels

POLICIES = ptx_model.POLICIES


def run(text, arguments, threads=32, grid=1, policy="eager", **options):
    return ptx_model.run(text, "k", grid, threads, arguments, policy=policy, **options)


def fault(text, arguments, threads=32, **options):
    with pytest.raises(ptx_model.Fault) as caught:
        run(text, arguments, threads, **options)
    return caught.value


OUT = "ld.param.u64 %rd1, [p0]; cvta.to.global.u64 %rd1, %rd1; mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 4;"
OUT += " add.u64 %rd1, %rd1, %rd2;\n"


@pytest.mark.parametrize("policy", POLICIES)
def test_threads_of_a_warp_part_and_meet(policy):
    body = (
        OUT
        + """
    and.b32 %r2, %r1, 3; mov.u32 %r3, 0; mov.u32 %r4, 0;
    LOOP: setp.ge.u32 %p1, %r4, %r2; @%p1 bra OUT; add.u32 %r3, %r3, %r1; add.u32 %r4, %r4, 1; bra LOOP;
    OUT: shfl.sync.bfly.b32 %r5, %r3, 1, 31, -1; add.u32 %r3, %r3, %r5; st.global.u32 [%rd1], %r3;"""
    )
    out = np.zeros(64, np.uint32)
    run(kernels.entry("u64", body), (out,), 64, policy=policy)
    own = np.arange(64) * (np.arange(64) & 3)
    assert np.array_equal(out, own + own.reshape(-1, 2)[:, ::-1].reshape(-1))


# Odd threads come to elect.sync by way of code that lies behind it.
ELECT = (
    OUT
    + """
    and.b32 %r2, %r1, 1; mov.u32 %r3, 5; setp.eq.u32 %p1, %r2, 1; @%p1 bra BEHIND;
    MEET: elect.sync _|%p2, -1; selp.u32 %r4, 1, 0, %p2; add.u32 %r3, %r3, %r4; st.global.u32 [%rd1], %r3; bra OVER;
    BEHIND: add.u32 %r3, %r3, %r1; bra MEET;
    OVER: ret;"""
)


@pytest.mark.parametrize("policy", POLICIES)
def test_threads_wait_for_their_warp_at_elect(policy):
    out = np.zeros(64, np.uint32)
    run(kernels.entry("u64", ELECT), (out,), 64, policy=policy)
    thread = np.arange(64)
    assert np.array_equal(out, 5 + thread * (thread & 1) + (thread % 32 == 0))


@pytest.mark.parametrize(
    ("behind", "said"),
    [
        ("bra OVER", "divergence: a thread ended"),
        ("elect.sync _|%p2, -1; bra OVER", "divergence: elect: a thread that"),
    ],
)
def test_threads_that_never_come_to_elect_are_a_fault(behind, said):
    out = np.zeros(32, np.uint32)
    assert str(fault(kernels.entry("u64", ELECT.replace("bra MEET", behind)), (out,))).startswith(said)


EXCHANGE = (
    OUT
    + """
    mov.u32 %r6, buf; shl.b32 %r2, %r1, 2; add.u32 %r3, %r6, %r2; st.shared.u32 [%r3], %r1; bar.sync 0;
    xor.b32 %r4, %r2, 128; add.u32 %r4, %r6, %r4; ld.shared.u32 %r5, [%r4]; st.global.u32 [%rd1], %r5;"""
)


@pytest.mark.parametrize("policy", POLICIES)
def test_warps_exchange_through_shared_memory(policy):
    out = np.zeros(64, np.uint32)
    run(kernels.entry("u64", EXCHANGE, 256), (out,), 64, policy=policy)
    assert np.array_equal(out, np.arange(64) ^ 32)


@pytest.mark.parametrize("policy", [p for p in POLICIES if p != "random"])
def test_without_the_barrier_it_is_a_race(policy):
    text = kernels.entry("u64", EXCHANGE.replace("bar.sync 0;", ""), 256)
    found = fault(text, (np.zeros(64, np.uint32),), 64, policy=policy)
    assert found.kind == "race" and "warp" in found.what and "PTX line" in found.where


def test_a_read_of_what_nothing_wrote_is_a_fault_or_the_poison():
    text = kernels.entry("u64", OUT + "ld.shared.u32 %r5, [buf]; st.global.u32 [%rd1], %r5;", 256)
    out = np.zeros(32, np.uint32)
    assert fault(text, (out,)).kind == "unwritten"
    run(text, (out,), poison=0x5A)
    assert (out == 0x5A5A5A5A).all()


def test_accesses_outside_of_an_array_are_refused():
    text = kernels.entry("u64", OUT + "st.global.u32 [%rd1+4], %r1;")
    found = fault(text, (np.zeros(32, np.uint32),))
    assert found.kind == "bounds" and "behind the end" in found.what
    odd = kernels.entry("u64", OUT + "st.global.u32 [%rd1+2], %r1;")
    assert fault(odd, (np.zeros(64, np.uint32),)).kind == "bounds"


def test_a_barrier_that_a_part_of_the_block_skips_is_a_deadlock_with_its_place():
    body = "mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 32; @%p1 bra END; bar.sync 0, 64; END: bar.sync 1, 64;"
    found = fault(kernels.entry("u64", body), (np.zeros(1, np.uint32),), 64)
    assert found.kind == "deadlock" and "barrier 0" in found.where and "barrier 1" in found.where


@pytest.mark.parametrize("policy", POLICIES)
def test_warps_that_go_together_may_each_name_another_barrier(policy):
    body = "mov.u32 %r1, %tid.x; shr.u32 %r2, %r1, 5; and.b32 %r2, %r2, 1; bar.sync %r2, 64;"
    run(kernels.entry("u64", body), (np.zeros(1, np.uint32),), 128, policy=policy)
    within = "mov.u32 %r1, %tid.x; and.b32 %r2, %r1, 1; bar.sync %r2, 64;"
    assert fault(kernels.entry("u64", within), (np.zeros(1, np.uint32),), 64, policy=policy).kind == "barrier"


@pytest.mark.parametrize("policy", POLICIES)
def test_who_looks_at_many_words_in_turn_is_not_blocked_before_it_has_seen_all(policy):
    words = range(0, 80, 4)
    told = " ".join(f"st.relaxed.gpu.global.u32 [%rd1+{at}], 1;" for at in words)
    seen = " ".join(f"ld.relaxed.gpu.global.u32 %r3, [%rd1+{at}]; and.b32 %r2, %r2, %r3;" for at in words)
    body = (
        "ld.param.u64 %rd1, [p0]; mov.u32 %r1, %tid.x; setp.eq.u32 %p1, %r1, 0; setp.eq.u32 %p2, %r1, 32;"
        f"@%p1 bra TELL; @!%p2 bra END; AGAIN: mov.u32 %r2, 1; {seen} setp.eq.u32 %p3, %r2, 0; @%p3 bra AGAIN; bra END;"
        f"TELL: {told} END: bar.sync 0;"
    )
    run(kernels.entry("u64", body), (np.zeros(20, np.uint32),), 64, policy=policy)


# Each block adds 1 to a counter and waits until all have.
MEET_IN_MEMORY = """
ld.param.u64 %rd1, [p0]; mov.u32 %r1, %tid.x; setp.ne.u32 %p1, %r1, 0; @%p1 bra END; mov.u32 %r2, %nctaid.x;
red.release.gpu.global.add.u32 [%rd1], 1;
AGAIN: ld.acquire.gpu.global.u32 %r3, [%rd1]; setp.lt.u32 %p2, %r3, %r2; @%p2 bra AGAIN;
END: bar.sync 0;"""


@pytest.mark.parametrize("policy", POLICIES)
def test_blocks_that_wait_for_each_other_run_together_as_far_as_they_fit(policy):
    text = kernels.entry("u64", MEET_IN_MEMORY)
    counter = np.zeros(1, np.uint32)
    run(text, (counter,), grid=150, policy=policy, multiprocessors=148)
    assert counter[0] == 150
    half = {"shared_bytes": 113 * 1024, "multiprocessors": 4}  # two blocks fit on one multiprocessor
    run(text, (np.zeros(1, np.uint32),), grid=8, policy=policy, **half)
    found = fault(text, (np.zeros(1, np.uint32),), grid=9, policy=policy, **half)
    assert found.kind == "deadlock" and "1 clusters of blocks have not begun" in found.what


@pytest.mark.parametrize("line", ["foo.u32 %r1, %r1;", "add.sat.s32 %r1, %r1, 1;", "ld.global.b999 %r1, [%rd1];"])
def test_what_is_not_modelled_is_an_error(line):
    assert fault(kernels.entry("u64", OUT + line), (np.zeros(32, np.uint32),)).kind == "not modelled"


def test_arguments_must_fit():
    with pytest.raises(ValueError, match="arguments must be 1"):
        run(kernels.entry("u64", ""), ())
    with pytest.raises(ValueError, match="argument 0 must have 8 bytes"):
        run(kernels.entry("u64", ""), (np.uint8(3),))
    with pytest.raises(ValueError, match="policy must be one of"):
        run(kernels.entry("u64", ""), (0,), policy="sometimes")


# ---- copies


def copier(load: str, count: int, rank: int) -> str:
    """Load a box with a tensor map, write the `count` bytes of shared memory to p1."""
    return kernels.entry(
        "[128] u64",
        f"""
mov.u32 %r0, buf; add.u32 %r2, %r0, 16384; mov.u32 %r1, %tid.x; setp.eq.u32 %p1, %r1, 0; mov.u64 %rd5, p0;
cvta.param.u64 %rd5, %rd5; ld.param.u64 %rd1, [p1]; cvta.to.global.u64 %rd1, %rd1;
@!%p1 bra WAIT; mbarrier.init.shared::cta.b64 [%r2], 1; mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], {count};
cp.async.bulk.tensor.{rank}d.shared::cluster.global.{load}, [%r2];
WAIT: bar.sync 0; {kernels.wait("%r2", "0", "FULL")}
mov.u32 %r5, %r1;
COPY: setp.ge.u32 %p2, %r5, {count}; @%p2 bra END; add.u32 %r6, %r0, %r5; ld.shared.u8 %h1, [%r6];
cvt.u64.u32 %rd2, %r5; add.u64 %rd3, %rd1, %rd2; st.global.u8 [%rd3], %h1; add.u32 %r5, %r5, 32; bra COPY;
END: bar.sync 0;""",
        16640,
    )


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
def test_a_box_is_loaded_swizzled_and_filled_with_zeros(policy, swizzle):
    rng = np.random.default_rng(swizzle)
    tensor = rng.integers(0, 256, (20, 160), np.uint8)
    inner = swizzle or 48
    box = ptx_model.TensorMap(tensor.ctypes.data, 8, (150, 20), (160,), (inner, 16), swizzle)
    out = np.zeros(16 * inner, np.uint8)
    text = copier("tile.mbarrier::complete_tx::bytes [%r0], [%rd5, {112, 9}]", len(out), 2)
    run(text, (box, out), policy=policy, memory=(tensor,))
    want = np.zeros((16, inner), np.uint8)
    width = min(inner, 150 - 112)
    want[:11, :width] = tensor[9:, 112 : 112 + width]
    assert np.array_equal(out[swizzled(np.arange(len(out)), swizzle)], want.reshape(-1))


def test_a_tensor_map_as_cute_dsl_writes_it():
    """The 64 bytes that version 4.8.1 makes of fp16 (5, 96, 192) with boxes of (2, 8, 64), swizzled by 128 bytes."""
    raw = bytes.fromhex(
        "0000345612700000"
        "22632400"
        "18000000000900000000000000000000"
        "00000000"
        "bf0000005f000000040000000000000000000000"
        "0000003f0701000000000000"
    )
    found = TensorMap.decode(raw + bytes(64))
    assert (found.address, found.bits, found.swizzle) == (0x7012_5634_0000, 16, 128)
    assert (found.dims, found.strides, found.box) == ((192, 96, 5), (384, 36864), (64, 8, 2))
    for at, value in ((10, 0x2C), (52, 1), (8, 0xA2)):  # an unknown flag, a step between elements, an unknown type
        with pytest.raises(ptx_model.Fault, match="descriptor"):
            TensorMap.decode(raw[:at] + bytes([value]) + raw[at + 1 :] + bytes(64))


def test_rows_are_gathered():
    tensor = np.arange(64 * 64, dtype=np.uint8).reshape(64, 64) ^ np.arange(64, dtype=np.uint8)[:, None]
    box = ptx_model.TensorMap(tensor.ctypes.data, 8, (64, 64), (64,), (64, 1))
    out = np.zeros(256, np.uint8)
    text = copier("tile::gather4.mbarrier::complete_tx::bytes [%r0], [%rd5, {0, 5, 63, 64, 7}]", 256, 2)
    run(text, (box, out), memory=(tensor,))
    want = np.stack([tensor[5], tensor[63], np.zeros(64, np.uint8), tensor[7]])
    assert np.array_equal(out.reshape(4, 64), want)


def test_too_few_bytes_are_a_deadlock():
    tensor = np.zeros((16, 64), np.uint8)
    box = ptx_model.TensorMap(tensor.ctypes.data, 8, (64, 16), (64,), (64, 16))
    text = copier("tile.mbarrier::complete_tx::bytes [%r0], [%rd5, {0, 0}]", 1024, 2)
    found = fault(text.replace("_, [%r2], 1024", "_, [%r2], 1040"), (box, np.zeros(1024, np.uint8)), memory=(tensor,))
    assert found.kind == "deadlock" and "16 bytes" in found.where


def test_a_box_is_stored_without_what_lies_outside():
    body = """
mov.u32 %r0, buf; mov.u32 %r1, %tid.x; shl.b32 %r2, %r1, 5; add.u32 %r2, %r0, %r2; add.u32 %r3, %r1, 1;
mov.b32 %r4, 0; st.shared.v4.b32 [%r2], {%r3, %r4, %r3, %r4}; st.shared.v4.b32 [%r2+16], {%r3, %r4, %r4, %r3};
fence.proxy.async.shared::cta; bar.sync 0; setp.ne.u32 %p1, %r1, 0; @%p1 bra END; mov.u64 %rd5, p0;
cvta.param.u64 %rd5, %rd5;
cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd5, {4, 30}], [%r0];
cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; END: bar.sync 0;"""
    target = np.full((40, 8), 7, np.uint32)
    box = ptx_model.TensorMap(target.ctypes.data, 32, (8, 40), (32,), (8, 32))
    text = kernels.entry("[128]", body, 2048)
    for policy in POLICIES:
        target[:] = 7
        run(text, (box,), policy=policy, memory=(target,))
        sent = (np.arange(32) + 1)[:, None] * np.array([1, 0, 1, 0])
        want = np.full((40, 8), 7)
        want[30:, 4:] = sent[:10]
        assert np.array_equal(target, want)
    unfenced = text.replace("fence.proxy.async.shared::cta;", "")
    found = fault(unfenced, (box,), memory=(target,))
    assert found.kind == "race" and "fence.proxy.async" in found.what


# ---- clusters


REMOTE = (
    OUT
    + """
mov.u32 %r0, buf; shl.b32 %r2, %r1, 2; add.u32 %r3, %r0, %r2; mov.u32 %r4, %cluster_ctarank; shl.b32 %r5, %r4, 8;
add.u32 %r5, %r5, %r1;
st.shared.u32 [%r3], %r5; barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
xor.b32 %r6, %r4, 1; mapa.shared::cluster.u32 %r7, %r3, %r6; ld.shared::cluster.u32 %r8, [%r7];
mul.wide.u32 %rd4, %r4, 128; add.u64 %rd1, %rd1, %rd4; st.global.u32 [%rd1], %r8;
barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"""
)
MEET = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"


@pytest.mark.parametrize("policy", POLICIES)
def test_blocks_of_a_cluster_read_each_other(policy):
    out = np.zeros(64, np.uint32)
    run(kernels.entry("u64", REMOTE, 128), (out,), 32, 2, policy, cluster=2)
    assert np.array_equal(out.reshape(2, 32), np.arange(32) + np.array([[256], [0]]))


MULTICAST = """
mov.u32 %r0, buf; add.u32 %r2, %r0, 4096; mov.u32 %r1, %tid.x; setp.ne.u32 %p1, %r1, 0; mov.u64 %rd5, p0;
cvta.param.u64 %rd5, %rd5; mov.u32 %r4, %cluster_ctarank; mov.b16 %h1, 3; shl.b32 %r6, %r4, 3; shl.b32 %r7, %r4, 9;
@%p1 bra READY; mbarrier.init.shared::cta.b64 [%r2], 1; fence.mbarrier_init.release.cluster;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 1024;
READY: barrier.cluster.arrive.RELAXED.aligned; barrier.cluster.wait.acquire.aligned;
@%p1 bra WAIT; add.u32 %r8, %r0, %r7;
cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster
[%r8], [%rd5, {0, %r6}], [%r2], %h1;
WAIT: W: mbarrier.try_wait.parity.shared::cta.b64 %p15, [%r2], 0; @!%p15 bra W;
ld.param.u64 %rd1, [p1]; mul.wide.u32 %rd2, %r4, 1024; add.u64 %rd1, %rd1, %rd2; mul.wide.u32 %rd3, %r1, 4;
add.u64 %rd1, %rd1, %rd3; shl.b32 %r9, %r1, 2; add.u32 %r9, %r9, %r0; mov.u32 %r10, 0;
COPY: ld.shared.u32 %r11, [%r9]; st.global.u32 [%rd1], %r11; add.u32 %r9, %r9, 128; add.u64 %rd1, %rd1, 128;
add.u32 %r10, %r10, 1; setp.lt.u32 %p2, %r10, 8; @%p2 bra COPY;
barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"""


def test_work_issued_before_there_were_more_agents_is_still_checked():
    clocks = races.Clocks(2)
    warp = clocks.add("a warp", True)
    past = clocks.start(clocks.add("copies", False), np.array([warp]))
    shadow = races.Shadow(clocks, 4, "memory,")
    late = [clocks.add(f"warp {n}", True) for n in range(100)][-1]
    shadow.asynchronous(np.array([0]), past, True)
    shadow.access(np.array([1]), 15, np.array([late]), False)
    with pytest.raises(ptx_model.Fault, match="after a read by warp 99"):
        shadow.asynchronous(np.array([1]), past, True)
    shadow.access(np.array([2]), 15, np.array([late]), True)
    with pytest.raises(ptx_model.Fault, match="after a write by warp 99"):
        shadow.asynchronous(np.array([2]), past, False)


@pytest.mark.parametrize("arrival", ["release", "relaxed"])
@pytest.mark.parametrize("policy", POLICIES)
def test_each_block_of_a_cluster_sends_half_of_a_tile_to_both(policy, arrival):
    """With a relaxed arrival it is the fence that makes the barriers known."""
    tensor = np.random.default_rng(9).integers(0, 2**32, (16, 16), np.uint32)
    box = ptx_model.TensorMap(tensor.ctypes.data, 32, (16, 16), (64,), (16, 8))
    out = np.zeros((2, 16, 16), np.uint32)
    text = kernels.entry("[128] u64", MULTICAST.replace("RELAXED", arrival), 4224)
    run(text, (box, out), 32, 2, policy, cluster=2, memory=(tensor,))
    assert np.array_equal(out[0], tensor) and np.array_equal(out[1], tensor)
    if arrival == "relaxed":
        unfenced = text.replace("fence.mbarrier_init.release.cluster;", "")
        assert fault(unfenced, (box, out), 32, grid=2, policy=policy, cluster=2, memory=(tensor,)).kind == "race"


def test_an_address_in_no_block_is_refused_where_it_is_used():
    text = kernels.entry("u64", REMOTE.replace("xor.b32 %r6, %r4, 1", "add.u32 %r6, %r4, 30"), 128)
    found = fault(text, (np.zeros(64, np.uint32),), 32, grid=2, cluster=2)
    assert found.kind == "bounds" and "no block" in found.what


def test_blocks_that_do_not_meet_are_found():
    first = kernels.entry("u64", REMOTE.replace(MEET, "", 1), 128)
    last = kernels.entry("u64", REMOTE[: REMOTE.rindex("barrier.cluster.arrive")], 128)
    kinds = {fault(first, (np.zeros(64, np.uint32),), 32, grid=2, cluster=2, policy=p).kind for p in POLICIES}
    assert kinds <= {"race", "unwritten"}
    found = set()
    for policy in POLICIES:
        try:
            run(last, (np.zeros(64, np.uint32),), 32, 2, policy, cluster=2)
        except ptx_model.Fault as error:
            found.add(error.kind)
    assert found == {"bounds"}  # a block has ended while the other reads its memory


# ---- products of a warp


def test_mma_and_ldmatrix():
    body = (
        OUT
        + """
mov.u32 %r0, buf; shl.b32 %r2, %r1, 5; ld.param.u64 %rd3, [p1]; cvta.to.global.u64 %rd3, %rd3;
cvt.u64.u32 %rd4, %r2; add.u64 %rd3, %rd3, %rd4;
add.u32 %r3, %r0, %r2;
ld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%rd3]; st.shared.v4.b32 [%r3], {%r10, %r11, %r12, %r13};
ld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%rd3+16]; st.shared.v4.b32 [%r3+16], {%r10, %r11, %r12, %r13};
bar.warp.sync -1;
and.b32 %r4, %r1, 15; shl.b32 %r4, %r4, 5; shr.u32 %r5, %r1, 4; shl.b32 %r5, %r5, 4; add.u32 %r4, %r4, %r5;
add.u32 %r4, %r0, %r4;
ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r20, %r21, %r22, %r23}, [%r4];
and.b32 %r6, %r1, 7; shl.b32 %r6, %r6, 5; shr.u32 %r7, %r1, 3; and.b32 %r7, %r7, 1; shl.b32 %r7, %r7, 4;
add.u32 %r6, %r6, %r7; add.u32 %r6, %r6, 512; add.u32 %r6, %r0, %r6;
ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r24, %r25}, [%r6];
mov.f32 %f1, 0f3F800000;
mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f2, %f3, %f4, %f5},
{%r20, %r21, %r22, %r23}, {%r24, %r25}, {%f1, %f1, %f1, %f1};
shr.u32 %r8, %r1, 2; and.b32 %r9, %r1, 3; shl.b32 %r8, %r8, 5; shl.b32 %r9, %r9, 3; add.u32 %r8, %r8, %r9;
sub.u32 %r8, %r8, %r2; shl.b32 %r9, %r1, 2;
ld.param.u64 %rd6, [p0]; cvta.to.global.u64 %rd6, %rd6; add.u32 %r8, %r8, %r2; cvt.u64.u32 %rd7, %r8;
add.u64 %rd6, %rd6, %rd7;
st.global.v2.f32 [%rd6], {%f2, %f3}; st.global.v2.f32 [%rd6+256], {%f4, %f5};"""
    )
    rng = np.random.default_rng(6)
    values = rng.integers(-8, 9, (32, 16)).astype(np.float32)
    out = np.zeros((16, 8), np.float32)
    run(kernels.entry("u64 u64", body, 1024), (out, formats.to_bf16(values)))
    assert np.array_equal(out, values[:16] @ values[16:24].T + 1)


@pytest.mark.parametrize("policy", POLICIES)
def test_cp_async_is_waited_for(policy):
    body = (
        OUT
        + """
mov.u32 %r0, buf; shl.b32 %r2, %r1, 2; add.u32 %r3, %r0, %r2; ld.param.u64 %rd3, [p1];
cvta.to.global.u64 %rd3, %rd3; add.u64 %rd3, %rd3, %rd2;
cp.async.ca.shared.global [%r3], [%rd3], 4; cp.async.commit_group; cp.async.wait_group 0;
ld.shared.u32 %r5, [%r3]; st.global.u32 [%rd1], %r5;"""
    )
    source, out = np.arange(32, dtype=np.uint32) * 3, np.zeros(32, np.uint32)
    run(kernels.entry("u64 u64", body, 128), (out, source), policy=policy)
    assert np.array_equal(out, source)
    text = kernels.entry("u64 u64", body.replace("cp.async.wait_group 0;", ""), 128)
    assert fault(text, (out, source), policy=policy).kind in ("race", "unwritten")


@pytest.mark.parametrize("policy", POLICIES)
def test_threads_leave_a_loop_at_different_times_by_a_predicate_that_each_turn_overwrites(policy):
    body = (
        "ld.param.u64 %rd1, [p0]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 4; add.u64 %rd1, %rd1, %rd2;\n"
        "and.b32 %r1, %r1, 7; mov.u32 %r2, 0;\n"
        "L: add.u32 %r2, %r2, 3; sub.s32 %r1, %r1, 1; setp.gt.s32 %p1, %r1, 0;\n@%p1 bra L;\nst.global.u32 [%rd1], %r2;"
    )
    out = np.zeros(64, np.uint32)
    ptx_model.run(kernels.entry("u64", body), "k", 1, 64, (out,), policy=policy, limit=10_000)
    assert out.tolist() == [3 * max(1, t % 8) for t in range(64)]
