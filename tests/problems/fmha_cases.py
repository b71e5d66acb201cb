"""The fmha_decode problem for its tests: its modules, and test cases solved once."""

import functools

import torch

from problems.common import load

FOLDER = load.PROBLEMS / "fmha_decode"
task = load.module(FOLDER, "task")
reference = load.module(FOLDER, "reference")


def named(case: object) -> str:
    return f"{case.batch}x{case.queries}x{case.heads}-{case.window}+{case.compressed}-{case.content}"


def poisoned(data: object) -> object:
    return data._replace(out=torch.full_like(data.out, torch.nan), lse=torch.full_like(data.lse, torch.nan))


@functools.cache
def solved(case: object, device: str = "cpu") -> tuple[object, tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and answer of a test case. Whoever writes to outputs takes poisoned(data) first."""
    data = reference.generate_input(**vars(case), device=device)
    return data, reference.ref_kernel(data)
