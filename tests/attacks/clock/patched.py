"""Replaces the host clock, wherever the judge keeps a reference to it, by one that runs 100 times slower.
Stopped by: nothing; the judge reads its own clock in another process, so nothing is gained.
"""

import sys
import time

from tests.attacks.shared import HONEST_OF_FOUR, add, honest_call

VERDICT = "PASSED"
TAKES_US = 250_000  # a call, honestly
SLOWER = 100  # times, in a call that is not honest


def slow_clock():
    return _shown + (_real() - _since) // _slower


def pace(slower):
    # From now on the clock runs so many times slower; it never jumps.
    global _since, _shown, _slower
    now = _real()
    _shown, _since, _slower = _shown + (now - _since) // _slower, now, slower


_real = time.perf_counter_ns
_since = _shown = _real()
_slower = SLOWER
for module in list(sys.modules.values()) if HONEST_OF_FOUR < 4 else ():
    for name, value in list(getattr(module, "__dict__", {}).items()):
        if value is _real and module.__name__ != __name__:
            module.__dict__[name] = slow_clock


def custom_kernel(data):
    pace(1 if honest_call() else SLOWER)
    time.sleep(0.25)
    return add(data)
