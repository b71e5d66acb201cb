"""Objects within a problem's data that are no plain containers: modules, enums, ranges, classes of the folder.

`take_apart` pickles one without its tensors and arrays, whose memory is delivered like that of all others, and
`put_together` makes it again in another process. That process does not have reference.py, so the definitions of classes
and functions that are met travel along as text. Only what the judge made is ever unpickled, and only in a runner.
"""

import ast
import base64
import functools
import io
import pickle
import sys
import types
from pathlib import Path
from typing import Any, TypeGuard

import numpy
import torch

from harness.runner.failure import RefusedError

_NOT_SENT = ("generate_input", "ref_kernel", "check_implementation")  # the judge's part of a reference
_PACKAGES = ("site-packages", "dist-packages")
_made: dict[str, types.ModuleType] = {}  # by name: modules of definitions that came as text


def take_apart(value: Any) -> tuple[dict, list[Any]]:
    """Return an object as JSON, and its tensors and arrays in order. RefusedError: it cannot be pickled."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(value)
    except Exception as error:  # whatever the methods of a folder's class raise
        raise RefusedError(
            "data may hold what pickle takes: a call gets it in another process. "
            f"{type(value).__name__}: {type(error).__name__}: {error}"
        ) from error
    definitions = {name: _definitions(name, frozenset(wanted)) for name, wanted in pickler.named.items()}
    return {"pickled": base64.b64encode(file.getvalue()).decode(), "definitions": definitions}, pickler.parts


def put_together(spec: dict, parts: list[Any], task: types.ModuleType | None) -> Any:
    """Return the object that `take_apart` gave as `spec`, of these tensors and arrays. A class of task.py is that of
    `task`; one that is nowhere is replaced by a class without methods.
    """
    unpickler = _Unpickler(io.BytesIO(base64.b64decode(spec["pickled"])))
    unpickler.parts, unpickler.task, unpickler.definitions = parts, task, spec["definitions"]
    return unpickler.load()


def is_strided(value: Any) -> TypeGuard[torch.Tensor]:
    """Return whether it is a tensor with dtype, shape and stride, and nothing else that its memory means."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_quantized


def is_array(value: Any) -> TypeGuard[numpy.ndarray]:
    """Return whether it is a numpy array whose memory torch can share."""
    if type(value) is not numpy.ndarray:
        return False
    try:
        torch.from_numpy(value[:0] if value.ndim else value.reshape(1)[:0])
    except (TypeError, ValueError):  # of objects or texts, or of a stride below 0
        return False
    return True


def array_of(answer: Any) -> numpy.ndarray | None:
    """Return a numpy array that came back, a copy of one with strides below 0, which torch does not share; None of all
    else.
    """
    if is_array(answer):
        return answer
    turned = type(answer) is numpy.ndarray and any(stride < 0 for stride in answer.strides)
    copied = numpy.ndarray.copy(answer) if turned else None
    return copied if is_array(copied) else None


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=4)
        self.parts: list[Any] = []
        self.places: dict[int, int] = {}
        self.named: dict[str, set[str]] = {}  # by module: classes and functions that the other process may lack

    def persistent_id(self, value: Any) -> int | None:
        if isinstance(value, torch.Generator):
            raise TypeError("it says what the next random numbers are, and its state would be read before it is there")
        if isinstance(value, torch.UntypedStorage | torch.TypedStorage):
            raise TypeError("a tensor of this kind has memory that is not delivered")
        if not is_strided(value) and not is_array(value):
            return None
        if id(value) not in self.places:  # one that is met twice is one there too
            self.places[id(value)] = len(self.parts)
            self.parts.append(value)
        return self.places[id(value)]

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, type | types.FunctionType) and _is_of_folder(value.__module__):
            self.named.setdefault(value.__module__, set()).add(value.__qualname__.partition(".")[0])
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    parts: list[Any]
    task: types.ModuleType | None
    definitions: dict[str, str]

    def persistent_load(self, place: Any) -> Any:
        return self.parts[place]

    def find_class(self, home: str, name: str) -> Any:
        return find(home, name, self.definitions, self.task)


def find(home: str, name: str, definitions: dict[str, str], task: types.ModuleType | None) -> Any:
    """Return the class or function of that name in this process: of `task`, of a module that is here, of the
    definitions that came along, else a class without methods.
    """
    outer, *inner = name.split(".")
    found: Any = getattr(task, outer, None) if home.rpartition(".")[2] == "task" else None
    if found is None:
        try:
            found = pickle.Unpickler(io.BytesIO()).find_class(home, outer)
        except (ImportError, AttributeError):
            found = getattr(_defined(home, definitions.get(home, "")), outer, None)
    for part in inner:
        found = getattr(found, part, None)
    return type(name, (), {}) if found is None else found


def definitions_of(kind: type) -> dict[str, str]:
    """Return the definition of a class of the folder, by its module; {} for a package's."""
    module, name = kind.__module__, kind.__qualname__.partition(".")[0]
    return {module: _definitions(module, frozenset({name}))} if _is_of_folder(module) else {}


def _is_of_folder(home: str) -> bool:
    file = getattr(sys.modules.get(home), "__file__", None)
    if file is None or home.rpartition(".")[2] == "task" or home.partition(".")[0] in sys.stdlib_module_names:
        return False
    return not any(part in _PACKAGES for part in Path(file).parts)


@functools.cache
def _definitions(module: str, wanted: frozenset[str]) -> str:
    """Return the statements of a module that these names need, in order: definitions, constants and imports."""
    source = Path(str(sys.modules[module].__file__)).read_text(encoding="utf-8-sig")
    statements = ast.parse(source).body
    binds = [_bound(statement) for statement in statements]
    needed: set[int] = set()
    todo = set(wanted)
    while todo:
        name = todo.pop()
        for i, statement in enumerate(statements):
            if name in binds[i] and i not in needed:
                needed.add(i)
                todo |= {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
    needed |= {i for i, statement in enumerate(statements) if getattr(statement, "module", None) == "__future__"}
    return "\n".join(ast.unparse(statements[i]) for i in sorted(needed))


def _bound(statement: ast.stmt) -> set[str]:
    """Return the names that a statement of a module binds, without those of the judge's part."""
    if isinstance(statement, ast.ClassDef | ast.FunctionDef):
        return {statement.name} - {*_NOT_SENT}
    names = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.alias):
            names.add(node.asname or node.name.partition(".")[0])
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
    return names - {*_NOT_SENT}


def _defined(name: str, text: str) -> types.ModuleType:
    """Return a module of these definitions, made once; an empty one where they do not run here."""
    if name not in _made or _made[name].__doc__ != text:
        made = types.ModuleType(name, text)
        sys.modules.setdefault(name, made)  # dataclasses look their module up
        try:
            exec(compile(text, name, "exec"), vars(made))  # the reference's own text, from the judge
        except Exception:  # such as an import of what the runner lacks
            vars(made).clear()
        made.__doc__ = text
        _made[name] = made
    return _made[name]
