"""The compile step of a submission: a process of its own, whose caches are kept for the runners of the same closure.

It is hostile code like a runner, in the same jail and with a budget of its own, and it sees no contents but those of
public seeds. What a runner writes is never kept.
"""

import ast
from pathlib import Path

from harness import private
from harness.entrant import Entrant
from harness.problem import Problem

COMPILING = ("triton", "cutlass", "torch.utils.cpp_extension", "problems.common.build", "numba")  # imports


def kind(file: Path) -> str:
    """How the submission `file` is compiled beforehand: by "compile_for", which it defines, by a "call", or "" where
    nothing in it asks for a compiler.
    """
    tree = ast.parse(file.read_text(), str(file))
    if any(isinstance(node, ast.FunctionDef) and node.name == "compile_for" for node in tree.body):
        return "compile_for"
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return "call" if any(name.startswith(COMPILING) for name in names) else ""


def todo(problem: Problem, entrants: tuple[Entrant, ...]) -> list[tuple[str, Entrant, Entrant]]:
    """(kind, entrant, the entrant of its compile step) for those that have none behind them."""
    found = []
    for entrant in entrants:
        if entrant.built or entrant.entry is None:
            continue
        entrant.built = True
        file, target = entrant.entry.file, entrant.target
        how = kind(file)
        if how and private.build_folder(file, problem, target) is None:
            found.append((how, entrant, Entrant(f"{entrant.name} (compile step)", entrant.entry, target, built=True)))
    return found


def keep(problem: Problem, entrant: Entrant) -> str:
    """Keep what the process of `entrant`, which has ended, compiled. -> why it is not kept, or ""."""
    key = private.key(entrant.entry.file, problem, entrant.target)
    try:
        entrant.private.publish(key)
    except private.CacheError as error:  # its runners compile for themselves
        return f"what {entrant.name} compiled is not kept: {error}"
    return ""
