"""What the machine is: the environment line that is printed and recorded, and the machine's slug."""

import functools
import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

from harness.results import gpu

ROOT = Path(__file__).resolve().parents[2]


class GpuState(NamedTuple):
    """clocks_mhz: sm, mem; throttle: names of active reasons; None without NVML. In a run's file it is a list."""

    clocks_mhz: dict[str, int] | None = None
    throttle: list[str] | None = None


UNKNOWN = GpuState()
# What datasheets promise: bytes a second and flops a second (dense; bf16), by what a GPU's name contains.
RATES = {"H200": (4.8e12, 989e12), "B200": (8.0e12, 2250e12), "H100": (3.35e12, 989e12)}
FP4 = {"B200": 9000e12}  # flops a second, dense, with FP4 on both sides, of GPUs that have such instructions


@functools.cache
def describe() -> dict[str, str | None]:
    """gpu, cpu, driver, cuda, torch, python, platform, cutlass_dsl; None where there is none."""
    import torch  # takes 2 s, and who asks for a machine's name needs none

    used = gpu.current()
    return {
        "gpu": used.name if used else None,
        "cpu": f"{_cpu_name()}, {os.cpu_count()} cores",
        "driver": used.driver if used else None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cutlass_dsl": version("nvidia-cutlass-dsl"),
    }


def line() -> str:
    """The environment on one line: processor or GPU, and the versions that matter."""
    e = describe()
    gpu_said = f"{e['gpu']}, CUDA {e['cuda']}, driver {e['driver']}" if e["gpu"] else "no GPU"
    return f"{e['cpu']}; {gpu_said}; torch {e['torch']}, Python {e['python']}"


def machine(device: str) -> str:
    """Slug of the machine whose results these are: the GPU's name, or "cpu-" and the processor's and its cores."""
    used = gpu.current()
    name = f"cpu {_cpu_name()} {os.cpu_count()}c" if device != "cuda" else used.name if used else "unknown gpu"
    return re.sub(r"[^a-z0-9.]+", "-", re.sub(r"\(r\)|\(tm\)|processor|cpu @", "", name.lower())).strip("-")


def gpu_uuid() -> str:
    """Return the UUID of the GPU in use, the same in every process and container. RuntimeError: there is no GPU."""
    if (used := gpu.current()) is None:
        raise RuntimeError("nvidia-smi names no GPU that is visible here")
    return used.uuid


def gpu_state() -> GpuState:
    try:
        import pynvml
    except ImportError:
        return UNKNOWN
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(gpu_uuid())
        clocks = {"sm": pynvml.NVML_CLOCK_SM, "mem": pynvml.NVML_CLOCK_MEM}
        mhz = {name: pynvml.nvmlDeviceGetClockInfo(handle, clock) for name, clock in clocks.items()}
        mask = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    except (pynvml.NVMLError, RuntimeError):
        return UNKNOWN
    prefix = "nvmlClocksThrottleReason"
    idle = {"None", "All", "GpuIdle", "ApplicationsClocksSetting", "UserDefinedClocks"}
    names = {name.removeprefix(prefix) for name in dir(pynvml) if name.startswith(prefix)} - idle
    return GpuState(mhz, sorted(name for name in names if mask & getattr(pynvml, prefix + name)))


@functools.cache
def commit(root: Path = ROOT) -> tuple[str | None, bool | None]:
    """(commit at `root`, whether more than records is uncommitted), or None. $GIT_COMMIT, $GIT_DIRTY may say it."""
    if os.environ.get("GIT_COMMIT"):
        return os.environ["GIT_COMMIT"], {"0": False, "1": True}.get(os.environ.get("GIT_DIRTY", ""))
    asked = (["git", "rev-parse", "HEAD"], ["git", "status", "--porcelain", "--", ".", ":(exclude)leaderboard/results"])
    try:
        texts = [subprocess.run(words, cwd=root, capture_output=True, text=True, check=True).stdout for words in asked]
    except (OSError, subprocess.CalledProcessError):
        return None, None
    return texts[0].strip(), bool(texts[1].strip())


@functools.cache
def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
