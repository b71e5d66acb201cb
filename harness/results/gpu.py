"""Which GPU a run uses: one of those that CUDA_VISIBLE_DEVICES leaves, known by its UUID. Numbers count as CUDA counts
them; in that variable a number is nvidia-smi's (the order of the PCI bus). `select` leaves one device visible, by UUID,
to this process and all that it starts, so that number 0 is the same device everywhere.
"""

import csv
import functools
import os
import shutil
import subprocess
from dataclasses import dataclass

VARIABLE = "CUDA_VISIBLE_DEVICES"
LIMIT_S = 30
_FIELDS = ("index", "uuid", "name", "driver_version", "compute_cap")


@dataclass(frozen=True)
class Gpu:
    """A GPU as nvidia-smi describes it. capability: its compute capability, such as "9.0"."""

    index: int
    uuid: str
    name: str
    driver: str
    capability: str


def asked(kind: str, fields: tuple[str, ...]) -> list[list[str]]:
    """Return the rows of nvidia-smi's table of `kind`, "gpu" or "compute-apps". RuntimeError: it does not answer."""
    if not shutil.which("nvidia-smi"):
        raise RuntimeError("there is no nvidia-smi to ask")
    command = ["nvidia-smi", f"--query-{kind}={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"nvidia-smi gave no answer within {LIMIT_S} s") from None
    if result.returncode:
        raise RuntimeError(f"nvidia-smi failed with {result.returncode}: {(result.stderr or result.stdout).strip()}")
    return [[cell.strip() for cell in row] for row in csv.reader(result.stdout.splitlines(), skipinitialspace=True)]


@functools.cache
def present() -> tuple[Gpu, ...]:
    """Return the GPUs of this machine in nvidia-smi's order; () without a driver."""
    try:
        rows = asked("gpu", _FIELDS)
    except RuntimeError:
        return ()
    return tuple(Gpu(int(row[0]), *row[1:]) for row in rows if len(row) == len(_FIELDS) and row[0].isdigit())


def visible() -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA sees, in its order. A word that names none, or one again, hides all from there on."""
    setting = os.environ.get(VARIABLE)
    if setting is None:
        return present()
    gpus: list[Gpu] = []
    for word in map(str.strip, setting.split(",")):
        is_uuid = word.startswith("GPU-")
        named = [gpu for gpu in present() if word == str(gpu.index) or (is_uuid and gpu.uuid.startswith(word))]
        if len(named) != 1 or named[0] in gpus:
            break
        gpus += named
    return tuple(gpus)


def current() -> Gpu | None:
    """Return the GPU that CUDA calls device 0, None where it sees none."""
    return next(iter(visible()), None)


def select(number: int = 0) -> Gpu:
    """Leave this process, ahead of CUDA, and its children GPU `number` of the visible ones. LookupError: none such."""
    gpus = visible()
    if number >= len(gpus):
        names = "; ".join(f"cuda:{i} is {gpu.name} ({gpu.uuid})" for i, gpu in enumerate(gpus)) or "there is none"
        hidden = len(present()) - len(gpus)
        rest = f" ({VARIABLE}={os.environ.get(VARIABLE)} hides {hidden})" if hidden else ""
        raise LookupError(f"no GPU cuda:{number}: {names}{rest}")
    os.environ[VARIABLE] = gpus[number].uuid
    return gpus[number]
