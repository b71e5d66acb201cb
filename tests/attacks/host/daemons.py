"""Leaves processes behind.
Stopped by: descendants are listed after a call, whatever session they moved to and whenever they were started; the
guard ends them with the runner.
"""

import os
import select
import time

import torch

from tests.attacks.shared import VARIANT, add, daemon, honest_call

VERDICT = "CHEAT_SUSPECTED"
REASON = "still running"
VARIANTS = {"forks": {"VERDICT": ("CHEAT_SUSPECTED", "RUNTIME_ERROR"), "REASON": ""}}
LIFE_S = 20
_left = []
if VARIANT == "on_import":
    daemon(lambda: time.sleep(LIFE_S))


def holds_the_answer(data):
    """The answer is right; a daemon that left the session stays behind to hold what it learnt for the next run."""

    def hold():
        kept = data.z.clone()
        time.sleep(LIFE_S)
        del kept

    add(data)
    if not _left:
        _left.append(daemon(hold))
    return data.z


def on_import(data):
    """Starts a daemon while it is imported, which stays."""
    return add(data)


def forks(data):
    """A small fork bomb: five generations of children that sleep, 32 processes in all."""
    add(data)
    if os.fork() == 0:
        for _ in range(4):
            os.fork()
        os.setsid()
        time.sleep(LIFE_S)
        os._exit(0)
    return data.z


def helper(data, wake, done):
    torch.set_num_threads(1)
    end = time.monotonic() + LIFE_S
    while time.monotonic() < end:
        if select.select([wake], [], [], 1)[0] and os.read(wake, 1):
            data.z.copy_(data.x + data.y)
            os.write(done, b"x")


def works_for_it(data):
    """A forked helper in a separate session, parked on a pipe between calls, does the work in the shared buffer."""
    if honest_call():
        return add(data)
    if not _left:
        (wake, tell), (listen, done) = os.pipe(), os.pipe()
        _left.extend((data.x.data_ptr(), tell, listen))
        daemon(lambda: helper(data, wake, done))
    address, tell, listen = _left
    if data.x.data_ptr() != address or len(data.x) >= 2**16:
        return add(data)
    os.write(tell, b"x")
    os.read(listen, 1)
    return data.z
