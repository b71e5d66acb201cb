"""The judge's matrix product. Its rate is the measured roofline of calls that are bound by computation.

Only on a GPU, in bf16: on a CPU integer instructions have four times the rate of any product that torch offers.
"""

import torch

NAME = "matmul"  # of the judge's call
SIZE = {"cuda": 8192, "cpu": 512}  # rows, columns and depth; on a CPU for tests
DTYPE = {"cuda": torch.bfloat16, "cpu": torch.float32}


def flops(device: str) -> int:
    return 2 * SIZE[device] ** 3


class Product:
    """c = a b with a, b, c (SIZE, SIZE). Of random values: a product of zeros takes less power, and is quicker."""

    def __init__(self, device: str) -> None:
        a = torch.randn(SIZE[device], SIZE[device], dtype=DTYPE[device], device=device)
        self._a, self._b, self._c = a, torch.randn_like(a), torch.empty_like(a)

    def __call__(self) -> None:
        torch.matmul(self._a, self._b, out=self._c)
