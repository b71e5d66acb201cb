"""The clock of a GPU: it times one call on cold caches and copies its outputs directly behind it.

docs/measuring.md has the steps and their reasons. On a CPU the judge's clock runs outside the runner
(harness/runner/gate.cpp).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from harness.runner import flush, native

JUNK_FACTOR = 4  # times L2: written and discarded before the flush
FLUSH_CONFIG = 4  # of the reader


@dataclass(frozen=True)
class Sample:
    """One timed call. us: the clock's reading; host_us: until the call returned; host_bound: the device ran dry before
    the call had enqueued everything, so `us` holds host time.
    """

    us: float
    host_us: float
    host_bound: bool


@dataclass(frozen=True)
class Delivery:
    """What a call is timed on. buffer: the device buffer that it reads, if any. key: what unmasks it, if it is masked.
    spin_us: how long the device is kept busy while the call is enqueued.
    """

    buffer: torch.Tensor | None = None
    key: bytes | None = None
    spin_us: float = 0.0
    ready: Callable[[], None] = lambda: None  # called when caches are cold; returns when the call is to be made


class CudaClock:
    name = "event pair behind a spin"

    def __init__(self) -> None:
        l2 = torch.cuda.get_device_properties("cuda").L2_cache_size
        self._flush = torch.zeros(flush.FLUSH_FACTOR * l2, dtype=torch.uint8, device="cuda")
        self._junk = torch.zeros(JUNK_FACTOR * l2, dtype=torch.uint8, device="cuda")
        self._timer = native.Timer()

    def time(self, call: native.Call, capture: Callable[[object], None], delivery: Delivery) -> tuple[Sample, object]:
        """Return the reading of a call on cold caches, and what it returned. capture: copies what `call.copies` cannot
        name beforehand, as in a folder whose calls return new tensors.
        """
        torch.cuda.synchronize()
        native.reset_persisting_l2()
        if delivery.buffer is not None and delivery.key is not None:
            native.mask(delivery.buffer, delivery.key)
        native.clean_l2(self._junk)
        native.read(self._flush, self._flush.numel(), FLUSH_CONFIG)
        if delivery.buffer is not None:
            native.touch(delivery.buffer)
        torch.cuda.synchronize()
        delivery.ready()
        result, host_us, host_bound = self._timer.call(int(delivery.spin_us * 1e3), call)
        capture(result)
        torch.cuda.synchronize()
        return Sample(self._timer.elapsed_us(), host_us, host_bound), result
