"""problems/dsv4_forward/torch_ops/indexer.py: scores against fp64 loops, the selection against a sorted list."""

from types import SimpleNamespace

import pytest
import torch

from problems.common import load
from problems.dsv4_forward import trace
from problems.dsv4_forward.cache.pages import Pages
from problems.dsv4_forward.torch_ops import indexer
from problems.dsv4_forward.weights import config, formats
from tests.dsv4.experts import Raises

WIDTH, PAGE, SCALE = 128, 32, 0.3


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def filled(kind: str, tables: torch.Tensor, n_pages: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Pages:
    """Pages of which those in `tables` hold normal keys, and the others values far away."""
    shape, kept = Pages.shape(kind, n_pages, PAGE, WIDTH, 64)
    data = torch.zeros(shape, dtype=dtype if kind == "plain" else kept)
    pages = Pages(data, PAGE, kind, WIDTH, 64)
    pages.write(torch.arange(n_pages * PAGE), torch.full((n_pages * PAGE, WIDTH), 1e4))
    index = (tables.long().flatten().unsqueeze(1) * PAGE + torch.arange(PAGE)).flatten()
    pages.write(index, torch.randn(len(index), WIDTH, generator=generator(seed)))
    return pages


def wanted(q, weights, keys, table, entries) -> torch.Tensor:
    """fp64; each entry's key is read on its own."""
    want = torch.zeros(*q.shape[:2], entries, dtype=torch.float64)
    for b in range(len(q)):
        for i in range(entries):
            key = keys.read(torch.tensor([int(table[b, i // PAGE]) * PAGE + i % PAGE]))[0].double()
            want[b, :, i] = (SCALE * weights[b].double() * (q[b].double() @ key).clamp(min=0)).sum(-1)
    return want


def problem(batch: int, tokens: int, heads: int, entries: int, kind="plain", dtype=torch.float32, spare=0):
    """Distinct heads, weights of both signs, shuffled pages, a table with `spare` blocks more than needed."""
    gen = generator(batch * 1000 + entries)
    q = torch.randn(batch, tokens, heads, WIDTH, generator=gen)
    q = (q * (1 + torch.arange(heads).unsqueeze(1))).to(dtype)
    weights = torch.randn(batch, tokens, heads, generator=gen)
    blocks = -(-entries // PAGE)
    n_pages = batch * blocks + 3
    table = torch.randperm(n_pages, generator=gen)[: batch * blocks].view(batch, blocks)
    keys = filled(kind, table, n_pages, dtype)
    table = torch.cat((table, torch.full((batch, spare), -1)), 1).to(torch.int32)
    return q, weights, keys, table


def scored(q, weights, keys, table, entries) -> torch.Tensor:
    out = torch.full((*q.shape[:2], entries), torch.nan)
    indexer.index_scores(q, weights, SCALE, keys, table, entries, out)
    return out


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    """fp32 sums of 128 products, then of the heads: within 1e-5 of the largest score of the row."""
    assert got.shape == want.shape
    assert not got.numel() or ((got - want).abs() <= 1e-5 * want.abs().amax(-1, keepdim=True)).all()


@pytest.mark.parametrize(
    "given",
    [
        *((1, 1, 5, 1), (3, 2, 4, PAGE), (2, 3, 7, 97), (2, 1, 3, 0)),
        *((2, 3, 5, 61, kind, dtype) for kind in ("plain", "index") for dtype in (torch.bfloat16, torch.float32)),
        (2, 1, 3, 40, "plain", torch.float32, 5),  # a table that is wider than the entries, with holes there
    ],
    ids=str,
)
def test_scores(given):
    """Those of the values that the pages hold: FP4 keys are read, not rounded again; bf16 weights scale in fp32."""
    (q, weights, keys, table), entries = problem(*given), given[3]
    for mixed in (weights, weights.bfloat16()):
        close(scored(q, mixed, keys, table, entries), wanted(q, mixed, keys, table, entries))


@pytest.mark.parametrize("tile", [1, 2 * 3 * 5 * PAGE, 2 * 3 * 5 * PAGE * 2 + 1])
def test_scores_in_tiles_of_entries(monkeypatch, tile):
    args = problem(2, 3, 5, 97, spare=2)
    monkeypatch.setattr(indexer, "TILE", tile)
    close(scored(*args, 97), wanted(*args, 97))


def test_wrong_arguments_are_named():
    q, weights, keys, table = problem(2, 1, 3, 33)
    out = torch.empty(2, 1, 33)
    for name, args in {
        "weights": (q, weights[..., :2], SCALE, keys, table, 33, out),
        "table": (q, weights, SCALE, keys, table[:, :1], 33, out),
        "out": (q, weights, SCALE, keys, table, 33, out[..., :32]),
    }.items():
        with pytest.raises(ValueError, match=f"^{name}"):
            indexer.index_scores(*args)
    for scores, kept in ((torch.zeros(1, 1, 4).double(), torch.int32), (torch.zeros(1, 1, 4), torch.int64)):
        with pytest.raises(ValueError, match="scores must be fp32 and out int32"):
            indexer.select(scores, torch.ones(1, 1, dtype=torch.int64), torch.empty(1, 1, 2, dtype=kept))


def test_places_of_entries():
    ids = torch.tensor([[[0, 31, 32, -1]], [[5, 64, -1, 63]]], dtype=torch.int32)
    table, out = torch.tensor([[7, 2, 9], [1, 8, 4]], dtype=torch.int32), torch.empty(2, 1, 4, dtype=torch.int32)
    indexer.locate(ids, table, PAGE, out)
    assert out.tolist() == [[[224, 255, 64, -1]], [[37, 128, -1, 287]]]
    with pytest.raises(ValueError, match="out must be int32 as ids, of 3 sequences"):
        indexer.locate(ids, table.repeat(2, 1)[:3], PAGE, out)


def selected(scores: torch.Tensor, visible: torch.Tensor, k: int) -> torch.Tensor:
    out = torch.full((*scores.shape[:2], k), -7, dtype=torch.int32)
    indexer.select(scores, visible, out)
    return out


def listed(scores: torch.Tensor, visible: torch.Tensor, k: int) -> torch.Tensor:
    """By sorting (score falling, id rising) with Python's own comparison, where -0.0 == 0.0."""
    rows = []
    for row, seen in zip(scores.flatten(0, 1).tolist(), visible.flatten().tolist(), strict=True):
        best = sorted(range(seen), key=lambda i: (-row[i], i))[:k]
        rows.append(best + [-1] * (k - len(best)))
    return torch.tensor(rows, dtype=torch.int32).view(*scores.shape[:2], k)


@pytest.mark.parametrize(
    ("entries", "k", "levels"),
    [(1, 1, 0), (16, 16, 0), (17, 16, 0), (1009, 37, 0), (0, 4, 0), *((257, 16, levels) for levels in (1, 2, 5))],
)
def test_selection_with_ragged_visibility(entries, k, levels):
    """levels: so many scores that are equal among many entries, of which the lower ids win."""
    scores = torch.randn(3, 5, entries, generator=generator(entries)) * 100
    if levels:
        scores = torch.randint(0, levels, scores.shape, generator=generator(levels)).float() - levels // 2
    visible = torch.randint(0, entries + 1, (3, 5), generator=generator(k))
    visible[0, 0], visible[1, 1], visible[2, 2] = 0, entries, min(k, entries)
    before = scores.clone()
    assert torch.equal(selected(scores, visible, k), listed(scores, visible, k)) and torch.equal(scores, before)


def test_order_over_the_whole_range_of_floats():
    """Both zeros are one score; subnormals, infinities and the largest finite values are in order."""
    tiny, big = 2.0**-149, 3.4028234663852886e38
    values = [0.0, -0.0, tiny, -tiny, 2**-126, -(2**-126), 1.0, -1.0, big, -big, torch.inf, -torch.inf, -0.0, 0.0, 1.0]
    for seed in range(20):
        row = torch.tensor(values)[torch.randperm(len(values), generator=generator(seed))].view(1, 1, -1)
        assert torch.equal(selected(row, torch.tensor([[13]]), 9), listed(row, torch.tensor([[13]]), 9))


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -float("nan"), 3e38])
def test_what_is_not_visible_is_never_selected(value):
    scores = torch.randn(2, 2, 50, generator=generator(1)) - 1e4
    visible = torch.tensor([[0, 7], [16, 49]])
    want = listed(scores, visible, 16)
    hidden = torch.arange(50) >= visible.unsqueeze(2)
    assert torch.equal(selected(scores.masked_fill(hidden, value), visible, 16), want)


# The problem in the model's op choose: equal to the reference, and what it leaves to others.
FOLDER = load.PROBLEMS / "indexer"
HEADS, ENTRIES, TOPK = 32, 333, 40


@pytest.fixture(scope="module")
def call() -> dict:
    """Arguments of the op but for `out`: 3 sequences of 2 tokens, of which one sees fewer entries than are kept."""
    gen = torch.Generator().manual_seed(2)
    shape, dtype = Pages.shape("index", 40, PAGE, WIDTH)
    keys = Pages(torch.full(shape, 0xFF, dtype=dtype), PAGE, "index", WIDTH)
    table = torch.randperm(39, generator=gen)[:33].view(3, 11).int()
    for row in table.long():
        place = (row.unsqueeze(1) * PAGE + torch.arange(PAGE)).flatten()[:ENTRIES]
        keys.write(place, torch.randn(ENTRIES, WIDTH, generator=gen))
    table[2, 1:] = table[2, 0]  # a short sequence's row names pages again behind its end
    q = formats.round_trip_fp4(torch.randn(3, 2, HEADS, WIDTH, generator=gen), 32).bfloat16()
    weights = torch.randn(3, 2, HEADS, generator=gen)
    visible = torch.tensor([[332, 333], [150, 151], [29, 30]], dtype=torch.int32)
    given = {"q": q, "weights": weights, "scale": 0.01, "keys": keys}
    return given | {"table": table, "visible": visible, "entries": ENTRIES}


def run(op, call: dict) -> torch.Tensor:
    out = torch.full((*call["visible"].shape, TOPK), -7, dtype=torch.int32)
    assert op(**call, out=out) is not NotImplemented
    return out


def fit(variant: object, fmt: str = "released", cfg: object = config.CONFIGS["tiny-512"]) -> object:
    return load.module(FOLDER, "in_model").fit(variant, SimpleNamespace(format=fmt, config=cfg), ("choose",))


def sets(rows: torch.Tensor) -> list[set[int]]:
    return [set(row) for row in rows.flatten(0, 1).tolist()]


@pytest.mark.parametrize("name", ["torch_eager", "cpu_portable"])
def test_it_chooses_what_the_reference_does(call, name):
    want = run(indexer.choose, {**call, "q": call["q"].float()})
    assert sets(run(fit(load.variant("indexer", name)).functions["choose"], call)) == sets(want)
    assert (want >= 0).sum(2).tolist() == [[40, 40], [40, 40], [29, 30]]


def test_places_are_entries_again(call):
    ids = torch.tensor([[[0, 31, 32, -1]], [[330, -1, 5, 64]], [[29, 0, -1, -1]]], dtype=torch.int32)
    own, foreign = torch.empty_like(ids), torch.empty_like(ids)
    indexer.locate(ids, call["table"], PAGE, own)
    indexer.locate(ids, call["table"].roll(1, 0), PAGE, foreign)
    assert torch.equal(trace._entries(own, call), ids)
    assert bool((trace._entries(foreign, call)[ids >= 0] >= ENTRIES).all())


def test_what_it_does_not_serve_is_left(call):
    """fp32 queries, bf16 weights and plain pages; a kernel that raises shows who was called."""
    op, out = fit(Raises).functions["choose"], torch.zeros(3, 2, TOPK)
    plain = Pages(torch.randn(40, PAGE, WIDTH), PAGE, "plain", WIDTH)
    for changes in ({"q": call["q"].float()}, {"weights": call["weights"].bfloat16()}, {"keys": plain}):
        assert op(**{**call, **changes}, out=out) is NotImplemented and not bool(out.any())
    with pytest.raises(AssertionError, match="called"):
        run(op, call)
    assert fit(None, "bf16").refused == {"choose": "no MXFP4 keys in bf16"}
    other = SimpleNamespace(index_n_heads=8, index_head_dim=WIDTH)
    assert fit(None, cfg=other).refused == {"choose": "index heads must be 32 or 64 of 128, are 8 of 128"}
