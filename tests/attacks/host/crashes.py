"""Ends, hangs or floods.
Stopped by: a submission has a process of its own, with limits for each call, import, memory and output; it and all that
descends from it are killed, it is not started again where it would hang, and the run goes on.
"""

import ctypes
import os
import signal
import time

import torch

from tests.attacks.shared import VARIANT, add

VERDICT = "RUNTIME_ERROR"
VARIANTS = {
    "exits": {"TARGETS": ("cpu", "sm90", "sm100"), "REASON": "exited with status 0"},
    "segfault": {"REASON": "SIGSEGV"},
    "output_flood": {"REASON": "printed more than"},
    "memory": {"REASON": "out of memory"},
    "memory_of_children": {"VERDICT": ("RUNTIME_ERROR", "CHEAT_SUSPECTED")},
    "hang": {"VERDICT": "TIMEOUT", "REASON": "no answer within", "LIMIT_S": 4},
    "deaf_hang": {"VERDICT": "TIMEOUT", "REASON": "no answer within", "LIMIT_S": 4},
    "import_hang": {"VERDICT": "TIMEOUT", "REASON": "no answer within", "IMPORT_LIMIT_S": 12, "ABOUT": "Import hangs."},
    "gpu_fault": {"TARGETS": ("sm90", "sm100")},
    "gpu_hang": {"TARGETS": ("sm90", "sm100"), "VERDICT": "TIMEOUT", "REASON": "no answer within", "LIMIT_S": 10},
    # Its limit is no other's, so that it is judged alone.
    "gpu_memory": {"TARGETS": ("sm90", "sm100"), "VERDICT": ("PASSED", "RUNTIME_ERROR"), "LIMIT_S": 19},
}
LIFE_S = 30
if VARIANT == "import_hang":
    time.sleep(1000)


def exits(data):
    """Ends its process with status 0 in the hope that this counts as success."""
    add(data)
    os._exit(0)


def segfault(data):
    """Reads address 0."""
    ctypes.string_at(0)


def output_flood(data):
    """Prints a gigabyte."""
    for _ in range(2**14):
        print("x" * 2**16)
    return add(data)


def memory(data):
    """Takes memory for ever."""
    hoard = []
    while True:
        hoard.append(bytearray(b"x") * 2**28)


def memory_of_children(data):
    """Has its children take the memory, each a part."""
    for _ in range(6):
        if os.fork() == 0:
            hoard = bytearray(b"x") * (400 * 2**20)
            time.sleep(20)
            os._exit(len(hoard) == 0)
    time.sleep(20)
    return data.z


def hang(data):
    """Never returns, and would hang in every process that it gets."""
    while True:
        time.sleep(1000)


def deaf_hang(data):
    """Never returns, ignores signals, and left its process group with a child that does the same."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.fork()
    os.setsid() if os.getpid() != os.getsid(0) else None
    time.sleep(LIFE_S)
    os._exit(0)


def gpu_fault(data):
    """An illegal access, which breaks the context of this submission alone."""
    torch.take(data.x, torch.full((4,), 2**40, device="cuda"))
    torch.cuda.synchronize()
    return data.z


def gpu_hang(data):
    """A kernel that does not end within the limit: a canary kernel then asks whether the device still answers."""
    torch.cuda._sleep(2**50)
    torch.cuda.synchronize()
    return data.z


_taken = []


def gpu_memory(data):
    """Takes all memory of the device outside what torch is given, and keeps it, so that nobody else gets any. Stopped
    by: its process is gone before any call is timed; what others lack meanwhile must not be their fault.
    """
    take = ctypes.CDLL("libcuda.so.1").cuMemAlloc_v2
    while not _taken or _taken[-1].value:
        _taken.append(ctypes.c_uint64())
        take(ctypes.byref(_taken[-1]), ctypes.c_size_t(2**28))
    return add(data)
