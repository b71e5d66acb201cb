"""What a decode step launches: nothing of torch but what is listed, and as many kernels as README.md says."""

import pytest

from problems.common import load
from problems.dsv4_forward import launches
from problems.dsv4_forward.torch_ops import experts
from problems.dsv4_forward.weights.config import FORMATS
from tests.support.marks import first


def test_the_table_of_launches_is_that_of_the_code():
    """Among others that no layer runs an operation of torch for one sequence in nvfp4."""
    lines = launches.table()
    said = (load.PROBLEMS / "dsv4_forward" / "README.md").read_text()
    assert all(line in said for line in lines), "\\n".join(["the table should be", *lines])
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]
    left = [row[-1] for row in cells if row[1] == "1" and row[0] in launches.PLACES.values()]
    assert left == ["none"] * 3


def test_the_released_format_launches_nothing_of_torch_in_a_layer():
    """And one kernel for its routed experts, for one sequence as for three."""
    every, layers = launches.steps("released", (1, 3))
    for kernels, operations in every:
        counts = [sum(n for (at, _), n in kernels.items() if at == place) // layers[place] for place in layers]
        assert not operations and sorted(counts) == [14, 14, 16]


@pytest.mark.parametrize("fmt", first(sorted(FORMATS, key="nvfp4_experts".__ne__)))  # of three kinds
def test_no_reference_waits_for_a_device(fmt, monkeypatch):
    monkeypatch.setattr(experts, "by_hit", experts.by_pair)  # on the CPU, reading ids is free
    ((_, operations),), _ = launches.steps(fmt, (3,), "reference")
    names = {name for _, name in operations}
    waits = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2", "item"}
    assert {"topk", "softplus"} <= names and not names & waits
