"""problems/dsv4_forward/torch_ops/fmha.py against fp64 loops over queries, heads and entries."""

import math

import pytest
import torch

from problems.dsv4_forward.cache.pages import Pages
from problems.dsv4_forward.torch_ops import fmha, rope

KINDS = [("plain", torch.float32), ("plain", torch.bfloat16), ("entry", torch.bfloat16)]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def filled(kind: str, dtype: torch.dtype, n_pages: int, page: int, width: int, seed: int, spread: float = 1.0) -> Pages:
    """Pages whose entries all differ, with magnitudes spread over 10**+-spread."""
    gen = generator(seed)
    shape, kept = Pages.shape(kind, n_pages, page, width, 64)
    pages = Pages(torch.zeros(shape, dtype=dtype if kind == "plain" else kept), page, kind, width, 64)
    rows = torch.randn(n_pages * page, width, generator=gen)
    rows *= 10 ** (spread * (2 * torch.rand(len(rows), 1, generator=gen) - 1))
    pages.write(torch.arange(len(rows)), rows.to(dtype))
    return pages


def chosen(shape: tuple[int, ...], entries: int, holes: float, seed: int) -> torch.Tensor:
    """Distinct entries a query, from all over the pages in no order, a share `holes` of them -1."""
    gen = generator(seed)
    rows = [torch.randperm(entries, generator=gen)[: shape[-1]] for _ in range(math.prod(shape[:-1]))]
    index = torch.stack(rows).view(shape)
    return index.masked_fill(torch.rand(shape, generator=gen) < holes, -1).to(torch.int32)


def problem(shape=(2, 3, 5, 128), kind="plain", dtype=torch.float32, nw=9, ne=21, holes=0.3, q_dtype=torch.float32):
    """-> arguments of attend(), by name."""
    batch, tokens, heads, width = shape
    gen = generator(sum(shape) + nw + ne)
    q = torch.randn(shape, generator=gen) * (0.1 + torch.arange(heads).unsqueeze(1))  # heads of different sharpness
    return {
        "q": q.to(q_dtype),
        "window": filled(kind, dtype, 3, 64, width, 1),
        "window_index": chosen((batch, tokens, nw), 3 * 64, holes, 3),
        "cache": filled(kind, dtype, 7, 32, width, 2),
        "index": chosen((batch, tokens, ne), 7 * 32, holes, 4),
        "sink": torch.randn(heads, generator=gen),
        "scale": width**-0.5,
    }


def attend(out_dtype=torch.float32, **args) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.full(args["q"].shape, torch.nan, dtype=out_dtype)
    lse = torch.full(args["q"].shape[:3], torch.nan)
    fmha.attend(**args, out=out, lse=lse)
    return out, lse


def entry(pages: Pages, i: int) -> torch.Tensor:
    return pages.read(torch.tensor([i]))[0].double()


def wanted(q, window, window_index, cache, index, sink, scale) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """fp64, an entry at a time; the largest exponent, sink included, is taken out first. -> out, lse, sum of |p c|."""
    out, lse = torch.zeros(q.shape, dtype=torch.float64), torch.full(q.shape[:3], math.inf, dtype=torch.float64)
    size = out.clone()
    for b in range(q.shape[0]):
        for s in range(q.shape[1]):
            found = [entry(window, i) for i in window_index[b, s].tolist() if i >= 0]
            if cache is not None:
                found += [entry(cache, i) for i in index[b, s].tolist() if i >= 0]
            for h in range(q.shape[2] if found else 0):
                scores = [scale * float(q[b, s, h].double() @ c) for c in found]
                top = max(scores)
                total = sum(math.exp(a - top) for a in scores)
                lse[b, s, h] = math.log(total) + top
                peak = max(top, float(sink[h]))
                below = sum(math.exp(a - peak) for a in scores) + math.exp(float(sink[h]) - peak)
                for a, c in zip(scores, found, strict=True):
                    out[b, s, h] += math.exp(a - peak) / below * c
                    size[b, s, h] += math.exp(a - peak) / below * c.abs()
    return out, lse, size


def close(got, want, tolerance=2e-5) -> None:
    """Channel by channel, relative to the sum of the |p c| that make it up: no channel hides behind a larger one.

    2e-5: scores reach 50, where fp32 has steps of 4e-6, and a weight's relative error is its score's absolute one.
    """
    (out, lse), (want_out, want_lse, size) = got, want
    error = (out.double() - want_out).abs()
    assert (error <= tolerance * size + 1e-38).all(), f"worst {(error / size).nan_to_num(math.inf).max():.2e}"
    empty = want_lse == math.inf
    assert torch.equal(lse == math.inf, empty)
    assert ((lse.double() - want_lse).abs()[~empty] <= 1e-5 * (1 + want_lse.abs()[~empty])).all()


@pytest.mark.parametrize(
    "given",
    [
        *((shape, *kind) for shape in ((1, 1, 3, 128), (2, 3, 5, 192)) for kind in KINDS),
        *([shape] for shape in ((1, 2, 3, 40), (2, 3, 4, 17))),  # plain widths that are no multiples of anything
        *(((2, 2, 3, 128), *KINDS[0], *counts) for counts in ((64, 63), (127, 65))),  # around a tile of 64
    ],
    ids=str,
)
def test_window_and_cache(given):
    args = problem(*given)
    close(attend(**args), wanted(**args))


@pytest.mark.parametrize("kind, dtype", KINDS)
def test_window_alone(kind, dtype):
    args = problem(kind=kind, dtype=dtype) | {"cache": None, "index": None}
    close(attend(**args), wanted(**args))


def test_an_empty_list_of_entries_is_no_cache():
    args = problem(ne=0)
    none = args | {"cache": None, "index": None}
    for got, want in zip(attend(**args), attend(**none), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bf16_is_rounded_once(dtype):
    args = problem(kind="entry", dtype=torch.bfloat16, q_dtype=torch.bfloat16)
    full, _ = attend(**args)
    got, _ = attend(dtype, **args)
    assert got.dtype == dtype and torch.equal(got, full.to(dtype))
    close(attend(**args), wanted(**args))


@pytest.mark.parametrize("sink", [-math.inf, 0.0, 80.0, 1e30])
def test_sinks(sink):
    """A sink of 80 leaves e^-80 or so of the output; more leaves 0 (in fp32), never NaN."""
    args = problem()
    args["q"] *= 0.1
    args["sink"] = torch.full_like(args["sink"], sink)
    args["sink"][1] = 0.5  # one ordinary head beside the others
    got, want = attend(**args), wanted(**args)
    if sink > 80:
        assert (got[0][:, :, [0, 2, 3, 4]] == 0).all()
        got[0][:, :, [0, 2, 3, 4]], want[0][:, :, [0, 2, 3, 4]] = 0.0, 0.0  # fp64 has less than 1e-40 there
    close(got, want, 5e-5)  # exp(80) has lost 80 times as much as exp(1)


@pytest.mark.parametrize("sink", [-math.inf, 0.0, 80.0])
@pytest.mark.parametrize("alone", [True, False])
def test_rows_of_holes_beside_ordinary_rows(sink, alone):
    args = problem()
    args["sink"].fill_(sink)
    if alone:
        args |= {"cache": None, "index": None}
    else:
        args["index"][0, 1] = -1
        args["index"][1, 0] = -1  # a query with a window and no entries
    args["window_index"][0, 1] = -1
    args["window_index"][1, 2] = -1  # entries and no window, or nothing
    out, lse = attend(**args)
    assert (out[0, 1] == 0).all() and (lse[0, 1] == math.inf).all()
    close((out, lse), wanted(**args), 5e-5)


def test_nothing_to_attend_to():
    for args in (problem(holes=1.0), problem(nw=0) | {"cache": None, "index": None}):
        out, lse = attend(**args)
        assert (out == 0).all() and (lse == math.inf).all()


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 3e38])
def test_entries_that_no_index_names_never_count(garbage):
    """Among them entry 0, which a hole may stand on."""
    args = problem()
    for index in ("window_index", "index"):
        args[index][args[index] == 0] = -1
    want = attend(**args)
    for pages, index in (("window", "window_index"), ("cache", "index")):
        unused = torch.ones(args[pages].data.shape[:2].numel(), dtype=torch.bool)
        unused[args[index][args[index] >= 0].long()] = False
        args[pages].data.view(len(unused), -1)[unused] = garbage
    for got, wish in zip(attend(**args), want, strict=True):
        assert torch.equal(got, wish)


def test_the_row_maximum_is_the_rows_own():
    """Queries a thousand times apart, of both signs: no row's weights may depend on another row's scores."""
    args = problem((2, 3, 4, 64))
    for s, size in enumerate((1e-3, 1.0, 1e3)):
        args["q"][:, s] *= size
    args["q"][1] *= -1
    close(attend(**args), wanted(**args), 1e-3)  # scores of 1e4 have steps of 1e-3


def test_scores_far_below_zero():
    """All scores near -1000: a maximum that starts at 0, or counts a hole as 0, gives nothing or NaN."""
    args = problem((1, 2, 3, 64))
    for pages in ("window", "cache"):
        args[pages].data[..., 0] = 80.0
    args["q"][..., 0] = -100.0
    _, lse, _ = wanted(**args)
    assert (lse < -900).all()
    args["sink"].fill_(-1000.0)
    close(attend(**args), wanted(**args), 1e-3)
    args["sink"].fill_(-math.inf)
    close(attend(**args), wanted(**args), 1e-3)


def test_magnitudes_spread_over_six_decades():
    args = problem((2, 2, 3, 128))
    args["window"], args["cache"] = (filled("plain", torch.float32, n, p, 128, n, 3.0) for n, p in ((3, 64), (7, 32)))
    close(attend(**args), wanted(**args), 1e-3)


def test_an_entry_named_twice_counts_twice():
    args = problem((1, 1, 2, 64), holes=0.0)
    args["index"][0, 0, 3] = args["index"][0, 0, 4]
    close(attend(**args), wanted(**args))


@pytest.mark.parametrize("tile", [1, 128 * 30 * 2, 128 * 30 * 5])
def test_queries_in_tiles(monkeypatch, tile):
    args = problem()
    monkeypatch.setattr(fmha, "TILE", tile)
    close(attend(**args), wanted(**args))


def test_the_order_of_entries_does_not_matter():
    args = problem((1, 2, 3, 128))
    want = wanted(**args)
    args["index"] = args["index"].flip(2)
    args["window_index"] = args["window_index"].roll(2, 2)
    close(attend(**args), want)


def test_written_entries_are_near_what_was_written():
    """So that a fault that write and read share does not hide: e4m3 keeps 3 bits, bf16 8."""
    rows = torch.randn(64, 192, generator=generator(5))
    shape, kept = Pages.shape("entry", 2, 64, 192, 64)
    pages = Pages(torch.zeros(shape, dtype=kept), 64, "entry", 192, 64)
    order = torch.randperm(128, generator=generator(6))[:64]
    pages.write(order, rows.to(torch.bfloat16))
    got = pages.read(order)
    assert (got - rows).abs().max() < 0.25 and torch.equal(got[:, 128:], rows[:, 128:].bfloat16().float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fmha_rotates_back_what_is_rounded(dtype):
    args = problem((3, 2, 4, 64))
    angles = torch.randn(3, 16, generator=generator(9))
    got, lse = torch.empty(3, 2, 4, 64, dtype=dtype), torch.empty(3, 2, 4)
    fmha.fmha(**args, cos=angles.cos(), sin=angles.sin(), out=got, lse=lse)
    want, total = attend(dtype, **args)
    rope.rotate(want, angles.cos(), -angles.sin(), want)
    assert torch.equal(got, want) and torch.equal(lse, total)


def test_wrong_arguments_are_named():
    args = problem()
    for changed, message in [
        ({"index": None}, "cache and index"),
        ({"cache": None}, "cache and index"),
        ({"sink": args["sink"][:2]}, "sink must"),
        ({"sink": args["sink"].double()}, "sink must"),
    ]:
        with pytest.raises(ValueError, match=f"^{message}"):
            attend(**(args | changed))
    with pytest.raises(ValueError, match=r"^out must"):
        fmha.attend(**args, out=torch.empty(2, 3, 5, 127), lse=torch.empty(2, 3, 5))
    with pytest.raises(ValueError, match=r"^out must"):
        fmha.attend(**args, out=torch.empty(2, 3, 5, 128), lse=torch.empty(2, 3, 5).double())
