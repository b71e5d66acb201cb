"""The honest answer to each problem, and honest ways of giving it that a judge might take for an offence. Nothing to
stop.
"""

import random
import time
from typing import NamedTuple

import torch

from tests.attacks.shared import VARIANT, rounds

TARGETS = ("cpu", "sm90", "sm100")
VERDICT = "PASSED"
VARIANTS = {
    "linear": {"PROBLEM": "linear"},
    "gpu_rounds": {"PROBLEM": "gpu_rounds", "TARGETS": ("cpu",)},
    "gpu_numbers": {"PROBLEM": "gpu_numbers", "TARGETS": ("cpu",), "TAKES_US": 1000},
    "prepared": {"PROBLEM": "linear"},
    "long": {"TARGETS": ("sm90", "sm100")},
}
_kept = {}


def vector_add(data):
    """With torch."""
    return torch.add(data.x, data.y, out=data.z)


def linear(data):
    """With torch and without prepare."""
    return torch.mv(data.weights.w, data.inputs.x, out=data.outputs.y)


def gpu_rounds(data):
    """To GPU MODE's rounds, in C++ on one thread."""
    y = torch.empty_like(data)
    rounds(data, y)
    return y


def gpu_numbers(data):
    """To a folder whose data are a number and a buffer, in C++ on one thread."""
    start, y = data
    rounds(torch.arange(len(y)) + start, y)
    return y, int(y[-1])


class Prepared(NamedTuple):
    columns: torch.Tensor  # fp32 (k, m)


if VARIANT == "prepared":

    def prepare(weights):
        return Prepared(weights.w.T.contiguous())


def prepared(data):
    """Prepares the weights once, in another layout and within the bound, and keeps nothing else."""
    return torch.mv(data.weights.columns.T, data.inputs.x, out=data.outputs.y)


def in_parts(count, x, y, z):
    for part in zip(x.chunk(count), y.chunk(count), z.chunk(count), strict=True):
        torch.add(*part[:2], out=part[2])


def seconds(count, x):
    before = time.perf_counter()
    for _ in range(3):
        in_parts(count, x, x, torch.empty_like(x))
    if x.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - before


def tuned(data):
    """Chooses by measuring once for each shape, on data of its own. Choices by shape may be kept."""
    key = (data.x.shape, data.x.device)
    if key not in _kept:
        _kept[key] = min((1, 2), key=lambda count: seconds(count, torch.ones_like(data.x)))
    in_parts(_kept[key], data.x, data.y, data.z)
    return data.z


def repeated(count, data):
    for _ in range(count):
        torch.add(data.x, data.y, out=data.z)
    return data.z


def long(data):
    """As many launches as a call may have, or nearly. Many are no offence."""
    return repeated(750, data)


def slow(data):
    """Ten passes over the data. Slow is no offence."""
    return repeated(10, data)


def noisy(data):
    """Times that scatter by a factor of several; on a GPU one of its ways is recorded. The interval shows the noise."""
    return repeated(random.randint(1, 12), data)


def scratch(data):
    """Keeps scratch memory between calls, and works in place in it. What was computed in it is not used again."""
    key = (data.x.shape, data.x.device)
    if key not in _kept:
        _kept[key] = torch.empty_like(data.x, dtype=torch.float32)
    return data.z.copy_(_kept[key].copy_(data.x).add_(data.y))
