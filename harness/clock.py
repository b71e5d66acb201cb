"""The two clocks. Each times one call on cold caches and captures its outputs directly behind it.

CUDA: device sync; persisting L2 reset; a read (not a write) of 3x L2; one word of every 64 KiB of the slot, so that
address translations are warm and data is cold; a spin kernel of at least twice the call's own enqueue time, so that the
device never waits for the host; start event; an empty kernel; the call; stop event; copy of the outputs on the same
queue; device sync. CPU: a read of 3x the last-level cache, then the host clock around the call.
"""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from harness import native

FLUSH_FACTOR = 3  # times the last-level cache
FLUSH_CONFIG = 0  # any configuration of the reader will do
SPIN_MARGIN_US = 100  # events, the mark and the capture are enqueued under the spin as well
FIRST_SPIN_US = 1000  # before the call's own enqueue time is known


@dataclass(frozen=True)
class Sample:
    """One timed call. us: the clock's reading; host_us: until the call returned to Python; host_bound: the device ran
    dry before everything was enqueued, so `us` holds host time.
    """

    us: float
    host_us: float
    host_bound: bool


class CpuClock:
    name = "host clock around the call"

    def __init__(self) -> None:
        self._flush = torch.zeros(FLUSH_FACTOR * last_level_cache(), dtype=torch.uint8)

    def time(self, call: Callable[[], object], capture: Callable[[object], None], slot: torch.Tensor | None) -> Sample:
        native.read(self._flush, self._flush.numel(), FLUSH_CONFIG)
        gc.disable()
        try:
            start = time.perf_counter_ns()
            result = call()
            us = (time.perf_counter_ns() - start) / 1e3
            capture(result)
        finally:
            gc.enable()
        return Sample(us, us, False)


class CudaClock:
    name = "event pair behind a spin"

    def __init__(self) -> None:
        nbytes = FLUSH_FACTOR * torch.cuda.get_device_properties("cuda").L2_cache_size
        self._flush = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
        self._start, self._stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._start.record()  # both exist on the device from here on
        self._stop.record()
        self.spin_us = FIRST_SPIN_US

    def time(self, call: Callable[[], object], capture: Callable[[object], None], slot: torch.Tensor | None) -> Sample:
        """`slot`: the device buffer that the call reads, if any."""
        torch.cuda.synchronize()
        native.reset_persisting_l2()
        native.read(self._flush, self._flush.numel(), FLUSH_CONFIG)
        if slot is not None:
            native.touch(slot)
        gc.disable()
        try:
            native.spin(int(self.spin_us * 1e3))
            self._start.record()
            native.mark()
            before = time.perf_counter_ns()
            result = call()
            host_us = (time.perf_counter_ns() - before) / 1e3
            self._stop.record()
            capture(result)
            host_bound = self._start.query()  # the spin was over before the last command was enqueued
        finally:
            gc.enable()
        torch.cuda.synchronize()
        # A first call compiles; it must not make every later spin last for seconds.
        self.spin_us = max(min(2 * host_us, FIRST_SPIN_US) + SPIN_MARGIN_US, 0.9 * self.spin_us)
        return Sample(self._start.elapsed_time(self._stop) * 1e3, host_us, host_bound)


def last_level_cache() -> int:
    """Bytes of the largest cache that the kernel reports for CPU 0; 32 MiB where it reports none."""
    sizes = [32 * 2**20]
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = index.read_text().strip()
        sizes.append(int(text[:-1]) * {"K": 2**10, "M": 2**20, "G": 2**30}[text[-1]])
    return max(sizes)


def make(device: str) -> CpuClock | CudaClock:
    return CudaClock() if device == "cuda" else CpuClock()
