"""--device model: the verdict on a right and on a wrong variant, and what is refused."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CASE = ("--mode", "test", "--case", "m=1 k=64")

nvcc = pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")


def run(*arguments):
    command = [sys.executable, "harness/run.py", "nvfp4_gemv", "--device", "model", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@nvcc
def test_a_right_variant_is_model_checked_under_every_order():
    ran = run("--variant", "sm100_native", *CASE)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("MODEL_CHECKED") == 7 and " us " not in ran.stdout


@nvcc
def test_a_ring_that_waits_for_too_little_is_a_race_with_its_source_line(tmp_path):
    variants = ROOT / "problems" / "nvfp4_gemv" / "variants"
    for name in ("sm100_native.cu", "warp_ring.cuh", "sm100_native.py"):
        shutil.copy(variants / name, tmp_path)
    ring = tmp_path / "warp_ring.cuh"
    wait = '"n"(NUM_STAGES - 1)'
    assert wait in ring.read_text()
    ring.write_text(ring.read_text().replace(wait, '"n"(NUM_STAGES)'))
    case = json.dumps([{"m": 40, "k": 5184, "l": 1, "seed": 5}])
    command = [
        sys.executable, "-m", "harness.tools.model_check", str(variants.parent), str(tmp_path / "sm100_native.py"),
        "sm100",
    ]  # fmt: skip
    ran = subprocess.run(command, cwd=ROOT, input=case, capture_output=True, text=True)
    replies = [json.loads(line) for line in ran.stdout.splitlines()]
    assert {reply["status"] for reply in replies} == {"RUNTIME_ERROR"}, ran.stdout + ran.stderr
    assert "race" in replies[0]["said"] and "warp_ring.cuh" in replies[0]["said"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--variant", "sm100_native"), "--device model goes with --mode test only"),
        (("--variant", "cpu_portable", "--mode", "test"), "needs a variant for sm100 or sm90"),
        (("--all", "--mode", "test"), "--device model goes with --mode test only"),
    ],
)
def test_what_it_refuses(arguments, said):
    ran = run(*arguments)
    assert ran.returncode == 2 and said in ran.stderr
