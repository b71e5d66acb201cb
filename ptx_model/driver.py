"""Run the host side of unchanged variants without a GPU: their launches go to the model, on tensors of the CPU.

`install` puts a small shared library in place of the CUDA runtime (driver.c), for CUDA sources that `build.cuda`
compiles and for CuTe DSL, and lets torch's CPU tensors pass for those of a GPU. It changes the whole process, once.
"""

import contextlib
import ctypes
import functools
import gc
import hashlib
import os
import struct
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from problems.common import build, load
from ptx_model import parse
from ptx_model.execute import extent, place_globals, run_launch, variable_array
from ptx_model.faults import Fault
from ptx_model.launch import Launch, layout
from ptx_model.memory import LARGEST_SHARED, GlobalMemory
from ptx_model.tensor_map import BYTES, TensorMap

SOURCE = Path(__file__).with_suffix(".c")
MULTIPROCESSORS = {"sm90": 132, "sm100": 148}
CAPABILITY = {"sm90": (9, 0), "sm100": (10, 0)}
DEFAULT_SHARED = 49_152  # dynamic bytes that a kernel may have without asking for more
INVALID_VALUE, LAUNCH_FAILURE, NOT_SUPPORTED = 1, 719, 801  # error codes of the CUDA runtime
_CC = ("cc", "-std=c11", "-O1", "-shared", "-fPIC", "-Wl,-Bsymbolic")  # symbolic: calls within it stay in it
_CUDA_FLAGS = ("-std=c++17", "-O3", "-lineinfo")
_MAX_SHARED, _CLUSTER = 8, 4  # cudaFuncAttributeMaxDynamicSharedMemorySize, cudaLaunchAttributeClusterDimension
_COOPERATIVE = 2  # cudaLaunchAttributeCooperative
_NON_PORTABLE = 14  # cudaFuncAttributeNonPortableClusterSizeAllowed
_FATBIN = 0xBA55ED50  # how a container of machine code begins: magic, version, then the bytes behind these 16
_BITS = {0: 8, 1: 16, 2: 32, 3: 32, 4: 64, 5: 64, 6: 16, 7: 32, 8: 64, 9: 16, 10: 32, 11: 32, 12: 32, 13: 4}
_SWIZZLE = {0: 0, 1: 32, 2: 64, 3: 128}


@dataclass
class HostKernel:
    """A kernel that the host side knows: its name, the text that holds it, and what was set for it."""

    name: str
    ptx: str
    dynamic_limit: int = DEFAULT_SHARED
    non_portable: bool = False


@dataclass
class Driver:
    """The installed driver. policy: of the launches that follow; faults: what they ended with; launches: how many."""

    target: str
    policy: str = "eager"
    poison: int | None = 0xFF  # see Launch
    # That the host side sees; set by install. With few, blocks that persist take more turns.
    multiprocessors: int = 0
    edit: Callable[[str, str], str] | None = None  # kernel's name, PTX -> PTX: for mutants
    faults: list[Exception] = field(default_factory=list)
    launches: int = 0
    executed: int = 0
    _kernels: dict[int, HostKernel] = field(default_factory=dict)
    _modules: dict[int, str] = field(default_factory=dict)  # library -> PTX
    _compiled: list[tuple[bytes, str]] = field(default_factory=list)  # cubin of CuTe DSL, its PTX
    _ptx: str = ""  # of the CUDA source that is being loaded
    _variables: dict[int, tuple[str, str]] = field(default_factory=dict)  # host's address -> PTX, name
    _held: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)  # PTX -> its variables in global memory
    _callbacks: list[Any] = field(default_factory=list)
    _library: Any = None

    def set_order(self, policy: str, poison: int | None, multiprocessors: int = 0) -> None:
        """Let the launches that follow run in this order. multiprocessors: 0 for as many as the GPU has."""
        self.policy, self.poison = policy, poison
        self.multiprocessors = multiprocessors or MULTIPROCESSORS[self.target]

    def check(self) -> None:
        """Raise the first fault of the launches so far."""
        if self.faults:
            raise self.faults[0]

    def clear(self) -> None:
        """Forget the faults, and the error that the CUDA runtime would still report."""
        self.faults.clear()
        self._library.cudaGetLastError()

    def guarded(self, function: Callable[..., int]) -> Callable[..., int]:
        """`function` for C: an exception is kept for `check`, and becomes an error code."""

        @functools.wraps(function)
        def safe(*arguments: Any) -> int:
            try:
                return function(*arguments)
            except Exception as error:
                self.faults.append(error)
                return LAUNCH_FAILURE

        return safe

    # ---- what driver.c calls

    def register_kernel(self, handle: int, name: bytes) -> int:
        self._kernels[handle] = HostKernel(name.decode(), self._ptx)
        return 0

    def load_library(self, code: int, library: int) -> int:
        magic, size = struct.unpack("<I4xQ", ctypes.string_at(code, 16))
        binary = ctypes.string_at(code, 16 + size if magic == _FATBIN else 0)
        for cubin, ptx in reversed(self._compiled):
            if cubin in binary:
                self._modules[library] = ptx
                return 0
        raise Fault("not modelled", "CuTe DSL loads machine code whose PTX the model has not seen")

    def find_kernel(self, library: int, name: bytes, kernel: int) -> int:
        self._kernels[kernel] = HostKernel(name.decode(), self._modules[library])
        return 0

    def attribute(self, kernel: int, attribute: int, value: int) -> int:
        if attribute == _MAX_SHARED:
            if value > LARGEST_SHARED:
                return INVALID_VALUE
            self._kernels[kernel].dynamic_limit = value
        if attribute == _NON_PORTABLE:
            self._kernels[kernel].non_portable = bool(value)
        return 0

    def device(self, attribute: int, value: Any) -> int:
        major, minor = CAPABILITY[self.target]
        known = {16: self.multiprocessors, 75: major, 76: minor, 97: LARGEST_SHARED, 95: 1, 10: 32, 1: 1024}
        if attribute not in known:
            return NOT_SUPPORTED
        value[0] = known[attribute]
        return 0

    def clusters(self, count: Any, kernel: int, config: int) -> int:
        size = ctypes.cast(config, ctypes.POINTER(_Config)).contents.cluster()
        count[0] = max(1, self.multiprocessors // (size[0] * size[1] * size[2]))
        return 0

    def tensor_map(
        self,
        to: int,
        type_: int,
        rank: int,
        address: int,
        dims: Any,
        strides: Any,
        box: Any,
        steps: Any,
        interleave: int,
        swizzle: int,
        l2: int,
        fill: int,
    ) -> int:
        if interleave or type_ not in _BITS or swizzle not in _SWIZZLE:
            raise Fault("not modelled", f"a tensor map of type {type_}, interleave {interleave}, swizzle {swizzle}")
        made = TensorMap(
            address or 0,
            _BITS[type_],
            tuple(dims[:rank]),
            tuple(strides[: rank - 1]),
            tuple(box[:rank]),
            _SWIZZLE[swizzle],
            bool(fill),
            tuple(steps[:rank]),
        )
        ctypes.memmove(to, made.encode(), BYTES)
        return 0

    def launch(
        self, kernel: int, grid: Any, block: Any, shared: int, arguments: Any, attributes: int, count: int
    ) -> int:
        host = self._kernels[kernel]
        text = self.edit(host.name, host.ptx) if self.edit else host.ptx
        code = parse.kernels(text)[host.name].kernel
        if shared > host.dynamic_limit:
            raise Fault(
                "bounds",
                f"{host.name}: {shared} bytes of dynamic shared memory, but the kernel may have {host.dynamic_limit}: "
                "set its largest dynamic shared memory first",
            )
        cluster = _cluster(attributes, count) or code.cluster or (1, 1, 1)
        if cluster[0] * cluster[1] * cluster[2] > (most := 16 if host.non_portable else 8):
            portable = "" if host.non_portable else ", which is the portable size"
            raise Fault("bounds", f"{host.name}: a cluster of {cluster} blocks, at most {most} are allowed{portable}")
        raw = bytearray(code.parameter_bytes)
        for i, (at, size) in enumerate(code.parameters.values()):
            raw[at : at + size] = ctypes.string_at(arguments[i], size)
        regions = [extent(tensor) for tensor in _tensors()]
        counted = np.zeros(64, np.uint8)
        launch = Launch(
            code,
            tuple(grid[:3]),
            tuple(block[:3]),
            bytes(raw),
            GlobalMemory(regions),
            shared,
            cluster,
            multiprocessors=MULTIPROCESSORS[self.target],
            poison=self.poison,
            meeting=counted.ctypes.data if _value(attributes, count, _COOPERATIVE)[0] else 0,
        )
        # Keeps what earlier launches left in them.
        place_globals(launch, [*regions, extent(counted)], self._held.setdefault(host.ptx, {}))
        self.launches += 1
        self.executed += run_launch(launch, self.policy).executed
        return 0

    def register_variable(self, host: int, name: bytes) -> int:
        self._variables[host] = (self._ptx, name.decode())
        return 0

    def variable(self, address: Any, size: Any, host: int) -> int:
        """Where a variable in global memory lies, for copies of the host."""
        ptx, name = self._variables[host]
        known = parse.variables(ptx)
        if name not in known:
            return INVALID_VALUE  # no kernel uses it: the compiler has dropped it
        held = self._held.setdefault(ptx, {})
        if name not in held:
            held[name] = variable_array(known[name])
        address[0], size[0] = held[name].ctypes.data, known[name].size
        return 0

    def occupancy(self, blocks: Any, kernel: int, threads: int, shared: int) -> int:
        """Blocks of a multiprocessor, as far as threads and shared memory decide: ptxas chooses the registers."""
        code = parse.kernels(self._kernels[kernel].ptx)[self._kernels[kernel].name].kernel
        if threads < 1:
            return INVALID_VALUE
        launch = Launch(code, (1, 1, 1), (threads, 1, 1), b"", GlobalMemory([]), shared, multiprocessors=1)
        blocks[0] = launch.resident(layout(launch).bytes)
        return 0

    # ---- CUDA sources

    def cuda(self, source: str | Path, target: str, flags: tuple[str, ...] = ()) -> build.Artefact:
        """Stands in for build.cuda: the host side as a shared object of this process, its kernels as PTX."""
        if target not in build.ARCH:
            raise ValueError(f"target must be one of {sorted(build.ARCH)}, got {target!r}")
        path, arch = Path(source).resolve(), build.ARCH[target].removeprefix("sm_")
        common = (*_CUDA_FLAGS, f"-gencode=arch=compute_{arch},code=compute_{arch}", *flags)
        text = build._build(path, target, "nvcc", ("-ptx", *common))
        # Of the kernels in it only the names count: they are compiled quickly.
        shared = ("-shared", "-Xcompiler", "-fPIC", "-cudart", "none", "-Xcicc", "-O0")
        shared += ("-Xlinker", "--no-as-needed", "-Xlinker", str(_library()))
        host = build._build(path, target, "nvcc", (*shared, *common))
        self._ptx = text.path.read_text()
        # Registers its kernels, the first time; ahead of a CUDA runtime that torch may have loaded for all.
        ctypes.CDLL(str(host.path), mode=os.RTLD_NOW | os.RTLD_DEEPBIND)
        return host


class _Config(ctypes.Structure):
    """cudaLaunchConfig_t."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_size_t),
        ("order", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    ]

    def cluster(self) -> tuple[int, int, int]:
        return _cluster(self.attributes or 0, self.count) or (1, 1, 1)


def _value(attributes: int, count: int, wanted: int) -> tuple[int, int, int]:
    """The first three words of a launch's attribute, 72 bytes each; zeros: it has none of this kind."""
    for i in range(count if attributes else 0):
        at = attributes + 72 * i
        if ctypes.c_uint.from_address(at).value == wanted:
            x, y, z = (ctypes.c_uint * 3).from_address(at + 8)
            return x, y, z
    return 0, 0, 0


def _cluster(attributes: int, count: int) -> tuple[int, int, int] | None:
    """The cluster among a launch's attributes."""
    size = _value(attributes, count, _CLUSTER)
    return size if all(size) else None


def _tensors() -> list[torch.Tensor]:
    """Every tensor of this process that lies in host memory."""
    found = []
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and thing.layout == torch.strided and thing.numel():
            with contextlib.suppress(RuntimeError):  # one without storage
                if thing.device.type == "cpu":
                    found.append(thing)
    return found


def _library() -> Path:
    """driver.c as a shared library. BuildError: no C compiler, or it refused the source."""
    key = hashlib.sha256(SOURCE.read_bytes() + repr(_CC).encode()).hexdigest()[:20]
    path = build.directory() / f"ptx-model-driver-{key}.so"
    if not path.is_file():
        build.directory().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=build.directory(), prefix="tmp-") as scratch:
            made = Path(scratch, path.name)
            command = [*_CC, str(SOURCE), "-o", str(made)]
            try:
                result = subprocess.run(command, capture_output=True, text=True)
            except FileNotFoundError:
                raise build.BuildError("cc is not on PATH: the model's driver needs a C compiler") from None
            if result.returncode:
                raise build.BuildError(f"{' '.join(command)}\n{result.stderr}")
            os.replace(made, path)
    return path


_installed: list[Driver] = []


def install(target: str) -> Driver:
    """Put the model in place of CUDA in this process, as a GPU of `target` ("sm90" or "sm100"). Return the driver.

    Call it before CuTe DSL is imported. RuntimeError: the model is there already, for another target.
    """
    if target not in CAPABILITY:
        raise ValueError(f"target must be one of {sorted(CAPABILITY)}, got {target!r}")
    if _installed:
        if _installed[0].target != target:
            raise RuntimeError(f"the model is installed for {_installed[0].target}; start a new process for {target}")
        return _installed[0]
    path = _library()
    driver = Driver(target, multiprocessors=MULTIPROCESSORS[target])
    _connect(ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL), driver)
    os.environ.update(
        {
            "CUTE_DSL_ARCH": build.ARCH[target],
            "CUTE_DSL_LIBS": str(path),
            "CUTE_DSL_KEEP": "ptx,cubin",
            "CUTE_DSL_DUMP_DIR": tempfile.mkdtemp(prefix="ptx-model-"),
            "CUTE_DSL_DISABLE_FILE_CACHING": "1",
        }
    )
    build.cuda = driver.cuda  # ty: ignore[invalid-assignment]
    _pretend(driver)
    _watch_cute_dsl(driver)
    _installed.append(driver)
    return driver


def _connect(library: ctypes.CDLL, driver: Driver) -> None:
    p, i, u, s, name = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.c_size_t, ctypes.c_char_p
    axes, words, longs = ctypes.POINTER(u), ctypes.POINTER(ctypes.c_uint32), ctypes.POINTER(ctypes.c_uint64)
    kinds = (
        (driver.register_kernel, (p, name)),
        (driver.launch, (p, axes, axes, s, ctypes.POINTER(p), p, u)),
        (driver.attribute, (p, i, i)),
        (driver.load_library, (p, p)),
        (driver.find_kernel, (p, name, p)),
        (driver.device, (i, ctypes.POINTER(i))),
        (driver.tensor_map, (p, i, u, p, longs, longs, words, words, i, i, i, i)),
        (driver.clusters, (ctypes.POINTER(i), p, p)),
        (driver.register_variable, (p, name)),
        (driver.variable, (ctypes.POINTER(p), ctypes.POINTER(s), p)),
        (driver.occupancy, (ctypes.POINTER(i), p, i, s)),
    )
    driver._callbacks = [ctypes.CFUNCTYPE(i, *types)(driver.guarded(method)) for method, types in kinds]
    table = (p * len(kinds))(*(ctypes.cast(callback, p) for callback in driver._callbacks))
    library.ptx_model_install(table)
    driver._library = library


def _pretend(driver: Driver) -> None:
    """CPU tensors say that they are on a GPU, and torch.cuda answers as one would."""
    target = driver.target
    torch.Tensor.is_cuda = property(lambda self: True)  # ty: ignore[invalid-assignment]
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(  # ty: ignore[invalid-assignment]
        multi_processor_count=driver.multiprocessors,
        name=f"a model of {target}",
        major=CAPABILITY[target][0],
        minor=CAPABILITY[target][1],
        shared_memory_per_block_optin=LARGEST_SHARED,
    )
    torch.cuda.get_device_capability = lambda device=None: CAPABILITY[target]  # ty: ignore[invalid-assignment]
    torch.cuda.CudaError = lambda code: f"error {code} of the model's driver"  # ty: ignore[invalid-assignment]
    load.device_target = lambda device: target  # ty: ignore[invalid-assignment]


def _watch_cute_dsl(driver: Driver) -> None:
    """Note the PTX of all that CuTe DSL compiles, where it is installed."""
    try:
        from cuda.bindings import runtime  # ty: ignore[missing-module-member]
        from cutlass.base_dsl import jit_executor
    except ImportError:
        return
    runtime.cudaGetDeviceCount = lambda: (runtime.cudaError_t.cudaSuccess, 1)
    runtime.cudaLibraryUnload = lambda library: (runtime.cudaError_t.cudaSuccess,)
    before = jit_executor.JitFunctionArtifacts.__post_init__

    def note(self: Any) -> None:
        before(self)
        if isinstance(self.CUBIN, bytes) and self.PTX:
            driver._compiled.append((self.CUBIN, self.PTX if isinstance(self.PTX, str) else self.PTX.decode()))

    jit_executor.JitFunctionArtifacts.__post_init__ = note
