"""harness/results/gpu.py: which of several GPUs a run uses, with a faked nvidia-smi."""

import os
import subprocess

import pytest

from harness.results import environment, gpu
from tests.support import forked, script

TABLE = (
    "0, GPU-aaaa1111, NVIDIA H100 80GB HBM3, 580.1, 9.0\n"
    "1, GPU-bbbb2222, NVIDIA B200, 580.1, 10.0\n"
    "2, GPU-bbbb3333, NVIDIA H200, 580.1, 9.0\n"
)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Three GPUs."""
    script(tmp_path / "nvidia-smi", f"cat <<'END'\n{TABLE}END")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
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


def test_a_selected_gpu_is_the_only_one_and_names_the_machine(machine):
    machine.setenv(gpu.VARIABLE, "2,1")
    chosen = gpu.select(1)
    assert (chosen.uuid, chosen.name, chosen.capability) == ("GPU-bbbb2222", "NVIDIA B200", "10.0")
    assert os.environ[gpu.VARIABLE] == "GPU-bbbb2222" and gpu.current() == chosen and gpu.select(0) == chosen
    machine.delenv(gpu.VARIABLE)
    gpu.select(2)
    assert environment.describe()["gpu"] == "NVIDIA H200" and environment.gpu_uuid() == "GPU-bbbb3333"
    assert environment.machine("cuda") == "nvidia-h200"
    machine.setenv(gpu.VARIABLE, "0")
    with pytest.raises(LookupError, match=r"cuda:1: cuda:0 is NVIDIA H100 .*CUDA_VISIBLE_DEVICES=0 hides 2"):
        gpu.select(1)


def test_the_command_line_refuses_other_devices(machine):
    done = forked.run(["harness/run.py", "nvfp4_gemv", "--device", "cuda:3"])
    assert done.returncode == 2 and "no GPU cuda:3: cuda:0 is NVIDIA H100" in done.stderr
    assert "Traceback" not in done.stderr


def test_new_records_are_no_uncommitted_changes(tmp_path, monkeypatch):
    monkeypatch.delenv("GIT_COMMIT", raising=False)

    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=x", "-c", "user.email=x@x", *words], cwd=tmp_path, check=True)

    assert environment.commit.__wrapped__(tmp_path) == (None, None)
    records = tmp_path / "leaderboard" / "results" / "cpu" / "one.jsonl"
    records.parent.mkdir(parents=True)
    for file in (records, tmp_path / "kernel.py"):
        file.write_text("1\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    head, dirty = environment.commit.__wrapped__(tmp_path)
    assert head and len(head) == 40 and dirty is False
    records.write_text("1\n2\n")
    (records.parent / "two.jsonl").write_text("3\n")
    assert environment.commit.__wrapped__(tmp_path) == (head, False)
    (tmp_path / "kernel.py").write_text("2\n")
    assert environment.commit.__wrapped__(tmp_path) == (head, True)
