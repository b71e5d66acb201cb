"""The scan of a submission's text for rule 1: the reserved word, and the plain ways around writing it.

Every file of a submission's closure is read, comments and docstrings too: of a composition's also the modules and the
winners that it brings along. In a comment of a submission to a folder from elsewhere the word is only a warning, since
its authors did not know the rule. problems/common is exempt: it is the judge's. The run-time audit sees what really ran
on which stream; the scan sees only what a text can show.
"""

import ast
import io
import re
import tokenize
from dataclasses import dataclass
from pathlib import Path

from harness.problem import sources
from harness.results import record
from problems.common import build, load

WORD = re.compile("stream", re.IGNORECASE)
_AROUND = re.compile(r"\w*stream\w*", re.IGNORECASE)  # the identifier, or the plain word, that holds it
_CPP_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)  # also of CUDA sources within a Python file
_SHOWN = 60  # characters of a line in a message
_CALLS = {"exec", "eval", "__import__", "compile"}  # builtins that make code out of text
# Values of torch.compile that make it capture graphs, and what to do instead.
_GRAPH_MODES = {
    "reduce-overhead": "leave the mode out", "max-autotune": 'use "max-autotune-no-cudagraphs"',
    "triton.cudagraphs": "leave the option out", "cudagraphs": "use the default backend",
}  # fmt: skip
_MODULES = {"base64", "codecs", "marshal", "pickle", "zlib", "ctypes.util"}


@dataclass(frozen=True)
class Finding:
    """What breaks a rule, or, with `warns`, only may."""

    file: Path
    line: int
    what: str
    warns: bool = False

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


def findings(files: list[Path], baseline: bool = False, own: bool = True) -> list[Finding]:
    """Return what breaks the rules in these files, in order. A baseline may not name the word either; what it calls
    may. own: the problem is ours; in a comment of a submission to another the word is a warning.
    """
    found: list[Finding] = []
    for file in files:
        text = build.read(file).decode(errors="replace")
        comments = set() if own else _comments(file, text)
        for number, line in enumerate(text.splitlines(), 1):
            matches = list(_AROUND.finditer(line))
            if matches:
                found.append(_named(file, number, line, matches[0], {(number, m.start()) for m in matches} <= comments))
        if file.suffix == ".py" and not baseline:
            found += _ways_around(file)
    return found


def _named(file: Path, number: int, line: str, match: re.Match, in_comment: bool) -> Finding:
    shown = line.strip() if len(line.strip()) <= _SHOWN else f"{line.strip()[: _SHOWN - 3]}..."
    holds = "is" if WORD.fullmatch(match[0]) else "contains"
    return Finding(
        file, number,
        f'"{match[0]}" {holds} the reserved word "stream" (rule 1: default stream only; it counts inside other words, '
        f"comments and strings too). Rename it, or leave it out: {shown}",
        in_comment,
    )  # fmt: skip


def _comments(file: Path, text: str) -> set[tuple[int, int]]:
    """Return (line, column) of each word that holds the reserved one and is in a comment: of Python, or of C++ in a
    source or in a string of several lines.
    """
    if file.suffix != ".py":
        return _within(text, 1, 0)
    found: set[tuple[int, int]] = set()
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            (row, column), said = token.start, token.string
            if token.type == tokenize.COMMENT:
                found |= {(row, column + match.start()) for match in _AROUND.finditer(said)}
            elif token.type == tokenize.STRING and "\n" in said:
                found |= _within(said, row, column)
    except (tokenize.TokenError, IndentationError):  # what is no Python is said elsewhere
        pass
    return found


def _within(text: str, row: int, column: int) -> set[tuple[int, int]]:
    """Return (line, column) of such words in C++ comments of a text that begins at a place."""
    found = set()
    for comment in _CPP_COMMENT.finditer(text):
        for match in _AROUND.finditer(comment[0]):
            before = text[: comment.start() + match.start()]
            line = before.count("\n")
            found.add((row + line, len(before) - before.rfind("\n") - 1 + (0 if line else column)))
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
            found.append(Finding(file, line, "captures a graph, which needs a separate stream (rule 1)"))
    return found + _graph_modes(file, tree)


def _graph_modes(file: Path, tree: ast.Module) -> list[Finding]:
    """Return where a file that compiles names a graph mode of torch.compile, other than to switch it off."""
    nodes = list(ast.walk(tree))
    if "compile" not in {getattr(node, "attr", None) or getattr(node, "name", None) for node in nodes}:
        return []
    pairs = [pair for node in nodes if isinstance(node, ast.Dict) for pair in zip(node.keys, node.values, strict=True)]
    off = {key for key, value in pairs if isinstance(value, ast.Constant) and value.value is False}
    found = []
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in _GRAPH_MODES:
            said = (
                f'torch.compile with "{node.value}" captures graphs, which run on a separate stream (rule 1: '
                f"default stream only): {_GRAPH_MODES[node.value]}"
            )
            found += [Finding(file, node.lineno, said)] if node not in off else []
    return found


def _rooted(node: ast.Attribute, name: str) -> bool:
    inner = node.value
    return (isinstance(inner, ast.Attribute) and inner.attr == name) or (
        isinstance(inner, ast.Name) and inner.id == name
    )
