"""Compile C++ and CUDA sources once, into shared objects with extern "C" launchers that ctypes loads.

Builds are content-addressed: the key covers the source, every local header it includes, the flags and the compiler.
A build holds a lock that the kernel drops with the process, so a killed build never blocks a later one.
Plain nvcc takes a second or two; no header of torch is involved. Compiling for a GPU needs no GPU.
"""

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

COMMON = Path(__file__).resolve().parent
ARCH = {"sm90": "sm_90a", "sm100": "sm_100a"}
CUDA_FLAGS = ("-std=c++17", "-O3", "-lineinfo", "-Xptxas", "-v", "-shared", "-Xcompiler", "-fPIC")
CPP_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-Wall")
# FMA contraction is left to the source: it says std::fma where it means it.
_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


_more_flags: list[str] = []  # of every CUDA build, while capturable() is in force


class BuildError(RuntimeError):
    """The compiler refused the source, or there is no compiler. The message holds the compiler's whole output."""


@dataclass(frozen=True)
class Kernel:
    """What ptxas says of one kernel (`name` is mangled)."""

    name: str
    registers: int
    stack_bytes: int
    spill_bytes: int  # stores and loads together
    shared_bytes: int  # static


@dataclass(frozen=True)
class Artefact:
    """A finished build: the shared object, what it was made for, and what the compiler printed."""

    path: Path
    target: str  # "cpu", "sm90", "sm100"
    log: str

    def function(self, name: str, *argtypes: type) -> "ctypes._CFuncPtr":
        """The extern "C" function `name`, returning int. AttributeError if the object lacks it."""
        return _function(self.path, name, argtypes)

    def kernels(self) -> list[Kernel]:
        """Resource use of every kernel in a CUDA build, in the order of the compiler's report."""
        return _parse_ptxas(self.log)


def cuda(source: str | Path, target: str, flags: tuple[str, ...] = ()) -> Artefact:
    """Compile the CUDA file `source` for `target` ("sm90" or "sm100"); -I problems/common is set.

    Cached in the process and on disk. ValueError: unknown target. BuildError: no nvcc, or it refused the source.
    """
    if target not in ARCH:
        raise ValueError(f"target must be one of {sorted(ARCH)}, got {target!r}")
    arch = ARCH[target].removeprefix("sm_")
    gencode = f"-gencode=arch=compute_{arch},code=sm_{arch}"
    return _build(Path(source).resolve(), target, "nvcc", (*CUDA_FLAGS, gencode, *_more_flags, *flags))


@contextlib.contextmanager
def capturable() -> Iterator[None]:
    """Within: the default queue of CUDA code that is built is the thread's own, the one that a graph can record. Code
    built without it is missing from a graph, or spoils it.
    """
    _more_flags.append("-default-stream=per-thread")
    try:
        yield
    finally:
        _more_flags.pop()


def cpp(source: str | Path, flags: tuple[str, ...] = ()) -> Artefact:
    """Compile the C++ file `source` with g++ for this machine's baseline ISA; wider paths choose at run time
    (`__attribute__((target(...)))`). Cached. BuildError: no g++, or it refused the source.
    """
    return _build(Path(source).resolve(), "cpu", "g++", (*CPP_FLAGS, *flags))


def check(code: int, what: str) -> None:
    """RuntimeError naming `what` if a launcher returned a CUDA error code (nonzero)."""
    if code:
        import torch

        raise RuntimeError(f"{what}: {torch.cuda.CudaError(code)}")


def directory() -> Path:
    """Where builds live: $KERNEL_BUILD_DIR, else .build in the repository."""
    return Path(os.environ.get("KERNEL_BUILD_DIR") or COMMON.parent.parent / ".build")


def closure(source: Path) -> list[Path]:
    """`source` and every header it includes with quotes, transitively, beside the includer or in problems/common."""
    seen: dict[Path, None] = {}
    todo = [source]
    while todo:
        path = todo.pop()
        if path in seen:
            continue
        seen[path] = None
        for name in _INCLUDE.findall(path.read_text()):
            found = next((d / name for d in (path.parent, COMMON) if (d / name).is_file()), None)
            if found is None:
                raise BuildError(f'{path.name}: #include "{name}" is neither beside it nor in problems/common')
            todo.append(found.resolve())
    return list(seen)


@functools.cache
def _build(source: Path, target: str, compiler: str, flags: tuple[str, ...]) -> Artefact:
    # Where problems/common lies is no part of the key: the judge builds in private copies, and what it holds counts.
    command = [compiler, f"-I{COMMON}", *flags, str(source)]
    digest = hashlib.sha256(repr((_version(compiler), flags)).encode())
    for path in closure(source):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    folder = directory() / f"{source.stem}-{target}-{digest.hexdigest()[:20]}"
    library, log = folder / f"{source.stem}.so", folder / "log.txt"
    if library.is_file():
        return Artefact(library, target, log.read_text())
    directory().mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # held by this process alone: subprocess closes it in the compiler
        if library.is_file():
            return Artefact(library, target, log.read_text())
        with tempfile.TemporaryDirectory(dir=directory(), prefix="tmp-") as scratch:
            result = subprocess.run(
                [*command, "-o", f"{scratch}/{library.name}"],
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "TMPDIR": scratch},
            )  # fmt: skip
            if result.returncode:
                raise BuildError(f"{' '.join(command)}\nexit status {result.returncode}\n{result.stdout}")
            Path(scratch, log.name).write_text(result.stdout)
            folder.mkdir(exist_ok=True)
            os.replace(f"{scratch}/{log.name}", log)
            os.replace(f"{scratch}/{library.name}", library)  # last: its presence says that the build is whole
    return Artefact(library, target, result.stdout)


@functools.cache
def _version(compiler: str) -> str:
    if not shutil.which(compiler):
        hint = "install the CUDA toolkit" if compiler == "nvcc" else "install g++"
        raise BuildError(f"{compiler} is not on PATH: {hint}")
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout


@functools.cache
def _function(path: Path, name: str, argtypes: tuple[type, ...]) -> "ctypes._CFuncPtr":
    function = getattr(ctypes.CDLL(str(path)), name)
    function.argtypes, function.restype = argtypes, ctypes.c_int
    return function


def _parse_ptxas(log: str) -> list[Kernel]:
    kernels = []
    name, stack, spill = "", 0, 0
    for line in log.splitlines():
        if found := re.search(r"Compiling entry function '(\S+)'", line):
            name, stack, spill = found[1], 0, 0
        elif found := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            stack, spill = int(found[1]), int(found[2]) + int(found[3])
        elif name and (found := re.search(r"Used (\d+) registers", line)):
            shared = re.search(r"(\d+) bytes smem", line)
            kernels.append(Kernel(name, int(found[1]), stack, spill, int(shared[1]) if shared else 0))
            name = ""
    return kernels
