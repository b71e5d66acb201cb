"""Bindings to the judge's own compiled code (judge.cu, judge.cpp). Built once, like any kernel."""

import ctypes
import functools
from collections.abc import Callable
from ctypes import c_char_p, c_double, c_int, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path

import torch

from problems.common import build, load

_HERE = Path(__file__).resolve().parent
HANDLE_BYTES = 64  # sizeof(cudaIpcMemHandle_t)
PAGE = 1 << 21  # bytes, of device memory
TOUCHED = 16  # buffers in one launch of `touch`, the calls of a batch at most
TOUCH_STRIDE = 1 << 16  # bytes from one word that it reads to the next
TOUCH_REACH = 1 << 28  # bytes whose translations stay warm together
DONE_OFFSET = 64  # of the word that ends a batch, in its page (judge.cu)


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


def touch(*buffers: torch.Tensor) -> None:
    """Warm the address translations of buffers, uint8 on the GPU, TOUCHED at most, from every SM, in one launch; their
    data stays out of L2.
    """
    parts = (_Part * TOUCHED)(*(_Part(buffer.data_ptr(), buffer.numel()) for buffer in buffers))
    toucher = library("cuda").function("judge_touch", c_void_p, c_int, c_void_p)
    touched = ctypes.byref(_Touched(parts, len(buffers), TOUCH_STRIDE))
    _check("cuda", toucher(touched, _multiprocessors("cuda"), _sink("cuda").data_ptr()))


def touch_next(buffers: list[torch.Tensor], i: int) -> None:
    """Do as `touch` before the call on buffer i of those of a batch, all of one size: for it and as many behind it as
    stay warm together, where the launch before did not reach it.
    """
    reach = max(1, TOUCH_REACH // buffers[i].numel())
    if i % reach == 0:
        touch(*buffers[i : i + reach])


def mask(buffer: torch.Tensor, key: bytes) -> None:
    """XOR `buffer`, uint8 on the GPU (bytes a multiple of 64), with the keystream of the 32-byte `key`, in place."""
    masker = library("cuda").function("judge_mask", c_void_p, c_size_t, c_char_p, c_int)
    _check("cuda", masker(buffer.data_ptr(), buffer.numel(), key, _multiprocessors("cuda")))


def clean_l2(junk: torch.Tensor) -> None:
    """Leave no line in L2 that was written before. `junk`: uint8 on the GPU, larger than L2; its contents are lost."""
    cleaner = library("cuda").function("judge_clean", c_void_p, c_size_t, c_int)
    _check("cuda", cleaner(junk.data_ptr(), junk.numel(), _multiprocessors("cuda")))


@dataclass(frozen=True)
class Call:
    """What is timed: `kernel(*arguments)`. copies: (to, from, bytes) of what is copied right behind it, by address."""

    kernel: Callable[..., object]
    arguments: tuple = ()
    copies: tuple[tuple[int, int, int], ...] = ()


class Timer:
    """The event pair, in native code: from the spin to the copies of outputs nothing but the call itself is Python."""

    def __init__(self) -> None:
        code, locked = library("cuda"), ctypes.PyDLL(str(library("cuda").path))
        self._sms = _multiprocessors("cuda")
        self._elapsed = code.function("judge_elapsed", c_void_p)
        self._call = locked.judge_call
        self._call.argtypes = (
            c_uint64,
            c_int,
            ctypes.py_object,
            ctypes.py_object,
            c_void_p,
            c_int,
            ctypes.POINTER(_Called),
        )
        self._call.restype = ctypes.py_object

    def call(self, spin_ns: int, call: Call) -> tuple[object, float, bool]:
        """Occupy the whole GPU for `spin_ns`, record the start event, launch one empty kernel, make the call, record
        the stop event and enqueue the copies. Return what the call returned, the us until then, and whether the device
        reached the start event first: then it may have waited for the host. Raise what the call raised.
        """
        copies, called = (_Copy * len(call.copies))(*call.copies), _Called()
        result = self._call(spin_ns, self._sms, call.kernel, call.arguments, copies, len(copies), called)
        _check("cuda", called.error)
        return result, called.host_us, bool(called.ran_dry)

    def elapsed_us(self) -> float:
        """Return the time from start to stop, in us; both must be complete. RuntimeError if the device failed."""
        us = ctypes.c_float()
        _check("cuda", self._elapsed(ctypes.addressof(us)))
        return us.value


def copy(copies: tuple[tuple[int, int, int], ...]) -> None:
    """Enqueue these copies, (to, from, bytes), by address."""
    copier = library("cuda").function("judge_copy", c_void_p, c_void_p, c_size_t)
    for to, source, nbytes in copies:
        _check("cuda", copier(to, source, nbytes))


def digest(regions: list[tuple[int, int]], found: torch.Tensor) -> None:
    """Enqueue what adds the digest of device memory to `found`, int64 (1,) on the GPU. regions: (address, bytes), in
    this order; addresses are multiples of 8.
    """
    first = 0
    adder = library("cuda").function("judge_digest", c_void_p, c_size_t, c_uint64, c_int, c_void_p)
    for address, nbytes in regions:
        _check("cuda", adder(address, nbytes, first, _multiprocessors("cuda"), found.data_ptr()))
        first += -(-nbytes // 8)


def word_of(digest: torch.Tensor) -> int:
    """Return the word that ends a batch with this digest."""
    return (int(digest) | 1) % 2**64


def show(page: int, nbytes: int) -> int:
    """Let the device see host memory, by address. Return its address there."""
    seen = c_void_p()
    shower = library("cuda").function("judge_show", c_void_p, c_size_t, c_void_p)
    _check("cuda", shower(page, nbytes, ctypes.addressof(seen)))
    return seen.value or 0


def hide(page: int) -> None:
    _check("cuda", library("cuda").function("judge_hide", c_void_p)(page))


def done_word(page: int) -> int:
    return c_uint64.from_address(page + DONE_OFFSET).value


def await_gate(seen: int) -> None:
    """Hold the queue until the gate of a page is open. seen: the page's address on the device."""
    _check("cuda", library("cuda").function("judge_await_gate", c_void_p)(seen))


def stamp(digest: torch.Tensor, seen: int) -> None:
    """Enqueue the word that ends a batch."""
    _check("cuda", library("cuda").function("judge_stamp", c_void_p, c_void_p)(digest.data_ptr(), seen))


def wake(busy_s: float) -> None:
    """Keep the GPU busy for so long, and return when it is done: while it had no work it has lowered its clocks."""
    waker = library("cuda").function("judge_wake", c_uint64, c_int)
    _check("cuda", waker(int(busy_s * 1e9), _multiprocessors("cuda")))


def open_gate(masked: list[tuple[torch.Tensor, bytes]], page: int, seen: int, ahead_us: float, limit_s: float) -> float:
    """After ahead_us, unmask buffers, open the gate of a page, and wait for its last word. Return how long that took
    from the unmasking on, in us; 0 if it took more than limit_s.
    """
    parts = (_Masked * len(masked))(
        *(_Masked(part.data_ptr(), part.numel(), (ctypes.c_ubyte * 32)(*key)) for part, key in masked)
    )
    us = c_double()
    opener = library("cuda").function(
        "judge_open", c_void_p, c_int, c_void_p, c_void_p, c_int, c_double, c_double, c_void_p
    )
    place = ctypes.addressof(us)
    _check("cuda", opener(parts, len(masked), page, seen, _multiprocessors("cuda"), ahead_us, limit_s, place))
    return us.value


class _Part(ctypes.Structure):
    _fields_ = (("data", c_void_p), ("bytes", c_size_t))


class _Touched(ctypes.Structure):
    _fields_ = (("part", _Part * TOUCHED), ("count", c_int), ("stride", c_size_t))


class _Masked(ctypes.Structure):
    _fields_ = (("data", c_void_p), ("bytes", c_size_t), ("key", ctypes.c_ubyte * 32))


class _Copy(ctypes.Structure):
    _fields_ = (("to", c_void_p), ("source", c_void_p), ("bytes", c_size_t))


class _Called(ctypes.Structure):
    _fields_ = (("host_us", c_double), ("ran_dry", c_int), ("error", c_int))


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

    It takes whole pages: another process maps memory of another size in pages so small that translating addresses
    halves its rate (an addition of 3 GiB took 1,471 us there and not 735, on an H200).
    """

    def __init__(self, nbytes: int, handle: bytes | None = None) -> None:
        self._owner = handle is None
        pointer = c_void_p()
        if handle is None:
            call = library("cuda").function("judge_allocate", c_size_t, c_void_p)
            _check("cuda", call(-(-nbytes // PAGE) * PAGE, ctypes.addressof(pointer)))
            exported = ctypes.create_string_buffer(HANDLE_BYTES)
            _check("cuda", library("cuda").function("judge_export", c_void_p, c_void_p)(pointer, exported))
            handle = exported.raw
        else:
            call = library("cuda").function("judge_import", c_char_p, c_void_p)
            _check("cuda", call(ctypes.create_string_buffer(handle, HANDLE_BYTES), ctypes.addressof(pointer)))
        self.handle = handle
        self.address = pointer.value or 0
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
        }
        self.bytes = torch.as_tensor(self, device="cuda")

    def close(self) -> None:
        """Free the memory, or unmap it. Tensors over it must not be used afterwards."""
        torch.cuda.synchronize()
        name = "judge_free" if self._owner else "judge_close"
        _check("cuda", library("cuda").function(name, c_void_p)(self.address))


def _check(device: str, code: int) -> None:
    if code and device == "cuda":
        build.check(code, "the judge's own kernel or allocation")
    elif code:
        raise RuntimeError(f"the judge's own reader failed with {code}")
