"""kernels/start.cu on a GPU, and in the model of one, against torch_ops/start.py, bit by bit."""

import dataclasses

import pytest
import torch

from problems.dsv4_forward.cache.plan import Plan
from problems.dsv4_forward.kernels import start as module
from problems.dsv4_forward.torch_ops import rope, start
from problems.dsv4_forward.weights.config import CSA, HCA, SWA, TINY
from tests.dsv4 import in_model

kernel = module.Start  # for the fixture `ops`, and in_model
DEVICE = "cuda"
BF16, FP32 = torch.bfloat16, torch.float32
SEQUENCES, WIDTH, RING, UNREAD, VOCAB = 6, 9, 192, 50, 31  # in the state; WIDTH blocks each


def long(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


def recorded(numbers: list[int], lengths: list[int], ratios: tuple[int, ...], bound: int, topk: int) -> Plan:
    """One token of each of the sequences `numbers`, of these lengths."""
    length = long([-9] * SEQUENCES)
    length[long(numbers)] = long(lengths)
    every = long(list(range(len(numbers))))
    emit = dict.fromkeys(ratios, every)
    return Plan(length, blocks(), long(numbers), every, long(numbers), None, emit, RING, UNREAD, bound, topk)


def planned(numbers: list[int], lengths: list[int], counts: list[int], ratios: tuple[int, ...], topk: int) -> Plan:
    """counts[b] tokens of numbers[b]; those that end an entry are listed."""
    position = [p for n, count in zip(lengths, counts, strict=True) for p in range(n, n + count)]
    owner = [row for row, count in enumerate(counts) for _ in range(count)]
    emit = {ratio: long([i for i, p in enumerate(position) if (p + 1) % ratio == 0]) for ratio in ratios}
    length, sequence, bound = long([-9] * SEQUENCES), long([numbers[row] for row in owner]), max(position) + 1
    return Plan(length, blocks(), sequence, long(owner), long(numbers), long(position), emit, RING, UNREAD, bound, topk)


def blocks() -> torch.Tensor:
    order = torch.randperm(SEQUENCES * WIDTH, generator=torch.Generator().manual_seed(5))
    return order.view(SEQUENCES, WIDTH).to(DEVICE, torch.int32)


def room(given: Plan) -> tuple[torch.Tensor, torch.Tensor]:
    numbers, lists = given.room()
    return numbers.fill_(-7), lists.fill_(-7)


PLANS = (
    lambda: recorded([3], [511], (CSA, HCA), 700, 512),
    lambda: recorded([5, 0, 2], [0, 127, 1150], (CSA, HCA), 1152, 512),
    lambda: recorded([1, 2, 3, 4], [3, 128, 200, 255], (HCA,), 300, 512),
    lambda: recorded([0, 4], [190, 383], (CSA,), 384, 95),
    lambda: recorded([4, 1], [7, 700], (), 701, 0),
    lambda: planned([2], [126], [5], (CSA, HCA), 512),
    lambda: planned([5, 0, 2], [0, 250, 3], [1, 133, 40], (CSA, HCA), 512),
    lambda: planned([1, 0], [1, 2], [1, 2], (CSA, HCA), 16),
)


def test_wrong_arguments_are_named(on_a_cpu):
    plan = recorded([3], [511], (CSA, HCA), 700, 512)
    for change, wanted in (
        ({"length": plan.length.int()}, "length must be torch.int64"),
        ({"bound": 1200}, "at most 9 blocks"),
        ({"sequence": plan.sequence.int()}, "sequence must be torch.int64"),
        ({"emit": {CSA: plan.sequence.int()}}, "emit must be torch.int64"),
        ({"table": plan.table.t()}, r"length must be torch.int64 \(9,\)"),
    ):
        changed = dataclasses.replace(plan, **change)
        with pytest.raises(ValueError, match=wanted):
            module.made_plan(changed, *changed.room())
    names = ("tokens", "weight", "freqs", "copies", "cos", "sin")
    given = dict(zip(names, embedding(2, 5, 8, FP32, FP32), strict=True))
    for name, value, wanted in (
        ("tokens", torch.zeros(2), "tokens must be torch.int64"),
        ("copies", given["copies"].half(), "fp32 or bf16"),
        ("copies", torch.zeros(2, 5, 7), "copies must be torch.float32"),
        ("sin", torch.zeros(2), "sin must be"),
    ):
        with pytest.raises(ValueError, match=wanted):
            module.made_embedding(**given | {name: value})


def embedding(tokens: int, n: int, d: int, stored: torch.dtype, dtype: torch.dtype, kinds: int = 2) -> tuple:
    """The arguments of the op embed but position, with outputs that nothing has written."""
    gen = torch.Generator().manual_seed(d)
    weight = torch.randn(VOCAB, d, generator=gen).to(DEVICE, stored)
    freqs = torch.stack([rope.frequencies(TINY, ratio, DEVICE) for ratio in (SWA, CSA)[:kinds]])
    ids = torch.randint(VOCAB, (tokens,), generator=gen).to(DEVICE)
    copies = torch.full((tokens, n, d), float("nan"), device=DEVICE, dtype=dtype)
    angles = (torch.full((kinds, tokens, freqs.shape[1]), float("nan"), device=DEVICE) for _ in range(2))
    return ids, weight, freqs, copies, *angles


def same_angles(got: torch.Tensor, want: torch.Tensor) -> None:
    """Both are functions of the same fp32 angle."""
    assert bool(((got - want).abs() <= 2.0**-22).all()), float((got - want).abs().max())


@pytest.mark.gpu
@pytest.mark.parametrize(("stored", "dtype"), [(BF16, BF16), (BF16, FP32), (FP32, FP32), (FP32, BF16)])
@pytest.mark.parametrize(("tokens", "n", "d", "kinds"), [(1, 4, 4096, 2), (3, 1, 1100, 2), (37, 4, 200, 1)])
def test_embed(ops, tokens, n, d, kinds, stored, dtype):
    ids, weight, freqs, *got = embedding(tokens, n, d, stored, dtype, kinds)
    want = embedding(tokens, n, d, stored, dtype, kinds)[3:]
    position = long([(7919 * i + 3) % 2**20 for i in range(tokens)])
    ops["embed"](ids, weight, position, freqs, *got)
    start.embed(ids, weight, position, freqs, *want)
    assert torch.equal(got[0], want[0])
    same_angles(got[1], want[1])
    same_angles(got[2], want[2])


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(len(PLANS)))
def test_start(ops, number):
    """Every word of the buffers of lists, what lies between the lists too."""
    given = PLANS[number]()
    count = len(given.sequence)
    got, want = (embedding(count, 4, 1100, BF16, BF16) for _ in range(2))
    rooms = room(given), room(given)
    ops["start"](given, *rooms[0], *got)
    start.start(given, *rooms[1], *want)
    assert all(torch.equal(a, b) for a, b in zip(*rooms, strict=True)) and torch.equal(got[3], want[3])
    same_angles(got[4], want[4])
    same_angles(got[5], want[5])


@pytest.mark.gpu
def test_what_is_not_there_is_not_read(ops):
    """An id that the vocabulary has not becomes NaN; a sequence longer than its blocks writes to the unread page."""
    ids, weight, freqs, *out = embedding(4, 4, 300, BF16, BF16)
    ids[1], ids[2] = -1, VOCAB
    for embed in (ops["embed"], start.embed):
        embed(ids, weight, long([0, 1, 2, 3]), freqs, *out)
        assert out[0].isnan().flatten(1).all(1).tolist() == [False, True, True, False]
        out[0].zero_()
    given = recorded([0, 1], [128 * WIDTH + 127, 3], (CSA, HCA), 300, 512)
    (numbers, lists), want = room(given), room(given)
    ops["start"](given, numbers, lists, *embedding(2, 1, 8, BF16, BF16))
    start.plan(given, *want)
    assert torch.equal(numbers, want[0]) and given.views(numbers, lists).target[CSA].tolist()[0] == UNREAD * 32


MODEL = [
    *(("test_start", {"number": number}) for number in (1, 5)),
    ("test_embed", {"tokens": 5, "n": 4, "d": 200, "kinds": 1, "stored": FP32, "dtype": BF16}),
    ("test_what_is_not_there_is_not_read", {}),
]
LONG = [("test_start", {"number": number}) for number in (3, 4, 7)]
LONG.append(("test_embed", {"tokens": 3, "n": 1, "d": 1100, "kinds": 2, "stored": BF16, "dtype": FP32}))
test_in_the_model_of_a_gpu = in_model.test_of(__name__, MODEL, LONG)
