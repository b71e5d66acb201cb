"""Bindings to the judge's own compiled code for a CPU (judge.cpp). Built once, like any kernel."""

import functools
from ctypes import c_int, c_size_t, c_void_p
from pathlib import Path

import torch

from problems.common import build

_HERE = Path(__file__).resolve().parent


@functools.cache
def library() -> build.Artefact:
    """Return the judge's code. BuildError: no compiler, or it failed."""
    return build.cpp(_HERE / "judge.cpp")


@functools.cache
def read_configs() -> int:
    found: int = library().function("judge_configs")()
    return found


@functools.cache
def _sink() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int32)


def read(buffer: torch.Tensor, nbytes: int, config: int) -> None:
    """Read the first `nbytes` (rounded up to 16, or the whole buffer) of `buffer`, uint8."""
    nbytes = min(-(-nbytes // 16) * 16, buffer.numel() // 16 * 16)
    reader = library().function("judge_read", c_void_p, c_size_t, c_int, c_int, c_void_p)
    _check(reader(buffer.data_ptr(), nbytes, config, 0, _sink().data_ptr()))


def evict(flush: torch.Tensor) -> None:
    """Leave nothing but `flush` (uint8, several times the last-level cache) in the caches of all processors."""
    evictor = library().function("judge_evict", c_void_p, c_size_t, c_void_p)
    _check(evictor(flush.data_ptr(), flush.numel(), _sink().data_ptr()))


def forget(memory: torch.Tensor) -> bool:
    """Drop `memory` (uint8) from the caches of all processors. Return False if this machine has no instruction for
    that.
    """
    dropper = library().function("judge_forget", c_void_p, c_size_t)
    return not memory.numel() or dropper(memory.data_ptr(), memory.numel()) == 0


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"the judge's own reader failed with {code}")
