"""problems/dsv4_forward/kernels: every source compiles for both targets, to so many kernels, without spills."""

import shutil

import pytest

from problems.common import build, load
from tests.support.marks import first

FOLDER = load.PROBLEMS / "dsv4_forward" / "kernels"
KERNELS = {"argmax": 1, "cache_rows": 4, "copies": 6, "dense": 3, "experts": 2, "fmha": 6, "matmuls": 7}
KERNELS |= {"norm": 3, "router": 4, "start": 4}


def test_all_sources_are_here():
    assert list(KERNELS) == sorted(path.stem for path in FOLDER.glob("*.cu"))


@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
@pytest.mark.parametrize("target", first(("sm90", "sm100")))
@pytest.mark.parametrize("name", KERNELS)
def test_it_compiles_without_spills(name, target):
    kernels = build.cuda(FOLDER / f"{name}.cu", target).kernels()
    assert len(kernels) == KERNELS[name] and not any(one.spill_bytes for one in kernels)
