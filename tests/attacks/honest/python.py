"""Honest, with what Python and torch offer: settings, threads, processes, objects. Nothing to stop."""

import functools
import gc
import logging
import os
import random
import subprocess
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from tests.attacks.shared import VARIANT

VERDICT = "PASSED"
VARIANTS = {
    "switches": {"TARGETS": ("cpu", "sm90", "sm100")},
    "freed_heap": {"PROBLEM": "linear"},
    "autocast": "Decorated with torch.autocast('cpu').",
    "inference_mode": "Decorated with torch.inference_mode().",
    "no_grad": "Decorated with torch.no_grad().",
    "partial": "custom_kernel is a functools.partial of a function with more arguments.",
    "callable_object": "custom_kernel is an object of a class with __call__.",
}
_pool = ThreadPoolExecutor(2)
_ones = np.ones((256, 256), dtype=np.float32)
_kept = {}
if VARIANT == "seeds":
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
elif VARIANT == "logging_lines":
    logging.basicConfig(level=logging.INFO)
    logging.captureWarnings(True)
    warnings.simplefilter("always")


def add(data, alpha=1):
    return torch.add(data.x, data.y, alpha=alpha, out=data.z)


autocast, inference_mode, no_grad = torch.autocast("cpu")(add), torch.inference_mode()(add), torch.no_grad()(add)
partial = functools.partial(add, alpha=1)


class Kernel:
    calls = 0

    def __call__(self, data):
        self.calls += 1
        return add(data)


callable_object = Kernel()
if VARIANT == "switches":
    torch.set_grad_enabled(False)
    torch.set_float32_matmul_precision("medium")
    torch.set_default_dtype(torch.float64)
    torch.backends.cuda.matmul.allow_tf32 = True
    os.environ |= {"CUDA_LAUNCH_BLOCKING": "1", "PYTHONPATH": "/tmp", "LD_PRELOAD": "/tmp/x.so"}
    torch.set_num_threads(2)
    torch.set_num_interop_threads(2)
    gc.disable()
    gc.freeze()


def switches(data):
    """On import sets torch's switches, freezes the collector, asks for two threads, and sets environment variables."""
    return add(data)


def seeds(data):
    """Seeds all generators on import and draws from them in each call."""
    random.random(), np.random.rand(), torch.rand(1)
    return add(data)


def logging_lines(data):
    """Configures logging and warnings on import, and logs and prints in each call."""
    logging.getLogger(__name__).info("%d elements", len(data.x))
    warnings.warn("a harmless warning", stacklevel=2)
    print("a call with", len(data.x), "elements", flush=True)
    return add(data)


def executor(data):
    """Keeps a ThreadPoolExecutor, and gives it half of the work in each call."""
    middle = len(data.x) // 2
    parts = slice(0, middle), slice(middle, None)
    list(_pool.map(lambda part: torch.add(data.x[part], data.y[part], out=data.z[part]), parts))
    return data.z


def process(data):
    """Asks the compiler for its version in the first call, and waits for the answer."""
    if not _kept:
        found = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True)
        _kept["version"] = found.stdout.partition("\n")[0]
    return add(data)


def products(data):
    """Products and a convolution with torch, and a product with numpy, on as many threads as they like and keep."""
    np.matmul(_ones, _ones)
    block = data.x[: len(data.x) // 64 * 64].float().view(1, 1, -1, 64)
    if block.numel():
        torch.matmul(block[0, 0], block[0, 0].T[:, :64])
        torch.nn.functional.conv2d(block, torch.ones(1, 1, 3, 3), padding=1)
    return add(data)


def tables(data):
    """Makes a table in its first call and keeps it: it depends on nothing that the call was given."""
    if not _kept:
        _kept["ones"] = torch.ones(2**20, dtype=torch.float16)
    return torch.addcmul(data.x, data.y, _kept["ones"][: len(data.x)], out=data.z)


def scratch_per_call(data):
    """Takes and frees two large blocks of scratch memory in each call."""
    x, y = data.x.double(), data.y.double()
    return data.z.copy_(x + y)


small = []


def freed_heap(data):
    """Frees memory that malloc keeps, behind a small block that it still uses."""
    torch.empty(31 * 2**20, dtype=torch.uint8)  # freed: malloc serves blocks of that size from its heap from now on
    blocks = [torch.ones(20 * 2**20, dtype=torch.uint8) for _ in range(8)]
    small.append(torch.ones(64 * 2**10, dtype=torch.uint8))
    del blocks
    return torch.mv(data.weights.w, data.inputs.x, out=data.outputs.y)
