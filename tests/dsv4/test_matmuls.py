"""kernels/matmuls.cu on a GPU, and in the model of one, against fp64."""

import functools

import pytest
import torch

from problems.dsv4_forward.kernels import matmuls as module
from tests.dsv4 import in_model

draw = functools.partial(in_model.draw, dtype=torch.bfloat16)
kernel = module.Matmuls  # for the fixture `ops`, and in_model
DEVICE = "cuda"
BF16, FP32 = torch.bfloat16, torch.float32
# Rows of the matrices: a CSA layer's, an HCA layer's; ends inside of a block's rows; more than one launch takes; few.
LAYERS = ((512, 2048, 64), (1024,), (9, 33, 8, 1, 70), (9, 17))


def outputs(tokens: int, rows: tuple[int, ...]) -> list[torch.Tensor]:
    """fp32, but every third bf16."""
    kinds = (BF16 if i % 3 == 2 else FP32 for i in range(len(rows)))
    return [
        torch.full((tokens, n), float("nan"), dtype=kind, device=DEVICE) for n, kind in zip(rows, kinds, strict=True)
    ]


def close(got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    """fp32 sums in another order, and one rounding of bf16."""
    want, terms = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    step = 2.0**-8 if got.dtype == BF16 else 0.0
    assert bool(((got.double() - want).abs() <= step * want.abs() + 1e-6 * terms).all())


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 9, 16, 17, 32, 33])
@pytest.mark.parametrize(("layer", "columns"), [(0, 4096), (1, 4096), (2, 1032), (2, 8), (1, 7168)])
def test_all_matrices_of_the_same_tokens(ops, tokens, layer, columns):
    rows, x = LAYERS[layer], draw(tokens, columns)
    weights = [draw(n, columns, seed=i + 1) for i, n in enumerate(rows)]
    got, again, one = outputs(tokens, rows), outputs(tokens, rows), outputs(1, rows)
    ops["matmuls"](x, weights, got)
    ops["matmuls"](x[-1:].clone(), weights, one)
    for weight, out, single, alone in zip(weights, got, again, one, strict=True):
        close(out, x, weight)
        ops["matmuls"](x, [weight], [single])
        assert torch.equal(out, single)
        if tokens <= module.MOST_TOKENS:
            assert torch.equal(out[-1:], alone), "a token by itself"


@pytest.mark.gpu
def test_what_it_does_not_serve_is_torchs(ops):
    """Other types, columns that are no whole 16 bytes, views; each still beside one that it serves."""
    x, weight = draw(3, 72), draw(16, 72, seed=1)
    others = (
        draw(16, 72, seed=2, dtype=FP32),
        draw(16, 80, seed=3)[:, :72],
        draw(17, 72, seed=4).view(-1)[3 : 3 + 1152],
    )
    weights = [weight, *(other.view(16, 72) if other.dim() == 1 else other for other in others)]
    assert [module.serves(x, one, outputs(3, (16,))[0]) for one in weights] == [True, False, False, False]
    got = outputs(3, (16, 16))
    for one in weights[1:]:
        ops["matmuls"](x, [one, weight], got)
        close(got[0], x, one)
        close(got[1], x, weight)
    with pytest.raises(ValueError, match="x must be"):
        ops["matmuls"](x[:, :64], [weight], outputs(3, (16,)))


SIZES = [(5, 3, 72), (1, 2, 72), (9, 3, 3080), (17, 3, 8), (20, 3, 264), (32, 3, 1032)]  # tokens, layer, columns
MODEL = [
    ("test_all_matrices_of_the_same_tokens", {"tokens": tokens, "layer": layer, "columns": columns})
    for tokens, layer, columns in SIZES
]
MODEL.insert(1, ("test_what_it_does_not_serve_is_torchs", {}))
test_in_the_model_of_a_gpu = in_model.test_of(__name__, MODEL[:2], MODEL[2:])
