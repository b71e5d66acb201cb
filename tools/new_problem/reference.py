"""Make inputs for new_problem, compute the answer in fp64, and check outputs. Slow and obvious on purpose."""

import torch
from task import BASELINE_TOL, SUM_UNITS, Data, input_t, output_t

from problems.common import check


def generate_input(m: int, k: int, seed: int, device: str) -> input_t:
    """W and x are standard normal; y is NaN, so that an element that a kernel skips is caught."""
    gen = torch.Generator(device).manual_seed(seed)
    w = torch.randn(m, k, generator=gen, device=device)
    x = torch.randn(k, generator=gen, device=device)
    return Data(w, x, torch.full((m,), float("nan"), device=device))


def ref_kernel(data: input_t) -> torch.Tensor:
    """y before rounding, fp64 (m,)."""
    return data.w.double() @ data.x.double()


def tolerance(data: input_t) -> torch.Tensor:
    """Admitted |error| of each element, fp64 (m,): it scales with the terms, not with their sum."""
    return SUM_UNITS * (data.w.double().abs() @ data.x.double().abs())


def check_implementation(data: input_t, output: output_t) -> tuple[bool, str]:
    """(True, "") if `output`, fp32 (m,), is the answer within the tolerance, else (False, report)."""
    result = compare(data, ref_kernel(data), output)
    return result.ok, result.message


def compare(data: input_t, want: torch.Tensor, output: output_t, baseline: bool = False) -> check.Result:
    """`output` against `want` = ref_kernel(data); a baseline is held to BASELINE_TOL in the norm instead."""
    if baseline:
        return check.norm(output.unsqueeze(0), want.unsqueeze(0), BASELINE_TOL, torch.float32, batch=0)
    return check.elementwise(output, want, tolerance(data), torch.float32)
