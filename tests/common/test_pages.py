"""problems/common/kv_pages.py and index_pages.py against the layouts of their pages, byte by byte."""

import pytest
import torch

from problems.common import fp8, index_pages, kv_pages
from tests.problems.exact import kv_entry

FORMS = [(448, 64), (64, 64), (128, 4), (512, 0)]


def values(pages: torch.Tensor, per_page: int, index: torch.Tensor, nope: int, rope: int) -> torch.Tensor:
    """fp32 (..., nope + rope): what the pages hold, decoded."""
    codes, scales, rest = kv_pages.read(pages, per_page, index, nope, rope)
    return torch.cat([fp8.dequantise_groups(codes, scales, kv_pages.GROUP), rest.float()], dim=-1)


def entries(count: int, nope: int, rope: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random (codes, scales, rope) of `count` entries: any finite e4m3, any scale that keeps them normal."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 0x7F, (count, nope), generator=generator)
    codes |= torch.randint(0, 2, (count, nope), generator=generator) << 7
    scales = torch.randint(100, 160, (count, nope // 64), generator=generator)
    tail = torch.randn(count, rope, generator=generator).bfloat16()
    return codes.to(torch.uint8).view(torch.float8_e4m3fn), scales.to(torch.uint8), tail


@pytest.mark.parametrize(("per_page", "nope", "wanted"), [(64, 448, 37440), (1, 448, 1152), (32, 64, 6528)])
def test_page_bytes(per_page: int, nope: int, wanted: int) -> None:
    assert kv_pages.page_bytes(per_page, nope, 64) == wanted
    assert wanted % kv_pages.payload_bytes(nope, 64) == 0 and wanted >= per_page * (nope + 2 * 64 + 8)


@pytest.mark.parametrize("nope, rope", [(0, 64), (100, 64), (576, 64), (64, 3), (64, -4)])
def test_forms_without_a_layout(nope: int, rope: int) -> None:
    with pytest.raises(ValueError, match="nope must be a multiple of 64 up to 512 and rope of 4"):
        kv_pages.page_bytes(64, nope, rope)


@pytest.mark.parametrize("nope, rope", FORMS)
@pytest.mark.parametrize("per_page", [1, 3, 64])
def test_every_byte_is_where_the_layout_says(per_page: int, nope: int, rope: int) -> None:
    """Written in any order over several pages; bytes of other entries, unused scale bytes and padding stay."""
    n_pages, payload = 3, nope + 2 * rope
    stride = kv_pages.page_bytes(per_page, nope, rope)
    pages = torch.full((n_pages, stride), 0xA5, dtype=torch.uint8)
    order = torch.randperm(n_pages * per_page, generator=torch.Generator().manual_seed(5))
    index = order[: max(2, len(order) * 2 // 3)]
    codes, scales, tail = entries(len(index), nope, rope, seed=6)
    kv_pages.write(pages, per_page, index, codes, scales, tail)

    wanted = bytearray(b"\xa5" * (n_pages * stride))
    for e, i in enumerate(index.tolist()):
        page, slot = divmod(i, per_page)
        at = page * stride + slot * payload
        wanted[at : at + nope] = bytes(codes[e].view(torch.uint8).tolist())
        wanted[at + nope : at + payload] = bytes(tail[e].view(torch.uint8).tolist())
        at = page * stride + per_page * payload + 8 * slot
        wanted[at : at + nope // 64] = bytes(scales[e].tolist())
    assert bytes(pages.flatten().tolist()) == bytes(wanted)

    got = values(pages, per_page, index, nope, rope)
    assert got.dtype == torch.float32
    for row, i in zip(got.tolist(), index.tolist(), strict=True):
        page, slot = divmod(i, per_page)
        assert row == kv_entry(bytes(pages[page].tolist()), per_page, slot, nope, rope)


def test_read_accepts_every_code_and_scale() -> None:
    """e4m3 subnormals, both NaN codes, every scale byte; the eighth scale byte is not looked at."""
    nope, rope = 448, 64
    pages = torch.full((1, kv_pages.page_bytes(40, nope, rope)), 255, dtype=torch.uint8)
    codes = (torch.arange(37 * nope) % 256).to(torch.uint8).view(torch.float8_e4m3fn).view(37, nope)
    scales = torch.arange(37 * 7).clamp(max=255).to(torch.uint8).view(37, 7)
    kv_pages.write(pages, 40, torch.arange(37), codes, scales, torch.ones(37, rope, dtype=torch.bfloat16))
    got = values(pages, 40, torch.arange(37), nope, rope)
    wanted = fp8.dequantise_groups(codes, scales, 64)
    assert torch.equal(got[:, :nope].nan_to_num(7, 8, 9), wanted.nan_to_num(7, 8, 9))
    assert torch.isnan(got[36, 192:nope]).all() and not torch.isnan(got[:, nope:]).any()
    assert got[0, 1] == 2.0**-9 * 2.0**-127


def test_write_of_slices() -> None:
    pages = torch.zeros(2, kv_pages.page_bytes(4, 64, 8), dtype=torch.uint8)
    codes, scales, tail = entries(6, 64, 16, seed=8)
    kv_pages.write(pages, 4, torch.arange(3), codes[::2], scales[::2], tail[::2, 8:])  # rows and columns apart
    got = values(pages, 4, torch.arange(3), 64, 8)
    assert torch.equal(got[:, 64:], tail[::2, 8:].float())
    assert torch.equal(got[:, :64], fp8.dequantise_groups(codes[::2], scales[::2], 64))


def test_refusals() -> None:
    codes, scales, tail = entries(2, 128, 64, seed=9)
    index = torch.arange(2)
    pages = torch.zeros(2, kv_pages.page_bytes(4, 128, 64), dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"pages must be uint8 \(n_pages, 1280\), contiguous"):
        kv_pages.write(pages[:, :-1], 4, index, codes, scales, tail)
    with pytest.raises(ValueError, match="contiguous"):
        values(torch.zeros(2, 2 * 1280, dtype=torch.uint8)[:, :1280], 4, index, 128, 64)
    with pytest.raises(ValueError, match="want float8_e4m3fn, uint8, bfloat16"):
        kv_pages.write(pages, 4, index, codes, scales, tail.float())
    for wrong in ((codes[:1], scales, tail), (codes, scales[:, :1], tail), (codes, scales, tail[:1])):
        with pytest.raises(ValueError, match=r"index \(2,\) wants as many rows"):
            kv_pages.write(pages, 4, index, *wrong)
    on_meta = [one.to("meta") for one in (index, codes, scales, tail)]  # where a value is read on the host, this raises
    kv_pages.write(pages.to("meta"), 4, *on_meta)
    assert values(pages.to("meta"), 4, index.to("meta"), 128, 64).shape == (2, 192)


@pytest.mark.parametrize(("kind", "bytes_each"), [("mxfp4", 68), ("fp8", 132)])
def test_form_inverts_page_bytes(kind, bytes_each):
    for per_page in (16, 32, 64, 4096):
        assert index_pages.page_bytes(per_page, kind) == per_page * bytes_each
        assert index_pages.form(per_page * bytes_each) == (per_page, kind)


@pytest.mark.parametrize("stride", [0, 68, 8 * 68, 16 * 68 + 4, 24 * 132, 3 * 16 * 68, -16 * 68])
def test_other_strides_are_refused(stride):
    with pytest.raises(ValueError, match=f"got {stride}"):
        index_pages.form(stride)


@pytest.mark.parametrize(("kind", "codes"), [("mxfp4", 64), ("fp8", 128)])
def test_a_key_is_where_the_layout_says(kind, codes):
    pages = torch.randint(256, (3, index_pages.page_bytes(16, kind)), dtype=torch.uint8)
    got = index_pages.read(pages, torch.tensor([16 + 5, 2 * 16]))
    for i, (page, slot) in enumerate(((1, 5), (2, 0))):
        assert torch.equal(got[0][i], pages[page, codes * slot : codes * (slot + 1)])
        assert torch.equal(got[1][i], pages[page, 16 * codes + 4 * slot : 16 * codes + 4 * slot + 4])


@pytest.mark.parametrize("kind", ["mxfp4", "fp8"])
def test_what_is_written_is_read_and_nothing_else_changes(kind):
    gen = torch.Generator().manual_seed(3)
    pages, keys = (
        torch.randint(256, (n, index_pages.page_bytes(16, kind)), dtype=torch.uint8, generator=gen) for n in (4, 1)
    )
    place = torch.randperm(64, generator=gen)[:9]
    codes, scales = index_pages.read(keys, torch.arange(9))
    before = index_pages.read(pages, torch.arange(64))
    index_pages.write(pages, place, codes, scales)
    got, others = index_pages.read(pages, torch.arange(64)), torch.ones(64, dtype=torch.bool)
    others[place] = False
    for now, then, written in zip(got, before, (codes, scales), strict=True):
        assert torch.equal(now[place], written) and torch.equal(now[others], then[others])
