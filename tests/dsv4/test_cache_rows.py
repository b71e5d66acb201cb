"""kernels/cache_rows.cu on a GPU against the chains of the torch components."""

import pytest
import torch

from problems.dsv4_forward import ops as table
from problems.dsv4_forward.cache.pages import Pages
from problems.dsv4_forward.kernels import cache_rows as kernel
from problems.dsv4_forward.torch_ops import rope
from problems.dsv4_forward.weights.config import CSA, TINY
from tests.dsv4 import in_model
from tests.support.marks import first

DEVICE = "cuda"
REFERENCE = table.REFERENCE
BF16, FP32 = torch.bfloat16, torch.float32
KINDS = (("plain", BF16), ("plain", FP32), ("entry", torch.uint8), ("index", torch.uint8))
# Of a value, and of a row that is quantised: a sum in another order moves a value across a rounding now and then.
STEP = {BF16: 2.0**-7, FP32: 2e-5}
ROW = {"plain": 2.0**-8, "entry": 2.0**-6, "index": 0.1}


def draw(*shape: int, dtype: torch.dtype = FP32, seed: int = 0) -> torch.Tensor:
    """Rows of very different size."""
    gen = torch.Generator().manual_seed(seed)
    sizes = torch.rand(*shape[:-1], 1, generator=gen).mul(12).sub(6).exp2()
    return (torch.randn(shape, generator=gen) * sizes).to(DEVICE, dtype)


def made_pages(kind: str, dtype: torch.dtype, width: int, count: int = 7, per_page: int = 5) -> Pages:
    """Every byte 255: NaN, but for scales of entries."""
    rope_values = 64 if kind == "entry" else 0
    shape, dtype = Pages.shape(kind, count, per_page, width, rope_values, dtype)
    data = torch.empty(shape, dtype=dtype, device=DEVICE)
    data.view(torch.uint8).fill_(255)
    return Pages(data, per_page, kind, width, rope_values)


def turns(tokens: int, half: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.arange(tokens * half, dtype=FP32).view(tokens, half).mul(0.37)
    return angle.cos().to(DEVICE), angle.sin().to(DEVICE)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    error, size = (got.float() - want.float()).abs(), want.float().abs()
    assert bool((error <= STEP[got.dtype] * (size + 0.02 * size.amax(-1, keepdim=True))).all()), float(error.max())


def same_rows(got: Pages, want: Pages, index: torch.Tensor) -> None:
    """The rows that were written are near, and no other byte has changed."""
    a, b = got.read(index), want.read(index)
    assert bool(a.isfinite().all())
    error, size = (a - b).norm(dim=1), b.norm(dim=1)
    assert bool((error <= ROW[got.kind] * size + 1e-12).all()), float((error / size).max())
    for one in (got, want):
        one.write(index, torch.zeros(len(index), one.width, device=DEVICE))
    assert torch.equal(got.data.view(torch.uint8), want.data.view(torch.uint8))


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="all be bf16 or all fp32"):
        kernel._bf16(torch.zeros(2), torch.zeros(2, dtype=BF16))
    with pytest.raises(ValueError, match="contiguous"):
        kernel._bf16(torch.zeros(2, 3).t())
    with pytest.raises(ValueError, match="index must be int64"):
        kernel._long("index", torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ValueError, match="cos must be fp32"):
        kernel._half(torch.zeros(2, 4), torch.zeros(2, 4), 3, 64)
    with pytest.raises(ValueError, match="at most 3 pairs"):
        kernel._half(torch.zeros(2, 4), torch.zeros(2, 4), 2, 6)
    with pytest.raises(ValueError, match="1 to 8192 values, got 8193"):
        kernel._width(8193)
    with pytest.raises(ValueError, match="power of two"):
        kernel._turned(True, 96)
    made, turn = kernel.Entries.__new__(kernel.Entries), torch.zeros(3, 8)
    x, narrow = torch.zeros(3, 2, 64), torch.zeros(3, 2, 48)
    for given, wanted in (
        ((x, turn, turn, True, x.bfloat16()), "all be bf16 or all fp32"),
        ((x, turn[:2], turn, True, x), "cos must be"),
        ((x, turn, turn, True, x[:, :1].contiguous()), "out must be"),
        ((narrow, turn, turn, True, narrow), "power of two from 32 on as its width, got 48"),
    ):
        with pytest.raises(ValueError, match=wanted):
            made.index_query(*given)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("shape", [(1, 128), (3, 5, 192), (16, 64, 512), (2, 3, 70)])
def test_norm_rotate(ops, shape, dtype):
    x, (cos, sin) = draw(*shape, dtype=dtype), turns(shape[0])
    for weight in (None, draw(shape[-1], dtype=dtype, seed=1)):
        want, got = torch.empty_like(x), torch.full_like(x, float("nan"))
        REFERENCE.norm_rotate(x, weight, 1e-6, cos, sin, want)
        ops["norm_rotate"](x, weight, 1e-6, cos, sin, got)
        close(got, want)
        one = torch.full_like(x[-1:], float("nan"))  # a token by itself
        ops["norm_rotate"](x[-1:], weight, 1e-6, cos[-1:], sin[-1:], one)
        assert torch.equal(one, got[-1:])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(("kind", "stored"), KINDS)
@pytest.mark.parametrize("count", [1, 3, 16])
def test_write(ops, count, kind, stored, dtype):
    """Without a norm or Hadamard every byte is the reference's."""
    width = 128 if kind == "index" else 192
    index = torch.randperm(35, generator=torch.Generator().manual_seed(count))[:count].to(DEVICE)
    rows = draw(count, width, dtype=dtype)
    rows[0, :64] = 0
    rows[-1, 64:128] *= 1e-5
    got, want = made_pages(kind, stored, width), made_pages(kind, stored, width)
    ops["write"](rows, got, index)
    REFERENCE.write(rows, want, index)
    assert torch.equal(got.data.view(torch.uint8), want.data.view(torch.uint8))
    if kind == "index":
        ops["write"](rows, got, index, True)
        REFERENCE.write(rows, want, index, True)
        same_rows(got, want, index)


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "stored"), [KINDS[0], KINDS[2]])
def test_values_that_are_no_numbers(ops, kind, stored):
    rows = draw(4, 192, dtype=BF16)
    rows[1, 3], rows[2, 70], rows[3, 100] = float("nan"), float("inf"), float("-inf")
    index, got, want = torch.tensor([4, 9, 0, 30], device=DEVICE), *(made_pages(kind, stored, 192) for _ in range(2))
    ops["write"](rows, got, index)
    REFERENCE.write(rows, want, index)
    a, b = got.read(index), want.read(index)
    assert torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(("kind", "stored"), KINDS[:3])
@pytest.mark.parametrize("count", [1, 3, 16])
def test_write_key(ops, count, kind, stored, dtype):
    index = torch.randperm(35, generator=torch.Generator().manual_seed(count))[:count].to(DEVICE)
    x, weight, (cos, sin) = draw(count, 512, dtype=dtype), draw(512, dtype=dtype, seed=1), turns(count)
    got, want, one = (made_pages(kind, stored, 512) for _ in range(3))
    ops["write_key"](x, weight, 1e-6, cos, sin, got, index)
    REFERENCE.write_key(x, weight, 1e-6, cos, sin, want, index)
    ops["write_key"](x[-1:], weight, 1e-6, cos[-1:], sin[-1:], one, index[-1:])
    assert torch.equal(one.read(index[-1:]), got.read(index[-1:]))
    same_rows(got, want, index)


def compressor(ratio: int, width: int, lengths: list[int], counts: list[int], dtype: torch.dtype) -> dict:
    """The arguments of a call: counts[s] new tokens of sequence s, which has lengths[s] in the ring already."""
    halves, device = 2 if ratio == 4 else 1, DEVICE
    wide, size = halves * width, halves * ratio + max(counts)
    position = [p for length, count in zip(lengths, counts, strict=True) for p in range(length, length + count)]
    sequence = [s for s, count in enumerate(counts) for _ in range(count)]
    tail = draw(len(counts), size, 2, wide, seed=3)
    for s, length in enumerate(lengths):  # never read: before 0, or of this call
        held = {p % size for p in range(max(0, length - halves * ratio), length)}
        for row in set(range(size)) - held:
            tail[s, row] = float("nan")
    emit = [i for i, p in enumerate(position) if (p + 1) % ratio == 0]
    return {
        "projected": draw(len(position), 2 * wide, seed=4).contiguous(),
        "ape": draw(ratio, wide, seed=5),
        "norm_weight": draw(width, dtype=dtype, seed=6),
        "position": torch.tensor(position, device=device),
        "sequence": torch.tensor(sequence, device=device),
        "tail": tail,
        "emit": torch.tensor(emit, dtype=torch.int64, device=device),
        "ratio": ratio,
        "overlap": ratio == 4,
        "freqs": rope.frequencies(TINY, ratio, device),
        "eps": 1e-6,
        "dtype": dtype,
    }


CALLS = (
    (4, 128, [0], [1]),
    (4, 128, [3], [1]),
    (4, 192, [0, 7, 30], [9, 1, 2]),
    (4, 512, [5, 11, 1], [3, 5, 1]),
    (128, 192, [127, 3], [1, 1]),
    (128, 512, [100, 0, 255], [30, 130, 1]),
)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(("ratio", "width", "lengths", "counts"), CALLS)
def test_compress(ops, ratio, width, lengths, counts, dtype):
    given = compressor(ratio, width, lengths, counts, dtype)
    tails = [given["tail"].clone() for _ in range(2)]
    got, want = (torch.full((len(given["emit"]), width), 7.0, device=DEVICE, dtype=dtype) for _ in range(2))
    ops["compress"](**given | {"tail": tails[0]}, out=got)
    REFERENCE.compress(**given | {"tail": tails[1]}, out=want)
    assert torch.equal(tails[0].nan_to_num(7.5), tails[1].nan_to_num(7.5))
    if got.numel():
        close(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "stored"), KINDS)
@pytest.mark.parametrize(("ratio", "width", "lengths", "counts"), CALLS)
def test_write_entry(ops, ratio, width, lengths, counts, kind, stored):
    width = 128 if kind == "index" else width if width % 64 == 0 and width > 128 else 192
    given = compressor(ratio, width, lengths, counts, BF16)
    index = torch.arange(len(given["emit"]), device=DEVICE) * 3 % 35
    got, want = (made_pages(kind, stored, width, count=9) for _ in range(2))
    tails = [given["tail"].clone() for _ in range(2)]
    for run, tail, pages in ((ops["write_entry"], tails[0], got), (REFERENCE.write_entry, tails[1], want)):
        run(**given | {"tail": tail}, pages=pages, index=index, hadamard=kind == "index")
    assert torch.equal(tails[0].nan_to_num(7.5), tails[1].nan_to_num(7.5))
    same_rows(got, want, index)


@pytest.mark.gpu
def test_a_token_that_ends_no_window_writes_nothing(ops):
    """As in a step that a graph replays, where every token is in `emit`."""
    given = compressor(4, 192, [4, 7, 2], [1, 1, 1], BF16)
    given["emit"] = torch.arange(3, device=DEVICE)
    got, before = (made_pages("entry", torch.uint8, 192) for _ in range(2))
    index = torch.tensor([33, 6, 34], device=DEVICE)
    ops["write_entry"](**given, pages=got, index=index)
    REFERENCE.write_entry(**given, pages=before, index=index)
    assert bool(got.read(index[1:2]).isfinite().all()) and bool(got.read(index[::2]).isnan().all())
    same = (a.read(index[1:2]) for a in (got, before))
    assert float(torch.dist(*same)) <= ROW["entry"] * float(before.read(index[1:2]).norm())


@pytest.mark.gpu
def test_an_entry_does_not_depend_on_other_sequences(ops):
    given = compressor(4, 192, [3, 7, 11], [1, 1, 1], BF16)
    every, one = (torch.empty(n, 192, device=DEVICE, dtype=BF16) for n in (3, 1))
    ops["compress"](**given | {"tail": given["tail"].clone()}, out=every)
    alone = {name: given[name][2:] for name in ("projected", "position", "sequence")}
    ops["compress"](**given | alone | {"tail": given["tail"].clone(), "emit": given["emit"][:1]}, out=one)
    assert torch.equal(one, every[2:])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(("tokens", "heads", "width"), [(1, 64, 128), (3, 5, 128), (7, 2, 256), (2, 3, 32)])
def test_index_query(ops, tokens, heads, width, dtype):
    x, freqs = draw(tokens, heads, width, dtype=dtype), rope.frequencies(TINY, CSA, DEVICE)[: width // 2]
    position = torch.arange(tokens, device=DEVICE) * 977 + 5
    cos, sin = rope.angles(position, freqs)
    for quantise in (False, True):
        want, got = torch.empty_like(x), torch.full_like(x, float("nan"))
        REFERENCE.index_query(x, cos, sin, quantise, want)
        ops["index_query"](x, cos, sin, quantise, got)
        error, size = (got.float() - want.float()).norm(dim=-1), want.float().norm(dim=-1)
        # A sum in another order moves a value across a rounding now and then, and then a code.
        assert bool((error <= (0.1 if quantise else 2.0**-8) * size).all())
        assert float(error.norm()) <= (0.04 if quantise else 2.0**-8) * float(size.norm())
        one = x[-1:].clone()  # a token by itself, in place
        ops["index_query"](one, cos[-1:].contiguous(), sin[-1:].contiguous(), quantise, one)
        assert torch.equal(one, got[-1:])


@pytest.mark.gpu
def test_queries_that_are_no_numbers(ops):
    x = draw(2, 3, 128, dtype=BF16)
    x[0, 1, 5], x[1, 2, 127] = float("nan"), float("inf")
    cos, sin = torch.ones(2, 32, device=DEVICE), torch.zeros(2, 32, device=DEVICE)
    want, got = torch.empty_like(x), torch.empty_like(x)
    REFERENCE.index_query(x, cos, sin, True, want)
    ops["index_query"](x, cos, sin, True, got)
    assert torch.equal(got.isnan(), want.isnan()) and bool(got.isnan().any())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("ratios", [(), (128,), (4, 4)])
@pytest.mark.parametrize("lengths", [[127], [3, 255, 6]])
def test_rows_of_a_layer_are_those_of_its_parts(ops, lengths, ratios, dtype):
    """One launch has the bits of a launch each."""
    count = len(lengths)
    x, key, weight, (cos, sin) = (
        draw(count, 8, 512, dtype=dtype),
        draw(count, 512, dtype=dtype),
        draw(512),
        turns(count),
    )
    index = torch.randperm(35, generator=torch.Generator().manual_seed(count))[:count].to(DEVICE)
    found = []
    for together in (True, False):
        query, window = torch.full_like(x, float("nan")), made_pages("entry", torch.uint8, 512)
        turn = {"eps": 1e-6, "cos": cos, "sin": sin}
        queries = {"x": x, "weight": None, **turn, "out": query}
        written = {"x": key, "weight": weight.to(dtype), **turn, "pages": window, "index": index}
        scored, entries = draw(count, 4, 128, dtype=dtype), []
        index_query = {"x": scored, "cos": cos, "sin": sin, "quantise": True, "out": scored}
        index_query = index_query if len(ratios) == 2 else None
        outputs = [query, window.data, scored]
        for i, ratio in enumerate(ratios):
            width, kind = (128, "index") if i < len(ratios) - 1 else (512, "entry")
            given = compressor(ratio, width, lengths, [1] * count, dtype)
            given["emit"], pages = torch.arange(count, device=DEVICE), made_pages(kind, torch.uint8, width)
            entries.append({**given, "pages": pages, "index": index, "hadamard": kind == "index"})
            outputs += [given["tail"], pages.data]
        if together:
            ops["layer_rows"](queries, written, entries, index_query)
        else:
            ops["norm_rotate"](**queries)
            ops["write_key"](**written)
            for entry in entries:
                ops["write_entry"](**entry)
            if index_query:
                ops["index_query"](**index_query)
        found.append([one.view(torch.uint8) for one in outputs])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


B16, ENTRY = {"dtype": BF16}, {"kind": "entry", "stored": torch.uint8}
MODEL = [
    ("test_norm_rotate", {"shape": (2, 3, 70), **B16}),
    ("test_write_key", {"count": 3, **ENTRY, **B16}),
    ("test_write_entry", {"ratio": 4, "width": 512, "lengths": [5, 11, 1], "counts": [3, 5, 1], **ENTRY}),
    ("test_index_query", {"tokens": 3, "heads": 5, "width": 128, **B16}),
    ("test_queries_that_are_no_numbers", {}),
    ("test_rows_of_a_layer_are_those_of_its_parts", {"lengths": [3, 255, 6], "ratios": (4, 4), **B16}),
]
LONG = [
    ("test_norm_rotate", {"shape": (3, 5, 512), **B16}),
    ("test_write_entry", {"ratio": 128, "width": 512, "lengths": [100, 0], "counts": [30, 130], **ENTRY}),
    ("test_rows_of_a_layer_are_those_of_its_parts", {"lengths": [127], "ratios": (128,), "dtype": FP32}),
]


@pytest.mark.parametrize("calls", first([MODEL, LONG]), ids=["short", "long"])
def test_in_the_model_of_a_gpu(calls):
    in_model.run(__name__, calls)
