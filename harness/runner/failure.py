"""The report of an exception of a submission or of a problem's folder. It begins with their own line."""

import inspect
import re
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from problems.common import build

TEXT_LIMIT = 16_000  # characters of a traceback or compiler report in a reply, from both ends
# Of nvcc, "my.cu(12): error: ...", and of g++, "my.cpp:12:5: error: ...".
_ERROR_LINE = r"^(\S[^\n]*?)(?:\((\d+)\)|:(\d+)(?::\d+)?): (?:fatal |catastrophic )?error:? ([^\n]+)"
_EXTENSION = "Error building extension "  # begins what torch.utils.cpp_extension raises, with the compiler's report
_CALLED = {"hold": "prepare", "compile": "compile_for"}  # by request, the submission's function; else custom_kernel


class RefusedError(ValueError):
    """What the judge refuses: an answer, an output's name, a call to record. The message is the whole report."""


def reply(where: str, error: BaseException, file: str | None, module: Any = None) -> dict:
    """Return the reply to the request `where`: the submission's own line, and the traceback from there. module: it."""
    # By name too: a submission of another commit has that commit's class.
    kind = type(error)
    compiler = isinstance(error, build.BuildError) or (kind.__module__, kind.__name__) == (build.__name__, "BuildError")
    compiler |= kind is RuntimeError and any(type(arg) is str and arg.startswith(_EXTENSION) for arg in error.args)
    trace = error.__traceback__
    tail = _from(trace, Path(file)) if file else None
    text = str(error) if compiler else "".join(traceback.format_exception(kind, error, tail or trace))
    first = (compiler and compiler_said(text)) or (first_line(where, error, file, module) if file else _what(error))
    return {
        "failed": "compile" if compiler else where,
        "type": type(error).__name__,
        "memory": isinstance(error, MemoryError | torch.OutOfMemoryError),
        "text": _clip(f"{first}\n{text}"),
    }


def first_line(where: str, error: BaseException, file: str, module: Any) -> str:
    """Return the submission's own line and what was raised there."""
    return f"{_place(where, error, Path(file), module)}: {_what(error)}"


def of_folder(error: BaseException, file: Path) -> str:
    """Report what a problem's code raised, whose reference is `file`: its own line, and the traceback from there."""
    if isinstance(error, RefusedError):
        return _clip(str(error))
    if isinstance(error, SyntaxError):
        return _clip(f"{_place('', error, file, None)}: {_what(error)}")
    tail = _from(error.__traceback__, file)
    place = _place("", error, file, None) + ": " if tail else ""
    traced = "".join(traceback.format_exception(type(error), error, tail or error.__traceback__))
    return _clip(f"{place}{_what(error)}\n{traced}")


def _from(trace: TracebackType | None, file: Path) -> TracebackType | None:
    """Return the part of a traceback that begins in a file beside `file`, None if there is none."""
    while trace and Path(trace.tb_frame.f_code.co_filename).parent != file.parent:
        trace = trace.tb_next
    return trace


def _place(where: str, error: BaseException, file: Path, module: Any) -> str:
    """Return the submission's line that led to an exception, else that of the called function, else the file's name."""
    places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename:
        places.append((error.filename, error.lineno))
    called: Any = getattr(module, _CALLED.get(where, "custom_kernel"), None)
    if code := getattr(inspect.unwrap(called), "__code__", None):  # not that of a decorator
        places.insert(0, (code.co_filename, code.co_firstlineno))
    near = [(Path(name), line) for name, line in places if Path(name).parent == file.parent]
    nearest = [(path, line) for path, line in near if path == file] or near
    return f"{nearest[-1][0].name}:{nearest[-1][1]}" if nearest else file.name


def _what(error: BaseException) -> str:
    """Return the line of a traceback that says what was raised; what the judge refuses without its class."""
    if isinstance(error, RefusedError):
        return str(error)
    lines = traceback.format_exception_only(error)
    line = next(filter(str.strip, lines[-1 if isinstance(error, SyntaxError) else 0].splitlines()), "")
    frames = traceback.extract_tb(error.__traceback__) if isinstance(error, ImportError) else ()
    if frames and (frames[-1].line or "").strip().startswith("from ."):
        line += "; relative imports are not supported, this file is in no package: leave the dots out"
    return line


def compiler_said(report: str) -> str:
    """Return the first error of nvcc or g++ as "my.cu:12: error: ...", "" if the report names no line."""
    match = re.search(_ERROR_LINE, report, re.MULTILINE)
    return f"{Path(match[1]).name}:{match[2] or match[3]}: error: {match[4]}" if match else ""


def _clip(text: str) -> str:
    if len(text) <= TEXT_LIMIT:
        return text
    return f"{text[: TEXT_LIMIT // 2]}\n[{len(text) - TEXT_LIMIT} characters left out]\n{text[-TEXT_LIMIT // 2 :]}"
