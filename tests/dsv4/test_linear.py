"""torch_ops/linear.py and cache/pages.py of dsv4_forward against loops over the formats' definitions, in fp64."""

import dataclasses

import pytest
import torch

from problems.common import fp8, index_pages, kv_pages, nvfp4
from problems.dsv4_forward.cache.pages import Pages
from problems.dsv4_forward.torch_ops.linear import grouped_linear, input_values, linear, matmul
from problems.dsv4_forward.weights import formats
from problems.dsv4_forward.weights.linear import Linear
from tests.dsv4.linears import random, uneven, values64, weight_of

KINDS = ("plain", "fp8", "mxfp4", "nvfp4")


def values_of(w: Linear) -> torch.Tensor:
    """fp64 (..., n, k) of a Linear, by the formats' definitions."""
    if w.kind == "plain":
        return w.weight.double()
    if w.kind == "fp8":
        unit = torch.exp2(w.scale.view(torch.uint8).double() - 127)
        return w.weight.double() * unit.repeat_interleave(128, -2)[..., : w.n, :].repeat_interleave(128, -1)[..., : w.k]
    if w.kind == "mxfp4":
        return values64(w.weight, torch.exp2(w.scale.view(torch.uint8).double() - 127).repeat_interleave(2, -1))
    return values64(w.weight, w.scale) * w.scale_2.double()[..., None, None]


def one_rounding(got: torch.Tensor, wanted: torch.Tensor, size: torch.Tensor) -> None:
    """got: within half a step of its dtype of `wanted`, plus what an fp32 sum of terms of total size `size` adds."""
    half = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}[got.dtype]
    assert ((got.double() - wanted).abs() <= half * wanted.abs() + 2.0**-20 * size).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lead", [(), (3,)])
@pytest.mark.parametrize("n, k", [(5, 96), (150, 160)])
def test_dequantise(kind: str, n: int, k: int, lead: tuple[int, ...]) -> None:
    """n, k not square; of the 128x128 blocks the last are partial; leading axes are matrices of their own."""
    w = weight_of(kind, *lead, n, k)
    assert (w.n, w.k) == (n, k)
    got, half = w.dequantise(), w.dequantise(torch.bfloat16)
    assert got.dtype == torch.float32 and torch.equal(got, values_of(w).float())
    assert half.dtype == torch.bfloat16 and torch.equal(half, got.bfloat16())
    if kind in ("fp8", "mxfp4"):
        other = dataclasses.replace(w, scale=w.scale.view(torch.float8_e8m0fnu))
        assert torch.equal(other.dequantise(), got)
        assert not lead or torch.equal(other.select(2).dequantise(), got[2])
    for e in (0, 1, -1) if lead else ():
        one = w.select(e)
        assert one.weight.dim() == 2 and one.name == "w" and torch.equal(one.dequantise(), got[e])
        assert one.weight.data_ptr() == w.weight[e].data_ptr()  # a view
    for some in (torch.tensor([2, 0, 2, 1]), torch.tensor([[1], [0]])) if lead else ():
        assert torch.equal(w.select(some).dequantise(), got[some])


def test_select_keeps_the_rest_and_refuses_a_scalar_tensor() -> None:
    w = dataclasses.replace(weight_of("nvfp4", 3, 8, 32), quantise_input=False)
    one = w.select(1)
    assert not one.quantise_input and one.input_scale == w.input_scale[1] and one.scale_2 == w.scale_2[1]
    with pytest.raises(ValueError, match="0-d tensor would be read on the host"):
        w.select(torch.tensor(1))


def test_linear_refuses_what_does_not_fit() -> None:
    good = {kind: weight_of(kind, 2, 130, 160) for kind in KINDS}
    byte = torch.zeros(1, dtype=torch.uint8)
    wrong = [
        ("plain", {"kind": "fp4"}, "kind must be one of"),
        ("plain", {"weight": torch.ones(5)}, r"weight must be \(\.\.\., n, k\)"),
        ("plain", {"weight": torch.ones(5, 6, dtype=torch.float16)}, "weight must be torch.float32 or torch.bfloat16"),
        ("plain", {"scale": byte}, "plain has no scale"),
        ("fp8", {"scale": byte.expand(2, 1, 2)}, r"scale must be .* \(2, 2, 2\), got torch.uint8 \(2, 1, 2\)"),
        ("fp8", {"weight": byte.expand(2, 130, 160)}, "weight must be torch.float8_e4m3fn"),
        ("mxfp4", {"weight": byte.expand(2, 130, 72)}, "k must be a multiple of 32 for mxfp4, got 144"),
        ("mxfp4", {"scale": byte.expand(2, 130, 10)}, r"scale must be .* \(2, 130, 5\)"),
        ("mxfp4", {"scale_2": torch.ones(2)}, "mxfp4 has no scale_2"),
        ("nvfp4", {"scale": byte.expand(2, 130, 10)}, "scale must be torch.float8_e4m3fn"),
        ("nvfp4", {"scale_2": torch.ones(())}, r"scale_2 must be torch.float32 \(2,\), got torch.float32 \(\)"),
        ("nvfp4", {"input_scale": None}, r"input_scale must be torch.float32 \(2,\), got None"),
    ]
    for kind, change, message in wrong:
        with pytest.raises(ValueError, match=message) as caught:
            dataclasses.replace(good[kind], **{"name": "layers.1.wkv", **change})
        assert str(caught.value).startswith("layers.1.wkv: ")
    assert dataclasses.replace(good["nvfp4"], input_scale=None, quantise_input=False).input_scale is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS[1:])
def test_inputs_are_quantised_in_fp32(kind: str, dtype: torch.dtype) -> None:
    """nvfp4 by its input scale. The quantisers are in tests/common/test_formats.py."""
    w, x = weight_of(kind, 5, 160), uneven(7, 160, seed=2).to(dtype)
    x[:, :64] *= 2.0**-13  # subnormal under the scale of the next 64, not under one of their own
    got = input_values(x, w)
    wanted = nvfp4.round_trip(x.float(), w.input_scale) if kind == "nvfp4" else fp8.round_trip(x.float(), 128)
    assert got.dtype == torch.float32 and torch.equal(got, wanted)
    assert 0.01 < float((wanted - x).norm() / x.norm()) < 0.15


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_products(kind: str, quantised: bool, out_dtype: torch.dtype) -> None:
    """Of three groups, and of one matrix; rounded once: a product of bf16 operands, or one rounded twice, is off by
    more. x and out may be slices; what lies beside stays.
    """
    w = dataclasses.replace(weight_of(kind, 3, 150, 160, dtype=out_dtype), quantise_input=quantised)
    x = uneven(7, 3, 200, seed=6).to(out_dtype)[..., :160]
    out = torch.full((7, 3, 170), torch.nan, dtype=out_dtype)
    assert grouped_linear(x, w, out[..., :150]) is None and bool(out[..., 150:].isnan().all())
    for g in range(3):
        one, alone = w.select(g), torch.full((7, 170), torch.nan, dtype=out_dtype)
        assert linear(x[:, g], one, alone[:, :150]) is None and bool(alone[:, 150:].isnan().all())
        a, b = input_values(x[:, g], one).double(), values_of(one)
        for got in (out[:, g, :150], alone[:, :150]):
            one_rounding(got, a @ b.T, a.abs() @ b.abs().T)
        plain = x[:, g].double() @ b.T
        changed = float((alone[:, :150].double() - plain).norm() / plain.norm()) > 0.01
        assert changed == (quantised and kind != "plain"), "whether inputs were quantised"
    linear(x[:0, 0], w.select(0), out[:0, 0, :150])


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("w_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_products_of_plain_weights(x_dtype: torch.dtype, w_dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    w = weight_of("plain", 65, 300, dtype=w_dtype)
    x = uneven(7, 300, seed=7).to(x_dtype)
    a, b = (x.to(w_dtype) if out_dtype == torch.bfloat16 else x).double(), w.weight.double()
    for product in (lambda out: matmul(x, w.weight, out), lambda out: linear(x, w, out)):
        out = torch.full((7, 65), torch.nan, dtype=out_dtype)
        assert product(out) is None
        one_rounding(out, a @ b.T, a.abs() @ b.abs().T)


def test_products_refuse() -> None:
    w, grouped = weight_of("fp8", 33, 160), weight_of("plain", 3, 33, 160)
    for product, weight, x, out, named in (
        (linear, w, (2, 96), (2, 33), r"w: x must be \(N, 160\), got \(2, 96\)"),
        (linear, w, (2, 160), (3, 33), r"w: out must be \(2, 33\), got \(3, 33\)"),
        (grouped_linear, grouped, (2, 2, 160), (2, 3, 33), r"w: x must be \(N, 3, 160\), got"),
        (grouped_linear, w, (2, 3, 160), (2, 3, 33), "w: weight must have 3 axes"),
        (linear, grouped, (2, 160), (2, 33), "weight must have 2 axes"),
        (matmul, torch.ones(3, 5), (2, 5), (2, 4), r"out must be \(2, 3\), got \(2, 4\)"),
    ):
        with pytest.raises(ValueError, match=named):
            product(torch.ones(x), weight, torch.ones(out))


# ---- Pages ----

FORMS = [("plain", 12, 0), ("fp32", 7, 0), ("entry", 192, 64), ("entry", 512, 64), ("index", 128, 0), ("index", 64, 0)]


def pages_of(kind: str, n_pages: int, per_page: int, width: int, rope: int, fill: int = 0) -> Pages:
    """fp32: plain ones that keep every bit."""
    kind, dtype = ("plain", torch.float32) if kind == "fp32" else (kind, torch.bfloat16)
    shape, dtype = Pages.shape(kind, n_pages, per_page, width, rope, dtype)
    return Pages(torch.full(shape, fill, dtype=dtype), per_page, kind, width, rope)


def stored(kind: str, rows: torch.Tensor, rope: int) -> torch.Tensor:
    """What a kind keeps of the rows, in fp32; the quantisers are tested by themselves."""
    if kind in ("plain", "fp32"):
        return rows.float() if kind == "fp32" else rows.bfloat16().float()
    if kind == "index":
        return formats.dequantise_mxfp4(*formats.quantise_mxfp4(rows))
    nope = rows.shape[-1] - rope
    return torch.cat([fp8.round_trip(rows[:, :nope].float(), 64), rows[:, nope:].bfloat16().float()], dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind, width, rope", FORMS)
@pytest.mark.parametrize("per_page", [3, 32])
def test_pages_read_what_was_written(kind: str, width: int, rope: int, per_page: int, dtype: torch.dtype) -> None:
    """Several pages of rows of different magnitude, written in any order and twice; others stay zero."""
    n_pages = 5
    pages = pages_of(kind, n_pages, per_page, width, rope)
    order = torch.randperm(n_pages * per_page, generator=torch.Generator().manual_seed(11))
    index, rest = order[: n_pages * per_page * 3 // 4], order[n_pages * per_page * 3 // 4 :]
    rows = uneven(len(index), width, seed=12).to(dtype)
    pages.write(index, -7 * rows)
    pages.write(index, rows)
    got = pages.read(index)
    assert got.dtype == torch.float32 and torch.equal(got, stored(kind, rows, rope)) and not pages.read(rest).any()


@pytest.mark.parametrize("kind, width, rope", FORMS)
def test_pages_read_any_shape_and_masked_indices(kind: str, width: int, rope: int) -> None:
    pages = pages_of(kind, 4, 8, width, rope)
    pages.write(torch.arange(32), random(32, width, seed=13))
    rows = pages.read(torch.arange(32))
    index = torch.tensor([[[0, -1, 31], [8, 7, -9]]], dtype=torch.int32)
    assert torch.equal(pages.read(index), rows[index.clamp(min=0).long()])
    assert pages.read(index[..., :0]).shape == (1, 2, 0, width)
    pages.write(torch.arange(0), rows[:0])
    assert torch.equal(pages.read(torch.arange(32)), rows)


def test_entries_and_keys_lie_as_the_problems_have_them() -> None:
    """Where that is, byte by byte, is in tests/common/test_pages.py."""
    rows, index = uneven(100, 512, seed=15), torch.randperm(192, generator=torch.Generator().manual_seed(16))[:100]
    entry, keys = pages_of("entry", 3, 64, 512, 64, fill=0xA5), pages_of("index", 3, 64, 128, 64, fill=0xA5)
    assert entry.data.shape == (3, 37440) and keys.data.shape == (3, 64 * 68)
    wanted, want_keys = (torch.full_like(one.data, 0xA5) for one in (entry, keys))
    codes, scales = fp8.quantise_groups(rows[:, :448], 64)
    kv_pages.write(wanted, 64, index, codes, scales, rows[:, 448:].bfloat16())
    index_pages.write(want_keys, index, *formats.quantise_mxfp4(rows[:, :128]))
    entry.write(index, rows)
    keys.write(index, rows[:, :128])
    assert torch.equal(entry.data, wanted) and torch.equal(keys.data, want_keys)


def test_pages_write_the_callers_memory() -> None:
    """Pages are views of a buffer, at any offset of whole values."""
    buffer = torch.zeros(8 + 2 * 3 * 68, dtype=torch.uint8)
    pages = Pages(buffer[8:].view(2, 3 * 68), 3, "index", 128)
    pages.write(torch.tensor([0, 5]), random(2, 128, seed=18))
    assert not buffer[:8].any() and buffer[8:].any()
    entry = pages_of("entry", 2, 3, 192, 64)
    copy = torch.zeros(entry.data.numel() + 3, dtype=torch.uint8)[3:].view_as(entry.data)  # 3: no alignment is needed
    for data in (entry.data, copy):
        Pages(data, 3, "entry", 192, 64).write(torch.tensor([1, 4]), random(2, 192, seed=19))
    other = Pages(copy, 3, "entry", 192, 64)
    assert torch.equal(copy, entry.data) and torch.equal(other.read(torch.arange(6)), entry.read(torch.arange(6)))


def test_pages_refuse() -> None:
    data = torch.zeros(2, 4, 8)
    for act, named in (
        (lambda: Pages(data, 4, "paged", 8), "kind must be one of"),
        (lambda: Pages(data, 3, "plain", 8), r"data of plain pages must be torch.float32 \(2, 3, 8\)"),
        (lambda: Pages(torch.zeros(2, 8, 4).mT, 4, "plain", 8), r"contiguous, got .* with strides \(32, 1, 4\)"),
        (lambda: Pages(data.half(), 4, "plain", 8), "plain pages must be float32 or bfloat16"),
        (lambda: Pages(data, 4, "index", 128), r"data of index pages must be torch.uint8 \(2, 272\), contiguous"),
        (lambda: Pages.shape("index", 2, 4, 100), "width of index pages must be a multiple of 32, got 100"),
        (lambda: Pages(data, 4, "plain", 8).write(torch.arange(3), torch.ones(2, 8)), r"rows must be \(3, 8\)"),
    ):
        with pytest.raises(ValueError, match=named):
            act()
