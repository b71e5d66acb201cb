"""kernels/copies.cu on a GPU, and in the model of one, against the torch components."""

import dataclasses

import pytest
import torch

from problems.dsv4_forward.kernels.copies import Copies as kernel
from problems.dsv4_forward.torch_ops import mhc
from problems.dsv4_forward.weights.config import FLASH
from tests.dsv4 import in_model

DEVICE = "cuda"
BF16, FP32 = torch.bfloat16, torch.float32


def draw(*shape: int, dtype: torch.dtype = FP32, seed: int = 0) -> torch.Tensor:
    """Rows of very different size."""
    gen = torch.Generator().manual_seed(seed)
    sizes = torch.rand(*shape[:-1], 1, generator=gen).mul(12).sub(6).exp2()
    return (torch.randn(shape, generator=gen) * sizes).to(DEVICE, dtype)


def test_wrong_arguments_are_named():
    run = kernel.mhc_post
    names = ("y", "second", "copies", "post", "comb", "out")
    shapes = ((2, 8), (2, 8), (2, 4, 8), (2, 4), (2, 4, 4), (2, 4, 8))
    given = {name: torch.zeros(shape) for name, shape in zip(names, shapes, strict=True)}
    site, cfg = (torch.zeros(24, 32), torch.zeros(24), torch.zeros(3)), dataclasses.replace(FLASH, hidden_size=8)
    outs = torch.zeros(2, 8), torch.zeros(2, 4), torch.zeros(2, 4, 4)
    made = kernel.__new__(kernel)
    for args, wanted in (
        ((torch.zeros(2, 4, 8).half(), *site, cfg, *outs), "copies must be fp32 or bf16"),
        ((torch.zeros(2, 4, 8), site[0][:4], *site[1:], cfg, *outs), r"fn must be torch.float32 \(24, 32\)"),
        ((torch.zeros(2, 4, 8), *site, cfg, outs[0].to(BF16), *outs[1:]), "out must be torch.float32"),
        ((torch.zeros(2, 4, 8), *site, cfg, outs[0], outs[1][:1], outs[2]), "post must be"),
    ):
        with pytest.raises(ValueError, match=wanted):
            made.mhc_pre(*args)
    for change, wanted in (
        ({"second": torch.zeros(2, 9)}, r"second must be torch.float32 \(2, 8\)"),
        ({"y": torch.zeros(2, 8).half()}, "y must be fp32 or bf16"),
        ({"post": torch.zeros(2, 5)}, "post must be"),
        ({"out": given["out"].to(BF16)}, "out must be torch.float32"),
        ({"comb": torch.zeros(4, 4, 2).permute(2, 0, 1)}, "comb must be .* strides"),
    ):
        with pytest.raises(ValueError, match=wanted):
            run(None, **given | change)
    assert run(None, **given | {"copies": torch.zeros(2, 3, 8)}) is NotImplemented


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("addends", "dtype"),
    [
        ((FP32, FP32), FP32),
        ((FP32, FP32), BF16),
        ((BF16, BF16), BF16),
        ((BF16, FP32), BF16),
        ((BF16, None), BF16),
        ((FP32, None), BF16),
        ((FP32, None), FP32),
    ],
)
@pytest.mark.parametrize(("tokens", "d"), [(1, 256), (3, 192), (5, 250), (2, 7168), (130, 4096)])
def test_mhc_post(ops, tokens, d, addends, dtype):
    """A sum is rounded once, to the dtype of the copies: by element, of the terms' sizes."""
    first, second = (None if kind is None else draw(tokens, d, dtype=kind, seed=i) for i, kind in enumerate(addends))
    copies, post = draw(tokens, 4, d, dtype=dtype, seed=2), draw(tokens, 4, seed=3).abs()
    comb = torch.rand(tokens, 4, 4, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    given = {"y": first, "second": second, "copies": copies, "post": post, "comb": comb}
    got, one = torch.full_like(copies, float("nan")), torch.full_like(copies[-1:], float("nan"))
    assert ops["mhc_post"](**given, out=got) is None
    y = first.double() if second is None else torch.add(first.float(), second.float()).to(dtype).double()
    written, mixed = post.double().unsqueeze(2) * y.unsqueeze(1), comb.double().mT
    want = written + mixed @ copies.double()
    terms = written.abs() + mixed @ copies.double().abs()
    step = 2.0**-8 if dtype == BF16 else 1e-6
    assert bool(((got.double() - want).abs() <= step * want.abs() + 1e-6 * terms).all())
    again = torch.full_like(copies, float("nan"))
    mhc.post(**given, out=again)
    assert bool(((got.double() - again.double()).abs() <= 2 * step * want.abs() + 2e-6 * terms).all())
    ops["mhc_post"](**{name: part if part is None else part[-1:] for name, part in given.items()}, out=one)
    assert torch.equal(one, got[-1:])  # a token by itself


def site(width: int, rows: int, scales: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    fn = draw(rows, width, seed=2)
    return (
        fn / fn.norm(dim=1, keepdim=True) * 3,
        draw(rows, seed=3).clamp(-2, 2),
        draw(scales, seed=4).abs().clamp(0.3, 1),
    )


def exact(copies: torch.Tensor, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
    """fn @ copies / rms(copies) * scale + base, fp64; scale by row."""
    flat = copies.double().flatten(1)
    return flat @ fn.double().t() * (flat.square().mean(1, keepdim=True) + eps).rsqrt() * scale.double() + base.double()


def collapsed(copies: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """sum_j weight_j copies_j, and the sum of its terms' sizes."""
    return tuple(torch.einsum("tj,tjd->td", weight, values) for values in (copies.double(), copies.double().abs()))


def near(got: torch.Tensor, want: torch.Tensor, terms: torch.Tensor) -> None:
    """One rounding of bf16, or fp32 sums in another order."""
    step = 2.0**-8 if got.dtype == BF16 else 2e-5
    error = (got.double() - want).abs()
    assert bool((error <= step * want.abs() + 2e-5 * terms).all()), float(error.max())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(
    ("tokens", "d", "iterations"),
    [(1, 256, 20), (3, 192, 1), (37, 250, 20), (18, 132, 2), (2, 4096, 20), (300, 512, 20)],
)
def test_mixing_the_copies(ops, tokens, d, iterations, dtype):
    """post and comb are functions of the products: an error there shows at once. After 20 iterations of Sinkhorn one
    more changes nothing.
    """
    cfg = dataclasses.replace(FLASH, hidden_size=d, hc_sinkhorn_iters=iterations)
    copies = draw(tokens, 4, d, dtype=dtype) * torch.logspace(-1, 2, tokens, device=DEVICE).view(-1, 1, 1).to(dtype)
    fn, base, scale = site(4 * d, cfg.hc_rows, 3)
    kinds = (((tokens, d), dtype), ((tokens, 4), FP32), ((tokens, 4, 4), FP32))
    out, post, comb = [torch.full(shape, float("nan"), device=DEVICE, dtype=kind) for shape, kind in kinds]
    ops["mhc_pre"](copies, fn, base, scale, cfg, out, post, comb)
    every = scale.repeat_interleave(torch.tensor([4, 4, 16], device=DEVICE))
    logits = exact(copies, fn, base, every, cfg.rms_norm_eps)
    near(out, *collapsed(copies, logits[:, :4].sigmoid() + cfg.hc_eps))
    near(post, 2 * logits[:, 4:8].sigmoid(), torch.ones_like(post))
    want = [torch.empty_like(value) for value in (out, post, comb)]
    mhc.pre(copies, fn, base, scale, cfg, *want)
    near(comb, want[2].double(), torch.ones_like(comb))
    alone = [torch.full_like(value[-1:], float("nan")) for value in (out, post, comb)]  # a token by itself
    ops["mhc_pre"](copies[-1:], fn, base, scale, cfg, *alone)
    assert all(torch.equal(one, value[-1:]) for one, value in zip(alone, (out, post, comb), strict=True))


# Two blocks of a token; two tiles of tokens and several parts of a sum.
MODEL = [
    *(
        ("test_mhc_post", {"tokens": 3, "d": 300, "addends": addends, "dtype": dtype})
        for addends in ((FP32, BF16), (BF16, None))
        for dtype in (FP32, BF16)
    ),
    ("test_mixing_the_copies", {"tokens": 18, "d": 132, "iterations": 2, "dtype": FP32}),
    ("test_mixing_the_copies", {"tokens": 18, "d": 300, "iterations": 3, "dtype": BF16}),
    ("test_mixing_the_copies", {"tokens": 264, "d": 512, "iterations": 1, "dtype": BF16}),
]


def test_in_the_model_of_a_gpu():
    in_model.run(__name__, MODEL)
