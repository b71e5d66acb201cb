"""fmha_decode/sm90_wgmma in the model of its GPU: every launch ends and is right, chosen by a benchmark or not."""

import shutil

import pytest

from tests.support import forked

# argv: entries of a tile and splits, or "few" and blocks of a cluster; then lengths of both lists, heads and a content.
IN_MODEL = """
import sys

from ptx_model.tools import check
from ptx_model import driver

model = driver.install("sm90")
from problems.common import load

import torch

folder = load.PROBLEMS / "fmha_decode"
reference, variant = load.module(folder, "reference"), load.module(folder, "variants/sm90_wgmma")
kind, shared, window, compressed, heads = sys.argv[1], *map(int, sys.argv[2:6])
pool, order = (320, "random") if compressed < 320 else (compressed, "sequential")  # in which maxima rise
data = reference.generate_input(1, 1, heads, window, compressed, 64, 2, pool, order, sys.argv[6], 5, "cpu")
want = reference.ref_kernel(data)
variant.MOST_FEW_HEADS, variant.clusters_that_fit = 128, lambda: {1: 1}
variant.few_heads_for = lambda *_: variant.FewHeads(shared) if kind == "few" else None
variant.launch_for = lambda *_: variant.Launch(int(kind), shared)
for order in check.ORDERS[::3]:
    check.set_order(model, order)
    model.clear()
    data.out.fill_(torch.nan), data.lse.fill_(torch.nan)
    try:
        result = reference.compare(data, want, variant.custom_kernel(data))
        model.check()
    except Exception as error:
        raise SystemExit(f"{order.policy}: {model.faults[0] if model.faults else error}") from None
    if not result.ok:
        raise SystemExit(f"{order.policy}: {result.message}")
print("right")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "shared", "window", "compressed", "heads", "content"),
    [
        # Tiles of 32, of which only one is in shared memory: with two a block, values once waited for ever.
        ("32", 2, 37, 91, 64, "plain"),
        ("32", 3, 37, 91, 20, "ragged"),
        ("48", 1, 37, 91, 64, "ragged"),
        ("48", 3, 37, 191, 64, "maxima"),
        ("48", 8, 37, 91, 64, "empty"),
        ("few", 1, 37, 191, 8, "maxima"),
        ("few", 1, 1, 511, 16, "maxima"),
        ("few", 3, 37, 191, 20, "ragged"),
        ("few", 7, 37, 291, 16, "plain"),
        ("few", 16, 37, 91, 16, "empty"),
    ],
)
def test_every_launch_ends_and_is_right(kind, shared, window, compressed, heads, content):
    if not shutil.which("nvcc"):
        pytest.skip("needs nvcc")
    ran = forked.run(["-c", IN_MODEL, kind, *map(str, (shared, window, compressed, heads)), content], timeout=300)
    assert ran.stdout == "right\n", ran.stderr[-2000:]
