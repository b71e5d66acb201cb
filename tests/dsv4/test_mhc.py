"""mHC against its formulas in fp64: torch_ops/mhc.py, and kernels/copies.cu on a GPU and in the model of one."""

import dataclasses

import pytest
import torch

from problems.dsv4_forward import layers
from problems.dsv4_forward.kernels.copies import Copies as kernel
from problems.dsv4_forward.torch_ops import mhc
from problems.dsv4_forward.weights.config import FLASH, Config
from problems.dsv4_forward.weights.tree import Site
from tests.dsv4 import in_model
from tests.dsv4.in_model import draw_uneven as draw

DEVICE = "cuda"
BF16, FP32 = torch.bfloat16, torch.float32
N, D = 4, 40  # d is no multiple of n squared, n d none of a vector's width
CFG = dataclasses.replace(FLASH, hidden_size=D)


def is_kernel(table: dict) -> bool:
    """Whether bits do not depend on the other tokens: of a CPU's matrix products they do."""
    return set(table) == set(kernel.OPS)


def near(got: torch.Tensor, want: torch.Tensor, terms: torch.Tensor, noise: float = 2e-5) -> None:
    """One rounding of bf16, or fp32 sums in another order."""
    step = 2.0**-8 if got.dtype == BF16 else noise
    error = (got.double() - want).abs()
    assert bool((error <= step * want.abs() + noise * terms).all()), float(error.max())


def written(y, second, copies, post, comb) -> tuple[torch.Tensor, torch.Tensor]:
    """post_k y + sum_j comb_jk copies_j in fp64, and the sum of its terms' sizes. y is rounded once, as a sum."""
    y = y.double() if second is None else torch.add(y.float(), second.float()).to(copies.dtype).double()
    first, mixed = post.double().unsqueeze(2) * y.unsqueeze(1), comb.double().mT
    return first + mixed @ copies.double(), first.abs() + mixed @ copies.double().abs()


def writing(tokens: int, d: int, addends: tuple, dtype: torch.dtype) -> dict:
    first, second = (None if kind is None else draw(tokens, d, dtype=kind, seed=i) for i, kind in enumerate(addends))
    comb = torch.rand(tokens, N, N, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    copies, post = draw(tokens, N, d, dtype=dtype, seed=2), draw(tokens, N, seed=3).abs()
    return {"y": first, "second": second, "copies": copies, "post": post, "comb": comb}


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
def test_mhc_post(either, tokens, d, addends, dtype):
    """A sum is rounded once, to the dtype of the copies: by element, of the terms' sizes."""
    given = writing(tokens, d, addends, dtype)
    got, one = (torch.full_like(given["copies"][first:], float("nan")) for first in (0, -1))
    assert either["mhc_post"](**given, out=got) is None
    near(got, *written(**given), 1e-6)
    if is_kernel(either):
        either["mhc_post"](**{name: part if part is None else part[-1:] for name, part in given.items()}, out=one)
        assert torch.equal(one, got[-1:])  # a token by itself


def site(width: int, rows: int, scales: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    fn = draw(rows, width, seed=2)
    return (
        fn / fn.norm(dim=1, keepdim=True) * 3,
        draw(rows, seed=3).clamp(-2, 2),
        draw(scales, seed=4).abs().clamp(0.3, 1),
    )


def exact(copies: torch.Tensor, fn, base, scale, cfg: Config) -> tuple[torch.Tensor, ...]:
    """-> u and the sum of its terms' sizes, post and comb, in fp64."""
    flat, eps = copies.double().flatten(1), cfg.hc_eps
    z = flat @ fn.double().t() * (flat.square().mean(1, keepdim=True) + cfg.rms_norm_eps).rsqrt()
    z = z * scale.double().repeat_interleave(torch.tensor([N, N, N * N], device=z.device)) + base.double()
    u, terms = (torch.einsum("tj,tjd->td", z[:, :N].sigmoid() + eps, part.double()) for part in (copies, copies.abs()))
    comb = z[:, 2 * N :].view(-1, N, N).softmax(2) + eps
    for turn in range(2 * cfg.hc_sinkhorn_iters - 1):  # columns, which are sums over the first index, at both ends
        comb = comb / (comb.sum(1 + turn % 2, keepdim=True) + eps)
    return u, terms, 2 * z[:, N : 2 * N].sigmoid(), comb


def ours(op, copies: torch.Tensor, given: tuple, cfg: Config, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    tokens, _, d = copies.shape
    kinds = (((tokens, d), dtype or copies.dtype), ((tokens, N), FP32), ((tokens, N, N), FP32))
    outs = [torch.full(shape, float("nan"), device=DEVICE, dtype=kind) for shape, kind in kinds]
    op(copies, *given, cfg, *outs)
    return outs


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(
    ("tokens", "d", "iterations"),
    [(1, 256, 20), (3, 192, 1), (37, 250, 20), (18, 132, 2), (2, 4096, 20), (300, 512, 20)],
)
def test_mixing_the_copies(either, tokens, d, iterations, dtype):
    """post and comb are functions of the products: an error there shows at once. After 20 iterations of Sinkhorn one
    more changes nothing.
    """
    cfg = dataclasses.replace(FLASH, hidden_size=d, hc_sinkhorn_iters=iterations)
    copies = draw(tokens, N, d, dtype=dtype) * torch.logspace(-1, 2, tokens, device=DEVICE).view(-1, 1, 1).to(dtype)
    given = site(N * d, cfg.hc_rows, 3)
    out, post, comb = got = ours(either["mhc_pre"], copies, given, cfg)
    u, terms, want_post, want_comb = exact(copies, *given, cfg)
    near(out, u, terms)
    near(post, want_post, torch.ones_like(post))
    near(comb, want_comb, torch.ones_like(comb))
    if is_kernel(either):
        alone = ours(either["mhc_pre"], copies[-1:], given, cfg)
        assert all(torch.equal(one, value[-1:]) for one, value in zip(alone, got, strict=True))


@pytest.fixture
def small(on_a_cpu) -> tuple[torch.Tensor, tuple]:
    """Copies on a CPU, down to where the epsilon of the norm acts; a site far from doubly stochastic."""
    fn, base, scale = site(N * D, CFG.hc_rows, 3)
    size = torch.tensor([1.0, 1e-3, 100.0, 0.1, 7.0]).view(-1, 1, 1)
    copies = torch.randn(5, N, D, generator=torch.Generator().manual_seed(1)) * size
    return copies, (fn, base * 8, scale * torch.tensor([1.0, 3.0, 8.0]))


@pytest.mark.parametrize("iterations", [1, 3, 20])
@pytest.mark.parametrize(
    ("rows", "base"),
    [
        (slice(0), ()),
        (slice(0, 2 * N), -30.0),  # sigmoids of 1e-13: pre has an epsilon and post has none
        (slice(0, 2 * N), 30.0),
        (slice(2 * N, None), torch.tensor([200.0, -200, -200, -200]).repeat(N)),  # columns of almost nothing
    ],
    ids=["as it is", "nothing", "ones", "columns"],
)
def test_odd_sites_of_the_reference(small, rows, base, iterations):
    """Far from where another iteration would change nothing, and of a size each."""
    (copies, (fn, changed, scale)), cfg = small, dataclasses.replace(CFG, hc_sinkhorn_iters=iterations)
    if isinstance(base, float):
        fn[rows], changed[rows] = 0, base
    elif len(base):
        changed[rows] = base
    (out, post, comb), want = ours(mhc.pre, copies, (fn, changed, scale), cfg), exact(copies, fn, changed, scale, cfg)
    near(out, *want[:2], 5e-6)
    near(post, want[2], want[2], 2e-5)
    near(comb, want[3], torch.ones_like(comb), 1e-5)


def test_head_is_the_first_part_of_a_site(small):
    copies, (fn, base, scale) = small
    whole = layers.whole_site(Site(fn[:N], base[:N], scale[:1]), CFG)
    out, *_ = ours(mhc.pre, copies, (whole.fn, whole.base, whole.scale), CFG)
    near(out, *exact(copies, fn, base, scale, CFG)[:2], 5e-6)


def test_bf16_copies_are_rounded_once(small):
    copies, given = small[0].bfloat16(), small[1]
    (short, *both), (whole, *same) = (ours(mhc.pre, copies, given, CFG, dtype) for dtype in (BF16, FP32))
    assert torch.equal(short, whole.bfloat16()) and all(map(torch.equal, both, same))
    parts = writing(5, D, (BF16, None), BF16)
    out, exact_ = torch.empty_like(copies), torch.empty(copies.shape)
    mhc.post(**parts, out=out)
    mhc.post(**parts, out=exact_)
    assert torch.equal(out, exact_.bfloat16())


def refused(op, names: str, given: list, *wrong: tuple[str, object]) -> None:
    """op names an argument that is another. wrong: its name, the value."""
    given = dict(zip(names.split(), given, strict=True))
    for name, value in wrong:
        with pytest.raises(ValueError, match=f"^{name} must be"):
            op(**given | {name: value})


PRE, WRITING = "copies fn base scale cfg out post comb", "y second copies post comb out"


def test_wrong_arguments_are_named(small):
    copies, (fn, base, scale) = small
    outs = [torch.empty(5, D), torch.empty(5, N), torch.empty(5, N, N)]
    some = ("fn", fn[:23]), ("fn", fn[:, :-1]), ("scale", scale[:1]), ("out", torch.empty(5, D + 1)), ("post", fn)
    given = [copies, fn, base, scale, CFG, *outs]
    refused(mhc.pre, PRE, given, *some, ("base", base.double()), ("comb", outs[2].half()))
    refused(kernel.__new__(kernel).mhc_pre, PRE, given, *some, ("copies", copies.half()), ("out", outs[0].bfloat16()))
    given = [outs[0], outs[0], copies, *outs[1:], torch.empty_like(copies)]
    some = ("y", torch.empty(5, 1)), ("second", torch.zeros(5, 9)), ("post", torch.zeros(5, 5)), ("out", outs[0])
    refused(mhc.post, WRITING, given, *some[1:])
    refused(mhc.post, WRITING, [outs[0], None, *given[2:]], some[0])
    turned = torch.zeros(N, N, 5).permute(2, 0, 1)
    some = *some[1:], ("y", outs[0].half()), ("out", copies.bfloat16()), ("comb", turned)
    refused(lambda **named: kernel.mhc_post(None, **named), WRITING, given, *some)
    narrow = dict(zip(WRITING.split(), given, strict=True)) | {"copies": copies[:, :3]}
    assert kernel.mhc_post(None, **narrow) is NotImplemented


# Two blocks of a token; two tiles of tokens and several parts of a sum.
POST = [("test_mhc_post", {"tokens": 3, "d": 300, "addends": (FP32, BF16), "dtype": dtype}) for dtype in (BF16, FP32)]
MODEL = [POST[0], ("test_mixing_the_copies", {"tokens": 18, "d": 132, "iterations": 2, "dtype": BF16})]
LONG = [
    POST[1],
    *(("test_mhc_post", {"tokens": 3, "d": 300, "addends": (BF16, None), "dtype": dtype}) for dtype in (FP32, BF16)),
    ("test_mixing_the_copies", {"tokens": 18, "d": 132, "iterations": 2, "dtype": FP32}),
    ("test_mixing_the_copies", {"tokens": 18, "d": 300, "iterations": 3, "dtype": BF16}),
    ("test_mixing_the_copies", {"tokens": 264, "d": 512, "iterations": 1, "dtype": BF16}),
]

test_in_the_model_of_a_gpu = in_model.test_of(__name__, MODEL, LONG)
