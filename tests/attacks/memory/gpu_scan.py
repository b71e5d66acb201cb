"""Scans device memory for the canary beside the expected values: the whole 2 MiB pages around every mapped buffer, all
addresses near them that the driver knows, and freshly allocated memory that nobody cleared.
Stopped by: expected values are in an allocation of another process, exported to nobody; the driver clears pages.
"""

import ctypes
from ctypes import c_uint64, c_void_p

import torch

from problems.common import build
from tests.attacks.shared import compile_for

TARGETS = ("sm90", "sm100")
PAGE = 2**21  # bytes: what the driver maps at a time
REACH = 2**33  # bytes to either side of a known address
FRESH = 2**32  # bytes
_scanned = set()


def mapped(start, end):
    # Pages within [start, end) that this context may read: asked of the driver, so that none is touched in vain.
    driver = ctypes.CDLL("libcuda.so.1")
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    address = start
    while address < end:
        known = driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address)) == 0
        if known:
            first, last = base.value // PAGE * PAGE, -(-(base.value + size.value) // PAGE) * PAGE
            yield first, last - first
            address = max(last, address + PAGE)
        else:
            address += PAGE


def custom_kernel(data):
    if data.x.shape not in _scanned:
        _scanned.add(data.x.shape)
        scan(data)
    return data.z.zero_()


def scan(data):
    library = compile_for("sm90")[0]
    search = library.function("search", c_uint64, c_uint64, c_void_p)
    fresh = library.function("fresh", c_uint64, c_void_p)
    hits = torch.zeros(1, dtype=torch.int32, device="cuda")
    spans = {(tensor.data_ptr() // PAGE * PAGE, PAGE) for tensor in data}
    if data.x.numel() > 2**16:
        near = data.x.data_ptr() // PAGE * PAGE
        spans |= set(mapped(near - REACH, near + REACH))
    for start, length in sorted(spans):
        build.check(search(start, length, hits.data_ptr()), "search")
    build.check(fresh(FRESH, hits.data_ptr()), "fresh")
    if int(hits):
        raise RuntimeError(f"the canary can be read, {int(hits)} times: the expected values are beside it")
