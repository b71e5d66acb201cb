"""fmha_decode/sm100_cute: what it refuses while tracing, and how it shares out lists. No GPU is needed.

tests/problems/test_in_model.py runs it.
"""

import os

import pytest

from problems.common import build, load
from tests.support import ROOT, forked

pytest.importorskip("cutlass")

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
    ran = forked.run([script, name, value], env=env)
    assert said in ran.stdout, ran.stdout + ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ctas", "listed", "multiprocessors", "shares"),
    [(128, 640, 148, 1), (1, 640, 148, 5), (1, 1, 148, 1), (1, 0, 148, 1), (4, 350, 4, 1), (1, 8320, 148, 33)],
)
def test_how_lists_are_shared_out(ctas, listed, multiprocessors, shares):
    variant = load.variant("fmha_decode", "sm100_cute")
    assert variant.shares_for(ctas, listed, multiprocessors) == shares
