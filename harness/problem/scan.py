"""The scan of a submission's text for rule 1: the reserved word, and the plain ways around writing it.

Every file of a submission's closure is read, comments and docstrings too: of a composition's also the modules and the
winners that it brings along. In a comment of a submission to a folder from elsewhere the word is only a warning, since
its authors did not know the rule. problems/common is exempt: it is the judge's. The scan sees only what a text can
show, and nothing relies on it: on a GPU a call that uses another stream cannot be recorded.

A text is read twice: as it is written, and as its compiler takes it. Python's own compiler gives the names and the
constants of a file, where escapes, forms of letters and sums of constants are gone; of C++ lines that go on, letters by
number and neighbouring strings are joined.

Python's compiler may need any time and memory for a small text. So the judge runs this file as a program in a jail,
`python -m harness.problem.scan FD`, once a run (harness/judge/scanning.py). It needs little of the project.
"""

import ast
import io
import re
import resource
import socket
import sys
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

from harness.runner import wire

WORD = re.compile("stream", re.IGNORECASE)
# The identifier, or the plain word, that holds it. From its begin alone: else a long word is read from each letter on.
_AROUND = re.compile(r"(?<!\w)\w*stream\w*", re.IGNORECASE)
_CPP_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_LINE_COMMENT = re.compile(r"//[^\n]*")
_NEVER_CLOSED = "\n*/"  # behind a text: closes a comment that the text does not
_SHOWN = 60  # characters of a line, or of a word, in a message
MOST = 200  # findings in a file; of more, those that break a rule come first
MEMORY = 2 * 2**30  # bytes that the program may take; a file of 1 MiB with the largest tree takes 1 GiB
# Of a problem folder, what no runner gets to see. A winner's variant is loaded, not imported.
HIDDEN = ("reference", "check", "wrong", "variants")
_CALLS = {"exec", "eval", "__import__", "compile"}  # builtins that make code out of text
# Values of torch.compile that make it capture graphs, and what to do instead.
_GRAPH_MODES = {
    "reduce-overhead": "leave the mode out",
    "max-autotune": 'use "max-autotune-no-cudagraphs"',
    "triton.cudagraphs": "leave the option out",
    "cudagraphs": "use the default backend",
}
_MODULES = {"base64", "builtins", "code", "codecs", "codeop", "marshal", "pickle", "runpy", "zlib", "ctypes.util"}
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


def findings(file: Path, content: bytes, baseline: bool, ours: bool) -> list[Finding]:
    """Return what breaks the rules in a file with this content, see harness/judge/scanning.py."""
    python = file.suffix == ".py"
    text = content.decode("utf-8-sig" if python else "utf-8", errors="replace")
    lines = text.split("\n")
    found: list[Finding] = []
    written: set[str] = set()
    for number, line, code in zip(range(1, len(lines) + 1), lines, lines if ours else _code(text, python), strict=True):
        written.update(_AROUND.findall(code))
        if match := _AROUND.search(line):
            found.append(_named(file, number, line, match, not _AROUND.search(code)))
    if python and not baseline:
        found += _ways_around(file, text)
    found += _disguised(file, text, written, ours)
    return found if len(found) <= MOST else sorted(found, key=lambda finding: finding.warns)[:MOST]


def _disguised(file: Path, text: str, written: set[str], ours: bool) -> list[Finding]:
    """Return where the compiler finds the word, in identifiers or texts other than those that are `written`. own: as
    for findings; where it is False, comments of C++ do not count, in a string neither.
    """
    found: dict[str, int] = {}
    if file.suffix == ".py":
        pieces = _read_by_python(text)
    else:
        for pattern, plain in _CPP_FORMS:
            text = pattern.sub(plain, text)
        pieces = iter([(1, text)])
    for line, said in pieces:
        for word in _AROUND.findall(said if ours or not WORD.search(said) else _uncommented(said)):
            if word not in written:
                found.setdefault(word, line)
    return [
        Finding(file, line, f'"{_short(word)}" is put together in the code from here on, and holds the word of rule 1')
        for word, line in found.items()
    ]


def _read_by_python(text: str) -> Iterator[tuple[int, str]]:
    """Yield (first line of the function or class, text) of each name and each text constant of a compiled source."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the source: a literal in a comparison, say
            todo = [compile(text, "submission", "exec", dont_inherit=True)]
    except (SyntaxError, ValueError, RecursionError):  # what is no Python is said elsewhere
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
    holds = "is" if WORD.fullmatch(match[0]) else "contains"
    rule = "rule 1: default stream only; it counts inside other words, comments and strings too"
    said = f'"{_short(match[0])}" {holds} the reserved word "stream" ({rule}). Rename it, or leave it out'
    return Finding(file, number, f"{said}: {_short(line.strip())}", in_comment)


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _code(text: str, python: bool) -> list[str]:
    """Return the lines of a text without comments: of Python, or of C++ in a source or in a string of several lines."""
    if not python:
        return _uncommented(text).split("\n")
    lines = text.split("\n")
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            (row, column), (last, end), said = token.start, token.end, token.string
            if token.type == tokenize.COMMENT:
                lines[row - 1] = lines[row - 1][:column]
            elif token.type == tokenize.STRING and "\n" in said:
                whole = lines[row - 1][:column] + _uncommented(said) + lines[last - 1][end:]
                lines[row - 1 : last] = whole.split("\n")
    except (tokenize.TokenError, IndentationError):  # what is no Python is said elsewhere
        pass
    return lines


def _uncommented(text: str) -> str:
    """Return a text, or CUDA source within a Python file, with blanks for its C++ comments. One that is never closed is
    none, and is looked at once: it hides no comments of a line behind it.
    """
    pieces, at = [], 0
    for comment in _CPP_COMMENT.finditer(text + _NEVER_CLOSED):
        if comment.end() > len(text):
            return "".join(pieces) + _LINE_COMMENT.sub(_blank, text[at:])
        pieces += [text[at : comment.start()], _blank(comment)]
        at = comment.end()
    return "".join((*pieces, text[at:]))


def _blank(comment: re.Match) -> str:
    return re.sub(r"[^\n]", " ", comment[0])


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every absolute import, those in functions too; `from a import b` counts as a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and _called(node.func).endswith("import_module"):
            yield from ((node.lineno, str(name.value)) for name in node.args[:1] if isinstance(name, ast.Constant))


def _called(function: ast.expr) -> str:
    """The last name of what is called, or of another expression, "" if it has none."""
    return getattr(function, "attr", getattr(function, "id", ""))


def hidden(name: str) -> bool:
    """Whether the module of that dotted name is one of a problem's that no runner gets to see."""
    parts = name.split(".")
    return len(parts) > 2 and parts[0] == "problems" and parts[1] != "common" and parts[2] in HIDDEN


def _ways_around(file: Path, text: str) -> list[Finding]:
    tree = ast.parse(text)
    found = [
        Finding(file, line, f"imports {name}, which no submission gets to see")
        for line, name in imports(tree)
        if hidden(name)
    ]
    taken = [(line, f"{name}.") for line, name in imports(tree)]
    read = {(line, module) for line, name in taken for module in _MODULES if name.startswith(f"{module}.")}
    found += [Finding(file, line, f"imports {module}: code must be readable") for line, module in sorted(read)]
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in _CALLS:
                found.append(Finding(file, line, f"calls {node.func.id}(): code must stand in the file"))
            literal = len(node.args) < 2 or isinstance(node.args[1], ast.Constant)
            if node.func.id == "getattr" and not literal:
                found.append(Finding(file, line, "getattr with a name that is computed"))
        if isinstance(node, ast.Attribute) and node.attr in ("CUDAGraph", "graph") and _called(node.value) == "cuda":
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
            why = "which run on a separate stream (rule 1: default stream only)"
            said = f'torch.compile with "{node.value}" captures graphs, {why}: {_GRAPH_MODES[node.value]}'
            found += [Finding(file, node.lineno, said)] if node not in off else []
    return found


def main() -> None:
    """Answer each message of the judge, which comes with a file's content, with the findings in it."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))

    def answer(message: dict, fds: list[int]) -> dict:
        with open(fds[0], "rb") as content:
            try:
                found = findings(Path(message["name"]), content.read(), message["baseline"], message["ours"])
            except MemoryError:
                sys.exit(f"to read {message['name']} takes more than {MEMORY / 2**30:g} GiB of memory")
        return {"findings": [{"line": f.line, "what": f.what, "warns": f.warns} for f in found]}

    wire.serve(socket.socket(fileno=int(sys.argv[1])), answer)


if __name__ == "__main__":
    main()
