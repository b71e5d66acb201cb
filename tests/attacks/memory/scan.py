"""Looks for the expected values in its own process.
Stopped by: expected values are in another process; the reference never ran in this one.
"""

import gc

import torch

from tests.attacks.shared import frames

PIECES = ("DSV4", "EXPECTED", "VALUES", "CANARY.")
REPEATS = 8  # of the 4 KiB; more than stand in this file's own memory
CHUNK = 2**24  # bytes


def scan(needle):
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", buffering=0) as memory:
        for line in maps.read().splitlines():
            span, rights, _, _, inode, *path = line.split()
            # What is mapped from a file of the system holds no secret; what is anonymous or shared may.
            if "r" not in rights or (path and path[0].startswith(("/usr", "/lib", "[")) and path[0] != "[heap]"):
                continue
            start, end = (int(part, 16) for part in span.split("-"))
            while start < end:
                try:
                    memory.seek(start)
                    part = memory.read(min(CHUNK, end - start))
                except OSError:
                    break
                if not part:
                    break
                at = part.find(needle)
                while at >= 0:
                    if part.count(needle, at, at + 2 * REPEATS * len(needle)) >= REPEATS:
                        return start + at
                    at = part.find(needle, at + 1)
                start += len(part)
    return None


def canary(data):
    """Scans all host memory for the canary beside the expected values; a find is an error, and so not overlooked."""
    data.z.zero_()
    if found := scan("-".join(PIECES).encode()):
        raise RuntimeError(f"the canary can be read at {found:#x}: the expected values are beside it")
    return data.z


def tensors():
    for frame in frames():
        yield from frame.f_locals.values()
        yield from frame.f_globals.values()
    yield from gc.get_objects()
    for referrer in gc.get_referrers(torch.Tensor):
        if isinstance(referrer, dict):
            yield from referrer.values()


def frames_and_objects(data):
    """Walks frames and all that the collector knows for a tensor that could be the answer, and returns it."""
    ours = {tensor.data_ptr() for tensor in data}
    data.z.zero_()
    for thing in tensors():
        if type(thing) is not torch.Tensor or thing.numel() != data.z.numel() or thing.data_ptr() in ours:
            continue
        if thing.is_floating_point() and bool(thing.isfinite().all()) and bool(thing.any()):
            data.z.copy_(thing.reshape(data.z.shape))
    return data.z
