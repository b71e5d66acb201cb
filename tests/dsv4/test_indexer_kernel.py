"""kernels/indexer.cu on a GPU, and in the model of one, against torch_ops/indexer.py and chains.py."""

import pytest
import torch

from problems.dsv4_forward import ops as table
from problems.dsv4_forward.cache.pages import Pages
from problems.dsv4_forward.kernels import indexer as kernel
from tests.dsv4 import in_model

DEVICE = "cuda"
REFERENCE = table.REFERENCE
BF16, FP32 = torch.bfloat16, torch.float32
PAGE, NO_PAGE = 32, -3


def draw(*shape: int, dtype: torch.dtype = FP32, seed: int = 0) -> torch.Tensor:
    """Rows of very different size."""
    gen = torch.Generator().manual_seed(seed)
    sizes = torch.rand(*shape[:-1], 1, generator=gen).mul(6).sub(3).exp2()
    return (torch.randn(shape, generator=gen) * sizes).to(DEVICE, dtype)


def test_wrong_arguments_are_named():
    made = kernel.Indexer.__new__(kernel.Indexer)
    ids, blocks = torch.zeros(2, 3, 4).int(), torch.zeros(2, 5).int()
    scores, visible, keys = (
        torch.zeros(2, 3, 70),
        torch.zeros(2, 3).int(),
        Pages(torch.zeros(9, 32, 96), 32, "plain", 96),
    )
    q, weights, two = torch.zeros(2, 3, 5, 96), torch.zeros(2, 3, 5), torch.zeros(2, 2).int()
    for run, args, wanted in (
        (made.index_scores, (q, weights, 1.0, keys, two, 70, scores), "table must be .* for 70 entries"),
        (made.index_scores, (q, weights.half(), 1.0, keys, blocks, 70, scores), "weights must be fp32 or bf16"),
        (made.index_scores, (q[..., :95], weights, 1.0, keys, blocks, 70, scores), "q must be"),
        (made.select, (scores.double(), visible, ids), "scores must be torch.float32"),
        (made.select, (scores, visible.long(), ids), "visible must be torch.int32"),
        (made.select, (scores, visible, torch.zeros(2, 3, 2049).int()), "got 70 and 2049"),
        (made.locate, (ids, blocks[:1], 32, ids), "table must be torch.int32"),
    ):
        with pytest.raises(ValueError, match=wanted):
            run(*args)


def scored(batch: int, tokens: int, heads: int, entries: int, kind: str, dtype: torch.dtype, width: int = 128) -> tuple:
    """Arguments of index_scores; pages that no table names, and entries behind the last one, are NaN."""
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


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "tokens", "heads", "entries", "kind", "dtype", "width"), SCORED)
def test_index_scores(ops, batch, tokens, heads, entries, kind, dtype, width):
    """fp32 sums in another order: of the largest score of a row, and of the sizes of a score's terms."""
    args = scored(batch, tokens, heads, entries, kind, dtype, width)
    got, want = (torch.full((batch, tokens, entries), float("nan"), device=DEVICE) for _ in range(2))
    ops["index_scores"](*args, got)
    REFERENCE.index_scores(*args, want)
    assert bool(((got - want).abs() <= 2e-5 * want.abs().amax(-1, keepdim=True)).all()), float((got - want).abs().max())
    q, weights, scale, keys, rows, _ = args
    alone = torch.full((1, tokens, entries), float("nan"), device=DEVICE)  # a sequence by itself
    ops["index_scores"](q[-1:], weights[-1:], scale, keys, rows[-1:], entries, alone)
    assert torch.equal(alone, got[-1:])


@pytest.mark.gpu
def test_a_score_does_not_depend_on_how_many_there_are(ops):
    q, weights, scale, keys, rows, _ = scored(1, 1, 64, 300, "index", BF16)
    few, many = (torch.empty(1, 1, n, device=DEVICE) for n in (77, 300))
    for out in (few, many):
        ops["index_scores"](q, weights, scale, keys, rows, out.shape[2], out)
    assert torch.equal(few, many[..., :77])


def chosen(ops, scores: torch.Tensor, visible: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids by the kernel, for which locate finds the right places, and by the reference."""
    batch, tokens, entries = scores.shape
    rows = torch.randperm(batch * (-(-entries // PAGE) + 1)).view(batch, -1).to(DEVICE, torch.int32)
    got, want, places, located = (
        torch.full((batch, tokens, k), -7, dtype=torch.int32, device=DEVICE) for _ in range(4)
    )
    visible = visible.int()
    ops["select"](scores, visible, got)
    REFERENCE.select(scores, visible, want)
    ops["locate"](got, rows, PAGE, places)
    REFERENCE.locate(got, rows, PAGE, located)
    assert torch.equal(places, located)
    return got, want


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "entries", "k"), [(2, 301, 64)])
@pytest.mark.parametrize(("kind", "dtype"), [("index", BF16), ("plain", FP32)])
def test_choose_is_the_chain_of_its_parts(ops, tokens, entries, k, kind, dtype):
    """Of sequences of which one sees no entry, beside others."""
    args = scored(3, tokens, 32, entries, kind, dtype)
    visible = torch.tensor([[entries, entries - 1], [0, 7], [64, 65]], device=DEVICE, dtype=torch.int32)[:, :tokens]
    visible = visible.contiguous()
    got, want = (torch.full((3, tokens, k), -7, dtype=torch.int32, device=DEVICE) for _ in range(2))
    ops["choose"](*args[:5], visible, entries, got)
    scores = torch.empty(3, tokens, entries, device=DEVICE)
    ops["index_scores"](*args, scores)
    ids = torch.empty_like(want)
    REFERENCE.select(scores, visible, ids)
    REFERENCE.locate(ids, args[4], PAGE, want)
    assert torch.equal(got, want) and torch.equal((want >= 0).sum(2), visible.clamp(max=k))


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
    scores[:, :, 4] = float("nan")  # first, as in the reference; ids stay entries
    got, want = chosen(ops, scores, torch.full(scores.shape[:2], 13, device=DEVICE), 9)
    assert torch.equal(got, want) and bool((got[..., 0] == 4).all())


@pytest.mark.gpu
@pytest.mark.parametrize("value", [float("inf"), float("nan"), 3e38])
def test_what_is_not_visible_is_never_chosen(ops, value):
    scores = torch.randn(2, 2, 50, generator=torch.Generator().manual_seed(1)).to(DEVICE) - 1e4
    visible = torch.tensor([[0, 7], [16, 49]], device=DEVICE)
    hidden = torch.arange(50, device=DEVICE) >= visible.unsqueeze(2)
    got, want = chosen(ops, scores.masked_fill(hidden, value), visible, 16)
    assert torch.equal(got, want) and bool((got < visible.unsqueeze(2)).all())


SIZES = "batch", "tokens", "heads", "entries", "kind", "dtype", "width"
SCORES = [
    *(
        ("test_index_scores", dict(zip(SIZES, sizes, strict=True)))
        for sizes in (
            (2, 1, 80, 97, "index", BF16, 128),
            (3, 1, 16, 70, "plain", BF16, 128),
            (2, 3, 5, 33, "plain", FP32, 128),
            (1, 2, 3, 40, "index", FP32, 96),
        )
    ),
    ("test_choose_is_the_chain_of_its_parts", {"tokens": 1, "entries": 75, "k": 9, "kind": "plain", "dtype": FP32}),
]
SELECTION = [
    ("test_select", {"shape": (1, 3), "entries": 1030, "k": 12}),
    ("test_order_over_the_whole_range_of_floats", {"orders": 2}),
]


@pytest.mark.parametrize("calls", [SCORES, SELECTION], ids=["scores", "selection"])
def test_in_the_model_of_a_gpu(calls):
    in_model.run(__name__, calls)
