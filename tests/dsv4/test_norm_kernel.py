"""kernels/norm.cu on a GPU, and in the model of one, against torch_ops/norm.py."""

import pytest
import torch

from problems.dsv4_forward.kernels.norm import Norm as kernel
from problems.dsv4_forward.torch_ops import norm
from tests.dsv4 import in_model

DEVICE = "cuda"
SHAPES = (
    (1, 256),
    (3, 192),
    (130, 4096),
    (2, 7168),
    (5, 250),
    (2, 8200),
)  # tokens, d: not multiples of 256, several blocks


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    """One rounding of bf16, or fp32 sums in another order."""
    step, error = 2.0**-8 if got.dtype == torch.bfloat16 else 2e-5, (got.float() - want).abs()
    assert bool((error <= step * (want.abs() + 0.05 * want.abs().amax(-1, keepdim=True))).all()), float(error.max())


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def test_wrong_arguments_are_named():
    x, run = torch.zeros(2, 8), kernel.__new__(kernel).rms_norm
    for change, wanted in (
        ({"x": x.half()}, "x must be fp32 or bf16"),
        ({"out": x.bfloat16()}, "out must be torch.float32"),
        ({"out": torch.zeros(2, 7)}, "out must be"),
        ({"weight": torch.zeros(7)}, "weight must be"),
        ({"x": torch.zeros(8, 2).t()}, "x must be .* strides"),
    ):
        with pytest.raises(ValueError, match=wanted):
            run(**{"x": x, "weight": torch.zeros(8), "eps": 1e-6, "out": x} | change)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "d"), SHAPES)
def test_rms_norm(ops, tokens, d, dtype):
    x, weight = draw(tokens, 3, d, dtype=dtype) * 7, draw(d, dtype=dtype, seed=1)
    x *= torch.logspace(-3, 3, tokens, device=DEVICE).view(-1, 1, 1).to(dtype)  # rows of very different size
    x[0, 1:] = 0
    for w in (weight, None):
        want, got = torch.empty_like(x, dtype=torch.float32), torch.full_like(x, float("nan"))
        norm.rms_norm(x.float(), None if w is None else w.float(), 1e-6, want)
        ops["rms_norm"](x=x, weight=w, eps=1e-6, out=got)
        close(got, want)


# In parts, in no whole eights, and of more values than a block holds.
ROWS = ((2, 2104, torch.bfloat16), (3, 250, torch.bfloat16), (3, 300, torch.float32), (1, 8200, torch.bfloat16))


def test_in_the_model_of_a_gpu():
    calls = [("test_rms_norm", {"tokens": tokens, "d": d, "dtype": dtype}) for tokens, d, dtype in ROWS]
    in_model.run(__name__, calls)
