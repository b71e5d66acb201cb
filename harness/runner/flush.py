"""Memory several times the last-level cache. Every processor reads a share of it to make a CPU's caches cold.

Some machines report a last-level cache of half a gigabyte, so only the checker holds such memory, for all runners.
"""

from pathlib import Path

import torch

FLUSH_FACTOR = 3  # times the last-level cache


def last_level_cache() -> int:
    """Return the bytes of the largest cache that the kernel reports for CPU 0; 32 MiB if it reports none."""
    sizes = [32 * 2**20]
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = index.read_text().strip()
        sizes.append(int(text[:-1]) * {"K": 2**10, "M": 2**20, "G": 2**30}[text[-1]])
    return max(sizes)


def nbytes() -> int:
    """Return the bytes of the memory that is read: FLUSH_FACTOR times the last-level cache."""
    return FLUSH_FACTOR * last_level_cache()


def memory(size: int) -> torch.Tensor:
    """Return `size` bytes, flat uint8. They are written once, since pages that were only read would be one page."""
    return torch.ones(size, dtype=torch.uint8)
