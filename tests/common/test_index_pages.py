"""problems/common/index_pages.py against the page layout, byte by byte."""

import pytest
import torch

from problems.common import index_pages


@pytest.mark.parametrize(("kind", "bytes_each"), [("mxfp4", 68), ("fp8", 132)])
def test_form_inverts_page_bytes(kind, bytes_each):
    for per_page in (16, 32, 64, 4096):
        assert index_pages.page_bytes(per_page, kind) == per_page * bytes_each
        assert index_pages.form(per_page * bytes_each) == (per_page, kind)


@pytest.mark.parametrize("stride", [0, 68, 8 * 68, 16 * 68 + 4, 24 * 132, 3 * 16 * 68, -16 * 68])
def test_other_strides_are_refused(stride):
    with pytest.raises(ValueError, match=f"got {stride}"):
        index_pages.form(stride)


def test_an_mxfp4_key_is_where_the_layout_says():
    pages = torch.randint(256, (3, index_pages.page_bytes(16, "mxfp4")), dtype=torch.uint8)
    pages[1, 64 * 5 : 64 * 6] = torch.arange(64) * 3 % 256
    pages[1, 64 * 16 + 4 * 5 : 64 * 16 + 4 * 6] = torch.tensor([127, 120, 130, 127])
    key = index_pages.read(pages, torch.tensor(16 + 5))
    levels = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    for d in range(128):
        code = (d // 2 * 3 % 256) >> 4 * (d % 2) & 15
        assert float(key[d]) == levels[code] * 2.0 ** ([0, -7, 3, 0][d // 32])


def test_an_fp8_key_is_where_the_layout_says():
    pages = torch.randint(256, (2, index_pages.page_bytes(32, "fp8")), dtype=torch.uint8)
    codes = torch.arange(128).byte() % 127
    pages[1, 128 * 7 : 128 * 8] = codes
    pages[1, 128 * 32 + 28 : 128 * 32 + 32] = torch.tensor([0.3]).view(torch.uint8)
    want = codes.view(torch.float8_e4m3fn).float() * torch.tensor(0.3)
    assert torch.equal(index_pages.read(pages, torch.tensor([32 + 7]))[0], want)


@pytest.mark.parametrize("kind", ["mxfp4", "fp8"])
def test_what_is_written_is_read(kind):
    gen = torch.Generator().manual_seed(3)
    pages = torch.randint(256, (4, index_pages.page_bytes(16, kind)), dtype=torch.uint8, generator=gen)
    x = torch.randn(9, 128, generator=gen) * torch.tensor([1e-3, 1.0, 50.0]).repeat(3).unsqueeze(1)
    place = torch.randperm(64, generator=gen)[:9]
    before = pages.clone()
    index_pages.write(pages, place, *index_pages.quantise(x, kind))
    got = index_pages.read(pages, place)
    assert torch.equal(got, index_pages.dequantise(*index_pages.quantise(x, kind)))
    assert float((got - x).norm() / x.norm()) < {"mxfp4": 0.15, "fp8": 0.04}[kind]
    others = [i for i in range(64) if i not in place.tolist()]
    codes, was = index_pages.views(pages)[0].flatten(0, 1), index_pages.views(before)[0].flatten(0, 1)
    assert torch.equal(codes[others], was[others])
