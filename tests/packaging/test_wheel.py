"""The wheel: built, installed beside torch into an environment without this repository, and called."""

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.marks import needs_nvcc

# Run where there is no compiler but g++, and with -S no other package. It prints the import's seconds behind torch's.
CALL = """
import ctypes, importlib.metadata as metadata, sys, time, torch
start = time.perf_counter()
import dsv4_kernels
print(time.perf_counter() - start)
from dsv4_kernels import __version__, compat, vllm
from dsv4_kernels.problems.common import build, load
from dsv4_kernels.problems.dsv4_forward.kernels import experts, norm
from dsv4_kernels.problems.dsv4_forward.torch_ops import experts as torch_experts
own = [part.compile_for(target)[0] for part in (experts.Experts, norm.Norm) for target in build.ARCH]
assert {made.path.parent for made in own} == {build.PREBUILT}
for problem in (file.parent.name for file in load.PROBLEMS.glob("*/task.py")):
    for target in build.ARCH:
        name = load.winners(load.PROBLEMS / problem)[target][0]
        if (load.PROBLEMS / problem / f"variants/{name}.cu").is_file():
            for made in load.variant(problem, name).compile_for(target):
                assert made.path.parent == build.PREBUILT and ctypes.CDLL(str(made.path)), (problem, target)
q, pages = torch.randn(1, 1, 2, 512).bfloat16(), torch.zeros(1, 1152, dtype=torch.uint8)
index, one = torch.zeros(1, 1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
out, lse = torch.empty_like(q), torch.empty(1, 1, 2)
torch.ops.dsv4.fmha_decode(q, pages, index, one, pages, index, one, torch.zeros(2), out, lse)
assert out.count_nonzero() == 0 and torch.allclose(lse, torch.tensor(2.0).log()), "two entries of zeros"
assert not {"problems", "harness", "allpairspy"} & set(sys.modules) and metadata.version("dsv4-kernels") == __version__
"""


@needs_nvcc
@pytest.mark.slow
def test_the_wheel_works_beside_torch_alone(tmp_path):
    pytest.importorskip("build.env", reason="needs `python3 tools/setup.py wheel`")
    python, folder, packages = [sys.executable, "-m"], str(tmp_path), tmp_path / "packages"
    build = ["build", "--wheel", "--no-isolation", "--outdir", folder, str(ROOT / "packaging")]
    subprocess.run([*python, *build], check=True, stdout=subprocess.DEVNULL)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-manylinux_2_28_x86_64.whl") and wheel.stat().st_size < 35e6
    install = ["pip", "install", "-q", "--no-deps", "--no-index", "--target", str(packages), str(wheel)]
    subprocess.run([*python, *install], check=True)
    for entry in Path(sysconfig.get_path("purelib")).iterdir():  # torch and what it needs
        if not re.match(r"allpairspy|_|pip|.*\.pth", entry.name):
            (packages / entry.name).symlink_to(entry)
    away = os.environ | {"PATH": "/usr/bin:/bin", "KERNEL_BUILD_DIR": folder, "PYTHONPATH": str(packages)}
    assert float(subprocess.check_output([sys.executable, "-S", "-c", CALL], cwd=tmp_path, env=away, text=True)) < 1
