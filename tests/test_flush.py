"""What the CPU clock reads: as large as it says, once for all who map it, and nothing that anybody can write to."""

import mmap
import os
from pathlib import Path

import pytest

from harness import flush, native


def anonymous() -> int:
    """KiB of this process's own memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def test_it_is_larger_than_every_cache_and_takes_no_memory_of_who_maps_it():
    before = anonymous()
    pages = [flush.mapped(os.dup(flush.file())) for _ in range(2)]
    for page in pages:
        native.read(page, page.numel(), 0)
        assert page.numel() == flush.nbytes() == flush.FLUSH_FACTOR * flush.last_level_cache() >= 3 * 2**25
    assert anonymous() - before < 2**14


def test_nobody_can_write_to_it():
    with pytest.raises(OSError, match="not permitted"):
        os.pwrite(flush.file(), b"x", 0)
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(flush.file(), 0)
    with pytest.raises(OSError, match="not permitted"):
        mmap.mmap(flush.file(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
