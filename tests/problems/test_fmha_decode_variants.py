"""fmha_decode's variants: shared tiles, indices outside the pages, launches and clusters, and what one refuses while
tracing, which tests/problems/test_in_model.py runs.
"""

import dataclasses
import functools
import importlib.util
import os

import pytest
import torch

from problems.common import build, load
from ptx_model.tools.check import ORDERS
from tests.dsv4 import in_model
from tests.problems import cases
from tests.problems.cases import made_for, named, skip_unless_it_runs
from tests.support import ROOT, forked

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
    assert reference.check_implementation(data, kernel(data)) == (True, "")
    for wrong in (count, count + 1, 2**31 - 1, -2, -(2**31)):
        index[place] = wrong
        with pytest.raises(RuntimeError, match=f"^{file.stem}: an index is outside the pages$"):
            kernel(data)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "launch", [1, 2, 3, 7, 8, 16, (48, 1), (48, 2), (48, 3), (32, 3), (48, 2, 4), (48, 3, 2), (32, 3, 2)]
)
def test_every_launch_of_the_winner_is_right_in_every_case(monkeypatch, launch):
    """Of clusters for few heads (given 64 and 128 too), of tiles, splits and slices; more parts than a list has."""
    skip_unless_it_runs(WINNER, "cuda")
    module = load.variant(NAME, WINNER.stem)
    monkeypatch.setattr(module, "launch_for", lambda *_: module.Launch(*launch))
    monkeypatch.setattr(module, "few_heads_for", lambda *_: module.FewHeads(launch) if launch in FIT else None)
    monkeypatch.setattr(module, "MOST_FEW_HEADS", 128)
    for case in task.TESTS:
        cases.check(NAME, WINNER, case, "cuda")


# What CUDA says that an H200 has room for at once, two blocks a multiprocessor.
FIT = {1: 264, 2: 132, 3: 79, 4: 62, 5: 47, 6: 39, 7: 32, 8: 30, 16: 14}


@pytest.mark.parametrize(
    ("batch", "heads", "listed", "blocks", "slices"),
    [
        *((8, 16, 640, 16, 1), (32, 16, 640, 7, 1), (32, 8, 1152, 6, 1), (128, 16, 640, 2, 1)),
        # Long lists of few queries, slices of the dims, and more heads, are for the kernels of 64 heads.
        *((1, 16, 8320, None, 1), (8, 16, 8320, None, 1), (32, 32, 640, None, 1), (1, 16, 640, None, 4)),
        *((2, 16, 640, None, 2), (1, 64, 640, None, 2), (1, 128, 1152, None, 2), (8, 64, 640, None, 1)),
    ],
)
def test_how_a_list_is_shared_out(batch, heads, listed, blocks, slices):
    module = load.variant(NAME, WINNER.stem)
    sizes = task.Sizes(batch, 1, heads, 128, listed - 128, 64, 64)
    assert module.launch_for(sizes).slices == slices
    assert module.few_heads_for(sizes, FIT) == (blocks and module.FewHeads(blocks))
    fit = {size: count for size, count in FIT.items() if size != blocks}  # a GPU without room for such a cluster
    without = module.few_heads_for(sizes, fit)
    assert without is None or without.blocks != blocks


def launched(kind: str, shared: int, window: int, compressed: int, heads: int, content: str) -> None:
    """kind, shared: entries of a tile (x slices) and splits, or "few" and blocks; then the lengths of both lists."""
    pool, order = (320, "random") if compressed < 320 else (compressed, "sequential")  # in which maxima rise
    case = task.Case(1, 1, heads, window, compressed, 64, 2, pool, order, content, 5)
    module, (data, want) = load.variant(NAME, WINNER.stem), solved(case)
    module.MOST_FEW_HEADS, module.clusters_that_fit = 128, lambda: {1: 1}
    module.few_heads_for = lambda *_: module.FewHeads(shared) if kind == "few" else None
    module.launch_for = lambda *_: module.Launch(int(kind[:2]), shared, int(kind[3:] or 1))
    result = reference.compare(data, want, module.custom_kernel(poisoned(data)))
    assert result.ok, result.message


@pytest.mark.slow
@pytest.mark.parametrize(
    "launch",
    [
        # Tiles of 32, of which only one is in shared memory: with two a block, values once waited for ever.
        ("32", 2, 37, 91, 64, "plain"),
        ("32", 3, 37, 91, 20, "ragged"),
        ("48", 1, 37, 91, 64, "ragged"),
        ("48", 3, 37, 191, 64, "maxima"),
        *(("48", 8, 37, 91, 64, "empty"), ("48x2", 3, 37, 291, 64, "maxima"), ("32x4", 4, 37, 91, 16, "ragged")),
        ("few", 1, 37, 191, 8, "maxima"),
        ("few", 1, 1, 511, 16, "maxima"),
        ("few", 3, 37, 191, 20, "ragged"),
        ("few", 7, 37, 291, 16, "plain"),
        ("few", 16, 37, 91, 16, "empty"),
    ],
)
def test_every_launch_ends_and_is_right(launch):
    call = dict(zip(("kind", "shared", "window", "compressed", "heads", "content"), launch, strict=True))
    in_model.run(__name__, [("launched", call)], orders=ORDERS[::3])


needs_cutlass = pytest.mark.skipif(not importlib.util.find_spec("cutlass"), reason="needs CuTe DSL")
# The DSL traces only what stands in a file.
REFUSED = """
import sys
from problems.common import load

variant = load.variant("fmha_decode", "sm100_cute")
setattr(variant, sys.argv[1], int(sys.argv[2]))
try:
    variant.compiled(False)
except Exception as error:
    print(error)
"""


@needs_cutlass
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("GATHER_REGISTERS", 152, "a CTA may have 65536 registers"),
        ("TMEM_COLUMNS", 256, "a CTA may have 256 columns of tensor memory, got 320"),
        ("CHUNKS", 2, "the layout of q must be"),
    ],
)
def test_it_refuses_while_tracing_what_would_be_wrong(name, value, said, tmp_path):
    script = tmp_path / "trace.py"
    script.write_text(REFUSED)
    env = {**os.environ, "CUTE_DSL_ARCH": build.ARCH["sm100"], "PYTHONPATH": str(ROOT)}
    ran = forked.run([script, name, value], env=env)
    assert said in ran.stdout, ran.stdout + ran.stderr


@needs_cutlass
@pytest.mark.slow
@pytest.mark.parametrize(
    ("ctas", "listed", "multiprocessors", "shares"),
    [(128, 640, 148, 1), (1, 640, 148, 5), (1, 1, 148, 1), (1, 0, 148, 1), (4, 350, 4, 1), (1, 8320, 148, 33)],
)
def test_how_lists_are_shared_out(ctas, listed, multiprocessors, shares):
    variant = load.variant("fmha_decode", "sm100_cute")
    assert variant.shares_for(ctas, listed, multiprocessors) == shares
