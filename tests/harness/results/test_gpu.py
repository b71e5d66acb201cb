"""harness/results/gpu.py: which of several GPUs a run uses, with a faked nvidia-smi."""

import os

import pytest

from harness.results import environment, gpu
from tests.support import forked

TABLE = (
    "0, GPU-aaaa1111, NVIDIA H100 80GB HBM3, 580.1, 9.0\n"
    "1, GPU-bbbb2222, NVIDIA B200, 580.1, 10.0\n"
    "2, GPU-bbbb3333, NVIDIA H200, 580.1, 9.0\n"
)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Three GPUs."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\ncat <<'END'\n{TABLE}END\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv(gpu.VARIABLE, raising=False)
    caches = (gpu.present, environment.describe)
    for cached in caches:
        cached.cache_clear()
    yield monkeypatch
    for cached in caches:
        cached.cache_clear()


@pytest.mark.parametrize(
    ("said", "names"),
    [
        (None, "aaaa1111 bbbb2222 bbbb3333"),
        ("", ""),
        ("1", "bbbb2222"),
        ("2,0", "bbbb3333 aaaa1111"),
        ("GPU-bbbb3333,0", "bbbb3333 aaaa1111"),
        ("GPU-a", "aaaa1111"),
        ("GPU-bbbb", ""),
        ("1,7,0", "bbbb2222"),
        ("0,0,1", "aaaa1111"),
        ("-1,0", ""),
        ("NoDevFiles", ""),
    ],
)
def test_visible_devices_are_those_that_cuda_sees(machine, said, names):
    if said is not None:
        machine.setenv(gpu.VARIABLE, said)
    assert " ".join(one.uuid.removeprefix("GPU-") for one in gpu.visible()) == names


def test_a_selected_gpu_is_the_only_one_and_the_first(machine):
    machine.setenv(gpu.VARIABLE, "2,1")
    chosen = gpu.select(1)
    assert (chosen.uuid, chosen.name, chosen.capability) == ("GPU-bbbb2222", "NVIDIA B200", "10.0")
    assert os.environ[gpu.VARIABLE] == "GPU-bbbb2222" and gpu.current() == chosen and gpu.select(0) == chosen


def test_the_machine_is_named_by_the_gpu_that_is_used(machine):
    gpu.select(2)
    assert environment.describe()["gpu"] == "NVIDIA H200" and environment.gpu_uuid() == "GPU-bbbb3333"
    assert environment.machine("cuda") == "nvidia-h200"


def test_a_missing_gpu_is_refused_with_those_that_are_there(machine):
    machine.setenv(gpu.VARIABLE, "0")
    with pytest.raises(LookupError, match=r"cuda:1: cuda:0 is NVIDIA H100 .*CUDA_VISIBLE_DEVICES=0 hides 2"):
        gpu.select(1)


@pytest.mark.parametrize(
    ("device", "said"), [("cuda:3", "no GPU cuda:3: cuda:0 is NVIDIA H100"), ("cuda:x", "cuda:N"), ("gpu", "cuda:N")]
)
def test_the_command_line_refuses_other_devices(machine, device, said):
    done = forked.run(["harness/run.py", "nvfp4_gemv", "--device", device])
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
