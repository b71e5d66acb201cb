"""Compile C++ and CUDA sources once, into shared objects with extern "C" launchers that ctypes loads.

Builds are content-addressed: the key covers the source, every local header it includes, the flags and the compiler.
A build holds a lock that the kernel drops with the process, so a killed build never blocks a later one.
The wheel of packaging/ brings shared objects with it: those are loaded, and a compiler is needed for others only.
Plain nvcc takes a second or two; no header of torch is involved. Compiling for a GPU needs no GPU.
"""

import ctypes
import fcntl
import functools
import hashlib
import os
import re
import shutil
import stat
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COMMON = Path(__file__).resolve().parent
PREBUILT = COMMON.parent.parent / "prebuilt"  # shared objects of an installed wheel; a checkout has none
ARCH = {"sm90": "sm_90a", "sm100": "sm_100a"}
# A launch without a stream goes to the thread's own default one: the legacy one cannot be recorded.
CUDA_FLAGS = (
    "-std=c++17",
    "-O3",
    "-lineinfo",
    "-default-stream=per-thread",
    "-Xptxas",
    "-v",
    "-shared",
    "-Xcompiler",
    "-fPIC",
)
CPP_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-Wall")
# FMA contraction is left to the source: it says std::fma where it means it.
_INCLUDE = re.compile(rb'^[ \t\f\v]*#[ \t\f\v]*include[ \t\f\v]*"([^"\r\n]+)"', re.MULTILINE)
# What an include may bring along, by the end of its name: no Python file, no results, no keys.
_HEADERS = {".h", ".hh", ".hpp", ".hxx", ".cuh", ".inc", ".inl", ".ipp", ".tpp", ".def"}
INCLUDED = _HEADERS | {".c", ".cc", ".cpp", ".cxx", ".cu", ".ptx"}
SOURCE_LIMIT = 4 * 2**20  # bytes of one source; the longest headers of public kernel libraries have a tenth of that
CLOSURE_LIMIT = 16 * 2**20  # bytes of a source with all that it includes: the judge reads them several times
CLOSURE_FILES = 1000  # of a source with all that it includes
INCLUDES = 20_000  # names that are looked for
_NAME_LIMIT = 4096  # bytes of a path, the kernel's


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

    def function(self, name: str, *argtypes: type) -> Any:
        """The extern "C" function `name`, returning int. AttributeError if the object lacks it."""
        return _function(self.path, name, argtypes)

    def kernels(self) -> list[Kernel]:
        """Resource use of every kernel in a CUDA build, in the order of the compiler's report."""
        return _parse_ptxas(self.log)


def cuda(source: str | Path, target: str, flags: tuple[str, ...] = ()) -> Artefact:
    """Compile the CUDA file `source` for `target` ("sm90" or "sm100"); -I problems/common is set.

    Cached in the process and on disk. ValueError: unknown target. BuildError: no nvcc, or it refused the source.
    """
    return _build(_resolved(source, os.getcwd()), target, "nvcc", (*cuda_flags(target), *flags))


def cuda_flags(target: str) -> tuple[str, ...]:
    """Flags of nvcc for `target`. ValueError: unknown target."""
    if target not in ARCH:
        raise ValueError(f"target must be one of {sorted(ARCH)}, got {target!r}")
    arch = ARCH[target].removeprefix("sm_")
    return *CUDA_FLAGS, f"-gencode=arch=compute_{arch},code=sm_{arch}"


def cpp(source: str | Path, flags: tuple[str, ...] = ()) -> Artefact:
    """Compile the C++ file `source` with g++ for this machine's baseline ISA; wider paths choose at run time
    (`__attribute__((target(...)))`). Cached. BuildError: no g++, or it refused the source.
    """
    return _build(_resolved(source, os.getcwd()), "cpu", "g++", (*CPP_FLAGS, *flags))


def check(code: int, what: str) -> None:
    """RuntimeError naming `what` if a launcher returned a CUDA error code (nonzero)."""
    if code:
        import torch

        # Without a GPU torch may have no texts of CUDA's errors.
        said = torch.cuda.CudaError(code) if torch.version.cuda else f"it returned {code}"
        raise RuntimeError(f"{what}: {said}")


def directory() -> Path:
    """Where builds live: $KERNEL_BUILD_DIR, else .build in the repository, of a wheel ~/.cache/dsv4-kernels."""
    default = Path.home() / ".cache" / "dsv4-kernels" if PREBUILT.is_dir() else COMMON.parent.parent / ".build"
    return Path(os.environ.get("KERNEL_BUILD_DIR") or default)


def prebuilt(source: Path, target: str, flags: tuple[str, ...]) -> Path:
    """Where a wheel has the shared object of `source`; no compiler is in its name, for there may be none."""
    return PREBUILT / f"{source.stem}-{target}-{_digest(source, flags)}.so"


def closure(*sources: Path) -> list[Path]:
    """`sources`, files of one folder, and every header that they include with quotes, at any distance.

    A header counts if it is a plain file in that folder, below it, or in problems/common, with an ending of INCLUDED.
    Any other include (a header of the toolchain, one that is missing, a path that leads out of the folder, a symbolic
    link) is left to the compiler: where the judge runs one for a submission, it can read nothing else. BuildError: a
    file cannot be read (see `read`), or there are too many.
    """
    folder = sources[0].parent
    found: dict[Path, None] = {}
    todo, size, names = list(sources), 0, 0
    while todo:
        path = todo.pop()
        if path in found:
            continue
        found[path] = None
        content = read(path)
        included = dict.fromkeys(_INCLUDE.findall(content))
        size, names = size + len(content), names + len(included)
        for count, limit, what in (
            (size, CLOSURE_LIMIT, "bytes"),
            (len(found), CLOSURE_FILES, "files"),
            (names, INCLUDES, "includes"),
        ):
            if count > limit:
                raise BuildError(f"{sources[0].name}: a source may have {limit} {what}, headers included: at {path}")
        todo += filter(None, (_header(name, path.parent, folder) for name in included))
    return list(found)


def read(path: Path) -> bytes:
    """The content of the source at `path`, which must be absolute and free of links.

    BuildError: it is no plain file, it lies elsewhere than its path says (a symbolic link), it is larger than
    SOURCE_LIMIT, or it cannot be opened.
    """
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise BuildError(f"{path} must be a plain file: no link, folder, pipe or device is read")
        # Whoever replaces the file meanwhile gains nothing: neither a link nor a pipe is waited for or followed.
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise BuildError(f"{path} must be a plain file: no link, folder, pipe or device is read")
            if os.readlink(f"/proc/self/fd/{file.fileno()}") != os.fspath(path):
                raise BuildError(f"{path} lies elsewhere: symbolic links are not followed")
            content = file.read(SOURCE_LIMIT + 1)
    except (OSError, ValueError) as error:
        raise BuildError(f"{path} cannot be read: {error}") from None
    if len(content) > SOURCE_LIMIT:
        raise BuildError(f"{path} is larger than {SOURCE_LIMIT // 2**20} MiB, the most that one source may have")
    return content


def _header(written: bytes, beside: Path, folder: Path) -> Path | None:
    """The header that an include means which stands in a file in `beside`; None: it is the compiler's to find."""
    if b"\0" in written or written.startswith(b"/") or len(written) > _NAME_LIMIT:
        return None
    try:
        name = written.decode()
    except UnicodeDecodeError:
        return None
    for place in (beside, COMMON):
        path = Path(os.path.normpath(place / name))
        if path.suffix in INCLUDED and (_inside(path, folder) or COMMON in path.parents) and _plain(path):
            return path
    return None


def _inside(path: Path, folder: Path) -> bool:
    """Whether `path` lies in `folder`; of the repository, and of a folder above it, no folder below counts."""
    repository = COMMON.parent.parent
    if folder == repository or folder in repository.parents:
        return path.parent == folder
    return folder in path.parents


def _plain(path: Path) -> bool:
    """Whether a plain file is there, reached without a symbolic link."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode) and os.path.realpath(path) == str(path)
    except OSError:
        return False


@functools.cache  # a launcher asks at each call, and each part of a path is a system call
def _resolved(source: str | Path, folder: str) -> Path:
    return Path(folder, source).resolve()


@functools.cache
def _build(source: Path, target: str, compiler: str, flags: tuple[str, ...]) -> Artefact:
    if PREBUILT.is_dir() and (made := prebuilt(source, target, flags)).is_file():
        return Artefact(made, target, "")
    command = [compiler, f"-I{COMMON}", *flags, str(source)]
    folder = directory() / f"{source.stem}-{target}-{_digest(source, (_version(compiler), flags))}"
    library, log = folder / f"{source.stem}.so", folder / "log.txt"
    if library.is_file():
        return Artefact(library, target, log.read_text())
    directory().mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # held by this process only: subprocess closes it in the compiler
        if library.is_file():
            return Artefact(library, target, log.read_text())
        with tempfile.TemporaryDirectory(dir=directory(), prefix="tmp-") as scratch:
            result = subprocess.run(
                [*command, "-o", f"{scratch}/{library.name}"],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, "TMPDIR": scratch, "NVCC_APPEND_FLAGS": ""},
            )
            if result.returncode:
                raise BuildError(f"{' '.join(command)}\nexit status {result.returncode}\n{result.stdout}")
            Path(scratch, log.name).write_text(result.stdout)
            folder.mkdir(exist_ok=True)
            os.replace(f"{scratch}/{log.name}", log)
            os.replace(f"{scratch}/{library.name}", library)  # last: its presence says that the build is whole
    return Artefact(library, target, result.stdout)


def _digest(source: Path, how: tuple) -> str:
    # Where problems/common lies is no part of it: the judge builds in private copies, and what it holds counts.
    digest = hashlib.sha256(repr(how).encode())
    for path in closure(source):
        digest.update(path.name.encode() + b"\0" + read(path))
    return digest.hexdigest()[:20]


@functools.cache
def _version(compiler: str) -> str:
    if not shutil.which(compiler):
        hint = "install the CUDA toolkit" if compiler == "nvcc" else "install g++"
        raise BuildError(f"{compiler} is not on PATH: {hint}")
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout


@functools.cache
def _function(path: Path, name: str, argtypes: tuple[type, ...]) -> Any:
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
