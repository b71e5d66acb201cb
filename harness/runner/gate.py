"""Bindings to gate.cpp: stop and resume a runner, wait for its turn, time its call; and the plain readers over all
processors, for the measured roofline and for flushing the caches. It does not import torch, whose tensors some take.
"""

import ctypes
import functools
from ctypes import c_char_p, c_double, c_int, c_int32, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from problems.common import build

FLUSH_FACTOR = 3  # times the last-level cache: what is read to make all caches cold
# As in gate.cpp.
RETURNED, WORDS, EMPTY_US, STOP_LIMIT_S = 1024, 64, 300.0, 10.0


@dataclass(frozen=True)
class Reading:
    """What the judge's clock says of one call on a CPU, `Reading` of gate.cpp behind a code: 0, or 1: no end within the
    limit, or 2: the process is gone, or 3: it ended and could not be stopped. Times in us.
    """

    code: int
    call_us: float  # from "continue" to "done"
    stop_us: float  # from "done" until all of the runner had been told to stop
    delay_us: float  # that its threads waited for a processor meanwhile
    ran_us: float  # that its processes ran while they were stopped; from SEEN_US on one was seen to
    others: int  # tasks of other processes that wanted a processor, before and after; the smaller
    changed: int  # words of the outputs that changed after "done"; -1: they could not be read
    raised: int  # 1: the runner says that the call raised, and makes no more


class Gate:
    """Bindings to gate.cpp, which says what each function does. `group`: reaper and pid (a Freezer)."""

    def __init__(self) -> None:
        path = str(artefact().path)
        # One handle that lets go of the interpreter's lock in a call, and one that does not.
        code, locked = ctypes.CDLL(path, use_errno=True), ctypes.PyDLL(path)
        group = (c_int,) * 2
        self.page_bytes: int = code.judge_gate_bytes()
        self.stop = _typed(code.judge_stop, *group)
        self.resume = _typed(code.judge_resume, *group, returns=None)
        self.ran_on = _typed(code.judge_ran_on, *group, returns=c_double)
        self.await_ready = _typed(code.judge_await_ready, c_void_p, c_uint32, c_int, c_double)
        self.which = _typed(code.judge_which, c_void_p)
        self.leave = _typed(code.judge_leave, c_void_p, c_uint32, returns=None)
        timed = (c_void_p, c_uint32, c_uint32, *group, c_double, c_void_p, c_int, c_void_p, ctypes.POINTER(_Reading))
        self._time = _typed(code.judge_time, *timed)
        self.peek = _typed(code.judge_peek, c_int, c_uint64, c_uint64, c_void_p)
        noted_by = (c_void_p, c_void_p, c_int, c_char_p, c_uint64)
        self._note_returned = _typed(code.judge_note_returned, *noted_by, returns=None)
        self.noted = _typed(code.judge_noted, returns=c_char_p)
        taken = (c_void_p, c_uint32, ctypes.py_object, ctypes.py_object)
        self.take_turns = _typed(locked.judge_take_turns, *taken, returns=ctypes.py_object)

    def time(
        self, page: int, number: int, which: int, group: tuple[int, ...], limit_s: float, outputs: list[tuple[int, int]]
    ) -> tuple[Reading, list[tuple[int, int]]]:
        """Let a runner make call `number`, and stop it. outputs: (address, bytes). Return (the reading, as noted)."""
        regions, sizes, raw = _pairs(outputs), (c_uint64 * len(outputs))(), _Reading()
        code = self._time(page, number, which, *group, limit_s, regions, len(outputs), sizes, ctypes.byref(raw))
        reading = Reading(code, *(getattr(raw, name) for name, *_ in _Reading._fields_))
        return reading, [(regions[2 * i], sizes[i]) for i in range(len(outputs))]

    def note_returned(self, page: int, places: list[tuple[int, int]], claims: bytes) -> None:
        """The runner, within its call: (address, bytes) of each tensor that it returns, and what they are, as JSON."""
        self._note_returned(page, _pairs(places), len(places), claims, len(claims))


class _Reading(ctypes.Structure):
    _fields_ = tuple((each.name, c_double if each.type is float else c_int32) for each in fields(Reading)[1:])


@functools.cache
def artefact() -> build.Artefact:
    """Return the judge's code for a CPU, compiled. BuildError: no compiler, or it failed."""
    return build.cpp(Path(__file__).with_name("gate.cpp"))


bindings = functools.cache(Gate)  # the code that times a call on a CPU. BuildError: no compiler, or it failed


@functools.cache
def read_configs() -> int:
    return int(artefact().function("judge_configs")())


def read(buffer: Any, nbytes: int, config: int) -> None:
    """Read the first `nbytes` (rounded up to 16, or the whole buffer) of `buffer`, uint8."""
    nbytes = min(-(-nbytes // 16) * 16, buffer.numel() // 16 * 16)
    artefact().function("judge_read", c_void_p, c_size_t, c_int)(buffer.data_ptr(), nbytes, config)


def last_level_cache() -> int:
    """Return the bytes of the largest cache that the kernel reports for CPU 0; 32 MiB if it reports none."""
    sizes = [32 * 2**20]
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = index.read_text().strip()
        sizes.append(int(text[:-1]) * {"K": 2**10, "M": 2**20, "G": 2**30}[text[-1]])
    return max(sizes)


def flush_bytes() -> int:
    """Return the bytes that `evict` reads. Since a cache may have half a GiB, only the checker holds as much."""
    return FLUSH_FACTOR * last_level_cache()


def evict(flush: Any) -> None:
    """Leave only `flush` in all caches: `flush_bytes` bytes (uint8) that were written, so that each has a page."""
    artefact().function("judge_evict", c_void_p, c_size_t)(flush.data_ptr(), flush.numel())


def forget(memory: Any) -> bool:
    """Drop `memory` (uint8) from all processors' caches. False: this machine has no instruction for that."""
    dropper = artefact().function("judge_forget", c_void_p, c_size_t)
    return not memory.numel() or dropper(memory.data_ptr(), memory.numel()) == 0


def _pairs(places: list[tuple[int, int]]) -> ctypes.Array:
    return (c_uint64 * (2 * len(places)))(*(number for place in places for number in place))


def _typed(function: Any, *argtypes: type, returns: type | None = c_int) -> Any:
    function.argtypes, function.restype = argtypes, returns
    return function
