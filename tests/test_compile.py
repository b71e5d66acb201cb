"""Every variant for a GPU compiles to machine code of its targets, here, without one; none spills registers but where
SPILLS says so.
"""

import importlib.util
import re
import shutil

import pytest

from harness import problem
from harness.session import ARCH, COMPILE_LIMIT_S, Entrant, Outcome, Session

# Kernels of a variant, by their mangled names, and the bytes a thread that they may spill. sm90_grouped: a few words
# once a unit row, in the forms for over 4096 columns (Li8E) and for NVFP4 activations (Lb1E) alone.
SPILLS = {("moe_gemm", "sm90_grouped"): (r"decode7expertsI(Li8E|.*Lb1E)", 128)}


def _jobs() -> list[tuple[str, str, str]]:
    return list(_each())


def _each():
    for name in problem.problem_names():
        for entry in problem.find(name).entries():
            if not entry.peer and "cpu" not in entry.targets:
                yield from ((name, entry.name, target) for target in entry.targets if target in ARCH)


@pytest.mark.parametrize(("name", "variant", "target"), _jobs())
def test_compiles_for(name, variant, target):
    found = problem.find(name)
    if found.variant(variant).file.with_suffix(".cu").is_file() and not shutil.which("nvcc"):
        pytest.skip("needs nvcc")
    if missing := [p for p in found.variant(variant).requires if importlib.util.find_spec(p) is None]:
        pytest.skip(f"needs the Python package {', '.join(missing)}")
    entrant = Entrant(variant, found.variant(variant), target)
    with Session(found, "cpu") as session:
        reply = session.ask_runner(entrant, {"op": "compile", "target": target}, 2 * COMPILE_LIMIT_S)
    assert not isinstance(reply, Outcome), reply
    assert all(artefact["bytes"] > 1000 for artefact in reply["artefacts"])
    kernels = [kernel for artefact in reply["artefacts"] for kernel in artefact["kernels"]]
    assert kernels, "the compiler's resource report is missing"
    which, most = SPILLS.get((name, variant), ("$^", 0))
    for kernel in kernels:
        allowed = most if re.search(which, kernel["name"]) else 0
        assert 0 < kernel["registers"] <= 255 and kernel["spill_bytes"] <= allowed, kernel


def test_every_gpu_target_has_a_variant_in_each_language():
    """CUDA C++ (a .cu beside it) and CuTe DSL (imports cutlass), for both targets."""
    files = {target: set() for target in ARCH}
    for entry in problem.find("nvfp4_gemv").entries():
        for target in set(entry.targets) & set(ARCH):
            if entry.file.with_suffix(".cu").is_file():
                files[target].add("CUDA")
            elif "cutlass" in entry.requires:
                files[target].add("CuTe DSL")
    assert files == {target: {"CUDA", "CuTe DSL"} for target in ARCH}
