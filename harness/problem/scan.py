"""The scan of a submission's text for rule 1: the forbidden word, and the plain ways around writing it.

Every file of a submission's closure is read, comments and docstrings too: of a composition's also the modules and the
winners that it brings along. problems/common is exempt: it is the judge's. What really ran where is for the run-time
audit; this is only what a text can show.
"""

import ast
import re
from dataclasses import dataclass
from pathlib import Path

from harness.problem import sources
from harness.results import record
from problems.common import build, load

WORD = re.compile("stream", re.IGNORECASE)
_CALLS = {"exec", "eval", "__import__", "compile"}  # builtins that make code out of text
_MODULES = {"base64", "codecs", "marshal", "pickle", "zlib", "ctypes.util"}


@dataclass(frozen=True)
class Finding:
    file: Path
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.file.name}:{self.line}: {self.what}"


def closure(file: Path, folder: Path | None = None) -> list[Path]:
    """All that the submission `file` to the problem `folder` is made of (harness/problem/sources.py); without a folder
    its own sources alone. ValueError, SyntaxError: one of them cannot be read (harness/problem/folders.py says so
    beforehand).
    """
    return sources.own(file) + (sources.brought(file, folder) if folder else [])


def source_hash(file: Path, folder: Path | None = None) -> str:
    """Hash of all that the submission `file` is made of, and of what that uses of problems/common."""
    files = closure(file, folder)
    return record.source_hash((*files, *sources.shared(files)))


def findings(files: list[Path], baseline: bool = False) -> list[Finding]:
    """What breaks the rule in these files, in order. A baseline may not name the word either; what it calls may."""
    found: list[Finding] = []
    for file in files:
        text = build.read(file).decode(errors="replace")
        for number, line in enumerate(text.splitlines(), 1):
            if match := WORD.search(line):
                found.append(Finding(file, number, f'names "{match[0]}": everything runs on the default one'))
        if file.suffix == ".py" and not baseline:
            found += _ways_around(file)
    return found


def _ways_around(file: Path) -> list[Finding]:
    tree = load.parse(file)
    found = [
        Finding(file, line, f"imports {name}, which no submission gets to see")
        for line, name in sources.imports(tree)
        if sources.hidden(name)
    ]
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in _CALLS:
                found.append(Finding(file, line, f"calls {node.func.id}(): code must stand in the file"))
            literal = len(node.args) < 2 or isinstance(node.args[1], ast.Constant)
            if node.func.id == "getattr" and not literal:
                found.append(Finding(file, line, "getattr with a name that is computed"))
        if isinstance(node, ast.Import):
            names = {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {node.module or ""}
        else:
            names = set()
        found += [Finding(file, line, f"imports {name}: code must be readable") for name in sorted(names & _MODULES)]
        if isinstance(node, ast.Attribute) and node.attr in ("CUDAGraph", "graph") and _rooted(node, "cuda"):
            found.append(Finding(file, line, "captures a graph, which needs a separate queue"))
    return found


def _rooted(node: ast.Attribute, name: str) -> bool:
    inner = node.value
    return (isinstance(inner, ast.Attribute) and inner.attr == name) or (
        isinstance(inner, ast.Name) and inner.id == name
    )
