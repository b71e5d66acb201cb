"""fmha_decode: every variant is right, on a CPU and on a GPU."""

import dataclasses
from pathlib import Path

import pytest
import torch

from problems.common import load
from tests.problems.fmha_cases import FOLDER, named, poisoned, reference, solved, task
from tests.problems.variants import made_for, skip_unless_it_runs

COMPILED = [file for file in made_for(FOLDER, "cpu") if file.with_suffix(".cpp").exists()]  # these say what is wrong
REPEATED = (("ragged", 64), ("maxima", 64), ("sinks", 128))  # contents and heads of three cases


def run(file: Path, case: object, device: str = "cpu") -> object:
    """The checker's result for one variant; a peer gets its own preparation and tolerance."""
    module = load.module(FOLDER, f"variants/{file.stem}")
    data, want = solved(case, device)
    data, peer = poisoned(data), file.stem.startswith("peer_")
    output = module.custom_kernel(*((data, module.setup(data)) if peer else (data,)))
    assert output[0] is data.out and output[1] is data.lse
    return reference.compare(data, want, output, peer)


# One row and one panel of heads, with work enough for two cores: they share out its tiles, of which the last is cut.
TILED = task.Case(1, 1, 8, 102, 1728, 2, 64, 1728, "random", "plain", 77)
SMALL = task.Case(1, 1, 1, 8, 8, 4, 2, 8, "random", "plain", 78)


@pytest.mark.parametrize("content", ["plain", "ragged", "empty"])
@pytest.mark.parametrize("file", made_for(FOLDER, "cpu"), ids=lambda file: file.stem)
def test_cores_may_share_the_tiles_of_a_row(file, content):
    """With every tile of the lists, with fewer, and with none."""
    skip_unless_it_runs(file, "cpu")
    case = dataclasses.replace(TILED, content=content)
    assert torch.isposinf(solved(case)[1][1]).all() == (content == "empty")
    result = run(file, case)
    assert result.ok, result.message


@pytest.mark.parametrize("case", [SMALL, TILED], ids=named)
@pytest.mark.parametrize("cache", ["window", "compressed"])
@pytest.mark.parametrize("file", COMPILED, ids=lambda file: file.stem)
def test_the_last_entry_may_be_named_and_the_next_one_not(file, cache, case):
    skip_unless_it_runs(file, "cpu")
    kernel = load.module(FOLDER, f"variants/{file.stem}").custom_kernel
    data = poisoned(solved(case)[0])
    pages, index = getattr(data, cache).clone(), getattr(data, f"{cache}_index").clone()
    data = data._replace(**{cache: pages, f"{cache}_index": index})
    per_page, place = task.page_entries(pages.shape[1]), (0, 0, 5)
    count = len(pages) * per_page
    pages[-1] = pages[index[place] // per_page]  # of which every entry is one
    index[place] = count - 1
    result = reference.compare(data, reference.ref_kernel(data), kernel(data))
    assert result.ok, result.message
    for wrong in (count, count + 1, 2**31 - 1, -2, -(2**31)):
        index[place] = wrong
        with pytest.raises(RuntimeError, match=f"^{file.stem}: an index is outside the pages$"):
            kernel(data)


# ---------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("file", made_for(FOLDER, "sm90"), ids=lambda file: file.stem)
def test_every_gpu_variant_is_right_in_every_case(file):
    skip_unless_it_runs(file, "cuda")
    for case in task.TESTS:
        result = run(file, case, "cuda")
        assert result.ok, f"{named(case)}: {result.message}"


@pytest.mark.gpu
@pytest.mark.parametrize("file", made_for(FOLDER, "sm90"), ids=lambda file: file.stem)
def test_every_gpu_variant_repeats_itself_bit_by_bit(file):
    skip_unless_it_runs(file, "cuda")
    module = load.module(FOLDER, f"variants/{file.stem}")
    for case in (next(c for c in task.TESTS if (c.content, c.heads) == kind) for kind in REPEATED):
        data = poisoned(solved(case, "cuda")[0])
        prepared = (module.setup(data),) if file.stem.startswith("peer_") else ()
        first = [t.clone() for t in module.custom_kernel(data, *prepared)]
        for _ in range(20):
            data.out.fill_(torch.nan), data.lse.fill_(torch.nan)
            for got, want in zip(module.custom_kernel(data, *prepared), first, strict=True):
                assert torch.equal(got, want), named(case)


@pytest.mark.gpu
@pytest.mark.parametrize(("entries", "splits"), [(48, 1), (48, 2), (48, 3), (32, 3)])
def test_every_launch_of_the_winner_is_right_in_every_case(monkeypatch, entries, splits):
    """Of splits more than a list has tiles, and of small tiles several a block, too."""
    file = FOLDER / "variants" / "sm90_wgmma.py"
    skip_unless_it_runs(file, "cuda")
    module = load.module(FOLDER, f"variants/{file.stem}")
    monkeypatch.setattr(module, "launch_for", lambda *_: module.Launch(entries, splits))
    monkeypatch.setattr(module, "few_heads_for", lambda *_: None)
    for case in task.TESTS:
        result = run(file, case, "cuda")
        assert result.ok, f"{named(case)}: {result.message}"


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", [1, 2, 3, 7, 8, 16])
def test_every_cluster_of_the_winner_for_few_heads_is_right_in_every_case(monkeypatch, blocks):
    """Of blocks more than a list has entries, and for 64 and 128 heads, too."""
    file = FOLDER / "variants" / "sm90_wgmma.py"
    skip_unless_it_runs(file, "cuda")
    module = load.module(FOLDER, f"variants/{file.stem}")
    monkeypatch.setattr(module, "few_heads_for", lambda *_: module.FewHeads(blocks))
    monkeypatch.setattr(module, "MOST_FEW_HEADS", 128)
    for case in task.TESTS:
        result = run(file, case, "cuda")
        assert result.ok, f"{named(case)}: {result.message}"


# What CUDA says that an H200 has room for at once, two blocks a multiprocessor.
FIT = {1: 264, 2: 132, 3: 79, 4: 62, 5: 47, 6: 39, 7: 32, 8: 30, 16: 14}


@pytest.mark.parametrize(
    ("batch", "heads", "listed", "blocks"),
    [(1, 16, 640, 16), (8, 16, 640, 16), (32, 16, 640, 7), (32, 8, 1152, 6), (128, 16, 640, 2)],
)
def test_how_few_heads_share_out_a_list(batch, heads, listed, blocks):
    module = load.module(FOLDER, "variants/sm90_wgmma")
    sizes = task.Sizes(batch, 1, heads, 128, listed - 128, 64, 64)
    assert module.few_heads_for(sizes, FIT) == module.FewHeads(blocks)
    fit = {size: count for size, count in FIT.items() if size != blocks}  # a GPU without room for such a cluster
    without = module.few_heads_for(sizes, fit)
    assert without is None or without.blocks != blocks


@pytest.mark.parametrize(("batch", "heads", "listed"), [(1, 16, 8320), (8, 16, 8320), (32, 32, 640)])
def test_long_lists_of_few_queries_and_more_heads_are_for_the_kernels_of_64_heads(batch, heads, listed):
    module = load.module(FOLDER, "variants/sm90_wgmma")
    assert module.few_heads_for(task.Sizes(batch, 1, heads, 128, listed - 128, 64, 64), FIT) is None


@pytest.mark.gpu
def test_the_oracle_on_a_gpu_and_on_a_cpu_agree():
    for content in ("ragged", "empty", "magnitudes", "plain", "duplicates"):
        data, want = solved(next(case for case in task.TESTS if case.content == content), "cuda")
        here = reference.ref_kernel(task.Data(*(t.cpu() for t in data)))
        for got, cpu in zip(want, here, strict=True):
            torch.testing.assert_close(got.cpu(), cpu, rtol=1e-11, atol=1e-12)
