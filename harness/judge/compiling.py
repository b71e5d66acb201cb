"""The compile step of a submission: a separate process, whose caches are kept for the runners of the same closure.

It is hostile code like a runner's. It runs in the same jail with a separate budget, and sees only contents of public
seeds. The judge never keeps what a runner writes.
"""

import contextlib
import hashlib
import re
from pathlib import Path

from harness.judge.handle import RunnerHandle
from harness.problem import sources
from harness.problem.folders import Problem
from harness.sandbox import workdir
from harness.sandbox.workdir import Workdir
from problems.common import build, cubins, load

COMPILING = ("triton", "cutlass", "torch.compile", "torch.utils.cpp_extension", "problems.common.build", "numba")
_COMPILE = re.compile(r"torch\.compile\b")


def kind(file: Path, folder: Path | None = None) -> str:
    """Return how `file` is compiled beforehand: by "compile_for", a "call", or ""."""
    tree = load.parse(file)
    if sources.defines(tree, "compile_for"):
        return "compile_for"
    files = [path for path in sources.closure(file, folder) if path.suffix == ".py"]
    imported = {name for path in files for _, name in sources.imported(path)}
    compiles = any(name.startswith(COMPILING) for name in imported) or any(_COMPILE.search(load.text(p)) for p in files)
    return "call" if compiles else ""


def todo(problem: Problem, handles: tuple[RunnerHandle, ...]) -> list[tuple[str, RunnerHandle, RunnerHandle]]:
    """Return (kind, handle, the handle of its compile step) for those that had no compile step yet."""
    found = []
    for handle in handles:
        if handle.built or handle.submission is None:
            continue
        handle.built = True
        one, target = handle.submission, handle.target
        how = kind(one.file, one.folder or problem.folder)
        if how and workdir.build_folder(one.file, problem, target) is None:
            runner = f"{handle.name} (compile step)"
            found.append(
                (how, handle, RunnerHandle(handle.name, one, target, built=True, printed=handle.printed, runner=runner))
            )
    return found


def keep(problem: Problem, handle: RunnerHandle, folder: Workdir | None) -> str:
    """Keep what a process of `handle`, which has ended, compiled in its folder. Return why it is not kept, or ""."""
    if handle.submission is None or folder is None:
        return ""
    key = workdir.key(handle.submission.file, problem, handle.target)
    try:
        folder.publish(key)
    except workdir.CacheError as error:  # its runners compile for themselves
        return f"what {handle.runner} compiled is not kept: {error}"
    return ""


def code_hash(problem: Problem, file: Path, target: str) -> str | None:
    """Return the hash of the GPU code that the compile step of `file` has left, or None."""
    built = workdir.build_folder(file, problem, target) if target in build.ARCH else None
    return hash_of(built) if built else None


def hash_of(folder: Path) -> str | None:
    """Hash of the GPU code in builds below `folder`, whatever its kernels and files are called; None: no cubin."""
    found = set()
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            if path.suffix in (".so", ".cubin") and path.is_file() and path.stat().st_size <= cubins.FILE_LIMIT:
                for _, loaded in cubins.images(path.read_bytes()):
                    contents = sorted(hashlib.sha256(section).hexdigest() for section in loaded)
                    found.add(hashlib.sha256("".join(contents).encode()).hexdigest())
    return hashlib.sha256("".join(sorted(found)).encode()).hexdigest()[:16] if found else None
