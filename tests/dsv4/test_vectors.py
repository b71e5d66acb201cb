"""kernels/vectors.cu on a GPU, and in the model of one, against the same steps in torch, bit for bit."""

import pytest
import torch

from problems.common import load, nvfp4
from problems.dsv4_forward.kernels import vectors
from tests.dsv4 import in_model
from tests.dsv4.linears import GEMV

DEVICE = "cuda"
SHAPES = ((1, 1, 64), (1, 8, 4096), (3, 1, 1024), (16, 2, 320), (5, 3, 192))  # tokens, groups, k


def kernels() -> vectors.Vectors:
    return vectors.Vectors(load.device_target(DEVICE))


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Normal values of very different sizes, halfway points of the format, zeros of both signs."""
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=gen) * torch.rand(*shape[:-1], 1, generator=gen).mul(24).sub(16).exp2()
    halfway = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -6.0, 0.0, -0.0, 448 * 6, 1e-6])
    picked = halfway[torch.randint(len(halfway), shape, generator=gen)]
    x = torch.where(torch.rand(shape, generator=gen) < 0.3, picked, x)
    return torch.where(torch.arange(shape[-1]) // 16 % 5 == 3, torch.zeros(()), x).to(DEVICE, dtype)


def test_other_dtypes_are_refused():
    with pytest.raises(ValueError, match="x must be bf16 or fp32"):
        vectors._bf16("x", torch.zeros(2, dtype=torch.float16))


def encoded(edges: object, x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The operands of all tokens as the problem wants them, as bytes."""
    tokens, groups, k = x.shape
    room = GEMV.make_vectors(k, groups, x.device)
    limit = scale.unsqueeze(1) * nvfp4.E2M1_MAX * nvfp4.E4M3_MAX
    edges.encode(x, scale, -limit, limit, room.rows[tokens])
    return tuple(part.view(torch.uint8) for token in room.operands for part in token)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "groups", "k"), SHAPES)
def test_encode(tokens, groups, k, dtype):
    x, scale = draw(tokens, groups, k, dtype=dtype), torch.linspace(0.5, 3, groups, device=DEVICE) / 3
    for one in (scale, scale * 2**-20):  # most values within the range, and most beyond it
        got, want = encoded(kernels(), x, one), encoded(vectors.TorchVectors(), x, one)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    shifted = torch.cat([x.flatten(), x.flatten()[:1]])[1:].view(x.shape)  # not at a multiple of 16 bytes
    got, want = encoded(kernels(), shifted, scale), encoded(vectors.TorchVectors(), shifted, scale)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "groups", "m"), SHAPES)
def test_scale(tokens, groups, m, dtype):
    products = draw(tokens, groups, m, dtype=torch.float16)
    factor = torch.linspace(1e-6, 300, groups, device=DEVICE).unsqueeze(1)
    for room in (
        torch.empty(tokens, groups, m, dtype=dtype, device=DEVICE),
        torch.empty(tokens, groups, m + 3, dtype=dtype, device=DEVICE)[..., 1:-2],
    ):
        want = torch.mul(products, factor, out=torch.empty_like(room))
        kernels().scale(products, factor, room)
        assert torch.equal(room, want)


MODEL = [
    *(
        ("test_encode", {"tokens": 3, "groups": 3, "k": 192, "dtype": dtype})
        for dtype in (torch.float32, torch.bfloat16)
    ),
    *(("test_scale", {"tokens": 5, "groups": 3, "m": 70, "dtype": dtype}) for dtype in (torch.float32, torch.bfloat16)),
]


def test_in_the_model_of_a_gpu():
    in_model.run(__name__, MODEL)
