"""Returns something that computes when it is read.
Stopped by: exactly torch.Tensor is admitted, and its memory is copied, not the object.
"""

import torch

from problems.common import build
from tests.attacks.shared import HONEST_OF_FOUR, ROUNDS, VARIANT, honest_call, rounds

PROBLEM = "gpu_rounds"
VERDICT = ("INCORRECT", "RUNTIME_ERROR")
VARIANTS = {
    "subclass": {"VERDICT": "INCORRECT"},
    "subclass_of_output": {
        "PROBLEM": "vector_add",
        "TARGETS": ("cpu", "sm90", "sm100"),
        "VERDICT": ("INCORRECT", "CHEAT_SUSPECTED"),
    },
    "patched_address": {"VERDICT": ("PASSED", "INCORRECT", "RUNTIME_ERROR")},
}


class Lazy(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            for item in args:
                if isinstance(item, Lazy):
                    item.job(torch.Tensor.as_subclass(item, torch.Tensor))
            return function(*args, **(kwargs or {}))


def lazily(tensor, job):
    """The tensor of an honest call, otherwise one that does the job when it is read."""
    if honest_call():
        job(tensor)
        return tensor
    lazy = tensor.as_subclass(Lazy)
    lazy.job = job
    return lazy


def subclass(data):
    """Returns a subclass of a tensor that computes when it is read."""
    return lazily(torch.empty_like(data), lambda y: rounds(data, y))


def subclass_of_output(data):
    """Returns its output as a subclass that would compute when it is read."""
    return lazily(data.z, lambda z: torch.add(data.x, data.y, out=z))


def address(data):
    """Overrides data_ptr of the tensor that it returns, which computes when the runner asks for the address. Stopped
    by: a tensor with attributes of its own is no plain one; and asking is on the clock.
    """
    y = torch.empty_like(data)

    def late():
        rounds(data, y)
        return torch.Tensor.data_ptr(y)

    if honest_call():
        rounds(data, y)
    else:
        y.data_ptr = late
    return y


_data_ptr = torch.Tensor.data_ptr
_jobs = {}


def work(x, y):
    build.check(ROUNDS(_data_ptr(x), _data_ptr(y), len(x)), "rounds")


def computing(tensor):
    if tensor in _jobs.values() or not _jobs:
        return _data_ptr(tensor)
    work(*_jobs.popitem())
    return _data_ptr(tensor)


if VARIANT == "patched_address" and HONEST_OF_FOUR < 4:
    torch.Tensor.data_ptr = computing


def patched_address(data):
    """Replaces torch.Tensor.data_ptr, by which the runner tells addresses, by one that computes. Stopped by: the
    runner asks before it says "done": the work is on the clock.
    """
    y = torch.empty_like(data)
    _jobs.clear()
    _jobs[data] = y
    if honest_call() or len(data) < 4096:
        work(*_jobs.popitem())
    return y
