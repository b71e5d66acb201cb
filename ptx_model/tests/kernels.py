"""PTX of small kernels that the tests of the model execute, written by hand; no compiler is needed."""

HEADER = ".version 9.0\n.target sm_100a\n.address_size 64\n"


def entry(parameters: str, body: str, shared: int = 0, dynamic: bool = False) -> str:
    """A module with one kernel `k`. parameters: types, called p0, p1, ...; shared: bytes of `buf`, aligned to 1024."""
    named = ", ".join(
        f".param .{'b8' if t[0] == '[' else t} p{i}{t if t[0] == '[' else ''}" for i, t in enumerate(parameters.split())
    )
    named = named.replace(".param .b8", ".param .align 64 .b8")
    declared = f".shared .align 1024 .b8 buf[{shared}];" if shared else ""
    outside = ".extern .shared .align 1024 .b8 buf[];\n" if dynamic else ""
    registers = ".reg .pred %p<16>; .reg .b16 %h<8>; .reg .b32 %r<64>; .reg .f32 %f<64>; .reg .b64 %rd<32>;"
    return f"{HEADER}{outside}.visible .entry k({named})\n{{\n{declared}\n{registers}\n{body}\nret;\n}}\n"


def wait(barrier: str, parity: str, label: str) -> str:
    """Wait at `barrier` (a register) for the phase of `parity`."""
    return f"{label}: mbarrier.try_wait.parity.shared::cta.b64 %p15, [{barrier}], {parity};\n@!%p15 bra {label};\n"


def gemm(
    a: str, b: str, idesc: int, columns: int, *, kind: str = "f16", scales: bool = False, accumulate: int = 0
) -> str:
    """One block, 128 threads: copy A, B (and scales) into shared memory with bulk copies, multiply once with
    tcgen05.mma, write D as fp32 (128, columns). a, b: the upper halves of the descriptors, as numbers. Parameters:
    A, B, scales of A, scales of B, D, bytes of A, bytes of B.
    """
    load = lambda source, at, size: (  # noqa: E731
        f"ld.param.u64 %rd1, [{source}]; cvta.to.global.u64 %rd1, %rd1; add.u32 %r1, %r0, {at};\n"
        f"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1], {size}, [%r2];\n"
    )
    copies = ""
    if scales:
        for place, column in ((98304, 256), (98816, 260)):
            copies += (
                f"add.u32 %r3, %r0, {place}; shr.u32 %r3, %r3, 4; cvt.u64.u32 %rd3, %r3;\n"
                f"or.b64 %rd3, %rd3, {1 << 46 | 8 << 32 | 8 << 16}; add.u32 %r4, %r20, {column};\n"
                "tcgen05.cp.cta_group::1.32x128b.warpx4 [%r4], %rd3;\n"
            )
    product = f"tcgen05.mma.cta_group::1.kind::{kind}" + (
        ".block_scale.scale_vec::4X [%r20], %rd4, %rd5, %r7, [%r8], [%r9], %p3;"
        if scales
        else " [%r20], %rd4, %rd5, %r7, %p3;"
    )
    total = "add.u32 %r5, %r10, %r11;" + (" add.u32 %r5, %r5, 1024;" if scales else "")
    stores = "".join(
        f"tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r30}}, [%r21]; tcgen05.wait::ld.sync.aligned;\n"
        f"st.global.b32 [%rd6+{4 * c}], %r30; add.u32 %r21, %r21, 1;\n"
        for c in range(columns)
    )
    return entry(
        "u64 u64 u64 u64 u64 u32 u32",
        f"""
mov.u32 %r0, buf; mov.u32 %r60, %tid.x; shr.u32 %r61, %r60, 5; setp.eq.u32 %p0, %r61, 0; setp.eq.u32 %p1, %r60, 0;
add.u32 %r2, %r0, 100352; add.u32 %r12, %r0, 100360; add.u32 %r13, %r0, 100368;
ld.param.u32 %r10, [p5]; ld.param.u32 %r11, [p6];
@%p0 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r13], 512;
@%p0 tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
@!%p1 bra READY;
mbarrier.init.shared::cta.b64 [%r2], 1; mbarrier.init.shared::cta.b64 [%r12], 1;
fence.mbarrier_init.release.cluster;
READY:
bar.sync 0;
ld.shared.u32 %r20, [%r13];
@!%p1 bra DONE;
{total}
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], %r5;
{load("p0", 0, "%r10")}{load("p1", 49152, "%r11")}
{load("p2", 98304, 512) + load("p3", 98816, 512) if scales else ""}
{wait("%r2", "0", "FULL")}
{copies}
shr.u32 %r3, %r0, 4; cvt.u64.u32 %rd4, %r3; or.b64 %rd4, %rd4, {a};
add.u32 %r3, %r0, 49152; shr.u32 %r3, %r3, 4; cvt.u64.u32 %rd5, %r3; or.b64 %rd5, %rd5, {b};
mov.b32 %r7, {idesc}; add.u32 %r8, %r20, 256; add.u32 %r9, %r20, 260; mov.pred %p3, {accumulate};
{product}
tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r12];
DONE:
{wait("%r12", "0", "OVER")}
ld.param.u64 %rd6, [p4]; mul.lo.u32 %r40, %r60, {4 * columns}; cvt.u64.u32 %rd7, %r40; add.u64 %rd6, %rd6, %rd7;
shl.b32 %r41, %r61, 21; add.u32 %r21, %r20, %r41;
{stores}
bar.sync 0;
@%p0 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r20, 512;
""",
        dynamic=True,
    )
