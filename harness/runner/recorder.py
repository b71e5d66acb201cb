"""Records a call on a GPU, so that the player can make it without this process (harness/player/).

Memory is the player's, mapped here at the addresses that it has there: inputs, outputs, weights, and the scratch memory
that torch's allocator hands out. What is exported is validated by the judge and by the player.
"""

import ctypes
import functools
import glob
import json
import os
import re
import tempfile
from collections.abc import Callable
from ctypes import c_char_p, c_int, c_size_t, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import torch

from harness.runner.failure import RefusedError
from harness.runner.wire import VARIABLE_BYTES
from problems.common import build, cubins, load

_HERE = Path(__file__).resolve().parent
PER_THREAD = 2  # cudaStreamPerThread, which is recorded; the legacy default stream cannot be
RANGE_WORDS = 2 * 4096  # for the ranges of scratch memory that are in use: fewer than half as many


class NotRecordedError(RefusedError):
    """A call cannot be recorded. The message is for the submission's author."""


class BranchesError(NotRecordedError):
    """The call's work is in no single order: it used further streams."""


def artefact(target: str) -> build.Artefact:
    """Return the native part, compiled. BuildError: no compiler, or it failed."""
    return build.cuda(_HERE / "capture.cu", target)


@functools.cache
def _library() -> ctypes.CDLL:
    return _loaded(artefact(load.device_target("cuda")).path)


@functools.cache
def _loaded(path: Path) -> ctypes.CDLL:
    ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)  # of whose functions the native part has the names only
    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    library.capture_error.restype = library.capture_exported.restype = c_char_p
    library.capture_top.restype = c_size_t
    library.capture_used.restype, library.capture_used.argtypes = c_size_t, (c_void_p, c_size_t)
    library.capture_image.restype = c_void_p
    library.capture_image.argtypes = (c_size_t, c_void_p)
    library.capture_map.argtypes = (c_void_p, c_uint64, c_void_p, c_void_p)
    library.capture_unmap.argtypes = library.capture_scratch.argtypes = (c_uint64, c_size_t)
    library.capture_variable.argtypes = (c_size_t, c_char_p, c_void_p, c_size_t)
    library.capture_watch.argtypes = (c_char_p,)
    return library


class Mapped:
    """The player's memory here, flat uint8. parts: (descriptor, bytes), one behind the other; address: 0 for any."""

    def __init__(self, parts: list[tuple[int, int]], address: int = 0) -> None:
        torch.cuda.init()
        self.address, self.nbytes = _mapped(parts, address), sum(size for _, size in parts)
        interface = {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}
        self.__cuda_array_interface__ = interface
        self.memory = torch.as_tensor(self, device="cuda")

    def close(self) -> None:
        """Unmap it. Tensors over it must not be used afterwards."""
        torch.cuda.synchronize()
        del self.memory
        _check(_library().capture_unmap(self.address, self.nbytes))


def _mapped(parts: list[tuple[int, int]], address: int) -> int:
    """Map memory as Mapped does. Return its address."""
    place, pair = c_uint64(), [*parts, (-1, 0)][:2]
    descriptors, sizes = (c_int * 2)(*(fd for fd, _ in pair)), (c_size_t * 2)(*(size for _, size in pair))
    try:
        _check(_library().capture_map(descriptors, address, sizes, ctypes.byref(place)))
    finally:
        for fd, _ in pair:
            if fd >= 0:
                os.close(fd)
    return place.value


def prepare(target: str) -> None:
    """Have torch use the player's memory, and report modules; before CUDA starts. NotRecordedError: no CUPTI."""
    compiler = torch._TorchCompileInductorWrapper
    plain = compiler.apply_options
    # Its graph modes launch their kernels: a graph of them cannot be a part of what is recorded.
    compiler.apply_options = lambda self, options: plain(self, {**(options or {}), "triton.cudagraphs": False})
    path, faults = artefact(target).path, []
    library = _loaded(path)  # with the driver's library, which the allocator's loader does not know
    allocator = torch.cuda.memory.CUDAPluggableAllocator(str(path), "capture_malloc", "capture_free")
    torch.cuda.memory.change_current_allocator(allocator)
    for name in _cuptis():
        if not library.capture_watch(name.encode()):
            return
        faults.append(library.capture_error().decode(errors="replace"))
    raise NotRecordedError(f"CUPTI, which tells of the code that is loaded, is missing: {'; '.join(faults)}")


def _cuptis() -> list[str]:
    """Return what CUPTI may be called: first the library that torch has loaded."""
    loaded = re.findall(r"\S*libcupti\S*", Path("/proc/self/maps").read_text())
    packaged = glob.glob(str(Path(torch.__file__).parent.parent / "nvidia/*/lib/libcupti.so*"))
    installed = glob.glob("/usr/local/cuda*/extras/CUPTI/lib64/libcupti.so*")
    return [*dict.fromkeys(loaded), *packaged, *installed, "libcupti.so.13", "libcupti.so"]


def use_scratch(address: int, nbytes: int, fd: int) -> None:
    """Have torch's allocator hand out this memory."""
    _check(_library().capture_scratch(_mapped([(fd, nbytes)], address), nbytes))
    torch.cuda.init()
    torch.cuda.set_stream(torch.cuda.ExternalStream(PER_THREAD))


def record(kernel: Callable, arguments: tuple, setup: Callable | None) -> tuple[dict, list[int], Any]:
    """Record a call. Return what the player needs: nodes, variables, the ranges of scratch memory that are in use, how
    many bytes from its beginning were ever handed out, and `before`, the nodes of a baseline's setup, whose state the
    call receives; descriptors of its images; and what it returned. NotRecordedError, BranchesError, what it raises.
    """
    before, state = _recorded(setup, arguments, True) if setup else ({"nodes": []}, None)
    exported, result = _recorded(kernel, (*arguments, state) if setup else arguments, setup is None)
    place = {index: i for i, index in enumerate(exported["images"])}
    for node in (*before["nodes"], *exported["nodes"]):
        if "image" in node:
            node["image"] = place[node["image"]]
    variables = [variable for i, index in enumerate(exported["images"]) for variable in _variables(i, index)]
    message = {"before": before["nodes"], "nodes": exported["nodes"], "variables": variables}
    message["scratch"] = _library().capture_top()
    words = (c_size_t * RANGE_WORDS)()
    message["used"] = words[: _library().capture_used(words, RANGE_WORDS)]
    if len(message["used"]) == RANGE_WORDS:
        raise NotRecordedError(f"its tensors lie in {RANGE_WORDS // 2} ranges of memory or more")
    return message, [os.dup(_image(index)[0]) for index in exported["images"]], result


def _recorded(function: Callable, arguments: tuple, anew: bool) -> tuple[dict, Any]:
    """Return what a function enqueues, and what it returns. anew: what was recorded before is of another call."""
    library = _library()
    _check(library.capture_begin(anew))
    try:
        result = function(*arguments)
    except BaseException:
        library.capture_end()
        raise
    if library.capture_end():
        raise NotRecordedError(
            "it waited for the GPU (cudaMemcpy and cudaMemset do, their Async forms do not), or an operation failed "
            f"({library.capture_error().decode()})"
        )
    if library.capture_export():
        error = library.capture_error().decode(errors="replace")
        if error == "BRANCHES":
            raise BranchesError("work ran on another stream than the default one")
        raise NotRecordedError(error)
    return json.loads(library.capture_exported()), result


@functools.cache  # torch's have megabytes
def _image(index: int) -> tuple[int, list[tuple[str, int]]]:
    """Return a file with an image, and the names and bytes of its variables."""
    size, capture = c_size_t(), _library().capture_image
    address = capture(index, ctypes.byref(size))  # which sets the size
    image = ctypes.string_at(address, size.value)
    with tempfile.TemporaryFile() as file:
        file.write(image)
        file.flush()
        return os.dup(file.fileno()), cubins.variables(image)


def _variables(number: int, index: int) -> list[dict]:
    """Return the variables of an image with their present values."""
    variables = []
    for name, nbytes in _image(index)[1]:
        if nbytes > VARIABLE_BYTES:
            text = f"variable {name} has {nbytes} bytes, and may have {VARIABLE_BYTES}: use torch.empty"
            raise NotRecordedError(text)
        value = ctypes.create_string_buffer(nbytes)
        if not _library().capture_variable(index, name.encode(), value, nbytes):
            variables.append({"image": number, "name": name, "value": value.raw.hex()})
    return variables


def _check(code: int) -> None:
    if code:
        raise RuntimeError(_library().capture_error().decode(errors="replace"))
