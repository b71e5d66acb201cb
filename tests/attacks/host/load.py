"""Right, and leaves load behind that makes the calls of others slow.
Stopped by: a runner that is not asked is stopped, or killed before any call is timed.
"""

import _thread
import ctypes
import os
import subprocess
import sys
import time

from tests.attacks.shared import HONEST_OF_FOUR, add, calls, honest_call

VERDICT = "PASSED"
VARIANTS = {
    "timers": {"VERDICT": "RUNTIME_ERROR", "REASON": "Operation not permitted"},
    "gpu_process": {"TARGETS": ("sm90", "sm100")},
}
_started = []


def spin():
    while True:
        if calls % 4 >= HONEST_OF_FOUR:
            sum(range(1000))
        else:
            time.sleep(0.001)


def thread(data):
    """Leaves a thread behind that never rests: it takes its own call's time, and is stopped while others run."""
    honest = honest_call()
    add(data)
    if not _started and not honest:
        _started.append(_thread.start_new_thread(spin, ()))
    return data.z


LIBC = ctypes.CDLL(None, use_errno=True)
TIMERS, WATCHERS, APART_NS = 60, 1000, 3_000_000


def made(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def armed():
    event = ctypes.create_string_buffer(b"\1", 12)  # EPOLLIN
    watchers = [made(LIBC.epoll_create1(0)) for _ in range(WATCHERS)]
    timers = [made(LIBC.timerfd_create(time.CLOCK_MONOTONIC, 0)) for _ in range(TIMERS)]
    for timer in timers:
        for watcher in watchers:
            made(LIBC.epoll_ctl(watcher, 1, timer, event))
    return timers


def timers(data):
    """Arms timers of the kernel that expire while others are timed and wake thousands of watchers each. Stopped by: a
    runner on a CPU makes no timer that would work while it is stopped.
    """
    add(data)
    _started[:] = _started or armed()
    for i, timer in enumerate(_started):
        made(LIBC.timerfd_settime(timer, 0, (ctypes.c_int64 * 4)(0, 0, 0, (i + 1) * APART_NS), None))
    return data.z


CODE = """
import time, torch
end = time.monotonic() + 20
block = torch.zeros(2**28, device="cuda")
while time.monotonic() < end:
    block.add_(1)
    torch.cuda.synchronize()
"""


def gpu_process(data):
    """Starts another Python that keeps the GPU busy, so that everybody else looks slow."""
    if not _started:
        _started.append(subprocess.Popen([sys.executable, "-c", CODE], start_new_session=True))
    return add(data)
