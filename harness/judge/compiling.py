"""The compile step of a submission: a process of its own, whose caches are kept for the runners of the same closure.

It is hostile code like a runner, in the same jail and with a budget of its own, and it sees no contents but those of
public seeds. What a runner writes is never kept.
"""

import ast
from pathlib import Path

from harness.judge.submission import Entrant
from harness.problem import scan, sources
from harness.problem.folders import Problem
from harness.sandbox import workdir
from problems.common import load

COMPILING = ("triton", "cutlass", "torch.utils.cpp_extension", "problems.common.build", "numba")  # imports


def kind(file: Path, folder: Path | None = None) -> str:
    """How the submission `file` to the problem `folder` is compiled beforehand: by "compile_for", which it defines, by
    a "call", or "" where nothing in it, or in what it brings along, asks for a compiler.
    """
    tree = load.parse(file)
    if any(isinstance(node, ast.FunctionDef) and node.name == "compile_for" for node in tree.body):
        return "compile_for"
    names: set[str] = set()
    for path in scan.closure(file, folder):
        if path.suffix == ".py":
            names |= {name for _, name in sources.imports(load.parse(path))}
    return "call" if any(name.startswith(COMPILING) for name in names) else ""


def todo(problem: Problem, entrants: tuple[Entrant, ...]) -> list[tuple[str, Entrant, Entrant]]:
    """(kind, entrant, the entrant of its compile step) for those that have none behind them."""
    found = []
    for entrant in entrants:
        if entrant.built or entrant.entry is None:
            continue
        entrant.built = True
        file, target = entrant.entry.file, entrant.target
        how = kind(file, problem.folder)
        if how and workdir.build_folder(file, problem, target) is None:
            found.append((how, entrant, Entrant(f"{entrant.name} (compile step)", entrant.entry, target, built=True)))
    return found


def keep(problem: Problem, entrant: Entrant) -> str:
    """Keep what the process of `entrant`, which has ended, compiled. -> why it is not kept, or ""."""
    key = workdir.key(entrant.entry.file, problem, entrant.target)
    try:
        entrant.private.publish(key)
    except workdir.CacheError as error:  # its runners compile for themselves
        return f"what {entrant.name} compiled is not kept: {error}"
    return ""
