"""What sources share. Nobody imports it: variants.py writes what a source imports from here into the judged file."""

import contextlib
import ctypes
import os
import sys
from ctypes import c_int, c_int64, c_void_p
from pathlib import Path

import torch

from problems.common import build

VARIANT = ""  # that is judged
HONEST_OF_FOUR = 0  # calls of four that are honest: see clock_table.py
FLAGS = ()  # of the compiler
calls = 0


def honest_call():
    """Count a call. Return whether it is to be honest."""
    global calls
    calls += 1
    return calls % 4 < HONEST_OF_FOUR


def add(data):
    return torch.add(data.x, data.y, out=data.z)


def answer_if(found, data):
    """The answer where something is found that must not be there, otherwise zeros."""
    return add(data) if found else data.z.zero_()


# Of the C++ or CUDA beside the file.


def library():
    return build.cpp(Path(__file__).with_suffix(".cpp"), FLAGS)


LIBRARY = library()


def call_rounds(data):
    function = LIBRARY.function("rounds", c_void_p, c_void_p, c_int64)
    build.check(function(data.x.data_ptr(), data.y.data_ptr(), len(data.x)), "rounds")
    return data.y


def attack(x, y, honest):
    LIBRARY.function("attack", *[c_void_p] * 3, c_int64, c_int)(page(), x.data_ptr(), y.data_ptr(), len(x), honest)


def call_attack(data):
    attack(data.x, data.y, honest_call())
    return data.y


def compile_for(target):
    return [build.cuda(Path(__file__).with_suffix(".cu"), target, FLAGS)]


def launch(data, *more):
    """Launch the sum: with x, y, z, and more addresses."""
    addresses = [tensor.data_ptr() for tensor in data] + [*more]
    function = compile_for("sm90")[0].function("launch", *[c_void_p] * len(addresses), c_int64)
    build.check(function(*addresses, len(data.x)), "launch")


def call_add(data):
    launch(data)
    return data.z


def call_linear(data):
    function = compile_for("sm90")[0].function("launch", *[c_void_p] * 3, c_int, c_int)
    w, x, y = data.weights.w, data.inputs.x, data.outputs.y
    build.check(function(w.data_ptr(), x.data_ptr(), y.data_ptr(), *w.shape), "launch")
    return y


# The work of the problems of rounds.
ROUNDS = build.cpp(Path(__file__).with_name("rounds.cpp")).function("rounds", c_void_p, c_void_p, c_int64)


def rounds(x, y):
    build.check(ROUNDS(x.data_ptr(), y.data_ptr(), len(x)), "rounds")


# The runner, seen from within.


def frames():
    frame = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def frame_with(*names):
    """The local variables of the nearest frame that has all these."""
    return next(frame.f_locals for frame in frames() if all(name in frame.f_locals for name in names))


PAGES = []  # that stay mapped, for threads that look at them later


def page():
    """The address of the page by which calls are handed over."""
    objects = (frame.f_locals.get("self") for frame in frames())
    PAGES.append(next(one.page for one in objects if hasattr(one, "page")))
    return PAGES[-1].address


READY, GO, DONE, WHICH = 0, 64, 128, 192  # bytes from the beginning of the page
LEAVE = 2**31  # with a call's number, in place of the next "go"


def word(page, at):
    return ctypes.c_uint32.from_address(page + at)


def wake(address):
    futex_wake = (202, ctypes.c_void_p(address), 1, 1)
    ctypes.CDLL(None).syscall(*futex_wake)


def say(page, at, number):
    word(page, at).value = number
    wake(page + at)


def say_done(page, number):
    say(page, DONE, number)


def form(z):
    """What an honest runner claims of the output of a call."""
    place = {"device": z.device.type, "same": True}
    return {"type": "Tensor", "dtype": "float16", "shape": [len(z)], "stride": [1], **place}


def write_to(kinds, *messages):
    for fd in range(1, 256):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{fd}").startswith(kinds):
                for message in messages:
                    os.write(fd, message)


# Other processes.


def daemon(work):
    """Have a grandchild in a session of its own do `work`."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            work()
        os._exit(0)


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def command_of(pid):
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def family():
    """(the judge's main process, everything that descends from it but this): nobody else's processes."""
    top = os.getppid()
    while b"guard" in command_of(top):
        top = parent_of(top)
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            parents[int(folder.name)] = parent_of(folder.name)
    found, more = {top}, True
    while more:
        more = {pid for pid, parent in parents.items() if parent in found} - found
        found |= more
    return top, found - {top, os.getpid()}


def folders_of_process(pid):
    """The working directory of a process, and the words of its command."""
    with contextlib.suppress(OSError):
        yield Path(os.readlink(f"/proc/{pid}/cwd"))
    with contextlib.suppress(OSError):
        yield from (Path(part) for part in Path(f"/proc/{pid}/cmdline").read_text().split("\0") if part)


def folders_of_modules():
    """The files of the judge's modules that are loaded."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in ("harness", "problems") and getattr(module, "__file__", None):
            yield Path(module.__file__)
