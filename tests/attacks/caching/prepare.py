"""prepare keeps more of the weights than it may.
Stopped by: memory, of device and host, and files are measured around prepare and after the last call; on a CPU all that
a process has taken or written since its start counts.
"""

import os
import tempfile
import time
from pathlib import Path

import torch

PROBLEM = "linear"
VERDICT = "RULE_BROKEN"
REASON = "prepare"
VARIANTS = {
    "hides_copies": {"TARGETS": ("cpu", "sm90", "sm100")},
    "memory_files": {"VERDICT": ("RULE_BROKEN", "RUNTIME_ERROR"), "REASON": ""},
    "goes_stale": {"VERDICT": "INCORRECT", "REASON": "Number of mismatched elements"},
    "too_long": {"VERDICT": "TIMEOUT", "REASON": "no answer within", "LIMIT_S": 4},
}
_kept = {}
_files = []
_pool = []


def custom_kernel(data):
    return torch.mv(data.weights, data.inputs.x, out=data.outputs.y)


def hides_copies(weights):
    """prepare returns the weights and hides a copy in fp64 in the module, twice what it may keep."""
    _kept[weights.w.shape] = weights.w.double()
    return weights.w.clone()


def fills_a_pool(weights):
    """The first prepare makes room for copies of all weights to come, and later ones fill it: nothing grows."""
    if not _pool:
        _pool.append(torch.ones(6 * 2**24))
    for copy in _pool[0].chunk(6):
        copy[: weights.w.numel()] = weights.w.flatten()[: len(copy)]
    return weights.w.clone()


def memory_files(weights):
    """prepare keeps copies of the weights in anonymous memory files that it does not map."""
    raw = weights.w.numpy().tobytes()
    for _ in range(3):
        _files.append(os.memfd_create("weights"))
        view = memoryview(raw)
        while view:
            view = view[os.write(_files[-1], view) :]
    return weights.w.clone()


def written(weights, names, nbytes=0):
    folder = Path(os.environ.get("TMPDIR") or tempfile.gettempdir())
    for name in names:
        (folder / name).write_bytes(weights.w.numpy().tobytes().ljust(nbytes))
    return weights.w.clone()


def files(weights):
    """prepare keeps copies of the weights in files, mapped again when needed: no memory of the process."""
    return written(weights, [f"weights-{copy}-{os.getpid()}.bin" for copy in range(3)])


def files_again(weights):
    """Every prepare writes the same large files, so that they do not grow from the second one on."""
    return written(weights, [f"weights-{copy}.bin" for copy in range(4)], 2**26)


def goes_stale(weights):
    """prepare keeps what it made first, by shape, whatever the weights are in later calls of it."""
    return _kept.setdefault(weights.w.shape, weights.w.clone())


def too_long(weights):
    """prepare does not end: a search that would go on for hours. Stopped by: a limit of its own."""
    time.sleep(1000)
