"""What a submission is made of: its own sources, and what a composition's submissions bring along.

A composition is a problem folder in problems/ whose task.py says `COMPOSITION = True`. Only its submissions may import
modules of their folder and of the folders in it (`from problems.<folder>.cache import pages`), and name in a literal,
`COMPOSES = ("nvfp4_gemv",)`, the problems whose winners they call through problems/common/load.py. Nothing is run.
"""

import ast
import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from harness.results.hashes import content_hash
from problems.common import build, load

SUFFIXES = {".cu", ".cuh", ".cpp", ".h", ".hpp"}  # of sources beside a Python file
# What task.py says of sm100 only. It is no part of problem_hash, or records of other targets would seem to be of
# another problem; a record names its case.
_LATER = {"BENCHMARKS_SM100", "ONLY_BY_TARGET"}
_LONGEST = 14_000  # bits of an integer that Python writes in decimal
_NOTHING = object()
# Of a problem folder, what no runner gets to see. A winner's variant is loaded, not imported.
_HIDDEN = ("reference", "check", "wrong", "variants")
_NAME_LIMIT = 4096  # characters of a module's dotted name
_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def closure(file: Path, folder: Path | None = None) -> list[Path]:
    """All that `file` is made of; without a folder its own sources alone. ValueError, SyntaxError: unreadable."""
    return files_of(file) + (brought(file, folder) if folder else [])


def source_hash(file: Path, folder: Path | None = None) -> str:
    """Hash of all that the submission `file` is made of, and of what that uses of problems/common."""
    files = closure(file, folder)
    return content_hash((path.name, content(path)) for path in sorted((*files, *shared(files))))


def files_of(file: Path) -> list[Path]:
    """`file`, the sources beside it that share its stem or whose name is one of its texts, and headers that these
    include, all in its folder or below (see build.closure). ValueError: one of them cannot be read, or there are too
    many. SyntaxError: `file` is not Python.
    """
    file = file.resolve()
    siblings = [path for path in file.parent.iterdir() if path.suffix in SUFFIXES]
    named = {node.value for node in ast.walk(load.parse(file)) if siblings and isinstance(node, ast.Constant)}
    siblings = sorted(path for path in siblings if path.name.startswith(f"{file.stem}.") or path.name in named)
    if odd := [path for path in (file, *siblings) if not str(path).isprintable()]:
        raise ValueError(f"{str(odd[0])!r}: the name of a source must be plain text")
    try:
        closure = build.closure(*siblings) if siblings else []
    except build.BuildError as error:
        raise ValueError(str(error)) from None
    return [file, *(path for path in closure if path != file and build.COMMON not in path.parents)]


def brought(file: Path, folder: Path) -> list[Path]:
    """Beyond that, for the runner of a submission to the composition `folder`: its modules that `file` imports, at any
    distance, and of each composed problem task.py, submission.py and the winners, with their sources, and in_model.py
    where it has one, with the modules of `folder` that this imports; [] for another problem. ValueError: COMPOSES in
    another problem, or malformed. SyntaxError: a module is not Python.
    """
    composed = composes(file, folder)
    if not is_composition(folder):
        return []
    users = [file, *(bridge for name in composed for bridge in _in_model(name))]
    paths = dict.fromkeys(path for user in users for module in modules(user, folder) for path in files_of(module))
    for name in composed:
        paths |= dict.fromkeys(_winners(name))
    return [path for path in paths if path not in files_of(file)]


def shared(files: Iterable[Path]) -> list[Path]:
    """What `files` use of problems/common, at any distance: headers, modules. ValueError, SyntaxError: unreadable."""

    def used(path: Path) -> list[Path | None]:
        if path.suffix == ".py":
            return [_found(name, build.COMMON, "problems.common") for _, name in imported(path)]
        try:
            return [header for header in build.closure(path) if build.COMMON in header.parents]
        except build.BuildError as error:
            raise ValueError(str(error)) from None

    return _reached(files, used)


def problem_hash(folder: Path, others: Iterable[Path] = ()) -> str:
    """Hash of what defines a problem. others: of GPU MODE's files. ValueError, SyntaxError, YAMLError: unreadable."""
    files = [folder / name for name in ("task.py", "reference.py")] + list(others)
    files = [file.resolve() for file in files if file.is_file()]
    if is_composition(folder):  # whose reference is made of the folder's modules
        files += modules(folder / "reference.py", folder)
    files += helpers(folder.resolve()).values()
    cases = task_yml(folder)
    whole = {*files, *shared(files), *([cases] if cases.is_file() else [])}
    return content_hash((path.name, content(path, docstrings=False)) for path in sorted(whole))


def content(path: Path, docstrings: bool = True) -> bytes:
    """What a source says: of Python its syntax tree, of YAML its data, else its bytes. SyntaxError: no Python."""
    if path.suffix in (".yml", ".yaml"):
        return json.dumps(yaml.safe_load(build.read(path.resolve())), sort_keys=True, default=str).encode()
    return _syntax(load.parse(path), docstrings) if path.suffix == ".py" else path.read_bytes()


@functools.lru_cache(maxsize=512)
def _syntax(tree: ast.Module, docstrings: bool) -> bytes:
    if not docstrings:
        later = [node for node in tree.body if isinstance(node, ast.Assign) and _LATER & _targets(node)]
        tree = ast.Module([node for node in tree.body if node not in later], [])
    return _dump(tree, docstrings).encode()


def _targets(node: ast.Assign) -> set[str]:
    return {target.id for target in node.targets if isinstance(target, ast.Name)}


def _dump(tree: ast.AST, docstrings: bool) -> str:
    """A syntax tree of any depth as text, the same for every version of Python, which `ast.dump` is not."""
    parts: list[str] = []
    todo: list[tuple[str, Any]] = [("", tree)]  # texts, and what comes behind each; the last one is the next
    while todo:
        label, node = todo.pop()
        parts.append(label)
        if isinstance(node, ast.AST):
            fields = dict(ast.iter_fields(node))
            if not docstrings and isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
                fields["body"] = fields["body"][1:]
            inner = [(f"{name}=", value) for name, value in fields.items() if value not in (None, [])]
            opening, closing = f"{type(node).__name__}(", ")"
        elif isinstance(node, list):
            inner, opening, closing = [("", each) for each in node], "[", "]"
        else:
            is_long = isinstance(node, int) and node.bit_length() > _LONGEST
            parts += [] if node is _NOTHING else [hex(node) if is_long else repr(node)]
            continue
        parts.append(opening)
        todo.append((closing, _NOTHING))
        todo += [(f",{label}" if number else label, value) for number, (label, value) in enumerate(inner)][::-1]
    return "".join(parts)


def is_composition(folder: Path) -> bool:
    task = folder / "task.py"
    return task.is_file() and load.constants(task, "COMPOSITION").get("COMPOSITION") is True


def composes(file: Path, folder: Path) -> tuple[str, ...]:
    """Names of the problems that the submission `file` to `folder` composes. ValueError: it may not, or not these."""
    names = load.constants(file, "COMPOSES").get("COMPOSES", ())
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{file.name}: COMPOSES must be a tuple of problems' names, got {names!r}")
    if names and not is_composition(folder):
        raise ValueError(f"{file.name}: COMPOSES is for compositions, {folder.name}/task.py says no COMPOSITION = True")
    for name in names:
        other = load.PROBLEMS / name
        needed = (other / "task.py", other / "submission.py")
        if not name.isidentifier() or not all(path.is_file() for path in needed) or is_composition(other):
            wanted = "problems with a task.py and a submission.py that are no compositions"
            raise ValueError(f"{file.name}: COMPOSES must name {wanted}, got {name!r}")
    return names


def modules(file: Path, folder: Path) -> list[Path]:
    """Return the modules of `folder` that `file` imports, at any distance: `problems.<folder>.<module>`, or deeper."""

    def used(path: Path) -> list[Path | None]:
        names = [name for _, name in imported(path) if not _is_hidden(name)]
        return [_found(name, folder, f"problems.{folder.name}") for name in names]

    return [module for module in _reached([file.resolve()], used) if module != file.resolve()]


def helpers(folder: Path) -> dict[str, Path]:
    """By place, the modules that reference.py imports by name; hidden from submissions. SyntaxError: no Python."""

    def used(path: Path) -> list[Path | None]:
        return [_found(f".{name}", folder, "") for _, name in imported(path)] if path.is_file() else []

    paths = [path for path in _reached([folder / "reference.py"], used) if folder in path.parents]
    return {str(path.relative_to(folder)): path for path in paths if path.name != "submission.py"}


def _reached(files: Iterable[Path], used: Callable[[Path], Iterable[Path | None]]) -> list[Path]:
    """Return what `files` use, and what that uses, each once."""
    paths: dict[Path, None] = {}
    todo = list(files)
    while todo:
        new = dict.fromkeys(path for path in used(todo.pop(0)) if path and path not in paths)
        paths |= new
        todo += new
    return list(paths)


def imported(path: Path) -> tuple[tuple[int, str], ...]:
    """(line, dotted name) of every absolute import of a Python file. SyntaxError: it is not Python."""
    return _imported(path, load.text(path))


@functools.lru_cache(maxsize=4096)  # a run reads the files of a composition for each hash
def _imported(path: Path, _: str) -> tuple[tuple[int, str], ...]:
    return tuple(_imports(load.parse(path)))


def _imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every absolute import, those in functions too; `from a import b` counts as a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and _called(node.func) == "import_module":
            yield from ((node.lineno, str(name.value)) for name in node.args[:1] if isinstance(name, ast.Constant))


def _called(function: ast.expr) -> str:
    """The last name of what is called, "" if it has none."""
    return getattr(function, "attr", getattr(function, "id", ""))


def _is_hidden(name: str) -> bool:
    """Whether the module of that dotted name is one of a problem's that no runner gets to see."""
    parts = name.split(".")
    return len(parts) > 2 and parts[0] == "problems" and parts[1] != "common" and parts[2] in _HIDDEN


def defines(tree: ast.Module, name: str) -> bool:
    """Return whether a module defines `name`: as a function of its own, or as the name of another."""
    defined = [_targets(node) if isinstance(node, ast.Assign) else {getattr(node, "name", "")} for node in tree.body]
    return name in set().union(*defined)


def _found(name: str, folder: Path, package: str) -> Path | None:
    """Return the file of the module `name` of the package `package`, which is `folder`; None: it has no such module."""
    if not name.startswith(f"{package}.") or len(name) > _NAME_LIMIT:
        return None
    path = folder
    for part in name.removeprefix(f"{package}.").split("."):
        if os.path.isfile(path / f"{part}.py"):  # no error for a name that no file can have
            return (path / f"{part}.py").resolve()
        path = path / part
    return None


def _winners(name: str) -> list[Path]:
    """Sources of the problem `name` with which load.variant can serve every target. ValueError: a winner is missing."""
    folder = load.PROBLEMS / name
    files = [folder / "task.py", *files_of(folder / "submission.py"), *_in_model(name)]
    for variant in dict.fromkeys(v for variants in load.winners(folder).values() for v in variants):
        file = folder / "variants" / f"{variant}.py"
        if not file.is_file():
            raise ValueError(f"{name}/submission.py: WINNERS names {variant!r}, but there is no {file.name}")
        files += files_of(file)
    return [path.resolve() for path in files]


def _in_model(name: str) -> list[Path]:
    """in_model.py of the problem `name`, which says how its variants serve a composition, if it has one."""
    file = load.PROBLEMS / name / "in_model.py"
    return [file] if file.is_file() else []


def task_yml(folder: Path) -> Path:
    """Return the file with the cases of a folder in GPU MODE's format, which may be missing."""
    other = folder / "task.yaml"
    return other if other.is_file() and not (folder / "task.yml").is_file() else folder / "task.yml"


def qualified(folder: Path) -> str:
    """Return a problem's name with where it comes from, if that is no folder of ours: records stay apart."""
    return f"{folder.name}@{folder.parent.name}-{hashlib.sha256(bytes(folder)).hexdigest()[:8]}"
