"""Make inputs for nvfp4_gemv, compute the answer in fp64, and check outputs. Slow and obvious on purpose."""

import torch
from task import ATOL, PEER_TOL, RTOL, SUM_UNITS, Data, input_t, output_t

from problems.common import check, nvfp4

# Rows dequantised at a time: 4 MiB of fp64 at k = 16384, near the caches of a CPU; on a GPU few, large launches.
ROWS = {"cpu": 32, "cuda": 1024}


def generate_input(m: int, k: int, l: int, seed: int, device: str) -> input_t:
    """Every corner of the format: all 16 codes in both nibbles, scales 2^U(-5, 1), 1/64 of them zero, and one column
    block with sfa 448 against sfb 2^-6 (in 1/4 of the rows a subnormal), one the other way round. c comes out with a
    standard deviation of about 610 at k = 16384 (536 to 671 over 40 seeds, and values to 4 times that), so fp16 holds
    it. c is NaN: an element that a kernel skips is caught.
    """
    if k % 64 or min(m, k, l) < 1:
        raise ValueError(f"m and l must be at least 1 and k a multiple of 64, got m={m} k={k} l={l}")
    gen = torch.Generator(device).manual_seed(seed)
    small, large = torch.randperm(k // 16, generator=gen, device=device)[:2].tolist()  # the two extreme column blocks

    def codes(rows: int) -> torch.Tensor:
        raw = torch.randint(0, 256, (l, rows, k // 2), dtype=torch.uint8, generator=gen, device=device)
        return raw.view(torch.float4_e2m1fn_x2).permute(1, 2, 0)

    def scales(rows: int, block_448: int, block_tiny: int) -> torch.Tensor:
        value = torch.rand(l, rows, k // 16, generator=gen, device=device).mul_(6).sub_(5).exp2_()
        value *= torch.rand(value.shape, generator=gen, device=device) >= 1 / 64
        tiny = torch.full(value.shape[:-1], 8, device=device)  # in steps of 2^-9: 8 is the least normal, 2^-6
        subnormal = torch.randint(1, 8, tiny.shape, generator=gen, device=device)
        tiny = torch.where(torch.rand(tiny.shape, generator=gen, device=device) < 1 / 4, subnormal, tiny)
        value[..., block_448], value[..., block_tiny] = 448.0, tiny * 2.0**-9
        return value.to(torch.float8_e4m3fn).permute(1, 2, 0)

    sfa, sfb = scales(m, small, large), scales(128, large, small)
    c = torch.full((l, m, 1), float("nan"), dtype=torch.float16, device=device).permute(1, 2, 0)
    return Data(codes(m), codes(128), sfa, sfb, nvfp4.permute_scales(sfa), nvfp4.permute_scales(sfb), c)


def rows(data: input_t, index: torch.Tensor) -> input_t:
    """The call of these batches alone. index: int64 (n,)."""
    parts = (part.view(torch.uint8) if part.element_size() == 1 else part for part in data)
    taken = (part.movedim(-1, 0)[index].movedim(0, -1) for part in parts)
    return Data(*(new.view(part.dtype) for new, part in zip(taken, data, strict=True)))


def ref_kernel(data: input_t) -> torch.Tensor:
    """c before rounding, fp64 (m, 1, l). The sum over k in fp64 is off by less than 2^-40 of its terms."""
    a, b, sfa, sfb, *_ = data
    m, _, l = a.shape
    step = ROWS[a.device.type]
    c = torch.empty(m, 1, l, dtype=torch.float64, device=a.device)
    for i in range(l):
        x = nvfp4.dequantise(b[0, :, i], sfb[0, :, i], torch.float64)
        for row in range(0, m, step):
            rows = slice(row, row + step)
            c[rows, 0, i] = nvfp4.dequantise(a[rows, :, i], sfa[rows, :, i], torch.float64) @ x
    return c


def tolerance(data: input_t, want: torch.Tensor) -> torch.Tensor:
    """Admitted |error| of each element, fp64 (m, 1, l), as task.py derives it: scales with the terms, not the sum."""
    size = torch.einsum("mkl,kl->ml", data.sfa.double(), data.sfb[0].double()).unsqueeze(1)
    return RTOL * want.abs() + SUM_UNITS * size + ATOL


def check_implementation(data: input_t, output: output_t) -> tuple[bool, str]:
    """(True, "") if `output`, fp16 (m, 1, l), is the product of `data` within the tolerance, else (False, report)."""
    result = compare(data, ref_kernel(data), output)
    return result.ok, result.message


def compare(data: input_t, want: torch.Tensor, output: output_t, peer: bool = False) -> check.Result:
    """`output` against `want` = ref_kernel(data); a peer is held to PEER_TOL in the norm of each batch instead."""
    if peer:
        return check.norm(output, want, PEER_TOL, torch.float16, batch=2)
    return check.elementwise(output, want, tolerance(data, want), torch.float16)
