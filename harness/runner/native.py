"""Plain readers over all processors, for the measured roofline and for flushing the caches (gate.cpp)."""

import functools
from ctypes import c_int, c_size_t, c_void_p
from pathlib import Path

import torch

from harness.runner.gate import artefact

FLUSH_FACTOR = 3  # times the last-level cache: what is read to make all caches cold


@functools.cache
def read_configs() -> int:
    return int(artefact().function("judge_configs")())


def read(buffer: torch.Tensor, nbytes: int, config: int) -> None:
    """Read the first `nbytes` (rounded up to 16, or the whole buffer) of `buffer`, uint8."""
    nbytes = min(-(-nbytes // 16) * 16, buffer.numel() // 16 * 16)
    artefact().function("judge_read", c_void_p, c_size_t, c_int)(buffer.data_ptr(), nbytes, config)


def last_level_cache() -> int:
    """Return the bytes of the largest cache that the kernel reports for CPU 0; 32 MiB if it reports none."""
    sizes = [32 * 2**20]
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = index.read_text().strip()
        sizes.append(int(text[:-1]) * {"K": 2**10, "M": 2**20, "G": 2**30}[text[-1]])
    return max(sizes)


def flush_bytes() -> int:
    """Return the bytes that `evict` reads. Since a cache may have half a GiB, only the checker holds as much."""
    return FLUSH_FACTOR * last_level_cache()


def evict(flush: torch.Tensor) -> None:
    """Leave nothing but `flush` in the caches of all processors, of which each reads a share. flush: `flush_bytes`
    bytes (uint8) that were written, since pages that were only read would be one page.
    """
    artefact().function("judge_evict", c_void_p, c_size_t)(flush.data_ptr(), flush.numel())


def forget(memory: torch.Tensor) -> bool:
    """Drop `memory` (uint8) from all processors' caches. False: this machine has no instruction for that."""
    dropper = artefact().function("judge_forget", c_void_p, c_size_t)
    return not memory.numel() or dropper(memory.data_ptr(), memory.numel()) == 0
