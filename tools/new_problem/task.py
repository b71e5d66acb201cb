"""new_problem: y = W x in fp32. Memory-bound: 4 bytes a weight. Put your own operation in its place."""

from dataclasses import dataclass
from typing import NamedTuple

import torch


class Data(NamedTuple):
    """One call's tensors, all fp32, contiguous, on one device.

    w  (m, k)
    x  (k,)
    y  (m,), the output, written in place
    """

    w: torch.Tensor
    x: torch.Tensor
    y: torch.Tensor


input_t = Data
output_t = torch.Tensor  # y itself
OUTPUTS = ("y",)  # allocated and poisoned by the judge


@dataclass(frozen=True)
class Case:
    m: int  # rows of W
    k: int  # columns of W
    seed: int

    def bytes_moved(self) -> int:
        """Least memory traffic, in bytes: W and x once, y once."""
        return 4 * (self.m * self.k + self.k + self.m)

    def flops(self) -> int:
        return 2 * self.m * self.k


# The smallest case for debugging first; then sizes of 1, odd ones, and ones past a block.
TESTS = [Case(m, k, seed=100 + i) for i, (m, k) in enumerate(((16, 64), (1, 1), (33, 7), (257, 129), (1031, 800)))]
BENCHMARKS = [Case(16384, 4096, seed=1), Case(65536, 1024, seed=1)]
BENCHMARKS_CPU = [Case(2048, 4096, seed=1), Case(8192, 512, seed=1)]

# fp32 products and sums, in any order: 16 units of 2^-24 of the sum of the terms' sizes. One rounding is half a unit.
SUM_UNITS = 16 * 2**-24
BASELINE_TOL = 1e-5  # Frobenius norm, for peer_* files


def unpack(data: Data) -> tuple[int, int]:
    """-> (m, k). ValueError, naming the tensor, where a dtype, shape, layout or device is not as `Data` says."""
    m, k = data.w.shape
    for name, tensor, shape in zip(Data._fields, data, ((m, k), (k,), (m,)), strict=True):
        same = tensor.dtype == torch.float32 and tensor.shape == shape and tensor.device == data.w.device
        if not (same and tensor.is_contiguous()):
            raise ValueError(
                f"{name} must be contiguous fp32 {shape} on {data.w.device}, "
                f"got {tensor.dtype} {tuple(tensor.shape)} {tensor.stride()} on {tensor.device}"
            )
    return m, k
