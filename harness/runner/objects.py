"""Classes, functions, enums' members and dtypes of a problem's data, by the names by which another process finds them.

That process does not have reference.py. Where data names its classes it comes along as text, without the judge's part.
"""

import ast
import enum
import functools
import operator
import pkgutil
import sys
import types
from pathlib import Path
from typing import Any

import torch

from harness.runner.failure import RefusedError

JUDGES = ("generate_input", "ref_kernel", "check_implementation")  # functions of reference.py


def name_of(value: Any) -> str:
    """Return "module:name" of a class, function, enum's member or dtype, "" of what has no such name."""
    if isinstance(value, torch.dtype):
        return str(value).replace(".", ":")
    if isinstance(value, enum.Enum):
        return f"{name_of(type(value))}.{value.name}"
    if isinstance(value, types.BuiltinFunctionType):
        return f"{value.__module__}:{value.__name__}"
    named = isinstance(value, type | types.FunctionType) and "<" not in value.__qualname__
    return f"{value.__module__}:{value.__qualname__}" if named else ""


def find(name: str, task: types.ModuleType | None = None) -> Any:
    """Return what has that name in this process. task: the module whose names those of a task.py are."""
    home, _, path = name.partition(":")
    of_task = task if home.rpartition(".")[2] == "task" else None
    return operator.attrgetter(path)(of_task or sys.modules.get(home) or pkgutil.resolve_name(home))


def see_found(spec: dict) -> None:
    """RefusedError: data has a class or function that another process does not find by its name."""
    if spec["type"] in ("class", "named", "object"):
        try:
            find(spec["value"])
        except (ImportError, AttributeError, ValueError):
            named = spec["value"] or "one within a function"
            raise RefusedError(f"data may hold classes and functions that modules define, got {named}") from None


def needed(reference: types.ModuleType, spec: dict, hidden: frozenset[str] = frozenset()) -> dict[str, str]:
    """The text of a reference, by module, if a specification names what it defines, else {}. hidden: stays here."""
    names, todo = set[str](), [spec]
    for node in todo:
        todo += node.get("items", ())
        home, _, name = str(node.get("value")).partition(":")
        names |= {name.partition(".")[0]} if home == reference.__name__ else set()
    classes = ", ".join(sorted(name for name in names if isinstance(getattr(reference, name, None), type)))
    public = f"from {reference.__name__} import {classes}" if classes else ""
    return {reference.__name__: _text(reference, hidden), "reference": public} if names else {}


@functools.cache
def _text(reference: types.ModuleType, hidden: frozenset[str]) -> str:
    """Return the text of reference.py without the judge's part. RefusedError: it does not run without that."""
    parsed = ast.parse(Path(str(reference.__file__)).read_text(encoding="utf-8-sig"))
    parsed.body = [statement for statement in parsed.body if not _bound(statement) & {*JUDGES, *hidden}]
    text = ast.unparse(parsed)
    try:
        exec(compile(text, "reference.py", "exec"), vars(types.ModuleType(reference.__name__)))
    except Exception as error:
        raise RefusedError(
            f"data has objects of classes of reference.py, which raises {type(error).__name__}: {error} without "
            f"{', '.join([*JUDGES, *hidden])}, as a call's process has it: move the classes to task.py"
        ) from error
    return text


def _bound(statement: ast.stmt) -> set[str]:
    """Return the names that a definition or an assignment binds, or the modules that an import names."""
    targets = [target.id for target in getattr(statement, "targets", ()) if isinstance(target, ast.Name)]
    modules = [alias.name for alias in statement.names] if isinstance(statement, ast.Import) else []
    return {getattr(statement, "name", ""), str(getattr(statement, "module", "")), *targets, *modules}


def define(texts: dict[str, str]) -> None:
    """Make these texts the modules of their names in this process, but for what it has: a submission imported that."""
    for name, text in texts.items():
        if sys.modules.get(name):
            continue
        module = sys.modules[name] = types.ModuleType(name)  # before its classes: dataclasses look their module up
        exec(compile(text, name, "exec"), vars(module))
