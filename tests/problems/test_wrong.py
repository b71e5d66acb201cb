"""Each wrong kernel of a problem (its wrong.py) and each planted bug of public threads is refused in a test case."""

import dataclasses
import json
from pathlib import Path

import pytest

from harness.checker import inputs
from harness.problem import folders
from harness.runner import tree
from problems import wrong
from problems.common import load
from tests.problems import cases

# Those of dsv4_forward are in tests/dsv4/test_forward.py and test_check.py.
NAMES = [(problem, name) for problem in cases.NAMES for name in wrong.read(load.PROBLEMS / problem)]
RARE = "distant_groups_lost"  # it passes with a seed of four


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("problem", "name"), NAMES)
def test_wrong_kernel_is_refused(problem, name, device):
    folder = load.PROBLEMS / problem
    kernel, named = wrong.load_kernel(folder, name), wrong.read(folder)[name].case
    ((number, _),) = [pair for pair in enumerate(folders.find(problem).tests) if str(pair[1]) == named]
    case = cases.task(problem).TESTS[number]

    def is_right(seed):
        data, want = cases.solved(problem, dataclasses.replace(case, seed=seed), device)
        mine = tree.clone(data)
        return inputs.compared(cases.reference(problem), mine, want, kernel(mine), False).ok

    # A GPU draws other contents, of which some mistakes change most answers only, or no more than in every tenth call.
    always = device == "cpu" and name != RARE
    assert not (any(map(is_right, (1, 2))) if always else all(map(is_right, range(1, 33))))


BUGS = [json.loads(line) for line in Path(__file__).with_name("public_bugs.jsonl").read_text().splitlines()]
LARGE = "flashinfer-ai/flashinfer#3136"  # wrong in caches above 4 GiB, which no test has
SHOWN = [bug for bug in BUGS if bug["source"] != LARGE]


@pytest.mark.parametrize("bug", SHOWN, ids=lambda bug: bug["source"])
def test_planted_bug_is_refused(bug, tmp_path):
    folder = load.PROBLEMS / bug["problem"]
    text = (folder / "variants" / bug["variant"]).read_text()
    assert text.count(bug["find"]) == 1
    file = tmp_path / "planted.py"
    file.write_text(text.replace(bug["find"], bug["replace"]))
    variant, reference = load.from_file(folder, file), cases.reference(bug["problem"])
    for case in sorted(cases.task(bug["problem"]).TESTS, key=lambda case: case.bytes_moved()):
        data, want = cases.solved(bug["problem"], case)
        mine = tree.clone(data)
        if not inputs.compared(reference, mine, want, variant.custom_kernel(mine), False).ok:
            return
    pytest.fail(f"{bug['what']}: no test case shows it")
