"""Names of our own that the field has a term for are gone from the code; the exceptions mean something else there."""

import io
import subprocess
import tokenize
from collections import defaultdict

from tests.support import ROOT

WORDS = """
entrant entrants Entrant Entry Judged peer peers roof roofs roof_us ground grounds Ground downgrades slot slots Slot
seal Seal tamper guard Guard private Private queue queues untimed untimed_us beside solo wave waves weigh slab Slab Row
Pick Bank beyond lanes meet show_up Turn entry entries product products floor figure figures
"""
GONE = frozenset(WORDS.split())
# By word: where it has its ordinary sense, and which.
EXCEPTIONS = {
    "Turn": {"harness/judge/handle.py"},  # what a request to the checker for one turn of a CPU's clock carries
    "Row": {"harness/lint/linter.py"},  # a row of the table that lint prints
    "floor": {  # rounding down
        "harness/results/text.py",
        "leaderboard/plot.py",
        "problems/dsv4_forward/cache/state.py",
        "problems/dsv4_forward/torch_ops/rope.py",
        "problems/dsv4_forward/trace.py",
    },
    "product": {  # of two matrices
        "harness/runner/runner.py",
        "problems/dsv4_forward/adapters/gemv.py",
        "problems/dsv4_forward/adapters/linear.py",
        "problems/dsv4_forward/torch_ops/indexer.py",
    },
    "products": {"problems/dsv4_forward/adapters/gemv.py", "problems/dsv4_forward/traffic.py"},
    "entry": {  # of a folder, of /proc, of a cache of compressed tokens
        "harness/sandbox/policy.py",
        "harness/sandbox/workdir.py",
        "problems/dsv4_forward/cache/batch.py",
        "problems/dsv4_forward/cache/plan.py",
        "problems/dsv4_forward/torch_ops/fmha.py",
        "problems/dsv4_forward/traffic.py",
    },
    "entries": {
        "harness/sandbox/policy.py",
        "harness/sandbox/workdir.py",
        "problems/dsv4_forward/cache/batch.py",
        "problems/dsv4_forward/adapters/indexer.py",
        "problems/dsv4_forward/cache/plan.py",
        "problems/dsv4_forward/kernels/indexer.py",
        "problems/dsv4_forward/kernels/start.py",
        "problems/dsv4_forward/layers.py",
        "problems/dsv4_forward/torch_ops/chains.py",
        "problems/dsv4_forward/torch_ops/fmha.py",
        "problems/dsv4_forward/torch_ops/indexer.py",
        "problems/dsv4_forward/traffic.py",
        "problems/dsv4_forward/wrong/choose_by_the_first_table.py",
        "problems/dsv4_forward/wrong/index_without_relu.py",
    },
    "private": {"harness/sandbox/process.py", "harness/sandbox/workdir.py"},  # memory, paths
    "figure": {"leaderboard/plot.py"},  # matplotlib's
    "peer": {"problems/dsv4_forward/reference.py"},  # a problem's `compare(..., peer=)`
}


def found() -> dict[str, set[str]]:
    command = ["git", "ls-files", "harness/*.py", "leaderboard/*.py", "problems/dsv4_forward/*.py"]
    files = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert files
    where = defaultdict(set)
    for file in files:
        for token in tokenize.generate_tokens(io.StringIO((ROOT / file).read_text()).readline):
            if token.type == tokenize.NAME and token.string in GONE:
                where[token.string].add(file)
    return where


def test_our_own_words_are_gone_but_for_listed_exceptions():
    assert found() == EXCEPTIONS
