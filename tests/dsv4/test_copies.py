"""kernels/copies.cu on a GPU against the torch components, and that it compiles."""

import shutil

import pytest
import torch

from problems.common import load
from problems.dsv4_forward import ops as table
from problems.dsv4_forward.kernels import copies as kernel

DEVICE = "cuda"
REFERENCE = table.REFERENCE
BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(scope="module")
def ops():
    return kernel.ops(load.device_target(DEVICE))


def draw(*shape: int, dtype: torch.dtype = FP32, seed: int = 0) -> torch.Tensor:
    """Rows of very different size."""
    gen = torch.Generator().manual_seed(seed)
    sizes = torch.rand(*shape[:-1], 1, generator=gen).mul(12).sub(6).exp2()
    return (torch.randn(shape, generator=gen) * sizes).to(DEVICE, dtype)


@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
@pytest.mark.parametrize("target", kernel.TARGETS)
def test_it_compiles_without_spills(target):
    kernels = [one for artefact in kernel.compile_for(target) for one in artefact.kernels()]
    assert len(kernels) == 2 and not any(one.spill_bytes for one in kernels)


def test_wrong_arguments_are_named():
    run = kernel.Copies.mhc_post_sum
    names = ("first", "second", "copies", "post", "comb", "out")
    shapes = ((2, 8), (2, 8), (2, 4, 8), (2, 4), (2, 4, 4), (2, 4, 8))
    given = {name: torch.zeros(shape) for name, shape in zip(names, shapes, strict=True)}
    for change, wanted in (
        ({"second": torch.zeros(2, 9)}, r"second must be torch.float32 \(2, 8\)"),
        ({"first": torch.zeros(2, 8).half()}, "first must be fp32 or bf16"),
        ({"copies": torch.zeros(2, 3, 8)}, r"copies must be \(N, 4, d\), got \(2, 3, 8\)"),
        ({"post": torch.zeros(2, 5)}, "post must be"), ({"out": given["out"].to(BF16)}, "out must be torch.float32"),
        ({"comb": torch.zeros(4, 4, 2).permute(2, 0, 1)}, "comb must be .* strides"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=wanted):
            run(None, **given | change)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("addends", "dtype"), [((FP32, FP32), FP32), ((FP32, FP32), BF16), ((BF16, BF16), BF16), ((BF16, FP32), BF16)]
)
@pytest.mark.parametrize(("tokens", "d"), [(1, 256), (3, 192), (5, 250), (2, 7168)])
def test_mhc_post_sum(ops, tokens, d, addends, dtype):
    """The sum is rounded once, to the dtype of the copies: by element, of the terms' sizes."""
    first, second = draw(tokens, d, dtype=addends[0]), draw(tokens, d, dtype=addends[1], seed=1)
    copies, post = draw(tokens, 4, d, dtype=dtype, seed=2), draw(tokens, 4, seed=3).abs()
    comb = torch.rand(tokens, 4, 4, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    got, one = torch.full_like(copies, float("nan")), torch.full_like(copies[-1:], float("nan"))
    ops["mhc_post_sum"](first, second, copies, post, comb, got)
    y = torch.add(first.float(), second.float()).to(dtype).double()
    written, mixed = post.double().unsqueeze(2) * y.unsqueeze(1), comb.double().mT
    want = written + mixed @ copies.double()
    terms = written.abs() + mixed @ copies.double().abs()
    step = 2.0**-8 if dtype == BF16 else 1e-6
    assert bool(((got.double() - want).abs() <= step * want.abs() + 1e-6 * terms).all())
    again = torch.full_like(copies, float("nan"))
    REFERENCE.mhc_post_sum(first, second, copies, post, comb, again)
    assert bool(((got.double() - again.double()).abs() <= 2 * step * want.abs() + 2e-6 * terms).all())
    ops["mhc_post_sum"](first[-1:], second[-1:], copies[-1:], post[-1:], comb[-1:], one)  # a token by itself
    assert torch.equal(one, got[-1:])
