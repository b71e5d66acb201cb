"""kernels/argmax.py: the place of the largest logit, as torch.argmax finds it."""

import pytest
import torch

from problems.common import load
from problems.dsv4_forward.kernels import argmax
from tests.dsv4 import in_model

SHAPES = [(1, 1), (2, 37), (3, 1024), (1, 129_280), (8, 32_771)]
DEVICE = "cuda"


def rows(shape: tuple[int, int], device: str) -> torch.Tensor:
    """Random logits, with the largest value twice, zeros of both signs, NaN and infinities where there are rows."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    drawn[0, -1] = drawn[0, drawn.shape[1] // 2] = drawn[0].max() + 1
    if shape[0] > 2:
        drawn[1] = -0.0
        drawn[1, 9::5] = 0.0
        drawn[2, [5, 6, 77]], drawn[2, 3] = torch.nan, torch.inf
    if shape[0] > 3:
        drawn[3] = -torch.inf
    return drawn.to(device)


def found(logits: torch.Tensor) -> torch.Tensor:
    out = torch.full((len(logits),), -1, dtype=torch.int64, device=logits.device)
    length = torch.arange(len(logits) + 2, device=logits.device)
    sequences = torch.arange(len(logits), device=logits.device).flip(0) + 1
    argmax.argmax(logits, out, argmax.Longer(length, sequences, 10 * sequences))
    assert length.tolist() == [0, *(11 * i for i in range(1, len(logits) + 1)), len(logits) + 1]
    again = torch.empty_like(out)
    argmax.argmax(logits, again)
    assert torch.equal(again, out)
    return out


@pytest.mark.parametrize("shape", SHAPES)
def test_on_a_cpu_it_is_torchs(shape):
    logits = rows(shape, "cpu")
    assert torch.equal(found(logits), logits.argmax(1))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_on_a_gpu_it_is_what_a_cpu_finds(shape):
    logits = rows(shape, DEVICE)
    assert load.device_target(logits.device) in argmax.TARGETS
    places = found(logits)
    assert torch.equal(places.cpu(), logits.cpu().argmax(1))
    wide = torch.zeros(len(logits), logits.shape[1] + 1, device=DEVICE)
    wide[:, 1:] = logits
    assert torch.equal(found(wide[:, 1:]), places)  # not contiguous


# Values by fours in two blocks; in two turns, and one by one in two turns.
MODEL = [("test_on_a_gpu_it_is_what_a_cpu_finds", {"shape": s}) for s in ((4, 2500), (1, 140_000), (4, 8195))]
test_in_the_model_of_a_gpu = in_model.test_of(__name__, MODEL[:1], MODEL[1:])


def test_other_shapes_and_dtypes_are_refused():
    places, two = torch.zeros(3, dtype=torch.int64), torch.zeros(2, 3)
    for logits, out in ((two[0], places), (two, places), (two.half(), places[:2]), (two, torch.zeros(2))):
        with pytest.raises(ValueError, match="logits, out must be fp32"):
            argmax.argmax(logits, out)
    logits, one = torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)
    for wrong in (one[:1], one.int()):
        with pytest.raises(ValueError, match="int64 vectors, the first two of 2"):
            argmax.argmax(logits, one.clone(), argmax.Longer(one, wrong, one))
