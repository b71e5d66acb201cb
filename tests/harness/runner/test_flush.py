"""What makes a CPU's caches cold: larger than every cache, really there, and read by every processor."""

import os
from pathlib import Path

import torch

from harness.runner import gate

CACHE = gate.last_level_cache()  # of this machine, before other tests put a smaller one in its place


def test_it_is_larger_than_every_cache():
    listed = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    sizes = [
        int(text[:-1]) * 2 ** {"K": 10, "M": 20}[text[-1]] for text in (file.read_text().strip() for file in listed)
    ]
    assert max([2**25, *sizes]) == CACHE
    assert gate.flush_bytes() == gate.FLUSH_FACTOR * gate.last_level_cache() and gate.FLUSH_FACTOR >= 3


def test_every_processor_reads_a_share_and_the_caller_may_run_anywhere_afterwards():
    before = os.sched_getaffinity(0)
    memory = torch.ones(2**26, dtype=torch.uint8)
    gate.evict(memory)
    gate.read(memory, memory.numel(), 0)
    assert os.sched_getaffinity(0) == before
    threads = [Path(f"/proc/self/task/{tid}/status").read_text() for tid in os.listdir("/proc/self/task")]
    pinned = {line.split()[1] for text in threads for line in text.splitlines() if line.startswith("Cpus_allowed_list")}
    assert {str(cpu) for cpu in sorted(before)[1:]} <= pinned
