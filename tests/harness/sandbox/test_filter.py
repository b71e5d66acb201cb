"""The program of the system-call filter does what its rules say."""

import errno
import os
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.sandbox import confine, policy


def run_program(program: bytes, number: int, arguments: tuple[int, ...], arch: int = 0xC000003E) -> int:
    """What a seccomp program returns for a system call, by the kernel's definition of its few instructions."""
    data = struct.pack("=iIQ6Q", number, arch, 0, *arguments)
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
            test = {0x15: accumulator == k, 0x35: accumulator >= k, 0x45: bool(accumulator & k)}[op]
            at += yes if test else no


def refused(rules: list, number: int, arguments: tuple[int, ...]) -> int | None:
    """The error of the first rule that holds, None if none does: the meaning of a rule, once more."""
    for wanted, error, conditions in rules:
        if wanted == number and all(
            _holds(test, arguments[i] & 0xFFFFFFFF, *values) for i, test, *values in conditions
        ):
            return error
    return None


def _holds(test: str, low: int, value: int, masked: int = 0) -> bool:
    if test == "masked":
        return low & value == masked
    return {"is": low == value, "not": low != value, "any": low & value != 0}[test]


PARENT_PID = os.getppid()
ORDERS = [
    {"measures": list(policy.MEASURES), "uid": None, "abi": 7, "parent": PARENT_PID},
    {"measures": list(policy.MEASURES), "uid": 60600, "abi": 7, "parent": PARENT_PID},
    {"measures": ["seccomp"], "uid": None, "abi": 2, "parent": PARENT_PID},
    {"measures": list(policy.MEASURES), "uid": 60600, "abi": 7, "parent": PARENT_PID, "stopped_by": "signals"},
    {"measures": list(policy.MEASURES), "uid": 60600, "abi": 7, "parent": PARENT_PID, "stopped_by": "cgroup"},
]
VALUES = st.one_of(
    st.integers(0, 2**64 - 1),
    st.integers(0, 2000),
    st.sampled_from([0, 1, 2, 16, 2**32 - 1, 2**32 - os.getpgid(0), 0x10000011, os.O_TRUNC, os.O_TRUNC | os.O_RDWR]),
    st.sampled_from([os.getpid(), PARENT_PID]),
)


@given(st.sampled_from(ORDERS), st.integers(0, 480), st.tuples(*[VALUES] * 6))
def test_the_program_does_what_the_rules_say(orders, number, arguments):
    rules = confine._rules(orders, os.getpid())
    result = run_program(confine.assemble(rules), number, arguments)
    error = refused(rules, number, arguments)
    assert result == (0x7FFF0000 if error is None else 0x00050000 | error)


@pytest.mark.parametrize(("number", "arch"), [(0x40000000 | 1, 0xC000003E), (0, 0x40000003), (0, 0xC00000B7)])
def test_other_kinds_of_calls_are_refused(number, arch):
    """The x32 and the 32-bit numbers of the same calls would pass by the list."""
    program = confine.assemble(confine._rules(ORDERS[0], os.getpid()))
    assert run_program(program, number, (0,) * 6, arch) == 0x00050000 | errno.ENOSYS


def test_what_an_old_landlock_lets_through_is_filtered():
    """Before its third version Landlock does not know truncation, before its sixth not signals."""
    rules = confine._rules({**ORDERS[0], "measures": ["seccomp", "landlock"], "abi": 2}, os.getpid())
    program = confine.assemble(rules)
    refuse, allow = 0x00050000 | errno.EPERM, 0x7FFF0000
    everybody = 2**32 - 1  # -1, as an int
    assert run_program(program, 76, (0,) * 6) == refuse  # truncate
    assert run_program(program, 257, (0, 0, os.O_TRUNC, 0, 0, 0)) == refuse  # open to read, and truncate
    assert run_program(program, 257, (0, 0, os.O_TRUNC | os.O_WRONLY, 0, 0, 0)) == allow  # Landlock sees this one
    assert run_program(program, 257, (0, 0, os.O_RDONLY, 0, 0, 0)) == allow
    assert run_program(program, 62, (PARENT_PID, 9, 0, 0, 0, 0)) == refuse
    assert run_program(program, 62, (everybody, 9, 0, 0, 0, 0)) == refuse
    assert run_program(program, 62, (os.getpid() + PARENT_PID, 9, 0, 0, 0, 0)) == allow


@pytest.mark.parametrize("number", [222, 283, 206], ids=["timer_create", "timerfd_create", "io_setup"])
def test_the_kernel_does_nothing_later_for_a_runner_that_is_stopped(number):
    """On a GPU it is not stopped, and the driver may use them."""
    for orders in ORDERS:
        program = confine.assemble(confine._rules(orders, os.getpid()))
        refuse = "stopped_by" in orders
        assert run_program(program, number, (0,) * 6) == (0x00050000 | errno.EPERM if refuse else 0x7FFF0000)


def test_nothing_continues_a_process_that_a_signal_stopped():
    """Where no cgroup can be made: neither a signal, nor what the kernel sends later. Other uses of the calls stay."""
    program = confine.assemble(confine._rules(ORDERS[3], os.getpid()))
    refuse, allow = 0x00050000 | errno.EPERM, 0x7FFF0000
    for number, *arguments in (
        (62, 1, 18),
        (234, 1, 1, 18),
        (222, 1, 0, 0),
        (72, 3, 10, 18),
        (157, 1, 18),
        (56, 18),
        (56, 0x100 | 18),
    ):
        assert run_program(program, number, (*arguments, *[0] * (6 - len(arguments)))) == refuse, (number, arguments)
    threads, vfork = 0x3D0F00, 0x4111  # as glibc makes them
    for number, *arguments in (
        (62, 1, 15),
        (72, 3, 2, 1),
        (157, 1, 9),
        (157, 15, 18),
        (56, 17),
        (56, threads),
        (56, vfork),
    ):
        assert run_program(program, number, (*arguments, *[0] * (6 - len(arguments)))) == allow, (number, arguments)
