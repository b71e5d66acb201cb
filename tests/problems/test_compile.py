"""Every variant for a GPU compiles to machine code of its targets, here, without one; none spills registers but where
SPILLS says so.
"""

import contextlib
import functools
import importlib.util
import re
import shutil
from collections.abc import Callable, Iterator

import pytest

from harness.judge import replies
from harness.judge.handle import RunnerHandle
from harness.judge.outcome import Outcome
from harness.judge.replies import COMPILE_LIMIT_S
from harness.judge.session import Session
from harness.problem import folders
from problems.common import build, load
from tests.support.marks import first, needs_nvcc

# By variant and target, kernels by their mangled names, and the bytes that they may spill and load. sm90_grouped with
# FP8 activations (Lb1E): some words of rows of over 4096 columns (Li8E); of two tiles of tokens (Li2E at last) any.
# sm90_mma: some words of fp8 (E0E) with up to 32 tokens (Li32E), and for sm100, where it was never run, of all fp8, and
# of chains of nvfp4 (E1E) with up to 8 (Li8E), which have 17 warps, so 96 registers.
LONG_FP8, LONGER_FP8 = "decode7expertsILi8ELi4ELi1ELb1E", "decode7expertsILi8ELi8ELi1ELb1E"
TILES_FP8, TILES = (f"decode7expertsILi4ELi2ELi2ELb{fp8}E" for fp8 in (1, 0))
SPILLS = {
    ("linear_decode", "sm90_mma", "sm90"): {"ConfigILNS_6FormatE0ELi32E": 32},
    ("linear_decode", "sm90_mma", "sm100"): {"ConfigILNS_6FormatE0E": 316, "ConfigILNS_6FormatE1ELi8E": 276},
    # Never run there. One row number, asked for once a tile, is kept.
    ("mhc_site", "sm90_columns", "sm100"): {"site_kernelILi128E": 68, "many_kernelILi128E": 36},
    ("moe_gemm", "sm90_grouped", "sm90"): {
        LONG_FP8: 36,
        LONGER_FP8: 108,
        TILES_FP8: 68,
        TILES: 36,
        "expertsIN5mxfp44FormILi2E": 8,  # where an address is, once a chunk
    },
    ("moe_gemm", "sm90_grouped", "sm100"): {LONG_FP8: 8, LONGER_FP8: 52, TILES_FP8: 128},
}

# In each run CUDA C++ for the GPU that a variant is tuned for, and CuTe DSL for sm90; moe_gemm's takes 15 s, and
# tests/dsv4/test_experts_kernel.py compiles its experts. tests/common/test_cute_compile.py compiles the one for sm100.
LONG = {
    ("linear_decode", "sm90_mma", "sm100"),
    ("mhc_site", "sm90_columns", "sm100"),
    ("moe_gemm", "sm90_grouped", "sm100"),
    ("moe_gemm", "sm90_grouped", "sm90"),
    ("nvfp4_gemv", "sm100_cute", "sm100"),
    ("moe_gemm", "sm100_cute", "sm100"),
    ("fmha_decode", "sm100_cute", "sm100"),
}

# Compiled in this process, and not by a runner as the others are: tests of these problems call what was compiled.
HERE = ("linear_decode", "mhc_site")

JOBS = [
    pytest.param(*job, marks=pytest.mark.slow if job in LONG else ())
    for name in folders.problem_names()
    for variant, targets, _ in folders.listing(load.PROBLEMS / name)
    if not variant.startswith("peer_") and "cpu" not in targets
    for job in ((name, variant, target) for target in targets if target in build.ARCH)
]


@pytest.fixture(scope="module")
def sessions() -> Iterator[Callable[[str], Session]]:
    """-> a function: the session of a problem, one for all of its variants."""
    with contextlib.ExitStack() as stack:
        yield functools.cache(lambda name: stack.enter_context(Session(folders.find(name), "cpu")))


@pytest.mark.parametrize(("name", "variant", "target"), JOBS)
def test_compiles_for(name, variant, target, sessions):
    found = folders.find(name)
    if found.variant(variant).file.with_suffix(".cu").is_file() and not shutil.which("nvcc"):
        pytest.skip("needs nvcc")
    if missing := [p for p in found.variant(variant).requires if importlib.util.find_spec(p) is None]:
        pytest.skip(f"needs the Python package {', '.join(missing)}")
    if name in HERE and found.variant(variant).file.with_suffix(".cu").is_file():
        compiled = load.variant(name, variant).compile_for(target)
        sizes, kernels = [one.path.stat().st_size for one in compiled], [k for one in compiled for k in one.kernels()]
    else:
        handle = RunnerHandle(variant, found.variant(variant), target)
        session = sessions(name)
        reply = session.ask_runner(handle, replies.Compiled, {"op": "compile", "target": target}, 2 * COMPILE_LIMIT_S)
        session.stop(handle)  # which keeps what it compiled: the same closure need not be compiled again
        assert not isinstance(reply, Outcome), reply
        sizes = [artefact.bytes for artefact in reply.artefacts]
        kernels = [kernel for artefact in reply.artefacts for kernel in artefact.kernels]
    assert all(size > 1000 for size in sizes)
    assert kernels, "the compiler's resource report is missing"
    spills = SPILLS.get((name, variant, target), {})
    for kernel in kernels:
        allowed = max((most for part, most in spills.items() if part in kernel.name), default=0)
        assert 0 < kernel.registers <= 255 and kernel.spill_bytes <= allowed, kernel


# Every CUDA source of the model, and how many kernels it has.
SOURCES = {path.stem: path for path in sorted((load.PROBLEMS / "dsv4_forward").rglob("*.cu"))}
KERNELS = {"argmax": 1, "cache_rows": 4, "copies": 6, "dense": 3, "experts": 2, "fmha": 6, "matmuls": 7}
KERNELS |= {"gpu_exchange": 1, "norm": 3, "router": 4, "start": 4}


@needs_nvcc
@pytest.mark.parametrize("target", first(("sm90", "sm100")))
@pytest.mark.parametrize("name", KERNELS)
def test_a_source_of_the_model_compiles_without_spills(name, target):
    assert KERNELS.keys() == SOURCES.keys()
    built = build.cuda(SOURCES[name], target)
    kernels = built.kernels()
    assert len(kernels) == KERNELS[name] and not any(one.spill_bytes for one in kernels)
    for launcher in re.findall(r'extern "C" int (\w+)', SOURCES[name].read_text()):
        built.function(launcher)
