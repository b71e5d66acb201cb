"""The first line of a submission's error is its own line."""

import itertools
import re
import shutil
from pathlib import Path

import pytest

from harness.runner import failure
from problems.common import load
from tests.support import VECTOR_ADD, write_files
from tests.support.marks import needs_nvcc

NUMBERS = itertools.count()


def replied(tmp_path: Path, source: str, where: str = "call") -> dict:
    """The reply to a request in which a submission of this text raises."""
    file = write_files(tmp_path / f"{next(NUMBERS)}", {"my.py": source}) / "my.py"
    for other in tmp_path.glob("my.c*"):
        shutil.copy(other, file.parent)
    module = None
    try:
        module = load.from_file(VECTOR_ADD, file)
        getattr(module, {"compile": "compile_for", "hold": "prepare"}.get(where, "custom_kernel"))(None)
    except Exception as error:
        return failure.reply(where, error, str(file), module)
    raise AssertionError("it raised nothing")


@pytest.mark.parametrize(
    ("source", "where", "first"),
    [
        ("def custom_kernel(data):\n    return 1 / 0\n", "call", "my.py:2: ZeroDivisionError: division by zero"),
        ("def custom_kernel():\n    pass\n", "call", "my.py:1: TypeError: custom_kernel() takes 0 positional"),
        ("import torch\ndef custom_kernel(data):\n    torch.ones(2).view(3)\n", "call", "my.py:3: RuntimeError"),
        ("def f(x):\n    {}[x]\n\ndef custom_kernel(data):\n    f('a\\nb')\n", "call", r"my.py:2: KeyError: 'a\nb'"),
        ("def custom_kernel(data):\n    raise ValueError('a\\nb')\n", "call", "my.py:2: ValueError: a"),
        ("import torch\nimport no_such_module\n", "import", "my.py:2: ModuleNotFoundError: "),
        ("from task import nothing\n", "import", "my.py:1: ImportError: cannot import name 'nothing' from "),
        ("def custom_kernel(data):\n    exec('x = (')\n", "call", "my.py:2: SyntaxError: '(' was never closed"),
        ("def prepare(weights):\n    raise MemoryError\n", "hold", "my.py:2: MemoryError"),
        ("def compile_for(target):\n    return target + 1\n", "compile", "my.py:2: TypeError: unsupported operand"),
    ],
)
def test_an_exception_begins_with_its_line_and_then_has_its_trace(tmp_path, source, where, first):
    said = replied(tmp_path, source, where)
    lines = said["text"].splitlines()
    assert lines[0].startswith(first) and lines[1] == "Traceback (most recent call last):"
    assert ".py" in lines[2] and ("my.py" in lines[2] or "takes 0 positional" in first)
    assert said["failed"] == where and said["memory"] == ("MemoryError" in first)


BUILDS = """from pathlib import Path
from problems.common import build

def custom_kernel(data):
    return {call}
"""


@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
def test_what_gpp_refuses_begins_with_the_line_of_the_source(tmp_path):
    (tmp_path / "my.cpp").write_text("int f() {\n    return y;\n}\n")
    said = replied(tmp_path, BUILDS.format(call='build.cpp(Path(__file__).with_suffix(".cpp"))'))
    assert re.match(r"my\.cpp:2: error: .*y.* was not declared", said["text"])
    assert said["failed"] == "compile" and "exit status" in said["text"]


@needs_nvcc
def test_what_nvcc_refuses_begins_with_the_line_of_the_source(tmp_path):
    (tmp_path / "my.cu").write_text('#include "no_such_header.h"\n')
    call = 'build.cuda(Path(__file__).with_suffix(".cu"), "sm90")'
    assert re.match(r"my\.cu:1: error: no_such_header\.h: ", replied(tmp_path, BUILDS.format(call=call))["text"])
    (tmp_path / "my.cu").write_text("__global__ void k(int* p) {\n    *p = q;\n}\n")
    assert replied(tmp_path, BUILDS.format(call=call))["text"].startswith("my.cu:2: error: ")


def test_an_exception_that_is_long_or_cannot_be_shown_is_still_reported(tmp_path):
    said = replied(tmp_path, "def custom_kernel(data):\n    raise ValueError('x' * 10**6)\n")
    assert said["text"].startswith("my.py:2: ValueError: xxx") and len(said["text"]) < failure.TEXT_LIMIT + 100
    odd = "class Odd(Exception):\n    def __str__(self):\n        raise KeyError\n"
    said = replied(tmp_path, f"{odd}\n\ndef custom_kernel(data):\n    raise Odd\n")
    assert said["text"].startswith("my.py:7: ") and "Odd" in said["text"]


@pytest.mark.parametrize(
    ("source", "first"),
    [
        ("import no_such_module\n", "reference.py:1: ModuleNotFoundError: No module named 'no_such_module'"),
        ("def f():\n    raise KeyError('x')\n\n\nf()\n", "reference.py:2: KeyError: 'x'"),
    ],
)
def test_an_exception_of_a_folder_begins_with_the_folders_line(tmp_path, source, first):
    write_files(tmp_path, {"reference.py": source, "task.py": ""})
    with pytest.raises((ImportError, KeyError)) as raised:
        load.from_file(tmp_path, tmp_path / "reference.py")
    lines = failure.of_folder(raised.value, tmp_path / "reference.py").splitlines()
    assert lines[0].startswith(first) and lines[1].startswith("Traceback")
    assert str(tmp_path) in lines[2]


def test_an_exception_of_the_judge_about_a_folder_has_no_place_in_it(tmp_path):
    with pytest.raises(ZeroDivisionError) as raised:
        divmod(1, 0)
    lines = failure.of_folder(raised.value, tmp_path / "reference.py").splitlines()
    assert lines[0] == "ZeroDivisionError: integer division or modulo by zero" and "test_failure.py" in "".join(lines)


def test_an_extension_of_torch_that_does_not_compile_is_a_compile_error(tmp_path):
    report = "Error building extension 'k': [1/2] c++ -c main.cpp\n/a/main.cpp:3:10: error: no x\nninja: stopped"
    reply = replied(tmp_path, f"raise RuntimeError({report!r})\n", "import")
    assert reply["failed"] == "compile" and reply["text"].startswith("main.cpp:3: error: no x\n")
