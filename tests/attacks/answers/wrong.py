"""A wrong answer that a careless comparison admits.
Stopped by: every element is compared; outputs are poisoned with NaN, which always fails, and the tolerance is derived
and scales with the terms of each element.
"""

import ctypes

import torch

TARGETS = ("cpu", "sm90", "sm100")
VARIANTS = {
    "zeros": {"PROBLEM": "linear"},
    "low_precision": {"PROBLEM": "linear"},
    "structure": {"PROBLEM": "linear", "TARGETS": ("cpu",)},
    "past_the_end": {"TARGETS": ("cpu",)},
}


def identity(data):
    """Returns an input: right wherever the other one is small."""
    return data.z.copy_(data.x)


def zeros(data):
    """Returns zeros: the mean of the answer."""
    return data.outputs.y.zero_()


def nan(data):
    """Answers NaN everywhere."""
    return data.z.fill_(float("nan"))


def low_precision(data):
    """Multiplies in bf16 where the problem says fp32: terms of bf16 are off by far more than fp32 sums."""
    return data.outputs.y.copy_(data.weights.w.bfloat16().float() @ data.inputs.x.bfloat16().float())


def structure(data):
    """Knows how the inputs are distributed and leaves out the columns whose x is small."""
    kept = data.inputs.x.abs() > 0.02
    return data.outputs.y.copy_(data.weights.w[:, kept] @ data.inputs.x[kept])


def unwritten(data):
    """Leaves one element in twenty unwritten."""
    n = len(data.x)
    written = n - -(-n // 20)
    torch.add(data.x[:written], data.y[:written], out=data.z[:written])
    return data.z


def off_grid(data):
    """Handles whole blocks of 1024 alone, which is all that the benchmarks have; test cases have others."""
    whole = len(data.x) // 1024 * 1024
    torch.add(data.x[:whole], data.y[:whole], out=data.z[:whole])
    return data.z


def past_the_end(data):
    """Off by a block: the last block is read from past the end of the inputs, where plausible numbers lie."""
    n = len(data.x)
    torch.add(data.x, data.y, out=data.z)
    last = max(0, n - 128)
    past = (ctypes.c_uint16 * (n - last)).from_address(data.x.data_ptr() + 2 * n)
    data.z[last:] = torch.frombuffer(past, dtype=torch.float16) + data.y[last:]
    return data.z
