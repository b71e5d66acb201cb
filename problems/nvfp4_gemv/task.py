"""nvfp4_gemv: c = A b for L independent NVFP4 matrices and vectors (W4A4). Memory-bound: 0.5625 bytes a weight.

Names, shapes and layouts are those of GPU MODE's NVFP4 GEMV problem. k is a multiple of 64, m any size from 1.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from allpairspy import AllPairs


class Data(NamedTuple):
    """One call's tensors, all on one device. Strides are in elements.

    a             float4_e2m1fn_x2 (m, k // 2, l), strides (k // 2, 1, m * k // 2); low nibble first along k
    b             float4_e2m1fn_x2 (128, k // 2, l), strides (k // 2, 1, 64 * k); only row 0 is the vector
    sfa           float8_e4m3fn (m, k // 16, l), strides (k // 16, 1, m * k // 16)
    sfb           float8_e4m3fn (128, k // 16, l), strides (k // 16, 1, 8 * k); only row 0 counts
    sfa_permuted  float8_e4m3fn (32, 4, ceil(m / 128), 4, k // 64, l), the same scales in 512-byte blocks
    sfb_permuted  float8_e4m3fn (32, 4, 1, 4, k // 64, l)
    c             float16 (m, 1, l), strides (1, 1, m); the output, written in place
    """

    a: torch.Tensor
    b: torch.Tensor
    sfa: torch.Tensor
    sfb: torch.Tensor
    sfa_permuted: torch.Tensor
    sfb_permuted: torch.Tensor
    c: torch.Tensor


input_t = Data
output_t = torch.Tensor  # c itself
OUTPUTS = ("c",)  # allocated and poisoned by the judge
BATCH, INVARIANT = "l", ("call",)


@dataclass(frozen=True)
class Case:
    m: int  # rows of A
    k: int  # columns of A, a multiple of 64
    l: int  # independent problems
    seed: int

    def bytes_moved(self) -> int:
        """Least memory traffic, in bytes: codes and one scale layout of A and b once, c once."""
        return self.l * (self.m * self.k * 9 // 16 + self.k * 9 // 16 + 2 * self.m)

    def flops(self) -> int:
        return 2 * self.m * self.k * self.l


_BENCHMARK_SHAPES = ((7168, 16384, 1), (4096, 7168, 8), (7168, 2048, 4))
_GPU_MODE_SHAPES = (
    (128, 256, 1),
    (128, 1536, 1),
    (128, 3072, 1),
    (256, 7168, 1),
    (2432, 4608, 2),
    (384, 7168, 2),
    (512, 512, 2),
    (512, 4096, 2),
    (512, 1536, 2),
)
_EDGE_SHAPES = ((16, 64, 1), (33, 64, 3), (257, 1088, 1), (1031, 832, 5), (7, 16384, 2))
# Any two levels of two axes meet in a test. M odd, prime, 1, past a tile; K of one 64-block, not a multiple of 128, 256
# or 512; L odd.
AXES = ((1, 2, 35, 127, 129), (64, 192, 320, 1024, 1088), (1, 2, 3, 4))


def _cases(shapes: Iterable[Sequence[int]], seed: int) -> list[Case]:
    return [Case(*shape, seed=seed + i) for i, shape in enumerate(shapes)]


def tests(seed: int) -> list[Case]:
    """Return test cases. Another seed gives others."""
    rng = random.Random(seed)
    return _cases(AllPairs([rng.sample(levels, len(levels)) for levels in AXES]), seed)


TESTS = _cases(_EDGE_SHAPES + _GPU_MODE_SHAPES + _BENCHMARK_SHAPES, 1000) + tests(2000)
BENCHMARKS = [Case(m, k, l, seed=1111) for m, k, l in _BENCHMARK_SHAPES]
BENCHMARKS_CPU = BENCHMARKS

# One rounding of the sum to fp16 (half an ulp, 2^-11), and the 2^-10 of it that an inexact sum may shift.
RTOL = 2**-11 * (1 + 2**-10)
# fp32 summation, in any order, of block terms s_a s_b dot with |dot| <= 16 * 36: 8 units of 2^-24 of that bound.
# A term is typically 1/17 of the bound, so 8 units cover 136 of its own; a lane of 32 terms and its tree have 37.
SUM_UNITS = 8 * 2**-24 * 576
# fp16 has no finer step below 2^-14 than 2^-24, so half of that is a rounding too.
ATOL = 2**-25
# Frobenius norm, per batch l. Humming's fp16 W4A16 GEMM rounds and splits K: 3.5e-3 was measured for bf16 here.
PEER_TOL = 5e-3


def unpack(data: Data) -> tuple[int, int, int]:
    """-> (m, k, l). ValueError, naming the tensor, where a dtype, shape, layout or device is not as `Data` says."""
    m, half_k, l = data.a.shape
    k = 2 * half_k
    if k % 64:
        raise ValueError(f"k must be a multiple of 64 (4 scale blocks of 16), got {k}")
    fp4, e4m3 = torch.float4_e2m1fn_x2, torch.float8_e4m3fn
    rest_m, rest_k = -(-m // 128), k // 64
    wanted = (
        (fp4, (m, k // 2, l), (k // 2, 1, m * k // 2)),
        (fp4, (128, k // 2, l), (k // 2, 1, 64 * k)),
        (e4m3, (m, k // 16, l), (k // 16, 1, m * k // 16)),
        (e4m3, (128, k // 16, l), (k // 16, 1, 8 * k)),
        (e4m3, (32, 4, rest_m, 4, rest_k, l), (16, 4, 512 * rest_k, 1, 512, 512 * rest_m * rest_k)),
        (e4m3, (32, 4, 1, 4, rest_k, l), (16, 4, 512 * rest_k, 1, 512, 512 * rest_k)),
        (torch.float16, (m, 1, l), (1, 1, m)),
    )
    for name, tensor, (dtype, shape, strides) in zip(Data._fields, data, wanted, strict=True):
        # An axis of length 1 has no meaningful stride.
        same = all(n == 1 or s == w for n, s, w in zip(shape, tensor.stride(), strides, strict=False))
        if tensor.dtype != dtype or tensor.shape != shape or not same or tensor.device != data.a.device:
            raise ValueError(
                f"{name} must be {dtype} {shape} with strides {strides} on {data.a.device}, "
                f"got {tensor.dtype} {tuple(tensor.shape)} {tensor.stride()} on {tensor.device}"
            )
    return m, k, l
