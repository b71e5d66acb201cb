"""fmha_decode: what is special to its variants: shared tiles, indices outside the pages, launches and clusters."""

import dataclasses
import functools

import pytest
import torch

from problems.common import load
from tests.problems import cases
from tests.problems.cases import named
from tests.problems.variants import made_for, skip_unless_it_runs

NAME = "fmha_decode"
FOLDER = load.PROBLEMS / NAME
task, reference = cases.task(NAME), cases.reference(NAME)
solved, poisoned = functools.partial(cases.solved, NAME), functools.partial(cases.poisoned, NAME)
CPU = made_for(FOLDER, "cpu")
COMPILED = [file for file in CPU if file.with_suffix(".cpp").exists()]  # these say what is wrong
WINNER = FOLDER / "variants" / "sm90_wgmma.py"
# One row and one panel of heads, with work enough for two cores: they share out its tiles, of which the last is cut.
TILED = task.Case(1, 1, 8, 102, 1728, 2, 64, 1728, "random", "plain", 77)
SMALL = task.Case(1, 1, 1, 8, 8, 4, 2, 8, "random", "plain", 78)


@pytest.mark.parametrize("content", ["plain", "ragged", "empty"])
@pytest.mark.parametrize("file", CPU, ids=lambda file: file.stem)
def test_cores_may_share_the_tiles_of_a_row(file, content):
    """With every tile of the lists, with fewer, and with none."""
    skip_unless_it_runs(file, "cpu")
    case = dataclasses.replace(TILED, content=content)
    assert torch.isposinf(solved(case)[1][1]).all() == (content == "empty")
    cases.check(NAME, file, case)


@pytest.mark.parametrize("case", [SMALL, TILED], ids=named)
@pytest.mark.parametrize("cache", ["window", "compressed"])
@pytest.mark.parametrize("file", COMPILED, ids=lambda file: file.stem)
def test_the_last_entry_may_be_named_and_the_next_one_not(file, cache, case):
    skip_unless_it_runs(file, "cpu")
    kernel = load.variant(NAME, file.stem).custom_kernel
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


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("splits", "entries"), [(1, 48), (2, 48), (3, 48), (3, 32), *((blocks, None) for blocks in (1, 2, 3, 7, 8, 16))]
)
def test_every_launch_of_the_winner_is_right_in_every_case(monkeypatch, splits, entries):
    """Of tiles of 48 and 32 entries, and of clusters for few heads, which are given 64 and 128 too. Of splits and
    blocks more than a list has tiles or entries, and of small tiles several a block.
    """
    skip_unless_it_runs(WINNER, "cuda")
    module = load.variant(NAME, WINNER.stem)
    few = None if entries else module.FewHeads(splits)
    monkeypatch.setattr(module, "launch_for", lambda *_: module.Launch(entries, splits))
    monkeypatch.setattr(module, "few_heads_for", lambda *_: few)
    monkeypatch.setattr(module, "MOST_FEW_HEADS", 128)
    for case in task.TESTS:
        cases.check(NAME, WINNER, case, "cuda")


# What CUDA says that an H200 has room for at once, two blocks a multiprocessor.
FIT = {1: 264, 2: 132, 3: 79, 4: 62, 5: 47, 6: 39, 7: 32, 8: 30, 16: 14}


@pytest.mark.parametrize(
    ("batch", "heads", "listed", "blocks"),
    [
        *((1, 16, 640, 16), (8, 16, 640, 16), (32, 16, 640, 7), (32, 8, 1152, 6), (128, 16, 640, 2)),
        # Long lists of few queries, and more heads, are for the kernels of 64 heads.
        *((1, 16, 8320, None), (8, 16, 8320, None), (32, 32, 640, None)),
    ],
)
def test_how_few_heads_share_out_a_list(batch, heads, listed, blocks):
    module = load.variant(NAME, WINNER.stem)
    sizes = task.Sizes(batch, 1, heads, 128, listed - 128, 64, 64)
    assert module.few_heads_for(sizes, FIT) == (blocks and module.FewHeads(blocks))
    fit = {size: count for size, count in FIT.items() if size != blocks}  # a GPU without room for such a cluster
    without = module.few_heads_for(sizes, fit)
    assert without is None or without.blocks != blocks
