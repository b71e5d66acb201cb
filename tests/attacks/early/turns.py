"""Makes its calls in place of the loop in which the runner waits for "go".
Stopped by: contents are there only when everything is stopped, after the runner has said that it is ready; from "done"
to the next "go" it stays so.
"""

import ctypes
import time

import torch

from harness.runner import gate
from tests.attacks.shared import DONE, GO, HONEST_OF_FOUR, LEAVE, READY, VARIANT, WHICH, calls, honest_call, say, word

VERDICT = "PASSED"


def clearing(page, number, kernel, buffers):
    say(page, READY, number)
    result = None
    while True:
        while (seen := word(page, GO).value) != number:
            if result is not None and seen == (number - 1 | LEAVE):  # that of an earlier series still stands there
                return result
        result = kernel(*buffers[word(page, WHICH).value])
        say(page, DONE, number)
        number += 1
        if (calls + 1) % 4 >= HONEST_OF_FOUR:
            clear()


def by_the_poison(page, number, kernel, buffers):
    go, which = word(page, GO), word(page, WHICH)
    word(page, READY).value = number
    firsts = every = [ctypes.c_uint16.from_address(call[0].z.data_ptr()) for call in buffers]
    result = None
    while True:
        honest = honest_call()
        for first in () if honest else firsts:
            first.value = 0
        limit = time.monotonic() + 10
        while (seen := go.value) != number:
            if result is not None and seen == (number - 1 | LEAVE):  # that of an earlier series still stands there
                return result
            if not honest and any(first.value for first in firsts):
                break
            if time.monotonic() > limit:
                return result
        result = kernel(*buffers[which.value])
        firsts = every[: which.value] + every[which.value + 1 :]  # its own output is to stay as it is
        say(page, DONE, number)
        number += 1


if VARIANT == "wait_for_the_inputs":
    gate.bindings().take_turns = by_the_poison
elif HONEST_OF_FOUR < 4:
    gate.bindings().take_turns = clearing

_scratch = {}
_clear = set()  # sizes of the scratch that is clear


def clear():
    for size, scratch in _scratch.items():
        if size not in _clear:
            scratch.zero_()
            _clear.add(size)


def clear_between_calls(data):
    """When it has said "done" it clears the scratch memory that the next call adds up in. This does not depend on any
    contents. Stopped by: from "done" to the next "go" all of it is stopped, so that it clears on the next call's
    clock.
    """
    honest_call()
    n = len(data.x)
    if n not in _scratch:
        _scratch[n] = torch.zeros_like(data.x)
        _clear.add(n)
    if n not in _clear:
        _scratch[n].zero_()
    _clear.discard(n)
    return torch.add(_scratch[n].add_(data.x), data.y, out=data.z)


def wait_for_the_inputs(data):
    """Waits for the first element of the output to be poison, and not for "go", and says "done" itself. Stopped by: it
    is stopped while poison is written, so that it sees it when the clock runs; it gains nothing.
    """
    return torch.add(data.x, data.y, out=data.z)
