"""sm90_classic_tma: TMA boxes through an mbarrier pipeline; rank-2 maps for l = 1, rank-3 maps and clusters above."""

import functools
from ctypes import byref, c_int, c_void_p
from pathlib import Path

from task import input_t, output_t, unpack

from problems.common import build, tma

TARGETS = ("sm90",)
SOURCE = Path(__file__).with_suffix(".cu")
BLOCK_K = 1024  # elements of K in one pipeline step; the boxes below and the CUDA source go by it


@functools.cache
def descriptors(m: int, k: int, l: int) -> tuple[tma.Descriptor, tma.Descriptor, tma.Descriptor, tma.Descriptor]:
    """The tensor maps of a, b, sfa_permuted and sfb_permuted, innermost first, without addresses; rank 2 for l = 1,
    else 3 with l outermost. They depend only on the shape. ValueError: a rule that the shape breaks.

    a, b: elements of 8 codes, k / 8 a row, box BLOCK_K codes by 8 rows (a) or only row 0 (b). The scales: 512-byte
    blocks of 128 rows x 4 (one stride of 512, legal for every k; a row of k / 16 bytes would be one only for
    k % 256 == 0), box 16 blocks by 8 rows of each quarter (sfa, 128 bytes, swizzled against bank conflicts) or by the
    16 bytes that hold row 0 (sfb).
    """
    rest_m, rest_k = -(-m // 128), k // 64
    blocks = BLOCK_K // 64

    def tiled(dtype: str, dims: tuple, strides: tuple, box: tuple, **options: str) -> tma.Descriptor:
        return (
            tma.check(dtype, dims, strides, box, **options)
            if l == 1
            else tma.check(dtype, (*dims, l), (*strides, strides[0] * dims[1]), (*box, 1), **options)
        )

    return (
        tiled("uint32", (k // 8, m), (k // 2,), (BLOCK_K // 8, 8), l2_promotion="256B"),
        tiled("uint32", (k // 8, 128), (k // 2,), (BLOCK_K // 8, 1), l2_promotion="256B"),
        tiled("uint8", (512, rest_k * rest_m), (512,), (128, blocks), swizzle="128B", l2_promotion="128B"),
        tiled("uint8", (512, rest_k), (512,), (16, blocks)),
    )


def compile_for(target: str) -> list[build.Artefact]:
    """Compile for `target`, without a GPU."""
    return [build.cuda(SOURCE, target)]


def custom_kernel(data: input_t) -> output_t:
    """Write A b into data.c, fp16 (m, 1, l), and return it. ValueError as unpack and tma.check say."""
    m, k, l = unpack(data)
    tensors = (data.a, data.b, data.sfa_permuted, data.sfb_permuted)
    maps = [
        descriptor.at(tensor.data_ptr(), tensor.nbytes).fields()
        for descriptor, tensor in zip(descriptors(m, k, l), tensors, strict=True)
    ]
    launch = build.cuda(SOURCE, "sm90").function("launch", *[c_void_p] * 5, *[c_int] * 4)
    build.check(launch(*map(byref, maps), data.c.data_ptr(), m, k, l, k // 16), "launch")
    return data.c
