"""kernels/fused.cu on a GPU, and in the model of one, against the torch components in fp64 or fp32."""

import pytest
import torch

from problems.dsv4_forward.kernels import fused as kernel
from problems.dsv4_forward.torch_ops import norm, rope
from problems.dsv4_forward.weights.config import TINY
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


def close(got: torch.Tensor, want: torch.Tensor, terms: torch.Tensor | None = None) -> None:
    """One rounding of bf16, or fp32 sums in another order: of every element, and of the terms that it is the sum of,
    which may cancel. terms: the sum of their sizes; default: a share of the row.
    """
    step = 2.0**-8 if got.dtype == torch.bfloat16 else 2e-5
    want = want.double()
    error, size = (got.double() - want).abs(), 0.05 * want.abs().amax(-1, keepdim=True)
    assert bool((error <= step * (want.abs() + (size if terms is None else terms))).all()), float(error.max())


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def test_mixed_dtypes_and_views_are_refused():
    bf16, fp32 = torch.zeros(2, 8, dtype=torch.bfloat16), torch.zeros(2, 8)
    with pytest.raises(ValueError, match="all be bf16 or all fp32"):
        kernel._bf16(bf16, fp32)
    with pytest.raises(ValueError, match="all be bf16 or all fp32"):
        kernel._bf16(fp32.half())
    with pytest.raises(ValueError, match="contiguous"):
        kernel._bf16(fp32.t())
    with pytest.raises(ValueError, match="copies must be"):
        kernel._shape(torch.zeros(2, 3, 8))


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
        ops["rms_norm"](x, w, 1e-6, got)
        close(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("shape", [(1, 128), (3, 128), (130, 5, 192), (2, 64, 512)])
def test_rotate(ops, shape, dtype, inverse):
    x = draw(*shape, dtype=dtype)
    position = torch.arange(shape[0], device=DEVICE) * 977 + 5
    cos, sin = rope.angles(position, rope.frequencies(TINY, 4, DEVICE))
    want, got = torch.empty_like(x, dtype=torch.float32), torch.full_like(x, float("nan"))
    rope.rotate(x.float(), cos, sin, want, inverse)
    ops["rotate"](x, cos, sin, got, inverse)
    close(got, want)
    ops["rotate"](x, cos, sin, x, inverse)
    assert torch.equal(x, got)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "d"), SHAPES)
def test_writing_the_copies(ops, tokens, d, dtype):
    copies = draw(tokens, 4, d, dtype=dtype) * torch.logspace(-1, 2, tokens, device=DEVICE).view(-1, 1, 1).to(dtype)
    post, comb = draw(tokens, 4, seed=3), draw(tokens, 4, 4, seed=4)
    y, written = draw(tokens, d, dtype=dtype, seed=5), torch.full_like(copies, float("nan"))
    ops["mhc_post"](y, copies, post, comb, written)
    want, size = (
        torch.einsum("tk,td->tkd", p, part) + torch.einsum("tjk,tjd->tkd", c, held)
        for p, part, c, held in (
            (post.double(), y.double(), comb.double(), copies.double()),
            (post.double().abs(), y.double().abs(), comb.double().abs(), copies.double().abs()),
        )
    )
    close(written, want, size)


ROWS = (
    (2, 2104, torch.bfloat16),
    (3, 250, torch.bfloat16),
    (3, 300, torch.float32),
)  # in parts, in values that are no eights
MODEL = [
    ("test_rotate", {"shape": (3, 5, 192), "dtype": torch.bfloat16, "inverse": True}),
    ("test_rotate", {"shape": (3, 128), "dtype": torch.float32, "inverse": False}),
    *(
        (test, {"tokens": tokens, "d": d, "dtype": dtype})
        for test in ("test_rms_norm", "test_writing_the_copies")
        for tokens, d, dtype in ROWS
    ),
]


def test_in_the_model_of_a_gpu():
    in_model.run(__name__, MODEL)
