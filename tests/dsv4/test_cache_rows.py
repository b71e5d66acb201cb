"""kernels/cache_rows.cu on a GPU, and in the model of one, against torch_ops/rows.py."""

import dataclasses

import pytest
import torch

from problems.dsv4_forward import ops as table
from problems.dsv4_forward.cache.pages import Pages
from problems.dsv4_forward.kernels.cache_rows import LayerRows as kernel
from problems.dsv4_forward.torch_ops import rope
from problems.dsv4_forward.weights.config import CSA, TINY
from tests.dsv4 import in_model
from tests.dsv4.in_model import draw_uneven as draw

DEVICE = "cuda"
REFERENCE = table.REFERENCE
BF16, FP32 = torch.bfloat16, torch.float32
KINDS = (("plain", BF16), ("plain", FP32), ("entry", torch.uint8), ("index", torch.uint8))
# Of a value, and of a row that is quantised: a sum in another order moves a value across a rounding now and then.
STEP = {BF16: 2.0**-7, FP32: 2e-5}
ROW = {"plain": 2.0**-8, "entry": 2.0**-6, "index": 0.1}


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


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype | None = None) -> None:
    error, size = (got.float() - want.float()).abs(), want.float().abs()
    step = STEP[dtype or got.dtype]
    assert bool((error <= step * (size + 0.02 * size.amax(-1, keepdim=True))).all()), float(error.max())


def same_rows(got: Pages, want: Pages, index: torch.Tensor, dtype: torch.dtype = BF16) -> None:
    """The rows that were written are near, and no other byte has changed."""
    a, b = got.read(index), want.read(index)
    assert bool(a.isfinite().all())
    if got.kind == "plain":
        close(a, b, BF16 if BF16 in (dtype, got.data.dtype) else FP32)
    error, size = (a - b).norm(dim=1), b.norm(dim=1)
    assert bool((error <= ROW[got.kind] * size + 1e-12).all()), float((error / size).max())
    for one in (got, want):
        one.write(index, torch.zeros(len(index), one.width, device=DEVICE))
    assert torch.equal(got.data.view(torch.uint8), want.data.view(torch.uint8))


def some(count: int) -> torch.Tensor:
    return torch.randperm(35, generator=torch.Generator().manual_seed(count))[:count].to(DEVICE)


def call(
    count: int, width: int, dtype: torch.dtype, heads: int = 2, weight: bool = False, pages: Pages | None = None
) -> dict:
    """A call for `count` tokens without compressors and the indexer's queries."""
    (cos, sin), x = turns(count), draw(count, heads, width, dtype=dtype)
    norm = {"eps": 1e-6, "cos": cos, "sin": sin}
    pages, factor = pages or made_pages("plain", dtype, width), draw(width, dtype=dtype, seed=1)
    key = {"x": draw(count, width, dtype=dtype, seed=2), "weight": factor, "pages": pages, "index": some(count)}
    queries = {"x": x, "weight": factor if weight else None, "out": torch.full_like(x, float("nan"))}
    return {"queries": queries | norm, "key": key | norm, "compressed": [], "index": None}


def both(ops, make) -> tuple[dict, dict]:
    """What the kernel and the reference have done with a call that `make` returns."""
    got, want = make(), make()
    assert ops["layer_rows"](**got) is None
    REFERENCE.layer_rows(**want)
    return got, want


def last(given: dict) -> dict:
    """The call of its last token alone, with other outputs."""
    alone = {k: v[-1:].contiguous() for k, v in given["queries"].items() if k in ("x", "cos", "sin", "out")}
    turn = {name: alone[name] for name in ("cos", "sin")}
    key = given["key"] | {name: given["key"][name][-1:].contiguous() for name in ("x", "index")} | turn
    pages = dataclasses.replace(key["pages"], data=key["pages"].data.clone())
    alone["out"] = torch.full_like(alone["x"], float("nan"))
    return given | {"queries": given["queries"] | alone, "key": key | {"pages": pages}}


def test_wrong_arguments_are_named(on_a_cpu):
    made, given = kernel.__new__(kernel), call(3, 128, FP32)
    x, ids, wide = given["queries"]["x"], given["key"]["index"], dict.fromkeys(("cos", "sin"), torch.zeros(3, 65))
    turn = {name: given["key"][name] for name in ("cos", "sin")}
    entry = compressor(4, 128, [3, 2, 1], [1, 1, 1], FP32) | {"pages": given["key"]["pages"], "index": ids[:1]}
    given |= {"compressed": [entry], "index": {"x": x, **turn, "quantise": True, "out": x}}
    for part, change, wanted in (
        ("queries", {"x": x.half()}, "x must be fp32 or bf16"),
        ("queries", {"out": x.bfloat16()}, "out must be torch.float32"),
        ("queries", {"weight": torch.zeros(127)}, "weight must be"),
        ("key", {"index": ids.int()}, "index must be torch.int64"),
        ("key", {"x": torch.zeros(128, 3).t()}, "key must be .* strides"),
        ("index", {"out": x[:, :1].contiguous()}, "index out must be"),
        ("index", {"sin": torch.zeros(2, 32)}, "sin must be"),
        ("index", wide, "at most 64 pairs, got 65"),
        ("compressed", {"emit": ids[:1].int()}, "emit must be torch.int64"),
        ("compressed", {"tail": entry["tail"][:, :7].contiguous()}, "the ring must hold the 8 tokens"),
        ("compressed", {"dtype": BF16}, "dtype must be that of the queries"),
    ):
        changed = [entry | change] if part == "compressed" else given[part] | change
        with pytest.raises(ValueError, match=wanted):
            made.layer_rows(**given | {part: changed})
    narrow, broad = torch.zeros(3, 2, 48), torch.zeros(3, 2, 8193)
    for part, changed in (
        ("queries", given["queries"] | {"x": broad, "out": broad}),
        ("queries", given["queries"] | {"eps": 1e-5}),
        ("key", given["key"] | {"cos": turn["cos"].clone()}),
        ("index", given["index"] | {"x": narrow, "out": narrow}),
        ("compressed", [entry] * 3),
        ("compressed", [entry | {"ratio": 128}]),
    ):
        assert made.layer_rows(**given | {part: changed}) is NotImplemented


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(("kind", "stored"), KINDS)
@pytest.mark.parametrize(("count", "heads", "width"), [(1, 1, 128), (3, 5, 192), (16, 64, 512), (2, 3, 70)])
def test_queries_and_keys(ops, count, heads, width, kind, stored, dtype):
    """Queries with a weight where pages are plain."""
    width = 128 if kind == "index" else max(width, 192) if kind == "entry" else width

    def make() -> dict:
        return call(count, width, dtype, heads, kind == "plain", made_pages(kind, stored, width))

    got, want = both(ops, make)
    close(got["queries"]["out"], want["queries"]["out"])
    one = last(make())  # a token by itself
    ops["layer_rows"](**one)
    index = one["key"]["index"]
    assert torch.equal(one["queries"]["out"], got["queries"]["out"][-1:])
    assert torch.equal(one["key"]["pages"].read(index), got["key"]["pages"].read(index))
    same_rows(got["key"]["pages"], want["key"]["pages"], got["key"]["index"], dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(("kind", "stored"), KINDS)
@pytest.mark.parametrize("strange", [False, True])
def test_every_byte_of_a_row_whose_norm_is_exact(ops, kind, stored, dtype, strange):
    """Keys of 1 and -1 are the weights then, with a sign, and all that is rounded is what the pages hold. strange:
    some are no numbers.
    """
    width = 128 if kind == "index" else 192

    def make() -> dict:
        given = call(4, width, dtype, pages=made_pages(kind, stored, width))
        key = given["key"]
        key["x"].copy_(key["x"].sign())
        key["weight"][:32], key["weight"][64:96] = 0, key["weight"][64:96] * 1e-5
        key["weight"][32:64] = torch.tensor((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6)).repeat(4) / 4  # e2m1's ties
        if strange:
            for at, value in ((3, "nan"), (50, "inf"), (100 - 2 * (kind == "index") * 30, "-inf")):
                key["weight"][at] = float(value)
        key["cos"].fill_(1), key["sin"].fill_(0)
        for part in (key, given["queries"]):
            part["eps"] = 0.0
        return given

    pages, wanted = (one["key"]["pages"] for one in both(ops, make))
    if not strange:
        assert torch.equal(pages.data.view(torch.uint8), wanted.data.view(torch.uint8))
    a, b = (one.read(some(4)) for one in (pages, wanted))
    assert torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


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


CSA_CALLS = [(4, 128, [0], [1]), (4, 128, [3], [1]), (4, 192, [0, 7, 30], [9, 1, 2]), (4, 512, [5, 11, 1], [3, 5, 1])]
HCA_CALLS = [(128, 192, [127, 3], [1, 1]), (128, 512, [100, 0, 255], [30, 130, 1])]


def with_entries(given: dict, pages: Pages, index: torch.Tensor, hadamard: bool = False) -> dict:
    """A call whose compressor gets the arguments `given`; its queries and keys are few."""
    count, dtype = len(given["projected"]), given["dtype"]
    entry = given | {"pages": pages, "index": index, "hadamard": hadamard}
    return call(min(count, 35), 512, dtype) | {"compressed": [entry]}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(("kind", "stored"), KINDS)
@pytest.mark.parametrize(("ratio", "width", "lengths", "counts"), CSA_CALLS + HCA_CALLS)
def test_entries(ops, ratio, width, lengths, counts, kind, stored, dtype):
    width = 128 if kind == "index" else max(width, 192) if kind == "entry" else width

    def make() -> dict:
        given = compressor(ratio, width, lengths, counts, dtype)
        index = torch.arange(len(given["emit"]), device=DEVICE) * 3 % 35
        return with_entries(given, made_pages(kind, stored, width, count=9), index, kind == "index")

    got, want = (one["compressed"][0] for one in both(ops, make))
    assert torch.equal(got["tail"].nan_to_num(7.5), want["tail"].nan_to_num(7.5))
    same_rows(got["pages"], want["pages"], got["index"], dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("quantise", [False, True])
@pytest.mark.parametrize(("tokens", "heads", "width"), [(1, 64, 128), (3, 5, 128), (7, 2, 256), (2, 3, 32)])
def test_index_queries(ops, tokens, heads, width, quantise, dtype):
    freqs = rope.frequencies(TINY, CSA, DEVICE)[: width // 2]
    cos, sin = rope.angles(torch.arange(tokens, device=DEVICE) * 977 + 5, freqs)

    def make(inside: bool = False, first: int = 0) -> dict:
        x = draw(tokens, heads, width, dtype=dtype)[first:].clone()
        out = x if inside else torch.full_like(x, float("nan"))
        index = {"x": x, "cos": cos[first:].contiguous(), "sin": sin[first:].contiguous(), "quantise": quantise}
        return call(len(x), 512, dtype) | {"index": index | {"out": out}}

    got, want = (one["index"]["out"] for one in both(ops, make))
    error, size = (got.float() - want.float()).norm(dim=-1), want.float().norm(dim=-1)
    # A sum in another order moves a value across a rounding now and then, and then a code.
    assert bool((error <= (0.1 if quantise else 2.0**-8) * size).all())
    assert float(error.norm()) <= (0.04 if quantise else 2.0**-8) * float(size.norm())
    one = make(True, tokens - 1)  # a token by itself, in place
    ops["layer_rows"](**one)
    assert torch.equal(one["index"]["out"], got[-1:])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_queries_that_are_no_numbers(ops, dtype):
    def make() -> dict:
        x = draw(2, 3, 128, dtype=dtype)
        x[0, 1, 5], x[1, 2, 127] = float("nan"), float("inf")
        turn = {"cos": torch.ones(2, 32, device=DEVICE), "sin": torch.zeros(2, 32, device=DEVICE)}
        return call(2, 512, dtype) | {"index": {"x": x, **turn, "quantise": True, "out": x}}

    got, want = (one["index"]["out"] for one in both(ops, make))
    assert torch.equal(got.isnan(), want.isnan()) and bool(got.isnan().any())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("ratios", [(), (128,), (4, 4)])
@pytest.mark.parametrize("lengths", [[127], [3, 255, 6]])
def test_all_rows_of_a_layer(ops, lengths, ratios, dtype):
    """Of each part, the rows that a call without the others makes, to the bit."""
    count = len(lengths)

    def make() -> dict:
        given = call(count, 512, dtype, 8, pages=made_pages("entry", torch.uint8, 512))
        for i, ratio in enumerate(ratios):
            width, kind = (128, "index") if i < len(ratios) - 1 else (512, "entry")
            entry = compressor(ratio, width, lengths, [1] * count, dtype) | {"emit": torch.arange(count, device=DEVICE)}
            entry |= {"pages": made_pages(kind, torch.uint8, width), "index": some(count), "hadamard": kind == "index"}
            given["compressed"].append(entry)
        x, turn = draw(count, 4, 128, dtype=dtype), {name: given["key"][name] for name in ("cos", "sin")}
        if len(ratios) == 2:
            given["index"] = {"x": x, **turn, "quantise": True, "out": x}
        return given

    together, apart = make(), make()
    ops["layer_rows"](**together)
    parts = [{"compressed": [one]} for one in apart["compressed"]] + ([{"index": apart["index"]}] if ratios else [])
    for part in ({}, *parts):
        ops["layer_rows"](**apart | {"compressed": [], "index": None} | part)
    found = [[one["queries"]["out"], one["key"]["pages"].data] for one in (together, apart)]
    for parts, one in zip(found, (together, apart), strict=True):
        parts += [part for entry in one["compressed"] for part in (entry["tail"], entry["pages"].data)]
        parts += [one["index"]["out"]] if one["index"] else []
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(*found, strict=True))


B16, ENTRY = {"dtype": BF16}, {"kind": "entry", "stored": torch.uint8}
MODEL = [
    ("test_queries_and_keys", {"count": 2, "heads": 3, "width": 70, "kind": "plain", "stored": BF16, **B16}),
    ("test_every_byte_of_a_row_whose_norm_is_exact", {**ENTRY, "strange": False, **B16}),
    ("test_every_byte_of_a_row_whose_norm_is_exact", {"kind": "index", "stored": torch.uint8, "strange": False, **B16}),
    ("test_entries", {"ratio": 4, "width": 192, "lengths": [3, 6], "counts": [1, 2], **ENTRY, **B16}),
    ("test_index_queries", {"tokens": 2, "heads": 3, "width": 128, "quantise": True, **B16}),
    ("test_queries_that_are_no_numbers", B16),
]
LONG = [
    ("test_entries", {"ratio": 4, "width": 512, "lengths": [4, 7, 2], "counts": [3, 5, 1], **ENTRY, **B16}),
    ("test_index_queries", {"tokens": 3, "heads": 5, "width": 128, "quantise": True, **B16}),
    ("test_index_queries", {"tokens": 1, "heads": 2, "width": 512, "quantise": True, "dtype": FP32}),
    ("test_all_rows_of_a_layer", {"lengths": [3, 255, 6], "ratios": (4, 4), **B16}),
    ("test_queries_and_keys", {"count": 3, "heads": 5, "width": 512, **ENTRY, **B16}),
    ("test_every_byte_of_a_row_whose_norm_is_exact", {"kind": "index", "stored": torch.uint8, "strange": True, **B16}),
    ("test_entries", {"ratio": 128, "width": 512, "lengths": [100, 0], "counts": [30, 130], **ENTRY, **B16}),
    ("test_entries", {"ratio": 4, "width": 192, "lengths": [0, 7], "counts": [9, 1], **ENTRY, "dtype": FP32}),
    ("test_index_queries", {"tokens": 2, "heads": 3, "width": 32, "quantise": True, "dtype": FP32}),
    ("test_all_rows_of_a_layer", {"lengths": [127], "ratios": (128,), "dtype": FP32}),
]
test_in_the_model_of_a_gpu = in_model.test_of(__name__, MODEL, LONG)
