"""Each wrong kernel of a problem (its wrong.py) is refused in the test case that it names."""

import functools

import pytest

from harness.checker import inputs
from harness.problem import folders
from harness.runner import tree
from problems import wrong
from problems.common import load

NAMES = [
    (folder.parent.name, name)
    for folder in load.PROBLEMS.glob("*/wrong.py")
    for name in wrong.read(folder.parent)
    if folder.parent.name != "dsv4_forward"  # in tests/dsv4/test_forward.py and test_check.py
]
RARE = "distant_groups_lost"  # it passes with a seed of four


@functools.cache
def solved(problem: str, case: str, seed: int, device: str) -> tuple[object, object]:
    """Data and answer of a test case with another seed."""
    found = folders.find(problem)
    task, reference = (load.module(found.folder, name) for name in ("task", "reference"))
    (params,) = [one.params for one in found.tests if str(one) == case]
    data = inputs.make(reference, task, {**params, "seed": seed}, device, True)
    return data, reference.ref_kernel(data)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("problem", "name"), sorted(NAMES))
def test_wrong_kernel_is_refused(problem, name, device):
    folder = load.PROBLEMS / problem
    reference, kernel = load.module(folder, "reference"), wrong.load_kernel(folder, name)

    def is_right(seed):
        data, want = solved(problem, wrong.read(folder)[name].case, seed, device)
        mine = tree.clone(data)
        return inputs.compared(reference, mine, want, kernel(mine), False).ok

    # A GPU draws other contents, of which some mistakes change most answers only, or no more than in every tenth call.
    always = device == "cpu" and name != RARE
    assert not (any(map(is_right, (1, 2))) if always else all(map(is_right, range(1, 33))))
