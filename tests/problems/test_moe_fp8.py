"""moe_gemm's sm90_grouped with FP8 activations: values are rounded as problems/common/fp8.py rounds them."""

import shutil
import subprocess

import numpy as np
import pytest
import torch

import ptx_model
from problems.common import fp8, load

SOURCE = """
#include "sm90_decode_fp8.cuh"

extern "C" __global__ void k(const uint32_t *groups, uint32_t *out) {
    const uint32_t *mine = groups + 64 * threadIdx.x;
    uint32_t most = mine[0];
    for (int i = 1; i < 64; ++i) most = decode::larger(most, mine[i]);
    const uint32_t least = decode::least_normal(decode::larger(most, most >> 16));
    for (int i = 0; i < 64; ++i) out[64 * threadIdx.x + i] = decode::nearest_e4m3(mine[i], least);
}
"""
GROUPS = 96


def groups() -> torch.Tensor:
    """bf16 (GROUPS, 128): every mantissa at the largest value, ties, values far below it, zeros, and the ends."""
    gen = torch.Generator().manual_seed(3)
    x = torch.randn(GROUPS, 128, generator=gen) * torch.exp2(torch.randint(-20, 20, (GROUPS, 1), generator=gen))
    x[:, 64:] *= torch.exp2(-torch.randint(0, 24, (GROUPS, 64), generator=gen))
    x[:64, 0] = (1 + torch.arange(64) / 128) * x[:64].abs().amax(1).log2().ceil().exp2()
    x[32:64, 0] += x[32:64, 0].log2().floor().exp2() / 2  # 1.5 and more: 1.75, the largest code, lies between
    x[64:72, 1:100] = torch.arange(-99, 0) * 2.0**-12 * x[64:72, :1].abs()
    x[72:80] = torch.randint(-8, 9, (8, 128), generator=gen) * 2.0**-133  # subnormal
    x[80], x[81], x[82] = 0, -0.0, 1e-4
    x[83, 0], x[84, 0], x[85] = 2.0**123, -1.99 * 2.0**123, 2.0**-24
    return x.bfloat16()


def test_values_are_rounded_as_fp8_holds_them(tmp_path):
    if not shutil.which("nvcc"):
        pytest.skip("needs nvcc")
    (tmp_path / "k.cu").write_text(SOURCE)
    folders = load.PROBLEMS / "common", load.PROBLEMS / "moe_gemm" / "variants"
    command = ["nvcc", "-std=c++17", "-ptx", "-arch=sm_90a", *(f"-I{folder}" for folder in folders), "k.cu"]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)
    x = groups()
    out = np.zeros((GROUPS, 64), np.uint32)
    given = np.ascontiguousarray(x.view(torch.int32).numpy().view(np.uint32))
    ptx_model.run((tmp_path / "k.ptx").read_text(), "k", 1, GROUPS, (given, out))
    got = torch.from_numpy(out.view(np.int32)).view(torch.bfloat16).view(GROUPS, 128)
    want = fp8.round_trip(x, 128)
    assert torch.equal(got, want), (got - want).nonzero()[:5]
    scales = fp8.quantise_groups(x, 128)[1]
    assert len(scales.unique()) > 20 and float((want != x).float().mean()) > 0.3
