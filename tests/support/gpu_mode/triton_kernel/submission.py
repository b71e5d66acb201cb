import triton
import triton.language as tl


@triton.jit
def grey(image, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    red = tl.load(image + 3 * at, mask=inside)
    green = tl.load(image + 3 * at + 1, mask=inside)
    blue = tl.load(image + 3 * at + 2, mask=inside)
    tl.store(out + at, 0.2989 * red + 0.5870 * green + 0.1140 * blue, mask=inside)


def custom_kernel(data):
    image, out = data
    grey[(triton.cdiv(out.numel(), 1024),)](image, out, out.numel(), BLOCK=1024)
    return out
