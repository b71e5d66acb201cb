"""Each wrong kernel of a problem (its wrong.py) is refused in the test case that it names."""

import dataclasses

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
