"""Sleeps in its first calls, so that a judge that plans by time takes few samples. The answer is right.
Stopped by: the number of samples is fixed; the suite checks that none is missing.
"""

import time

from tests.attacks.shared import add, calls

VERDICT = "PASSED"


def custom_kernel(data):
    global calls
    calls += 1
    if calls <= 2:
        time.sleep(1)
    return add(data)
