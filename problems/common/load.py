"""Load the modules of a problem folder. Each folder has a separate namespace, so that several live in one process.

A folder's modules become `problems.<folder>.<module>`; while one of them is executed, the bare names `task` (and,
for GPU MODE folders, `utils`) mean that folder's own files. Submissions import them at module level only.
"""

import ast
import contextlib
import functools
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import io
import sys
import threading
import tokenize
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from problems.common import build

PROBLEMS = Path(__file__).resolve().parent.parent
ROOT = __name__.removesuffix(".common.load")  # "problems"; in the wheel of packaging/, dsv4_kernels.problems
TARGETS = {9: "sm90", 10: "sm100"}  # by major compute capability
_BARE = ("task", "utils", "reference")  # names that mean "this folder's"
PYTHON_LIMIT = 2**20  # bytes of a Python file that is read; its tree takes a thousand times that
_lock = threading.RLock()  # binding bare names changes sys.modules for the whole process


def module(folder: Path, stem: str, extra: dict[str, ModuleType] | None = None) -> ModuleType:
    """Module `stem` ("task", "variants/sm90_plain", ...) of `folder`, loaded once. `extra`: further bare names bound
    while it loads. FileNotFoundError if there is no such file; whatever the module raises comes through.
    """
    folder = folder.resolve()
    return from_file(folder, folder / f"{stem}.py", extra)


def from_file(folder: Path, file: Path, extra: dict[str, ModuleType] | None = None) -> ModuleType:
    """`file`, which may lie outside `folder`, loaded once as a module of that folder's problem."""
    folder, file = folder.resolve(), file.resolve()
    if not file.is_file():
        # In a runner a problem is there if the submission composes it; a path there is shown as that of the checkout.
        hint = "" if folder.is_dir() else f": a submission that composes {folder.name} names it in COMPOSES"
        raise FileNotFoundError(f"no file {file}{hint}")
    name = _name(folder, file)
    with _lock:
        if name in sys.modules:
            return sys.modules[name]
        bare = dict(extra or {})
        if file.stem not in ("task", "utils") and not _is_bound(folder):
            bare["task"] = from_file(folder, folder / "task.py", extra)
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise ImportError(f"{file} is no Python source")
        loaded = importlib.util.module_from_spec(spec)
        sys.modules[name] = loaded
        try:
            with contextlib.nullcontext() if _is_bound(folder) else _bound(bare):
                spec.loader.exec_module(loaded)
        except BaseException:
            del sys.modules[name]
            raise
        return loaded


def bind(folder: Path, files: dict[str, Path]) -> None:
    """From now on these files, by names such as "utils.py" or "helpers/scale.py", are modules of this whole process.
    For a process that deals with one problem folder in GPU MODE's format, whose files import each other at any time.
    """
    for old in [finder for finder in sys.meta_path if isinstance(finder, _Files)]:
        sys.meta_path.remove(old)
        for name in [name for name in sys.modules if f"{name.replace('.', '/')}.py" in old.files]:
            del sys.modules[name]
    sys.meta_path.insert(0, _Files(folder.resolve(), files))


def bound(name: str) -> ModuleType:
    """Return the module of that name that `bind` made available, the same as an import gives."""
    return __import__(name)


class _Files(importlib.abc.MetaPathFinder):
    """Finds the files of one folder by their names."""

    def __init__(self, folder: Path, files: dict[str, Path]) -> None:
        self.folder, self.files = folder, files

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        place = name.replace(".", "/")
        for file, within in ((f"{place}.py", None), (f"{place}/__init__.py", [])):
            if file in self.files:
                found = self.files[file]
                return importlib.util.spec_from_file_location(name, found, submodule_search_locations=within)
        if any(file.startswith(f"{place}/") for file in self.files):
            return importlib.machinery.ModuleSpec(name, None, is_package=True)
        return None


def _is_bound(folder: Path) -> bool:
    return any(isinstance(finder, _Files) and finder.folder == folder for finder in sys.meta_path)


def variant(problem: str, name: str) -> ModuleType:
    """Variant `name` of one of our problems, for submission.py and the composition."""
    return module(PROBLEMS / problem, f"variants/{name}")


def text(file: Path) -> str:
    """The text of the Python file `file`, which must be UTF-8. SyntaxError: it is not, whatever else it says.

    build.BuildError: it is no plain file, or too large.
    """
    content = build.read(file.resolve())
    if len(content) > PYTHON_LIMIT:
        raise build.BuildError(f"{file} is larger than {PYTHON_LIMIT // 2**20} MiB, the most that it may have")
    try:
        decoded = content.decode("utf-8-sig")
        # With another encoding the interpreter would see another text than the judge.
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
    except UnicodeDecodeError as error:
        raise _no_python(file, f"it must be UTF-8: {error.reason}", content.count(b"\n", 0, error.start) + 1) from None
    except SyntaxError as error:  # an encoding that does not exist
        raise _no_python(file, error.msg) from None
    if encoding not in ("utf-8", "utf-8-sig"):
        raise _no_python(file, f"it must be UTF-8, but says that it is {encoding}")
    return decoded


def parse(file: Path) -> ast.Module:
    """The syntax tree of the Python file `file`, not to be changed. SyntaxError, with file and line, whatever is wrong
    with its text. build.BuildError: it is no plain file, or too large.
    """
    return _parsed(text(file), file)


@functools.lru_cache(maxsize=256)  # the board and a run read each file for many hashes
def _parsed(source: str, file: Path) -> ast.Module:
    try:
        return ast.parse(source, str(file))
    except (RecursionError, MemoryError):
        raise _no_python(file, "it is nested too deeply") from None
    except SyntaxError as error:
        raise _no_python(file, error.msg, error.lineno or 1) from None
    except ValueError as error:
        raise _no_python(file, str(error)) from None


def _no_python(file: Path, why: str, line: int = 1) -> SyntaxError:
    return SyntaxError(why, (str(file), line, None, None))


def constants(file: Path, *names: str) -> dict[str, Any]:
    """Literal module-level constants of `file`, read without running it; absent ones are left out.

    ValueError if one is not a literal. SyntaxError, build.BuildError: see `parse`.
    """
    found = {}
    for node in parse(file).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            value = getattr(node, "value", None)
            if isinstance(target, ast.Name) and target.id in names and value is not None:
                try:
                    found[target.id] = ast.literal_eval(value)
                except (ValueError, TypeError, RecursionError, MemoryError) as error:
                    raise ValueError(f"{file.name}:{node.lineno}: {target.id} must be a literal") from error
    return found


def summary(file: Path) -> str:
    """The first line of the module docstring of `file`, or ""."""
    return (ast.get_docstring(parse(file)) or "").partition("\n")[0]


def winners(folder: Path) -> dict[str, tuple[str, ...]]:
    """Return WINNERS of submission.py in `folder`: by target, variants in order of preference. {} if it has none."""
    return constants(folder / "submission.py", "WINNERS").get("WINNERS", {})


def winner(folder: Path, target: str) -> str:
    """Return the first of the winners for `target` whose CPU_FLAGS this machine has.

    ValueError: no winner for the target, or none that this CPU can run.
    """
    known = winners(folder)
    if target not in known:
        raise ValueError(f"target must be one of {sorted(known)}, for which there is a winner, got {target!r}")
    for name in known[target]:
        if not missing_cpu_flags(folder / "variants" / f"{name}.py"):
            return name
    raise ValueError(f"this CPU can run none of {known[target]}")


def missing_cpu_flags(file: Path) -> list[str]:
    """What the literal CPU_FLAGS of `file` names and /proc/cpuinfo does not."""
    return sorted(set(constants(file, "CPU_FLAGS").get("CPU_FLAGS", ())) - _cpu_flags())


@functools.cache
def _cpu_flags() -> frozenset[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def device_target(device: Any) -> str:
    """The target of a torch device: "cpu", "sm90" or "sm100". ValueError: it names no CPU or GPU of this machine that
    torch can use, or a GPU of another generation.
    """
    import torch

    try:
        device = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device must be cpu, cuda or cuda:N, got {device!r}") from error
    if device.type == "cpu":
        return "cpu"
    if device.type != "cuda":
        raise ValueError(f"device must be cpu, cuda or cuda:N, got {str(device)!r}")
    try:
        major, minor = torch.cuda.get_device_capability(device)
    except (AssertionError, RuntimeError) as error:  # a torch without CUDA, no driver, or fewer GPUs
        raise ValueError(f"device {device} is no GPU that torch can use here: {error}") from error
    if major not in TARGETS:
        raise ValueError(f"device must be a CPU or a GPU of sm_90 or sm_100, got sm_{major}{minor}")
    return TARGETS[major]


def _name(folder: Path, file: Path) -> str:
    inside = folder.parent == PROBLEMS
    root = f"{ROOT}.{folder.name}" if inside else f"{ROOT}._{folder.name}_{_digest(folder)}"
    if file.is_relative_to(folder):
        return ".".join((root, *file.relative_to(folder).with_suffix("").parts))
    return f"{root}._{file.stem}_{_digest(file)}"


def _digest(path: Path) -> str:
    return hashlib.sha256(str(path).encode()).hexdigest()[:8]


@contextlib.contextmanager
def _bound(modules: dict[str, ModuleType]) -> Iterator[None]:
    """Within: each bare name means the given module, and the other bare names mean nothing."""
    names = {*_BARE, *modules}
    before = {name: sys.modules.pop(name, None) for name in names}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update({name: old for name, old in before.items() if old is not None})
