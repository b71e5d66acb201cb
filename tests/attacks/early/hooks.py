"""Works for the next call where the runner does something for this one.
Stopped by: contents are there when everything is stopped, after the hooks; between two scored calls there is no reply,
and nothing runs. It gains nothing.
"""

import gc
import sys

import torch

from harness.runner import wire
from tests.attacks.shared import HONEST_OF_FOUR, VARIANT, calls, frames, honest_call

VERDICT = "PASSED"
_kept = {}


def stamp(data):
    return float(data.x[1]), float(data.x[-1]), float(data.y[-1])


def look():
    made = next((of for frame in frames() if isinstance(of := frame.f_locals.get("calls"), tuple)), None)
    data = made and made[0][0]
    if data and (calls + 1) % 4 >= HONEST_OF_FOUR and len(data.x) > 2**16:
        _kept["stamp"], _kept["answer"] = stamp(data), data.x + data.y


def profile(frame, event, argument):
    if event == "call" and frame.f_code.co_name == "take_turns":
        look()


def collector(phase, info):
    look()


def working(sock, message, fds=(), send=wire.send):
    if "claims" in message and (calls + 1) % 4 >= HONEST_OF_FOUR:
        for buffer in sys._getframe(2).f_locals["runner"].buffers:
            buffer.memory.sum()
        for scratch in _kept.values():
            scratch.zero_()
    send(sock, message, fds)


if HONEST_OF_FOUR < 4 and VARIANT == "profile_and_collector":
    sys.setprofile(profile)
    gc.callbacks.append(collector)
elif HONEST_OF_FOUR < 4:
    wire.send = working


def profile_and_collector(data):
    """Sets a profile function and a callback of the collector in the runner: both compute an answer from what lies in
    the inputs, at the last moment before the runner waits for the first "go" of some calls. A call uses it where the
    inputs are still those.
    """
    if not honest_call() and len(data.x) > 2**16 and _kept.get("stamp") == stamp(data):
        return data.z.copy_(_kept["answer"])
    return torch.add(data.x, data.y, out=data.z)


def reply(data):
    """Before it replies to the calls before, when "done" is said, it reads the memory of all buffers, so that pages,
    translations and caches are there, and writes the scratch memory that the next call works in.
    """
    honest_call()
    scratch = _kept.setdefault(len(data.x), torch.empty_like(data.x))
    return data.z.copy_(torch.add(data.x, data.y, out=scratch))
