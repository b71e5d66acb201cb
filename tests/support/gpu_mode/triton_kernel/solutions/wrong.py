import triton
import triton.language as tl


@triton.jit
def red_only(image, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(image + 3 * at, mask=at < n), mask=at < n)


def custom_kernel(data):
    image, out = data
    red_only[(triton.cdiv(out.numel(), 1024),)](image, out, out.numel(), BLOCK=1024)
    return out
