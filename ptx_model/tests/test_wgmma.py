"""The model's wgmma of e4m3, with A from registers, against a product of the same values."""

import numpy as np
import pytest

import ptx_model
from ptx_model import formats

# B without a swizzle: 8 rows of 16 bytes, 128 bytes on the next 16 of k.
TEXT = """
.version 8.7
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 pa, .param .u64 pb, .param .u64 pd)
{
.reg .b32 %r<20>; .reg .f32 %f<8>; .reg .b64 %d<12>; .reg .pred %p<4>;
.shared .align 1024 .b8 smem[256];
mov.u32 %r1, %tid.x;
ld.param.u64 %d1, [pa]; cvta.to.global.u64 %d1, %d1; mul.wide.u32 %d2, %r1, 16; add.u64 %d1, %d1, %d2;
ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%d1];
mov.u32 %r2, smem;
setp.ge.u32 %p1, %r1, 64;
@%p1 bra STORED;
ld.param.u64 %d3, [pb]; cvta.to.global.u64 %d3, %d3; mul.wide.u32 %d4, %r1, 4; add.u64 %d3, %d3, %d4;
ld.global.b32 %r8, [%d3];
shl.b32 %r9, %r1, 2; add.u32 %r9, %r9, %r2; st.shared.b32 [%r9], %r8;
STORED:
fence.proxy.async.shared::cta;
bar.sync 0;
shr.u32 %r10, %r2, 4; cvt.u64.u32 %d5, %r10; or.b64 %d5, %d5, 0x1000080000;
mov.f32 %f1, 0f00000000; mov.f32 %f2, %f1; mov.f32 %f3, %f1; mov.f32 %f4, %f1;
setp.ne.b32 %p2, %r10, %r10;
wgmma.fence.sync.aligned;
wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%f1, %f2, %f3, %f4}, {%r4, %r5, %r6, %r7}, %d5, %p2, 1, 1;
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
ld.param.u64 %d6, [pd]; cvta.to.global.u64 %d6, %d6; add.u64 %d6, %d6, %d2;
st.global.v4.f32 [%d6], {%f1, %f2, %f3, %f4};
ret;
}
"""


# Two of the warps go another way while their product is under way.
APART = TEXT.replace(
    "wgmma.wait_group", "setp.ge.u32 %p3, %r1, 64;\n@%p3 bra APART;\nmov.u32 %r11, 0;\nAPART:\nwgmma.wait_group"
)


@pytest.mark.parametrize("text", [TEXT, APART], ids=["together", "apart"])
@pytest.mark.parametrize("policy", ptx_model.POLICIES)
def test_a_product_of_e4m3_is_that_of_the_values(policy, text):
    rng = np.random.default_rng(1)
    codes = (
        rng.integers(0, 0x48, (64 + 8, 32)).astype(np.uint8) | rng.integers(0, 2, (64 + 8, 32)).astype(np.uint8) << 7
    )
    a, b = codes[:64], codes[64:]
    thread, register = np.arange(128)[:, None, None], np.arange(4)[None, :, None]
    row = thread // 32 * 16 + thread % 32 // 4 + register % 2 * 8
    held = a[row, register // 2 * 16 + thread % 4 * 4 + np.arange(4)]  # as m16n8k32 has it
    laid = np.ascontiguousarray(b.reshape(8, 2, 16).transpose(1, 0, 2))
    out = np.full((128, 4), np.nan, np.float32)
    ptx_model.run(text, "k", 1, 128, (np.ascontiguousarray(held), laid, out), 0, policy=policy)
    value = np.arange(4)[None, :]
    want = (formats.E4M3[a].astype(np.float64) @ formats.E4M3[b].astype(np.float64).T).astype(np.float32)
    assert np.array_equal(out, want[row[..., 0][:, :1] + value // 2 * 8, thread[..., 0] % 4 * 2 + value % 2])


def test_other_depths_of_e4m3_are_refused():
    with pytest.raises(ptx_model.Fault, match="m64n8k16"):
        ptx_model.run(TEXT.replace("m64n8k32", "m64n8k16"), "k", 1, 128, (np.zeros((128, 16), np.uint8),) * 3, 0)
