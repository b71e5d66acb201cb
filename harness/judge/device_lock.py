"""One judge at a time on a device, and who else is using it.

The lock is the kernel's, on a file of this user's: it goes with its process, however that ends, and children do not
inherit it. Judges of other users are seen by `users` only.
"""

import contextlib
import csv
import fcntl
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator

from harness.sandbox import policy

SMI_LIMIT_S = 30
_FIELDS = ("gpu_uuid", "pid", "process_name", "used_memory")


@contextlib.contextmanager
def hold(device: str, say: Callable[[str], object] = print) -> Iterator[None]:
    """Within: no other judge of this user is on `device`, "cpu" or a GPU's uuid.

    If one is, `say` is told once which process that is, and this waits until it ends. SandboxError: the lock's folder
    belongs to somebody else.
    """
    file = policy.runtime_folder("devices") / re.sub(r"[^A-Za-z0-9-]", "_", device)
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 32, 0).decode(errors="replace").strip()
            say(f"waiting for process {holder or '(unknown)'}, which is timing on {device}")
            fcntl.flock(fd, fcntl.LOCK_EX)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(fd)


def users(gpu: str, ignore: Iterable[int] = ()) -> list[str]:
    """Compute processes on the GPU of uuid `gpu`, each as one line, those of pids `ignore` left out.

    A driver shows a container only what the container may see. RuntimeError: neither NVML nor nvidia-smi answers.
    """
    ignored = set(ignore)
    found = _from_nvml(gpu)
    if found is None:
        found = _from_smi(gpu)
    return [
        f"process {pid} ({name})" + (f", {nbytes / 2**20:.0f} MiB" if nbytes else "")
        for pid, name, nbytes in found
        if pid not in ignored
    ]


def _from_nvml(gpu: str) -> list[tuple[int, str, int | None]] | None:
    """(pid, name, bytes) for each; None where there is no pynvml, or it does not know the GPU."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(gpu)
        return [
            (process.pid, _name(process.pid), process.usedGpuMemory)
            for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        ]
    except pynvml.NVMLError:
        return None
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _from_smi(gpu: str) -> list[tuple[int, str, int | None]]:
    if not shutil.which("nvidia-smi"):
        raise RuntimeError("neither pynvml nor nvidia-smi is here to ask who uses the GPU")
    command = ["nvidia-smi", f"--query-compute-apps={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=SMI_LIMIT_S)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"nvidia-smi gave no answer within {SMI_LIMIT_S} s") from None
    if result.returncode:
        raise RuntimeError(f"nvidia-smi failed with {result.returncode}: {(result.stderr or result.stdout).strip()}")
    return parse_smi(result.stdout, gpu)


def parse_smi(text: str, gpu: str) -> list[tuple[int, str, int | None]]:
    """(pid, name, bytes or None) of the lines of nvidia-smi's table of compute processes that are about `gpu`."""
    found = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        # A process name may hold commas; the other fields do not.
        if len(row) >= len(_FIELDS) and row[0].strip() == gpu and row[1].strip().isdigit():
            memory = row[-1].strip()
            nbytes = int(memory) * 2**20 if memory.isdigit() else None
            found.append((int(row[1]), ",".join(row[2:-1]).strip(), nbytes))
    return found


def _name(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm") as file:
            return file.read().strip()
    except OSError:
        return "not visible from here"
