from typing import TypedDict

import torch

input_t = tuple[int, torch.Tensor]  # the first number; a buffer for the answer, int64 (n,)
output_t = tuple[torch.Tensor, int]  # int64 (n,), and its last number

ROUNDS = 1000
FACTOR, TERM = 6364136223846793005, 1442695040888963407


class TestSpec(TypedDict):
    n: int
    seed: int
