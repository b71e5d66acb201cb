"""fmha_decode/sm100_cute in the model of a GPU: right under every order of asynchronous work; what it refuses."""

import json
import os
import subprocess
import sys

import pytest

from harness.tools import model_check
from problems.common import build, load
from tests.support import ROOT

pytest.importorskip("cutlass")

FILE = load.PROBLEMS / "fmha_decode" / "variants" / "sm100_cute.py"
SMALL = {
    "batch": 1, "queries": 1, "heads": 8, "window": 1, "compressed": 0, "page_window": 64, "page_compressed": 64,
    "pool": 4, "order": "random", "content": "plain", "seed": 5,
}  # fmt: skip
# Under most orders the host side is told of few multiprocessors, so that a block has several tiles.
LONG = [
    # Two blocks of heads, the second of 8; a last tile of 94 entries; lengths of each sequence, holes.
    {"batch": 3, "heads": 72, "window": 100, "compressed": 250, "page_compressed": 2, "pool": 300, "content": "ragged"},
    # Scores rise along the list, so that tiles rescale what others have added; 128 heads.
    {"batch": 4, "heads": 128, "compressed": 511, "pool": 511, "order": "sequential", "content": "maxima"},
    # Shares that are joined; two queries.
    {"queries": 2, "heads": 24, "window": 128, "compressed": 450, "pool": 450, "content": "duplicates"},
    # Lists without an entry, and shares without one.
    {"batch": 2, "queries": 2, "heads": 20, "window": 64, "compressed": 300, "pool": 300, "content": "empty"},
    {"batch": 1, "heads": 64, "window": 128, "compressed": 512, "pool": 600, "order": "sequential", "content": "sinks"},
]


def check(*cases: dict) -> None:
    """Run the cases in the model."""
    command = [sys.executable, "-m", "harness.tools.model_check", str(FILE.parents[1]), str(FILE), "sm100"]
    ran = subprocess.run(command, cwd=ROOT, input=json.dumps(cases), capture_output=True, text=True)
    replies = [json.loads(line) for line in ran.stdout.splitlines()]
    wrong = [reply for reply in replies if reply["status"] != "MODEL_CHECKED"]
    assert not wrong and len(replies) == len(cases) * len(model_check.ORDERS), f"{wrong} {ran.stderr}"


def test_a_small_case_is_right_under_every_order():
    check(SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("changes", LONG, ids=lambda changes: changes["content"])
def test_cases_of_several_tiles_are_right_under_every_order(changes):
    check({**SMALL, "page_compressed": 64, **changes})


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
    command = [sys.executable, str(script), name, str(value)]
    ran = subprocess.run(command, env=env, capture_output=True, text=True)
    assert said in ran.stdout, ran.stdout + ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ctas", "listed", "multiprocessors", "shares"),
    [(128, 640, 148, 1), (1, 640, 148, 5), (1, 1, 148, 1), (1, 0, 148, 1), (4, 350, 4, 1), (1, 8320, 148, 33)],
)
def test_how_lists_are_shared_out(ctas, listed, multiprocessors, shares):
    variant = load.variant("fmha_decode", "sm100_cute")
    assert variant.shares_for(ctas, listed, multiprocessors) == shares
