"""The filter of system calls allows those of its table, and refuses the rest and what its refusals say."""

import errno
import os
import re
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.sandbox import syscalls
from harness.sandbox.syscalls import CALLS, OWNERSHIP, TIMERS, Bounds

ALLOW, EPERM, ENOSYS = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
PARENT = os.getppid()
TABLE = CALLS | TIMERS | OWNERSHIP
BOUNDS = [
    Bounds(),
    Bounds(stopped=True),
    Bounds(stopped=True, shared=True),
    Bounds(shared=True, truncation=True, protected=(os.getpid(), PARENT)),
]
EVERYBODY, SIGCONT = 2**32 - 1, 18


def run(program: bytes, number: int, arguments: tuple[int, ...] = (), arch: int = 0xC000003E) -> int:
    """What a seccomp program returns for a system call, by the kernel's definition of its few instructions."""
    data = struct.pack("=iIQ6Q", number, arch, 0, *arguments, *[0] * (6 - len(arguments)))
    code = [struct.unpack_from("=HBBI", program, at) for at in range(0, len(program), 8)]
    at = accumulator = 0
    while True:
        op, yes, no, k = code[at]
        at += 1
        if op == 0x20:
            accumulator = struct.unpack_from("=I", data, k)[0]
        elif op == 0x54:
            accumulator &= k
        elif op == 0x06:
            return k
        else:
            at += yes if {0x15: accumulator == k, 0x35: accumulator >= k}[op] else no


VALUES = st.one_of(
    st.integers(0, 2**64 - 1),
    st.integers(0, 2000),
    st.sampled_from([0, 1, 2, 4, 10, 16, 18, EVERYBODY, 2**32 - os.getpgid(0), 0x10000011, os.O_TRUNC, os.getpid()]),
)


@given(st.sampled_from(BOUNDS), st.integers(0, 480), st.tuples(*[VALUES] * 6))
def test_program_allows_table_less_refusals(bounds, number, arguments):
    """The meaning of table and refusals, once more."""
    wanted = ENOSYS if number > syscalls.NEWEST or number == syscalls.CLONE3 else EPERM
    if number in bounds.calls():
        of_call = [tests for call, tests in bounds.refusals() if TABLE[call] == number]
        held = [
            all(((arguments[t.argument] & t.mask & 0xFFFFFFFF) == t.value) != t.unequal for t in tests)
            for tests in of_call
        ]
        wanted = EPERM if any(held) else ALLOW
    assert run(syscalls.program(bounds), number, arguments) == wanted


@pytest.mark.parametrize(("number", "arch"), [(0x40000000 | 1, 0xC000003E), (0, 0x40000003), (0, 0xC00000B7)])
def test_calls_of_other_architectures_are_unknown(number, arch):
    assert run(syscalls.program(BOUNDS[0]), number, arch=arch) == ENOSYS


OUTSIDE = """
connect=42 shmget=29 ptrace=101 chroot=161 mount=165 init_module=175 io_setup=206 settimeofday=164 mq_open=240
keyctl=250 inotify_init=253 unshare=272 perf_event_open=298 fanotify_init=300 setns=308 process_vm_readv=310
memfd_create=319 bpf=321 userfaultfd=323 io_uring_setup=425 pidfd_getfd=438 memfd_secret=447
"""
DENIED = {name: int(number) for name, number in re.findall(r"(\w+)=(\d+)", OUTSIDE)}


@pytest.mark.parametrize("name", DENIED)
def test_call_outside_the_threat_model_is_refused(name):
    for bounds in BOUNDS:
        assert run(syscalls.program(bounds), DENIED[name]) == EPERM


@pytest.mark.parametrize(
    ("bounds", "name", "arguments", "wanted"),
    [
        # The kernel does nothing later for a runner that is stopped; on a GPU the driver may use timers.
        (Bounds(), "timer_create", (), ALLOW),
        (Bounds(stopped=True), "timer_create", (), EPERM),
        (Bounds(stopped=True), "timerfd_create", (), EPERM),
        # Nothing continues a process that a signal stopped.
        (Bounds(), "kill", (1, SIGCONT), EPERM),
        (Bounds(), "kill", (1, 15), ALLOW),
        (Bounds(), "tgkill", (1, 1, SIGCONT), EPERM),
        (Bounds(), "fcntl", (3, 10, SIGCONT), EPERM),
        (Bounds(), "fcntl", (3, 2, 1), ALLOW),
        (Bounds(), "prctl", (1, SIGCONT), EPERM),
        (Bounds(), "prctl", (1, 9), ALLOW),
        (Bounds(), "prctl", (15, SIGCONT), ALLOW),
        (Bounds(), "clone", (0x100 | SIGCONT,), EPERM),
        # As glibc makes threads and starts programs.
        (Bounds(), "clone", (0x3D0F00,), ALLOW),
        (Bounds(), "clone", (0x4111,), ALLOW),
        (Bounds(), "clone", (0x10000011,), EPERM),
        (Bounds(), "clone", (0x8011,), EPERM),
        (Bounds(), "kill", (EVERYBODY, 9), EPERM),
        (Bounds(), "prctl", (4, 0), EPERM),
        (Bounds(), "prlimit64", (0,), ALLOW),
        (Bounds(), "prlimit64", (1,), EPERM),
        (Bounds(), "socket", (1, 1), ALLOW),
        (Bounds(), "socket", (2, 1), EPERM),
        (Bounds(), "socket", (16, 3, 0), ALLOW),
        (Bounds(), "socket", (16, 3, 2), EPERM),
        (Bounds(), "sched_setaffinity", (1,), ALLOW),
        (Bounds(shared=True), "sched_setaffinity", (1,), EPERM),
        (Bounds(shared=True), "chmod", (), EPERM),
        # Before its third version Landlock does not know truncation, before its sixth not signals.
        (BOUNDS[3], "truncate", (), EPERM),
        (BOUNDS[3], "openat", (0, 0, os.O_TRUNC), EPERM),
        (BOUNDS[3], "openat", (0, 0, os.O_TRUNC | os.O_WRONLY), ALLOW),
        (BOUNDS[3], "kill", (PARENT, 9), EPERM),
        (BOUNDS[3], "kill", (2**32 - os.getpgid(PARENT), 9), EPERM),
        (BOUNDS[3], "kill", (os.getpid() + PARENT, 9), ALLOW),
        (BOUNDS[3], "pidfd_send_signal", (3, 9), EPERM),
    ],
)
def test_arguments_decide(bounds, name, arguments, wanted):
    assert run(syscalls.program(bounds), TABLE[name], arguments) == wanted


def test_numbers_are_those_of_the_kernel():
    header = "/usr/include/x86_64-linux-gnu/asm/unistd_64.h"
    if not os.path.exists(header):
        pytest.skip("needs the kernel's header of x86_64")
    with open(header) as file:
        words = [line.split() for line in file if line.startswith("#define __NR_")]
    known = {name.removeprefix("__NR_"): int(number) for _, name, number in words}
    assert (TABLE | DENIED).items() <= known.items()
