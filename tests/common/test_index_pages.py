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
