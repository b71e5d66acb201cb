"""Attention against fp64: torch_ops/fmha.py, and kernels/fmha.cu on a GPU and in the model of one."""

import math

import pytest
import torch

from problems.dsv4_forward.cache.pages import Pages
from problems.dsv4_forward.kernels import fmha as kernels
from problems.dsv4_forward.torch_ops import fmha, rope
from tests.dsv4 import in_model
from tests.dsv4.in_model import draw

kernel = kernels.Attention

DEVICE = "cuda"
BF16, FP32 = torch.bfloat16, torch.float32
# Queries, heads, width, entries of the window, of the cache (None: there is none). Flash, Pro, tiny-k and tiny first.
REAL = [(1, 64, 512, 128, 512), (8, 64, 512, 128, 512), (32, 64, 512, 128, 16), (2, 128, 512, 128, 1024)]
TINY = [(3, 16, 512, 128, 32), (5, 4, 128, 128, None)]
ENDS = [(2, 8, 512, 1, 0), (3, 5, 64, 37, 33), (4, 9, 20, 0, 65), (1, 1, 4, 31, None), (2, 3, 132, 64, 1)]


def pages(rows: int, width: int, dtype: torch.dtype, seed: int, kind: str = "plain") -> Pages:
    """Pages of 8; the first row and every fifth, which nothing names, are NaN."""
    count = -(-rows // 8)
    shape, stored = Pages.shape(kind, count, 8, width, 64 * (kind == "entry"))
    data = torch.empty(shape, dtype=dtype if kind == "plain" else stored, device=DEVICE)
    data.view(torch.uint8).fill_(255)
    made = Pages(data, 8, kind, width, 64 * (kind == "entry"))
    named = [row for row in range(1, count * 8) if row % 5 != 4]
    made.write(torch.tensor(named, device=DEVICE), draw(count * 8, width, seed=seed, dtype=dtype)[named])
    return made


def chosen(shape: tuple[int, ...], rows: int, holes: float, seed: int) -> torch.Tensor:
    """int32 (queries, tokens, count), in no order, a share of them -1; the last query's list is short."""
    gen = torch.Generator().manual_seed(seed)
    index = torch.randint(1, rows // 5, shape, generator=gen) * 5 + torch.randint(4, (1,), generator=gen)
    index.masked_fill_(torch.rand(shape, generator=gen) < holes, -1)
    index[-1, :, shape[2] // 3 :] = -1
    return index.to(DEVICE, torch.int32)


def made(shape: tuple, q_dtype=FP32, dtype=FP32, holes: float = 0.2, tokens: int = 1, kind: str = "plain") -> dict:
    """Arguments of fmha but for its outputs, by name. Angles are 0."""
    queries, heads, width, near, far = shape
    sharp = 0.1 + torch.arange(heads, device=DEVICE).unsqueeze(1) / heads  # heads of different sharpness
    sink = draw(heads, seed=5)
    sink[0] = -torch.inf
    return {
        "q": (draw(queries, tokens, heads, width) * sharp).to(q_dtype),
        "window": pages(300, width, dtype, 1, kind),
        "window_index": chosen((queries, tokens, near), 300, holes, 2),
        "cache": None if far is None else pages(700, width, dtype, 3, kind),
        "index": None if far is None else chosen((queries, tokens, far), 700, holes, 4),
        "sink": sink,
        "scale": width**-0.5,
        "cos": torch.ones(queries, min(32, width // 2), device=DEVICE),
        "sin": torch.zeros(queries, min(32, width // 2), device=DEVICE),
    }


def outputs(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full_like(q, float("nan")), torch.full(q.shape[:3], float("nan"), device=DEVICE)


def wanted(q, window, window_index, cache, index, sink, scale, cos, sin) -> tuple[torch.Tensor, ...]:
    """fp64, not rotated -> out, lse, sum of |p c|."""
    parts = [(window, window_index)] + ([] if cache is None else [(cache, index)])
    parts = [(held, ids.flatten(0, 1)) for held, ids in parts]
    hole = torch.cat([ids < 0 for _, ids in parts], 1)
    entries = torch.cat([held.read(ids.long()).double() for held, ids in parts], 1).masked_fill(hole.unsqueeze(2), 0)
    score = (scale * q.flatten(0, 1).double() @ entries.mT).masked_fill(hole.unsqueeze(1), -torch.inf)
    lse = score.logsumexp(2)
    weight = (score - torch.logaddexp(lse, sink.double()).unsqueeze(2)).exp().masked_fill(hole.unsqueeze(1), 0.0)
    out, size = weight @ entries, weight @ entries.abs()
    return out.view(q.shape), lse.masked_fill(lse == -torch.inf, torch.inf).view(q.shape[:3]), size.view(q.shape)


def right(op, given: dict, more: float = 1.0, least: float = 1e-12) -> tuple[torch.Tensor, torch.Tensor]:
    """What op writes, which is near: channel by channel, relative to the sum of the |p c| that make it up."""
    (got, lse), want = outputs(given["q"]), wanted(**given)
    assert op(**given, out=got, lse=lse) is None
    step = 2.0**-8 if got.dtype == BF16 else 0.0
    assert bool(((got.double() - want[0]).abs() <= step * want[0].abs() + more * 1e-5 * want[2] + least).all())
    assert torch.allclose(lse.double(), want[1], rtol=1e-6 * more, atol=1e-5 * more)
    return got, lse


def row(arguments: dict, at: int) -> dict:
    """The arguments of one query."""
    by_query = {"q", "window_index", "index", "cos", "sin"}
    return {k: v[at : at + 1].clone() if k in by_query and v is not None else v for k, v in arguments.items()}


@pytest.mark.parametrize(("kind", "dtype"), [("plain", FP32), ("plain", BF16), ("entry", BF16)])
@pytest.mark.parametrize(
    "shape",
    [(1, 3, 128, 9, 21), (2, 5, 192, 9, None), (2, 3, 192, 64, 63), (3, 2, 128, 127, 65), (2, 3, 40, 9, 21)],
    ids=str,
)
def test_the_reference_attends_as_fp64(on_a_cpu, shape, kind, dtype):
    """Around a tile of 64; plain pages also of widths that are no multiples of anything."""
    right(fmha.fmha, made(shape, dtype=dtype, kind=kind if shape[2] > 40 else "plain", tokens=3), least=1e-38)


def lost(given: dict) -> dict:
    """A query of holes; one with a window and no entries, one with entries and no window."""
    near, far = given["window_index"].clone(), given["index"].clone()
    near[0, 1:], far[0, :2] = -1, -1
    return {"window_index": near, "index": far}


def far_below(given: dict) -> dict:
    """All scores near -700: a maximum that begins at 0, or counts a hole as 0, gives nothing or NaN."""
    given["window"].data[..., 0], given["cache"].data[..., 0], given["q"][..., 0] = 80.0, 80.0, -100.0
    assert bool((wanted(**given)[1] < -600).all())
    return {"sink": torch.tensor([-700.0, -torch.inf, -700, -1000, 0])}


def uneven(given: dict) -> dict:
    for held in (given["window"], given["cache"]):
        held.data.mul_(10 ** torch.linspace(-3, 3, held.data[..., 0].numel()).view(*held.data.shape[:2], 1))
    return {}


# What is unlike an ordinary call, and how much less exact fp32 is there: scores of 1e4 have steps of 1e-3.
ODD = {
    "a list of no entries": (lambda given: {"index": given["index"][..., :0]}, 1),
    "no window": (lambda given: {"window_index": given["window_index"][..., :0]}, 1),
    "holes": (lost, 1),
    "holes without sinks": (lambda given: lost(given) | {"sink": torch.full((5,), -torch.inf)}, 1),
    "a sink of 80": (lambda given: {"sink": torch.full((5,), 80.0)}, 5),
    "a sink beyond all others": (lambda given: {"sink": torch.tensor([1e30, 0.5, 1e30, 1e30, 80])}, 5),
    "scores far below zero": (far_below, 100),
    "queries far apart": (lambda given: {"q": given["q"] * torch.tensor([1e-3, -1, 1e3]).view(3, 1, 1)}, 100),
    "entries of many sizes": (uneven, 100),
    "an entry twice": (lambda given: {"index": given["index"][..., [0, 1, 1, 3, 3, 3]]}, 1),
}


@pytest.mark.parametrize("what", ODD)
def test_odd_calls_of_the_reference(on_a_cpu, what):
    given, (change, more) = made((2, 5, 128, 9, 21), tokens=3), ODD[what]
    out, lse = right(fmha.fmha, given | change(given), more, 1e-38)
    if change is lost:
        assert not bool(out[0, 1].any()) and bool((lse[0, 1] == math.inf).all())


@pytest.mark.parametrize("tile", [1, 128 * 30 * 2, 128 * 30 * 5])
def test_queries_in_tiles(on_a_cpu, monkeypatch, tile):
    monkeypatch.setattr(fmha, "TILE", tile)
    right(fmha.fmha, made((2, 5, 128, 9, 21), tokens=3))


def test_bf16_is_rounded_once_and_then_rotated_back(on_a_cpu):
    given = made((3, 4, 192, 9, 21), BF16, BF16, tokens=2, kind="entry")
    angles = draw(3, 32, seed=9)
    given |= {"cos": angles.cos(), "sin": angles.sin()}
    (got, lse), plain = outputs(given["q"]), {k: v for k, v in given.items() if k not in ("cos", "sin")}
    fmha.fmha(**given, out=got, lse=lse)
    exact, total = torch.empty(got.shape), torch.empty_like(lse)
    fmha.attend(**plain, out=exact, lse=total)
    want = exact.bfloat16()
    rope.rotate(want, angles.cos(), -angles.sin(), want)
    assert torch.equal(got, want) and torch.equal(lse, total)


def test_wrong_arguments_are_named(on_a_cpu):
    given = made((2, 5, 128, 9, 21), tokens=3)
    given |= dict(zip(("out", "lse"), outputs(given["q"]), strict=True))
    for change, message in (
        ({"index": None}, "cache and index"),
        ({"cache": None}, "cache and index"),
        ({"sink": given["sink"][:2]}, "sink must"),
        ({"sink": given["sink"].double()}, "sink must"),
        ({"out": given["out"][..., :127]}, "out must"),
        ({"lse": given["lse"].double()}, "out must"),
        ({"lse": given["lse"][:1]}, "out must"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            fmha.fmha(**given | change)


def test_nothing_to_attend_to(either):
    """Lists of holes, and no lists: 0, and lse +inf."""
    for near, far in ((5, 40), (0, None), (0, 0)):
        arguments = made((2, 3, 64, near, far), BF16, BF16, holes=1.0)
        got, lse = outputs(arguments["q"])
        either["fmha"](**arguments, out=got, lse=lse)
        assert not bool(got.any()) and bool((lse == torch.inf).all())


def test_not_a_number_stays_and_a_large_sink_leaves_nothing(either):
    arguments = made((2, 3, 64, 40, 5), FP32, FP32)
    arguments["q"][1, 0, 2, 7] = float("nan")
    arguments["sink"][1] = 1e30
    got, lse = outputs(arguments["q"])
    either["fmha"](**arguments, out=got, lse=lse)
    assert bool(got[1, 0, 2].isnan().all()) and bool(lse[1, 0, 2].isnan())
    assert bool(got[0].isfinite().all()) and not bool(got[:, 0, 1].any())


@pytest.mark.gpu
@pytest.mark.parametrize(("q_dtype", "dtype"), [(BF16, BF16), (FP32, FP32), (FP32, BF16), (BF16, FP32)])
@pytest.mark.parametrize("shape", REAL + TINY + ENDS)
def test_fmha(ops, shape, q_dtype, dtype):
    arguments = made(shape, q_dtype, dtype)
    got, lse = right(ops["fmha"], arguments)
    for at in {0, shape[0] - 1}:  # a query by itself, and with room for more entries behind its list
        one = row(arguments, at)
        for longer in (0, 40):
            if longer and one["index"] is not None:
                one["index"] = torch.nn.functional.pad(one["index"], (0, longer), value=-1)
            alone, total = outputs(one["q"])
            ops["fmha"](**one, out=alone, lse=total)
            assert torch.equal(alone, got[at : at + 1]) and torch.equal(total, lse[at : at + 1])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("shape", REAL + TINY + ENDS)
def test_outputs_are_rotated_back(ops, shape, dtype):
    """As by angles of 0, and then rotated, to the bit but where products are contracted."""
    arguments = made(shape, dtype, dtype)
    half = arguments["cos"].shape[1]
    angles = draw(shape[0], half, seed=9)
    turn = {"cos": angles.cos(), "sin": angles.sin()}
    (got, lse), (plain, total) = outputs(arguments["q"]), outputs(arguments["q"])
    ops["fmha"](**arguments | turn, out=got, lse=lse)
    ops["fmha"](**arguments, out=plain, lse=total)
    want = torch.empty_like(plain)
    rope.rotate(plain, **turn, out=want, inverse=True)
    assert torch.equal(lse, total) and torch.equal(got[..., : -2 * half], want[..., : -2 * half])
    near = {"rtol": 2.0**-7, "atol": 2.0**-9} if dtype == BF16 else {"rtol": 1e-5, "atol": 1e-6}
    assert torch.allclose(got.float(), want.float(), **near)


@pytest.mark.gpu
def test_what_does_not_fit_at_once_is_done_in_parts(ops):
    arguments = made((5, 3, 64, 40, 5), BF16, BF16)
    (got, lse), (want, total) = outputs(arguments["q"]), outputs(arguments["q"])
    ops["fmha"](**arguments, out=want, lse=total)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "ROOM", 2 * 3 * 3 * 66)
        ops["fmha"](**arguments, out=got, lse=lse)
    assert torch.equal(got, want) and torch.equal(lse, total)


@pytest.mark.gpu
def test_what_it_does_not_serve(ops):
    """Nothing is written: more queries, several of a sequence, other pages, wrong arguments."""
    arguments = made((2, 2, 64, 8, 8), BF16, BF16)
    several = {name: arguments[name].transpose(0, 1).contiguous() for name in ("q", "window_index", "index")}
    for other in (
        made((40, 2, 64, 8, 8), FP32, FP32),
        arguments | several,
        arguments | {"cache": pages(700, 64, FP32, 3)},
        arguments | {"cache": None},
        arguments | {"sin": arguments["sin"][:, 1:]},
        arguments | {"cos": arguments["cos"].bfloat16()},
    ):
        got, lse = outputs(other["q"])
        assert ops["fmha"](**other, out=got, lse=lse) is NotImplemented
        assert bool(got.isnan().all()) and bool(lse.isnan().all())


MODEL = [
    ("test_fmha", {"shape": (1, 1, 4, 96, None), "q_dtype": FP32, "dtype": BF16}),
    ("test_what_does_not_fit_at_once_is_done_in_parts", {}),
    ("test_outputs_are_rotated_back", {"shape": (1, 2, 8, 2, 1), "dtype": BF16}),
    ("test_nothing_to_attend_to", {}),
    ("test_not_a_number_stays_and_a_large_sink_leaves_nothing", {}),
    ("test_what_it_does_not_serve", {}),
]
LONG = [
    ("test_fmha", {"shape": (1, 9, 20, 0, 33), "q_dtype": BF16, "dtype": BF16}),
    ("test_fmha", {"shape": (2, 3, 132, 37, None), "q_dtype": FP32, "dtype": FP32}),
    ("test_fmha", {"shape": (2, 2, 512, 3, 1), "q_dtype": BF16, "dtype": FP32}),
    ("test_fmha", {"shape": (3, 2, 64, 40, 5), "q_dtype": BF16, "dtype": BF16}),
    *(("test_outputs_are_rotated_back", {"shape": (2, 3, 72, 4, 2), "dtype": dtype}) for dtype in (FP32, BF16)),
]

test_in_the_model_of_a_gpu = in_model.test_of(__name__, MODEL, LONG)
