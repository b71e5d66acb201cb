"""kernels/indexer.cu on a GPU, and in the model of one, against torch_ops/indexer.py."""

import pytest
import torch

from problems.dsv4_forward.cache.pages import Pages
from problems.dsv4_forward.kernels.indexer import Indexer as kernel
from problems.dsv4_forward.torch_ops import indexer
from tests.dsv4 import in_model

DEVICE = "cuda"
BF16, FP32 = torch.bfloat16, torch.float32
PAGE, NO_PAGE = 32, -3


def draw(*shape: int, dtype: torch.dtype = FP32, seed: int = 0) -> torch.Tensor:
    """Rows of very different size."""
    gen = torch.Generator().manual_seed(seed)
    sizes = torch.rand(*shape[:-1], 1, generator=gen).mul(6).sub(3).exp2()
    return (torch.randn(shape, generator=gen) * sizes).to(DEVICE, dtype)


def test_wrong_arguments_are_named():
    keys, out = Pages(torch.zeros(9, 32, 96), 32, "plain", 96), torch.zeros(2, 3, 4).int()
    q, weights, table = torch.zeros(2, 3, 5, 96), torch.zeros(2, 3, 5), torch.zeros(2, 5).int()
    given = {"q": q, "weights": weights, "scale": 1.0, "keys": keys, "table": table, "entries": 70, "out": out}
    given["visible"] = torch.zeros(2, 3).int()
    choose = kernel.__new__(kernel).choose
    for change, wanted in (
        ({"table": table[:, :2].contiguous()}, "table must have blocks of 32 for 70 entries, got 2"),
        ({"table": table[:1]}, "table must be torch.int32"),
        ({"weights": weights.half()}, "weights must be fp32 or bf16"),
        ({"q": q[..., :64].contiguous()}, "q must be"),
        ({"visible": given["visible"].long()}, "visible must be torch.int32"),
        ({"out": out.long()}, "out must be torch.int32"),
    ):
        with pytest.raises(ValueError, match=wanted):
            choose(**given | change)
    for change in ({"out": torch.zeros(2, 3, 2049).int()}, {"entries": 2**22}, {"q": q[..., :95]}):
        assert choose(**given | change) is NotImplemented


def scored(batch: int, tokens: int, heads: int, entries: int, kind: str, dtype: torch.dtype, width: int = 128) -> tuple:
    """Arguments of indexer.index_scores; pages that no table names, and entries behind the last one, are NaN."""
    blocks = -(-entries // PAGE)
    n_pages = batch * blocks + 3
    shape, stored = Pages.shape(kind, n_pages, PAGE, width, 0, dtype)
    data = torch.empty(shape, dtype=stored, device=DEVICE)
    data.view(torch.uint8).fill_(255)
    pages = Pages(data, PAGE, kind, width)
    order = torch.randperm(n_pages, generator=torch.Generator().manual_seed(entries))[: batch * blocks].to(DEVICE)
    rows = order.view(batch, blocks)
    entry = torch.arange(entries, device=DEVICE)
    places = (rows[:, entry // PAGE] * PAGE + entry % PAGE).flatten()
    pages.write(places, draw(len(places), width, dtype=dtype, seed=1))
    named = torch.cat((rows, torch.full((batch, 2), NO_PAGE, device=DEVICE)), 1).to(torch.int32)
    q, weights = draw(batch, tokens, heads, width, dtype=dtype, seed=2), draw(batch, tokens, heads, dtype=dtype, seed=3)
    return q, weights, 0.011, pages, named, entries


SCORED = (
    (1, 1, 64, 1, "index", BF16, 128),
    (2, 1, 64, 97, "index", BF16, 128),
    (3, 2, 32, 64, "index", BF16, 128),
    (1, 3, 80, 200, "index", BF16, 128),
    (2, 1, 16, 130, "plain", BF16, 128),
    (1, 2, 128, 65, "plain", BF16, 128),
    (2, 3, 5, 33, "plain", FP32, 128),
    (1, 2, 3, 40, "index", FP32, 96),
    (2, 1, 7, 65, "plain", BF16, 256),
)


def choose(ops, args: tuple, visible: torch.Tensor, k: int) -> torch.Tensor:
    """Places of the k best, int32 (B, S, k)."""
    *given, entries = args
    names, out = ("q", "weights", "scale", "keys", "table"), torch.full((*visible.shape, k), -7, dtype=torch.int32)
    out = out.to(DEVICE)
    given = dict(zip(names, given, strict=True))
    assert ops["choose"](**given, visible=visible.to(DEVICE, torch.int32), entries=entries, out=out) is None
    return out


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "tokens", "heads", "entries", "kind", "dtype", "width"), SCORED)
def test_scores(ops, batch, tokens, heads, entries, kind, dtype, width):
    """All entries, best first: a score may be below the next by what fp32 sums in another order differ, of the largest
    of a row.
    """
    args, seen = scored(batch, tokens, heads, entries, kind, dtype, width), torch.full((batch, tokens), entries)
    got, every = choose(ops, args, seen, entries), torch.arange(entries, dtype=torch.int32, device=DEVICE)
    scores, places = torch.empty(batch, tokens, entries, device=DEVICE), torch.empty_like(got)
    indexer.index_scores(*args, scores)
    indexer.locate(every.expand_as(places), args[4], PAGE, places)
    order = places.argsort(2).gather(2, torch.searchsorted(places.sort(2).values, got))  # numbers of the entries
    assert torch.equal(order.sort(2).values, every.expand_as(order).long())
    best = scores.gather(2, order)
    assert bool((best.diff(dim=2) <= 4e-5 * scores.abs().amax(2, keepdim=True)).all())
    alone = tuple(part[-1:] if isinstance(part, torch.Tensor) else part for part in args)  # a sequence by itself
    assert torch.equal(choose(ops, alone, seen[-1:], entries), got[-1:])


@pytest.mark.gpu
def test_a_score_does_not_depend_on_how_many_there_are(ops):
    *args, entries = scored(1, 1, 64, 300, "index", BF16)
    few, many = (choose(ops, (*args, count), torch.full((1, 1), 77), 77) for count in (77, entries))
    assert torch.equal(few, many)


def chosen(ops, scores: torch.Tensor, visible: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Places by the kernel and by the reference of the best of given scores: relu(x) - relu(-x) of keys x, exactly."""
    scores, visible = scores.flatten(0, 1).unsqueeze(1), visible.reshape(-1, 1).int()
    rows, _, entries = scores.shape
    blocks = -(-entries // PAGE)
    table = torch.randperm(rows * blocks, generator=torch.Generator().manual_seed(7)).view(rows, -1)
    table = table.to(DEVICE, torch.int32)
    data = torch.zeros(rows * blocks, PAGE, 32, device=DEVICE)
    padded = torch.nn.functional.pad(scores.squeeze(1), (0, blocks * PAGE - entries))
    data[table.flatten().long(), :, 0] = padded.view(-1, PAGE)
    q, weights = torch.zeros(rows, 1, 2, 32, device=DEVICE), torch.ones(rows, 1, 2, device=DEVICE)
    q[:, :, 0, 0], q[:, :, 1, 0], weights[:, :, 1] = 1, -1, -1
    ids = torch.full((rows, 1, k), -7, dtype=torch.int32, device=DEVICE)
    indexer.select(scores, visible, ids)
    want = torch.empty_like(ids)
    indexer.locate(ids, table, PAGE, want)
    return choose(ops, (q, weights, 1.0, Pages(data, PAGE, "plain", 32), table, entries), visible, k), want


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "entries", "k"), [(2, 301, 64)])
@pytest.mark.parametrize(("kind", "dtype"), [("index", BF16), ("plain", FP32)])
def test_of_what_each_token_sees(ops, tokens, entries, k, kind, dtype):
    """Of sequences of which one sees no entry, beside others: what a call with as many entries chooses."""
    *args, _ = scored(3, tokens, 32, entries, kind, dtype)
    visible = torch.tensor([[entries, entries - 1], [0, 7], [64, 65]])[:, :tokens].contiguous()
    got = choose(ops, (*args, entries), visible, k)
    assert torch.equal((got >= 0).sum(2).cpu(), visible.clamp(max=k))
    for b in range(3):
        for s in range(tokens):
            count = int(visible[b, s])
            q, weights, scale, keys, table = args
            one = q[b : b + 1, s : s + 1].contiguous(), weights[b : b + 1, s : s + 1].contiguous(), scale, keys
            alone = choose(ops, (*one, table[b : b + 1], count), torch.full((1, 1), count), k)
            assert torch.equal(alone[0, 0], got[b, s])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2, 3)])
@pytest.mark.parametrize(("entries", "k"), [(1, 1), (16, 16), (17, 16), (1009, 37), (2100, 512), (1500, 1100)])
def test_select(ops, shape, entries, k):
    gen = torch.Generator().manual_seed(entries)
    scores = (torch.randn(*shape, entries, generator=gen) * 100).to(DEVICE)
    scores[..., -1] = 1e3  # the best where it is visible, behind all whole tiles
    visible = torch.randint(0, entries + 1, shape, generator=gen)
    visible.view(-1)[:3] = torch.tensor([0, entries, min(k, entries)])
    got, want = chosen(ops, scores, visible.to(DEVICE), k)
    assert torch.equal(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("levels", [1, 2, 5])
def test_of_equal_scores_the_lower_id_is_chosen(ops, levels):
    gen = torch.Generator().manual_seed(levels)
    scores = torch.randint(0, levels, (2, 2, 2500), generator=gen).float() - levels // 2
    scores[0, 0, ::3] *= -1  # both zeros are one score
    visible = torch.tensor([[2500, 2499], [40, 17]], device=DEVICE)
    got, want = chosen(ops, scores.to(DEVICE), visible, 33)
    assert torch.equal(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("orders", [6])
def test_order_over_the_whole_range_of_floats(ops, orders):
    tiny, big = 2.0**-149, 3.4028234663852886e38
    values = [0.0, -0.0, tiny, -tiny, 2**-126, -(2**-126), 1.0, -1.0, big, -big, torch.inf, -torch.inf, -0.0, 0.0, 1.0]
    rows = [torch.tensor(values)[torch.randperm(15, generator=torch.Generator().manual_seed(i))] for i in range(orders)]
    scores = torch.stack(rows).view(2, -1, 15).to(DEVICE)
    got, want = chosen(ops, scores, torch.full(scores.shape[:2], 13, device=DEVICE), 9)
    assert torch.equal(got, want)
    scores[:, :, 4] = float("nan")  # first, as in the reference; places stay those of entries
    got, want = chosen(ops, scores, torch.full(scores.shape[:2], 13, device=DEVICE), 9)
    assert torch.equal(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("value", [float("inf"), float("nan"), 3e38])
def test_what_is_not_visible_is_never_chosen(ops, value):
    scores = torch.randn(2, 2, 50, generator=torch.Generator().manual_seed(1)).to(DEVICE) - 1e4
    visible = torch.tensor([[0, 7], [16, 49]], device=DEVICE)
    hidden = torch.arange(50, device=DEVICE) >= visible.unsqueeze(2)
    got, want = chosen(ops, scores.masked_fill(hidden, value), visible, 16)
    assert torch.equal(got, want)


SIZES = "batch", "tokens", "heads", "entries", "kind", "dtype", "width"
SCORES = [
    *(
        ("test_scores", dict(zip(SIZES, sizes, strict=True)))
        for sizes in (
            (2, 1, 80, 97, "index", BF16, 128),
            (3, 1, 16, 70, "plain", BF16, 128),
            (2, 3, 5, 33, "plain", FP32, 128),
            (1, 2, 3, 40, "index", FP32, 96),
        )
    ),
    ("test_of_what_each_token_sees", {"tokens": 1, "entries": 75, "k": 9, "kind": "plain", "dtype": FP32}),
]
SELECTION = [
    ("test_select", {"shape": (1, 3), "entries": 1030, "k": 12}),
    ("test_order_over_the_whole_range_of_floats", {"orders": 2}),
]


@pytest.mark.parametrize("calls", [SCORES, SELECTION], ids=["scores", "selection"])
def test_in_the_model_of_a_gpu(calls):
    in_model.run(__name__, calls)
