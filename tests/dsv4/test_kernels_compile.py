"""Every CUDA source of the model compiles for both targets, to so many kernels, without spills, with its launchers."""

import re
import shutil

import pytest

from problems.common import build, load
from tests.support.marks import first

SOURCES = {path.stem: path for path in sorted((load.PROBLEMS / "dsv4_forward").rglob("*.cu"))}
KERNELS = {"argmax": 1, "cache_rows": 4, "copies": 6, "dense": 3, "experts": 2, "fmha": 6, "matmuls": 7}
KERNELS |= {"gpu_exchange": 1, "norm": 3, "router": 4, "start": 4}


def test_all_sources_are_here():
    assert sorted(KERNELS) == sorted(SOURCES)


@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
@pytest.mark.parametrize("target", first(("sm90", "sm100")))
@pytest.mark.parametrize("name", KERNELS)
def test_it_compiles_without_spills(name, target):
    built = build.cuda(SOURCES[name], target)
    kernels = built.kernels()
    assert len(kernels) == KERNELS[name] and not any(one.spill_bytes for one in kernels)
    for launcher in re.findall(r'extern "C" int (\w+)', SOURCES[name].read_text()):
        built.function(launcher)
