"""The fmha_decode problem in the model's op fmha: equal to the reference, and what it leaves to others."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from problems.common import load
from problems.dsv4_forward.cache.pages import Pages
from problems.dsv4_forward.torch_ops import fmha, rope
from problems.dsv4_forward.weights import config
from tests.dsv4 import in_model
from tests.dsv4.experts import Raises

FOLDER = load.PROBLEMS / "fmha_decode"
WIDTH, ROPE, HEADS = 512, 64, 8
DEVICE = "cuda"
ALIKE = "test_a_token_has_the_same_bits_among_others_and_with_a_longer_list"


class kernel:  # as in_model has it
    """Our winner on Hopper."""

    @staticmethod
    def ops(target: str) -> dict:
        return fit(load.variant("fmha_decode", "sm90_wgmma")).functions


def pages(count: int, per_page: int, seed: int) -> Pages:
    """Pages whose bytes that belong to no entry are NaN in every format, as the model's are."""
    shape, dtype = Pages.shape("entry", count, per_page, WIDTH, ROPE)
    made = Pages(torch.full(shape, 0xFF, dtype=dtype), per_page, "entry", WIDTH, ROPE)
    rows = torch.randn(count * per_page, WIDTH, generator=torch.Generator().manual_seed(seed))
    made.write(torch.arange(count * per_page)[1:], rows[1:])  # entry 0 stays NaN: holes must not read it
    return made


def lists(tokens: int, n: int, most: int, seed: int) -> torch.Tensor:
    """int32 (tokens, 1, n) of entries from 1 on, a third of them holes."""
    source = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, most, (tokens, 1, n), generator=source, dtype=torch.int32)
    return ids.masked_fill_(torch.rand(tokens, 1, n, generator=source) < 1 / 3, -1)


@pytest.fixture(scope="module")
def call():
    """Arguments of the op but for its outputs, five tokens of which the last has no entry at all."""
    q = torch.randn(5, 1, HEADS, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()
    window, cache = pages(3, 64, 2), pages(40, 1, 3)
    ids, chosen = lists(5, 100, 192, 4), lists(5, 37, 40, 5)
    ids[4], chosen[4] = -1, -1
    return q, window, ids, cache, chosen, torch.linspace(-3, 3, HEADS), WIDTH**-0.5


def run(op, arguments: tuple) -> tuple[torch.Tensor, torch.Tensor]:
    q = arguments[0]
    out, lse = torch.full_like(q, float("nan")), torch.full(q.shape[:3], float("nan"), device=q.device)
    assert op(*arguments, out, lse) is not NotImplemented
    return out, lse


def angles(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    turn = torch.linspace(-9, 9, tokens * ROPE // 2).view(tokens, ROPE // 2)
    return turn.cos(), turn.sin()


def fit(variant: object, fmt: str = "released", name: str = "tiny-512") -> object:
    weights = SimpleNamespace(format=fmt, config=config.CONFIGS[name])
    return load.module(FOLDER, "in_model").fit(variant, weights, ("fmha",))


def close(got: tuple, want: tuple) -> None:
    task = load.module(FOLDER, "task")
    error = (got[0].float() - want[0]).norm(dim=-1)
    assert bool((error <= task.ROW_RTOL * want[0].norm(dim=-1)).all())
    torch.testing.assert_close(got[1], want[1], atol=task.LSE_ATOL, rtol=0)


@pytest.mark.parametrize("without_cache", [False, True])
def test_it_attends_as_the_reference_does(call, without_cache):
    arguments = (*call[:3], None, None, *call[5:]) if without_cache else call
    turn = angles(5)
    want = run(fmha.fmha, (call[0].float(), *arguments[1:], *turn))
    close(run(fit(load.variant("fmha_decode", "torch_eager")).functions["fmha"], (*arguments, *turn)), want)
    assert bool((want[0][4] == 0).all()) and bool(torch.isposinf(want[1][4]).all())


def test_what_it_does_not_serve_is_left(call):
    """fp32 activations, plain pages, an empty window; on the last, a kernel that raises shows who was called."""
    op, turn = fit(Raises).functions["fmha"], angles(5)
    plain = Pages(torch.zeros(3, 64, WIDTH, dtype=torch.bfloat16), 64, "plain", WIDTH)
    q, window, ids, *rest = call
    out, lse = torch.zeros_like(q), torch.zeros(q.shape[:3])
    for arguments in ((q.float(), window, ids, *rest), (q, plain, ids, *rest), (q, window, ids[:, :, :0], *rest)):
        assert op(*arguments, *turn, out, lse) is NotImplemented and not bool(out.any() or lse.any())
    with pytest.raises(AssertionError, match="called"):
        run(op, (*call, *turn))
    with pytest.raises(ValueError, match=r"scale must be 0\.04"):
        run(op, (*call[:6], 1.0, *turn))
    assert fit(None, "bf16").refused == {"fmha": "no 584-byte cache entries in bf16"}
    assert fit(None, name="tiny").refused == {"fmha": "head_dim must be 512, is 128"}


def there(tokens: int, heads: int, entries: tuple[int, int], seed: int) -> tuple:
    """Arguments of the op but for its outputs, and angles by themselves."""
    q = torch.randn(tokens, 1, heads, WIDTH, generator=torch.Generator().manual_seed(seed)).bfloat16().to(DEVICE)
    ids, chosen = (lists(tokens, n, most, 7).to(DEVICE) for n, most in zip(entries, (192, 40), strict=True))
    window, cache = (dataclasses.replace(one, data=one.data.to(DEVICE)) for one in (pages(3, 64, 2), pages(40, 1, 3)))
    sink = torch.linspace(-3, 3, heads).to(DEVICE)
    return [q, window, ids, cache, chosen, sink, WIDTH**-0.5], tuple(one.to(DEVICE) for one in angles(tokens))


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "entries"), [(64, (100, 188)), (64, (40, 60)), (70, (20, 0)), (9, (40, 25))])
def test_the_kernel_rotates_back(ops, heads, entries):
    """The bits of the two steps, but where a sum of two products is rounded once more: many splits, few, none; few
    heads. The last token has no entry.
    """
    given, turn = there(2, heads, entries, 6)
    given[2][1], given[4][1] = -1, -1
    still = torch.ones_like(turn[0]), torch.zeros_like(turn[0])  # turned by no angle
    (want, lse), (got, same) = (run(ops["fmha"], (*given, *by)) for by in (still, turn))
    rope.rotate(want, *turn, want, inverse=True)
    assert torch.equal(got[..., :-ROPE], want[..., :-ROPE]) and torch.equal(lse, same)
    assert bool(want[0].abs().sum() > 0) and bool((want[1] == 0).all())
    assert bool(((got.float() - want.float()).norm(dim=-1) <= 2**-12 * want.float().norm(dim=-1)).all())


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "entries"), [(64, (128, 512)), (9, (128, 37)), (128, (100, 1024)), (4, (40, 0))])
def test_a_token_has_the_same_bits_among_others_and_with_a_longer_list(ops, heads, entries):
    (q, window, ids, cache, chosen, *rest), turn = there(8, heads, entries, 8)
    more = torch.nn.functional.pad(chosen, (0, 200), value=-1)

    def attended(some: slice, listed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        given = q[some], window, ids[some], cache, listed[some], *rest, *(one[some] for one in turn)
        return run(ops["fmha"], given)

    together = attended(slice(8), more)
    for some in (slice(3, 4), slice(3, 5)):
        assert all(torch.equal(a, b[some]) for a, b in zip(attended(some, chosen), together, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("test", "heads", "entries"),
    [
        *(("test_the_kernel_rotates_back", *each) for each in ((70, (20, 0)), (9, (40, 25)), (64, (40, 60)))),
        *((ALIKE, 9, entries) for entries in ((40, 0), (128, 37))),
    ],
)
def test_in_the_model_of_a_gpu(test, heads, entries):
    in_model.run(__name__, [(test, {"heads": heads, "entries": entries})])
