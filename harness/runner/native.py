"""Bindings to the judge's own compiled code (judge.cu, judge.cpp). Built once, like any kernel."""

import ctypes
import functools
from ctypes import c_char_p, c_int, c_size_t, c_uint64, c_void_p
from pathlib import Path

import torch

from problems.common import build, load

_HERE = Path(__file__).resolve().parent
HANDLE_BYTES = 64  # sizeof(cudaIpcMemHandle_t)


@functools.cache
def library(device: str) -> build.Artefact:
    """Return the judge's code for "cpu" or "cuda". BuildError: no compiler, or it failed."""
    if device == "cpu":
        return build.cpp(_HERE / "judge.cpp")
    return build.cuda(_HERE / "judge.cu", load.device_target(device))


@functools.cache
def read_configs(device: str) -> int:
    return library(device).function("judge_configs")()


@functools.cache
def _sink(device: str) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int32, device=device)


@functools.cache
def _multiprocessors(device: str) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device == "cuda" else 0


def read(buffer: torch.Tensor, nbytes: int, config: int) -> None:
    """Read the first `nbytes` (rounded up to 16, or the whole buffer) of `buffer`, uint8, on its device."""
    device = buffer.device.type
    nbytes = min(-(-nbytes // 16) * 16, buffer.numel() // 16 * 16)
    reader = library(device).function("judge_read", c_void_p, c_size_t, c_int, c_int, c_void_p)
    _check(device, reader(buffer.data_ptr(), nbytes, config, _multiprocessors(device), _sink(device).data_ptr()))


def evict(flush: torch.Tensor) -> None:
    """Leave nothing but `flush` (uint8, several times the last-level cache) in the caches of all processors."""
    evictor = library("cpu").function("judge_evict", c_void_p, c_size_t, c_void_p)
    _check("cpu", evictor(flush.data_ptr(), flush.numel(), _sink("cpu").data_ptr()))


def forget(memory: torch.Tensor | None) -> bool:
    """Drop `memory` (uint8 on the host) from the caches of all processors. Return False if this machine has no
    instruction for that.
    """
    dropper = library("cpu").function("judge_forget", c_void_p, c_size_t)
    return memory is None or dropper(memory.data_ptr(), memory.numel()) == 0


def touch(buffer: torch.Tensor) -> None:
    """Warm the address translations of `buffer`, uint8 on the GPU, from every SM; its data stays out of L2."""
    toucher = library("cuda").function("judge_touch", c_void_p, c_size_t, c_int, c_void_p)
    _check("cuda", toucher(buffer.data_ptr(), buffer.numel(), _multiprocessors("cuda"), _sink("cuda").data_ptr()))


def mask(buffer: torch.Tensor, key: bytes) -> None:
    """XOR `buffer`, uint8 on the GPU (bytes a multiple of 64), with the keystream of the 32-byte `key`, in place."""
    masker = library("cuda").function("judge_mask", c_void_p, c_size_t, c_char_p, c_int)
    _check("cuda", masker(buffer.data_ptr(), buffer.numel(), key, _multiprocessors("cuda")))


def clean_l2(junk: torch.Tensor) -> None:
    """Leave no line in L2 that was written before. `junk`: uint8 on the GPU, larger than L2; its contents are lost."""
    cleaner = library("cuda").function("judge_clean", c_void_p, c_size_t, c_int)
    _check("cuda", cleaner(junk.data_ptr(), junk.numel(), _multiprocessors("cuda")))


class Timer:
    """The event pair, in native code: nothing that Python code can replace takes part in a reading."""

    def __init__(self) -> None:
        code = library("cuda")
        self._sms = _multiprocessors("cuda")
        self._spin = code.function("judge_spin", c_uint64, c_int)
        self._begin = code.function("judge_begin")
        self._end = code.function("judge_end")
        self._started = code.function("judge_started")
        self._elapsed = code.function("judge_elapsed", c_void_p)

    def begin(self, spin_ns: int) -> None:
        """Occupy the whole GPU for `spin_ns`, then record the start event, then launch one empty kernel."""
        _check("cuda", self._spin(spin_ns, self._sms) or self._begin())

    def end(self) -> None:
        _check("cuda", self._end())

    def started(self) -> bool:
        """Return whether the start event is complete: then the device may have waited for the host."""
        return self._started() == 0

    def elapsed_us(self) -> float:
        """Return the time from start to stop, in us; both must be complete. RuntimeError if the device failed."""
        us = ctypes.c_float()
        _check("cuda", self._elapsed(ctypes.addressof(us)))
        return us.value


def free_memory() -> int:
    """Return the bytes of device memory that no process holds."""
    free, total = c_size_t(), c_size_t()
    reader = library("cuda").function("judge_memory", c_void_p, c_void_p)
    _check("cuda", reader(ctypes.addressof(free), ctypes.addressof(total)))
    return free.value


def reset_persisting_l2() -> None:
    """Make every persisting line of L2 an ordinary one."""
    _check("cuda", library("cuda").function("judge_reset_l2")())


class DeviceBuffer:
    """Device memory of a separate cudaMalloc, so that sharing it shares nothing else. `bytes`: the memory as a flat
    uint8 tensor; `handle`: opens it in another process.
    """

    def __init__(self, nbytes: int, handle: bytes | None = None) -> None:
        self._owner = handle is None
        pointer = c_void_p()
        if handle is None:
            call = library("cuda").function("judge_allocate", c_size_t, c_void_p)
            _check("cuda", call(nbytes, ctypes.addressof(pointer)))
            exported = ctypes.create_string_buffer(HANDLE_BYTES)
            _check("cuda", library("cuda").function("judge_export", c_void_p, c_void_p)(pointer, exported))
            handle = exported.raw
        else:
            call = library("cuda").function("judge_import", c_char_p, c_void_p)
            _check("cuda", call(ctypes.create_string_buffer(handle, HANDLE_BYTES), ctypes.addressof(pointer)))
        self.handle = handle
        self._pointer = pointer.value
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (self._pointer, False), "version": 3,
        }  # fmt: skip
        self.bytes = torch.as_tensor(self, device="cuda")

    def close(self) -> None:
        """Free the memory, or unmap it. Tensors over it must not be used afterwards."""
        torch.cuda.synchronize()
        name = "judge_free" if self._owner else "judge_close"
        _check("cuda", library("cuda").function(name, c_void_p)(self._pointer))


def _check(device: str, code: int) -> None:
    if code and device == "cuda":
        build.check(code, "the judge's own kernel or allocation")
    elif code:
        raise RuntimeError(f"the judge's own reader failed with {code}")
