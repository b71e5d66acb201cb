"""The indexer problem in the model's op choose: equal to the reference, and what it leaves to others."""

from types import SimpleNamespace

import pytest
import torch

from problems.common import load
from problems.dsv4_forward import trace
from problems.dsv4_forward.cache.pages import Pages
from problems.dsv4_forward.torch_ops import indexer
from problems.dsv4_forward.weights import config, formats
from tests.dsv4.experts import Raises

FOLDER = load.PROBLEMS / "indexer"
WIDTH, HEADS, PER_PAGE, ENTRIES, TOPK = 128, 32, 32, 333, 40


@pytest.fixture(scope="module")
def call() -> dict:
    """Arguments of the op but for `out`: 3 sequences of 2 tokens, of which one sees fewer entries than are kept."""
    gen = torch.Generator().manual_seed(2)
    shape, dtype = Pages.shape("index", 40, PER_PAGE, WIDTH)
    keys = Pages(torch.full(shape, 0xFF, dtype=dtype), PER_PAGE, "index", WIDTH)
    table = torch.randperm(39, generator=gen)[:33].view(3, 11).int()
    for row in table.long():
        place = (row.unsqueeze(1) * PER_PAGE + torch.arange(PER_PAGE)).flatten()[:ENTRIES]
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
    indexer.locate(ids, call["table"], PER_PAGE, own)
    indexer.locate(ids, call["table"].roll(1, 0), PER_PAGE, foreign)
    assert torch.equal(trace._entries(own, call), ids)
    assert bool((trace._entries(foreign, call)[ids >= 0] >= ENTRIES).all())


def test_what_it_does_not_serve_is_left(call):
    """fp32 queries, bf16 weights and plain pages; a kernel that raises shows who was called."""
    op, out = fit(Raises).functions["choose"], torch.zeros(3, 2, TOPK)
    plain = Pages(torch.randn(40, PER_PAGE, WIDTH), PER_PAGE, "plain", WIDTH)
    for changes in ({"q": call["q"].float()}, {"weights": call["weights"].bfloat16()}, {"keys": plain}):
        assert op(**{**call, **changes}, out=out) is NotImplemented and not bool(out.any())
    with pytest.raises(AssertionError, match="called"):
        run(op, call)
    assert fit(None, "bf16").refused == {"choose": "no MXFP4 keys in bf16"}
    other = SimpleNamespace(index_n_heads=8, index_head_dim=WIDTH)
    assert fit(None, cfg=other).refused == {"choose": "index heads must be 32 or 64 of 128, are 8 of 128"}
