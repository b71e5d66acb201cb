"""The scan of a submission's text for rule 1: the reserved word, and the plain ways around writing it.

Every file of a submission's closure is read, comments and docstrings too: of a composition's also the modules and the
winners that it brings along. In a comment of a submission to a folder from elsewhere the word is only a warning, since
its authors did not know the rule. problems/common is exempt: it is the judge's. The scan sees only what a text can
show, and nothing relies on it: on a GPU a call that uses another stream cannot be recorded.

A text is read twice: as it is written, and as its compiler takes it. Python's own compiler gives the names and the
constants of a file, where escapes, forms of letters and sums of constants are gone; of C++ lines that go on, letters by
number and neighbouring strings are joined.
"""

import ast
import functools
import io
import re
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

from harness.problem import sources
from problems.common import build, load

WORD = re.compile("stream", re.IGNORECASE)
# The identifier, or the plain word, that holds it. From its begin alone: else a long word is read from each letter on.
_AROUND = re.compile(r"(?<!\w)\w*stream\w*", re.IGNORECASE)
_CPP_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)  # also of CUDA sources within a Python file
_SHOWN = 60  # characters of a line in a message
_CALLS = {"exec", "eval", "__import__", "compile"}  # builtins that make code out of text
# Values of torch.compile that make it capture graphs, and what to do instead.
_GRAPH_MODES = {
    "reduce-overhead": "leave the mode out",
    "max-autotune": 'use "max-autotune-no-cudagraphs"',
    "triton.cudagraphs": "leave the option out",
    "cudagraphs": "use the default backend",
}
_MODULES = {
    "base64",
    "builtins",
    "code",
    "codecs",
    "codeop",
    "marshal",
    "pickle",
    "runpy",
    "zlib",
    "ctypes.util",
}
# What C++ takes a text for, in this order: (pattern, what it is replaced by).
_CPP_FORMS: tuple[tuple[re.Pattern, Any], ...] = (
    (re.compile(r"\\[ \t]*\r?\n"), ""),  # a line goes on
    (
        re.compile(r"\\(?:u([0-9a-fA-F]{4})|U000([0-9a-fA-F]{5})|x([0-9a-fA-F]{2}))"),
        lambda found: chr(min(int(found[1] or found[2] or found[3], 16), 0x10FFFF)),
    ),
    (re.compile(r'"\s*"'), ""),  # neighbouring strings
    (re.compile(r"(?<!\s)\s*##\s*"), ""),  # names put together
)


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
    return sources.files_of(file) + (sources.brought(file, folder) if folder else [])


def source_hash(file: Path, folder: Path | None = None) -> str:
    """Hash of all that the submission `file` is made of, and of what that uses of problems/common."""
    files = closure(file, folder)
    return sources.hash_of((*files, *sources.shared(files)))


def findings(files: list[Path], baseline: bool = False, ours: bool = True) -> list[Finding]:
    """Return what breaks the rules in these files, in order. A baseline may not name the word either; what it calls
    may. ours: the problem has our format; in a comment of a submission to another the word is a warning.
    """
    found: list[Finding] = []
    for file in files:
        text = build.read(file).decode(errors="replace")
        comments = set() if ours else _comments(file, text)
        written: set[str] = set()
        for number, line in enumerate(text.splitlines(), 1):
            matches = list(_AROUND.finditer(line))
            written |= {match[0] for match in matches if (number, match.start()) not in comments}
            if matches:
                found.append(_named(file, number, line, matches[0], {(number, m.start()) for m in matches} <= comments))
        if file.suffix == ".py" and not baseline:
            found += _ways_around(file, load.text(file))
        found += _disguised(file, text, written, ours)
    return found


def _disguised(file: Path, text: str, written: set[str], ours: bool) -> list[Finding]:
    """Return where the compiler finds the word, in identifiers or texts other than those that are `written`. own: as
    for findings; where it is False, comments of C++ do not count, in a string neither.
    """
    found: dict[str, int] = {}
    for line, said in _read_by_compiler(text, file.suffix == ".py"):
        for word in _AROUND.findall(said if ours else _CPP_COMMENT.sub(" ", said)):
            if word not in written:
                found.setdefault(word, line)
    return [
        Finding(file, line, f'"{word}" is put together in the code from here on, and holds the word of rule 1')
        for word, line in found.items()
    ]


@functools.lru_cache(maxsize=4096)  # a composition's files are read for each of its submissions
def _read_by_compiler(text: str, python: bool) -> tuple[tuple[int, str], ...]:
    """Return (line, what is taken for code from there on) of those pieces of a source that hold the word."""
    pieces = _read_by_python(text) if python else [(1, _read_by_cpp(text))]
    return tuple((line, said) for line, said in pieces if WORD.search(said))


def _read_by_cpp(text: str) -> str:
    """Return a C++ source with the forms undone in which a name can be written."""
    for pattern, plain in _CPP_FORMS:
        text = pattern.sub(plain, text)
    return text


def _read_by_python(text: str) -> Iterator[tuple[int, str]]:
    """Yield (first line of the function or class, text) of each name and each text constant of a compiled source."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the source: a literal in a comparison, say
            todo = [compile(text, "submission", "exec", dont_inherit=True)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # what is no Python is said elsewhere
        return
    while todo:
        code = todo.pop()
        line = code.co_firstlineno
        for name in (*code.co_names, *code.co_varnames, *code.co_freevars, *code.co_cellvars):
            yield line, name
        constants = list(code.co_consts)
        while constants:
            constant = constants.pop()
            if isinstance(constant, CodeType):
                todo.append(constant)
            elif isinstance(constant, tuple | frozenset):
                constants.extend(constant)
            elif isinstance(constant, str | bytes):
                yield line, constant if isinstance(constant, str) else constant.decode("latin-1")


def _named(file: Path, number: int, line: str, match: re.Match, in_comment: bool) -> Finding:
    shown = line.strip() if len(line.strip()) <= _SHOWN else f"{line.strip()[: _SHOWN - 3]}..."
    holds = "is" if WORD.fullmatch(match[0]) else "contains"
    return Finding(
        file,
        number,
        f'"{match[0]}" {holds} the reserved word "stream" (rule 1: default stream only; it counts inside other words, '
        f"comments and strings too). Rename it, or leave it out: {shown}",
        in_comment,
    )


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


@functools.lru_cache(maxsize=4096)  # as for _read_by_compiler
def _ways_around(file: Path, _: str) -> tuple[Finding, ...]:
    tree = load.parse(file)
    found = [
        Finding(file, line, f"imports {name}, which no submission gets to see")
        for line, name in sources.imported(file)
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
    return (*found, *_graph_modes(file, tree))


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
