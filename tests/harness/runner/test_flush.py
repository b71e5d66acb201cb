"""What makes a CPU's caches cold: larger than every cache, really there, and read by every processor."""

import os
import subprocess
import sys
from pathlib import Path

from harness.runner import flush, native
from tests.support import ROOT

CACHE = flush.last_level_cache()  # of this machine, before other tests put a smaller one in its place
OWN_MEMORY = """
from pathlib import Path
from harness.runner import flush
def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))
before = anonymous()
memory = flush.memory(2**26)
assert memory.numel() == 2**26
print(anonymous() - before)
"""


def test_it_is_larger_than_every_cache():
    listed = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    sizes = [
        int(text[:-1]) * 2 ** {"K": 10, "M": 20}[text[-1]] for text in (file.read_text().strip() for file in listed)
    ]
    assert max([2**25, *sizes]) == CACHE
    assert flush.nbytes() == flush.FLUSH_FACTOR * flush.last_level_cache() and flush.FLUSH_FACTOR >= 3


def test_its_pages_are_there_each_for_itself():
    """In a new process: here the memory may have been another test's, whose pages are there."""
    ran = subprocess.run([sys.executable, "-c", OWN_MEMORY], capture_output=True, text=True, check=True, cwd=ROOT)
    assert int(ran.stdout) > 0.9 * 2**26


def test_every_processor_reads_a_share_and_the_caller_may_run_anywhere_afterwards():
    before = os.sched_getaffinity(0)
    memory = flush.memory(2**26)
    native.evict(memory)
    native.read(memory, memory.numel(), 0)
    assert os.sched_getaffinity(0) == before
    threads = [Path(f"/proc/self/task/{tid}/status").read_text() for tid in os.listdir("/proc/self/task")]
    pinned = {line.split()[1] for text in threads for line in text.splitlines() if line.startswith("Cpus_allowed_list")}
    assert {str(cpu) for cpu in sorted(before)[1:]} <= pinned
