"""The judge's matrix product on a GPU, in bf16. Its rate is the measured roofline of calls that are bound by
computation. On a CPU integer instructions have four times the rate of any product that torch offers.
"""

import torch

NAME = "matmul"  # of the judge's call
SIZE = 8192  # rows, columns and depth
FLOPS = 2 * SIZE**3


class Product:
    """c = a b with a, b, c (SIZE, SIZE). Of random values: a product of zeros takes less power, and is quicker."""

    def __init__(self) -> None:
        a = torch.randn(SIZE, SIZE, dtype=torch.bfloat16, device="cuda")
        self._a, self._b, self._c = a, torch.randn_like(a), torch.empty_like(a)

    def __call__(self) -> None:
        torch.matmul(self._a, self._b, out=self._c)
