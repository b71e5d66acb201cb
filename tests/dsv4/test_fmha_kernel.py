"""kernels/fmha.cu on a GPU, and in the model of one, against torch_ops/fmha.py and fp64."""

import pytest
import torch

from problems.dsv4_forward.cache.pages import Pages
from problems.dsv4_forward.kernels import fmha
from problems.dsv4_forward.torch_ops import rope
from tests.dsv4 import in_model

kernel = fmha.Attention

DEVICE = "cuda"
BF16, FP32 = torch.bfloat16, torch.float32
# Queries, heads, width, entries of the window, of the cache (None: there is none). Flash, Pro, tiny-k and tiny first.
SHAPES = (
    (1, 64, 512, 128, 512),
    (8, 64, 512, 128, 512),
    (32, 64, 512, 128, 16),
    (2, 128, 512, 128, 1024),
    (3, 16, 512, 128, 32),
    (5, 4, 128, 128, None),
    (2, 8, 512, 1, 0),
    (3, 5, 64, 37, 33),
    (4, 9, 20, 0, 65),
    (1, 1, 4, 31, None),
    (2, 3, 132, 64, 1),
)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def pages(rows: int, width: int, dtype: torch.dtype, seed: int) -> Pages:
    """Pages of 8; every fifth row, which nothing names, is NaN."""
    data = draw(-(-rows // 8) * 8, width, seed=seed, dtype=dtype)
    data[4::5] = float("nan")
    return Pages(data.view(-1, 8, width), 8, "plain", width)


def chosen(queries: int, count: int, rows: int, holes: float, seed: int) -> torch.Tensor:
    """int32 (queries, 1, count), in no order, a share of them -1; the last query's list is short, the first's whole."""
    gen = torch.Generator().manual_seed(seed)
    index = torch.randint(rows // 5, (queries, 1, count), generator=gen) * 5 + torch.randint(4, (1,), generator=gen)
    index.masked_fill_(torch.rand(index.shape, generator=gen) < holes, -1)
    index[-1, :, count // 3 :] = -1
    return index.to(DEVICE, torch.int32)


def made(shape: tuple, q_dtype: torch.dtype, dtype: torch.dtype, holes: float = 0.2) -> dict:
    """Arguments of fmha but for its outputs, by name. Angles are 0."""
    queries, heads, width, near, far = shape
    sharp = 0.1 + torch.arange(heads, device=DEVICE).unsqueeze(1) / heads  # heads of different sharpness
    sink = draw(heads, seed=5)
    sink[0] = -torch.inf
    return {
        "q": (draw(queries, 1, heads, width) * sharp).to(q_dtype),
        "window": pages(300, width, dtype, 1),
        "window_index": chosen(queries, near, 300, holes, 2),
        "cache": None if far is None else pages(700, width, dtype, 3),
        "index": None if far is None else chosen(queries, far, 700, holes, 4),
        "sink": sink,
        "scale": width**-0.5,
        "cos": torch.ones(queries, min(32, width // 2), device=DEVICE),
        "sin": torch.zeros(queries, min(32, width // 2), device=DEVICE),
    }


def outputs(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full_like(q, float("nan")), torch.full(q.shape[:3], float("nan"), device=DEVICE)


def wanted(
    q, window, window_index, cache, index, sink, scale, cos, sin
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """fp64, not rotated -> out, lse, sum of |p c|."""
    parts = [(window, window_index)] + ([] if cache is None else [(cache, index)])
    hole = torch.cat([ids[:, 0] < 0 for _, ids in parts], 1)
    entries = torch.cat([p.read(ids[:, 0].long()).double() for p, ids in parts], 1).masked_fill(hole.unsqueeze(2), 0)
    score = (scale * q[:, 0].double() @ entries.transpose(1, 2)).masked_fill(hole.unsqueeze(1), -torch.inf)
    lse = score.logsumexp(2)
    weight = (score - torch.logaddexp(lse, sink.double()).unsqueeze(2)).exp().masked_fill(hole.unsqueeze(1), 0.0)
    out, size = weight @ entries, weight @ entries.abs()
    return out.unsqueeze(1), lse.masked_fill(lse == -torch.inf, torch.inf).unsqueeze(1), size.unsqueeze(1)


def row(arguments: dict, at: int) -> dict:
    """The arguments of one query."""
    by_query = {"q", "window_index", "index", "cos", "sin"}
    return {k: v[at : at + 1].clone() if k in by_query and v is not None else v for k, v in arguments.items()}


@pytest.mark.gpu
@pytest.mark.parametrize(("q_dtype", "dtype"), [(BF16, BF16), (FP32, FP32), (FP32, BF16), (BF16, FP32)])
@pytest.mark.parametrize("shape", SHAPES)
def test_fmha(ops, shape, q_dtype, dtype):
    arguments = made(shape, q_dtype, dtype)
    (got, lse), want = outputs(arguments["q"]), wanted(**arguments)
    assert ops["fmha"](**arguments, out=got, lse=lse) is None
    step = 2.0**-8 if q_dtype == BF16 else 0.0
    assert bool(((got.double() - want[0]).abs() <= step * want[0].abs() + 1e-5 * want[2] + 1e-12).all())
    assert torch.allclose(lse.double(), want[1], rtol=1e-6, atol=1e-5)
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
@pytest.mark.parametrize("shape", SHAPES)
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
def test_nothing_to_attend_to(ops):
    """Lists of holes, and no lists: 0, and lse +inf."""
    for near, far in ((5, 40), (0, None), (0, 0)):
        arguments = made((2, 3, 64, near, far), BF16, BF16, holes=1.0)
        got, lse = outputs(arguments["q"])
        ops["fmha"](**arguments, out=got, lse=lse)
        assert not bool(got.any()) and bool((lse == torch.inf).all())


@pytest.mark.gpu
def test_not_a_number_stays_and_a_large_sink_leaves_nothing(ops):
    arguments = made((2, 3, 64, 40, 5), FP32, FP32)
    arguments["q"][1, 0, 2, 7] = float("nan")
    arguments["sink"][1] = 1e30
    got, lse = outputs(arguments["q"])
    ops["fmha"](**arguments, out=got, lse=lse)
    assert bool(got[1, 0, 2].isnan().all()) and bool(lse[1, 0, 2].isnan())
    assert bool(got[0].isfinite().all()) and not bool(got[:, 0, 1].any())


@pytest.mark.gpu
def test_what_does_not_fit_at_once_is_done_in_parts(ops):
    arguments = made((5, 3, 64, 40, 5), BF16, BF16)
    (got, lse), (want, total) = outputs(arguments["q"]), outputs(arguments["q"])
    ops["fmha"](**arguments, out=want, lse=total)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fmha, "ROOM", 2 * 3 * 3 * 66)
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


@pytest.mark.gpu
def test_replays_are_equal_bit_for_bit(ops):
    arguments = made((8, 16, 512, 128, 100), BF16, BF16)
    (first, total), (got, lse) = outputs(arguments["q"]), outputs(arguments["q"])
    ops["fmha"](**arguments, out=first, lse=total)
    other = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(200):
        ops["fmha"](**arguments, out=got.fill_(float("nan")), lse=lse.fill_(float("nan")))
        other += (got != first).sum() + (lse != total).sum()
    assert int(other) == 0


MODEL = [
    ("test_fmha", {"shape": (1, 1, 4, 96, None), "q_dtype": FP32, "dtype": BF16}),
    ("test_what_does_not_fit_at_once_is_done_in_parts", {}),
    ("test_outputs_are_rotated_back", {"shape": (2, 3, 72, 4, 2), "dtype": BF16}),
    ("test_nothing_to_attend_to", {}),
    ("test_not_a_number_stays_and_a_large_sink_leaves_nothing", {}),
    ("test_what_it_does_not_serve", {}),
]
LONG = [
    ("test_fmha", {"shape": (1, 9, 20, 0, 33), "q_dtype": BF16, "dtype": BF16}),
    ("test_fmha", {"shape": (2, 3, 132, 37, None), "q_dtype": FP32, "dtype": FP32}),
    ("test_fmha", {"shape": (2, 2, 512, 3, 1), "q_dtype": BF16, "dtype": FP32}),
    ("test_fmha", {"shape": (3, 2, 64, 40, 5), "q_dtype": BF16, "dtype": BF16}),
    ("test_outputs_are_rotated_back", {"shape": (2, 3, 72, 4, 2), "dtype": FP32}),
]


@pytest.mark.parametrize("calls", [MODEL, pytest.param(LONG, marks=pytest.mark.slow)], ids=["short", "long"])
def test_in_the_model_of_a_gpu(calls):
    in_model.run(__name__, calls)
