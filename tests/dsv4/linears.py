"""Matrices and inputs for tests of linears, the product of NVFP4 values in fp64, and a small model."""

import dataclasses
import math

import torch

from problems.common import fp8, load, nvfp4
from problems.dsv4_forward.prepared import by_first
from problems.dsv4_forward.weights import formats
from problems.dsv4_forward.weights.linear import Linear
from tests.dsv4 import models

FOLDER = load.PROBLEMS / "nvfp4_gemv"
TASK, REFERENCE, GEMV = (load.module(FOLDER, name) for name in ("task", "reference", "in_model"))
VALUES = (0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6)
# Of sizes that the problems' kernels take.
SMALL = dataclasses.replace(models.SMALL, hidden_size=384, q_lora_rank=64)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def uneven(*shape: int, seed: int) -> torch.Tensor:
    """Random rows whose magnitudes differ, up to 2^6 between first and last."""
    return random(*shape, seed=seed) * torch.exp2(torch.linspace(-3, 3, shape[-2]))[:, None]


def weight_of(
    kind: str, *shape: int, seed: int = 1, dtype: torch.dtype = torch.float32, size: float | None = None
) -> Linear:
    """A random Linear (..., n, k): its matrices have second and input scales of their own. size: of values in all rows;
    None: rows differ.
    """
    w, lead = uneven(*shape, seed=seed) if size is None else random(*shape, seed=seed) * size, shape[:-2]
    if kind == "plain":
        return Linear(kind, w.to(dtype), name="w")
    if kind == "fp8":
        return Linear(kind, *fp8.quantise_blocks(w), name="w")
    if kind == "mxfp4":
        return Linear(kind, *formats.quantise_mxfp4(w), name="w")
    scale_2 = 0.02 + 0.003 * torch.arange(math.prod(lead)).float().view(lead)
    packed, scale = nvfp4.quantise(w / scale_2[..., None, None])
    return Linear(kind, packed, scale, scale_2, scale_2 * 0.7, name="w")


def published(n: int, k: int, seed: int = 0, lead: tuple[int, ...] = (), name: str = "w") -> Linear:
    """Gaussian matrices as calibrated checkpoints have them: scale_2 = amax / (6 * 448), so scales reach 448."""
    gen = torch.Generator().manual_seed(seed)
    real = torch.randn(*lead, n, k, generator=gen) * torch.rand(*lead, n, 1, generator=gen).add(0.5) / k**0.5
    scale_2 = real.abs().amax((-2, -1)) / 2688
    codes, scale = nvfp4.quantise((real / scale_2[..., None, None]).clamp(-2688, 2688))
    input_scale = torch.rand(lead, generator=gen).add(0.5) * 6 / 2688
    return Linear("nvfp4", codes, scale, scale_2, input_scale, name=name)


def moved(tensor: torch.Tensor, by: int) -> torch.Tensor:
    """A copy that starts so many values behind where torch's memory does."""
    return torch.empty(tensor.numel() + by, dtype=tensor.dtype)[by:].view(tensor.shape).copy_(tensor)


def calls(*matrices: Linear, variant: str = "cpu_portable") -> object:
    made = by_first(GEMV.prepare(w) for w in matrices)
    return GEMV.Calls(load.variant("nvfp4_gemv", variant), made)


def values64(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """fp64 values of codes (low nibble first) times scales, by the format's table."""
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()
    return torch.tensor(VALUES, dtype=torch.float64)[codes] * scale.double().repeat_interleave(16, -1)


def exact(x: torch.Tensor, w: Linear) -> tuple[torch.Tensor, torch.Tensor]:
    """x: (N, k), within the calibrated range -> x w^T in fp64, (N, n), and a bound of what the kernel may be off by."""
    codes, scale = nvfp4.quantise((x.float() / w.input_scale).clamp(-2688, 2688))
    a, b = values64(w.weight, w.scale), values64(codes, scale)
    both = w.scale_2.double() * w.input_scale.double()
    terms = (b.abs() @ a.abs().T) * both
    want = (b @ a.T) * both
    # One rounding to fp16, fp32 sums, the product with two fp32 scales.
    return want, want.abs() * 2.0**-11 * 1.01 + terms * 8 * 2.0**-24 + 1e-12


def product(x: torch.Tensor, w: Linear, run, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    out = torch.full((*x.shape[:-1], w.n), math.nan, dtype=dtype)
    assert run(x=x, w=w, out=out) is not NotImplemented
    return out


def left(x: torch.Tensor, w: Linear, run, dtype: torch.dtype = torch.float32) -> bool:
    """Whether the op says that it does not serve the call, and writes nothing."""
    out = torch.full((*x.shape[:-1], w.n), math.nan, dtype=dtype)
    return run(x=x, w=w, out=out) is NotImplemented and bool(out.isnan().all())


def inputs(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal rows of different size, each within 6."""
    gen = torch.Generator().manual_seed(seed + 100)
    x = torch.randn(*shape, generator=gen).clamp_(-3, 3)
    return (x * torch.linspace(0.3, 1.0, shape[0]).view(-1, *[1] * (len(shape) - 1))).to(dtype)
