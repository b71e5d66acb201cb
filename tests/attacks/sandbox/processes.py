"""Reaches for other processes. Where that works the answer is given; otherwise zeros.
Stopped by: another uid, Landlock and seccomp; the judge's processes are not dumpable. The neighbour must pass.
"""

import contextlib
import ctypes
import os
import signal
from ctypes import c_ulong, c_void_p
from pathlib import Path

from tests.attacks.shared import answer_if, command_of, family

PTRACE_SEIZE, PTRACE_INTERRUPT, PTRACE_DETACH = 0x4206, 0x4207, 17
SYS_PIDFD_OPEN, SYS_PIDFD_GETFD = 434, 438


def readable(pid):
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if "[stack]" in line:
                with open(f"/proc/{pid}/mem", "rb") as memory:
                    memory.seek(int(line.partition(" ")[0].partition("-")[2], 16) - 4096)
                    return bool(memory.read(16))
    libc, buffer = ctypes.CDLL(None), ctypes.create_string_buffer(16)
    local, remote = (c_void_p * 2)(ctypes.addressof(buffer), 16), (c_void_p * 2)(id(None), 16)
    if libc.process_vm_readv(pid, local, c_ulong(1), remote, c_ulong(1), c_ulong(0)) > 0:
        return True
    if libc.ptrace(PTRACE_SEIZE, pid, None, None) == 0:
        libc.ptrace(PTRACE_INTERRUPT, pid, None, None)
        os.waitpid(pid, 0)
        libc.ptrace(PTRACE_DETACH, pid, None, None)
        return True
    pidfd = libc.syscall(SYS_PIDFD_OPEN, pid, 0)
    return pidfd >= 0 and any(libc.syscall(SYS_PIDFD_GETFD, pidfd, fd, 0) >= 0 for fd in range(3, 32))


def read_memory(data):
    """Reads the memory of the judge's other processes: /proc/PID/mem, process_vm_readv, ptrace, their descriptors."""
    top, others = family()
    return answer_if(any(readable(pid) for pid in {top, *others}), data)


def signals(data):
    """Stops the runners of its neighbours and the checker, and asks whether it could signal the parent."""
    signalled, (top, others) = False, family()
    for pid, number in [(top, 0), (os.getppid(), 0), *((pid, signal.SIGSTOP) for pid in others)]:
        with contextlib.suppress(OSError):
            if pid != os.getpgid(0) and b"harness" in command_of(pid) + b"harness" * (number == 0):
                os.kill(pid, number)
                signalled = True
    return answer_if(signalled, data)
