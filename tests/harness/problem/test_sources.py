"""What the judge reads of a submission: whatever stands there, it ends with one clear line and no traceback."""

import os
import resource
import time
from pathlib import Path

import pytest

from harness import run
from harness.judge.handle import RunnerHandle
from harness.judge.selection import refusal
from harness.judge.session import Session, kind
from harness.problem import folders, scan, sources
from harness.problem.folders import UsageError
from harness.results import hashes
from problems.common import build, load
from tests import support
from tests.support import warm, write_files

VECTOR_ADD = folders.find(str(support.VECTOR_ADD))
PLAIN = b"def custom_kernel(data): pass\n"


def written(folder: Path, content: bytes = PLAIN) -> Path:
    file = folder / "sub.py"
    file.write_bytes(content)
    return file


NO_PYTHON = {
    "a null byte": (b"x = 1\0", "null bytes"),
    "no UTF-8": (b"x = 1\nx = '\xff'\n", r"sub\.py:2: not Python: it must be UTF-8"),
    "another encoding": (b"# coding: utf-7\n", "must be UTF-8, but says that it is utf-7"),
    "an unknown encoding": (b"# coding: nonsense\n", "unknown encoding"),
    "parentheses": (b"x = " + b"(" * 100_000, "nested"),
    "signs": (b"x = " + b"-" * 100_000 + b"1", "nested too deeply"),
    "attributes": (b"x = a" + b".b" * 100_000, "nested too deeply"),
    "calls": (b"x = a" + b"()" * 10_000, "nested too deeply"),
    "sums": (b"x = 1" + b"+1" * 100_000, "nested too deeply"),
    "branches": (b"if 1: pass\n" + b"elif 1: pass\n" * 20_000, "nested too deeply"),
    "a long number": (b"x = " + b"9" * 10_000, "integer"),
    "a syntax error": (b"\nx =\n", r"sub\.py:2: not Python"),
    "too long": (b"#" * (load.PYTHON_LIMIT + 1), "larger than 1 MiB"),
    "a constant that is none": (b"TARGETS = {[]: 1}", r"sub\.py:1: TARGETS must be a literal"),
    "a constant that is deep": (b"TARGETS = " + b"-" * 800 + b"1", r"sub\.py:1: TARGETS must be a literal"),
    "targets that are none": (b"TARGETS = 5", r"sub\.py: TARGETS must be a tuple of names, got 5"),
    "targets that are no names": (b"TARGETS = ([],)", "TARGETS must be a tuple of names"),
    "packages that are no names": (b"REQUIRES = ('os', 3)", "REQUIRES must be a tuple of names"),
    "a package by its path": (b"REQUIRES = ('tests.conftest',)", "REQUIRES must be a tuple of names"),
    "flags that are no names": (b"CPU_FLAGS = ([],)", "CPU_FLAGS must be a tuple of names"),
}


@pytest.mark.parametrize("what", NO_PYTHON)
def test_a_python_file_that_cannot_be_read_is_a_usage_error(tmp_path, what):
    content, said = NO_PYTHON[what]
    with pytest.raises(UsageError, match=said):
        folders.submission(VECTOR_ADD, written(tmp_path, content))


def test_a_deep_call_is_still_searched_for_imports(tmp_path):
    """Nor does a deep sum, a long number, or a name that no file can have, end a run that asks for hash and kind."""
    deep = b"+1" * 900 + b"\nz[1" + b"+1" * 400 + b"] = 0x1" + b"0" * 5000 + b"\nimport problems.common." + b"a" * 300
    file = written(tmp_path, b"import importlib\nx = importlib.import_module('triton')\ny = a" + b".b()" * 400 + deep)
    assert len(sources.source_hash(file)) == 16
    assert "triton" in {name for _, name in sources.imported(file)} and kind(file) == "call"


def huge(path: Path) -> None:
    with open(path, "w") as file:
        file.truncate(10 * 2**30)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (os.mkfifo, "plain file"),
        (Path.mkdir, "plain file"),
        (lambda path: path.symlink_to("/etc/passwd"), "plain file"),
        (huge, "4 MiB"),
    ],
)
def test_a_source_beside_it_that_is_no_plain_file_is_a_usage_error(tmp_path, make, said):
    """None of them is waited for, followed, or taken into memory."""
    file = written(tmp_path)
    make(tmp_path / "sub.cu")
    start = time.monotonic()
    with pytest.raises(UsageError, match=rf"sub\.cu.*{said}"):
        folders.submission(VECTOR_ADD, file)
    assert time.monotonic() - start < 5


def test_a_source_may_hold_any_bytes_and_its_name_must_be_text(tmp_path):
    """The compiler says what it thinks of them; the scan reads what can be read."""
    file = written(tmp_path)
    (tmp_path / "sub.cu").write_bytes(bytes(range(256)) + b'\n#include "a\0b.h"\n// upstr' + b"eam\n")
    submission = folders.submission(VECTOR_ADD, file)
    (found,) = scan.findings(sources.closure(submission.file, submission.folder))
    assert found.file.name == "sub.cu" and hashes.source_hash(sources.closure(submission.file, submission.folder))
    file = written(tmp_path)
    Path(os.fsdecode(bytes(tmp_path) + b"/sub.\xff.cu")).touch()
    with pytest.raises(UsageError, match="plain text"):
        folders.submission(VECTOR_ADD, file)


def test_a_linked_submission_is_the_file_that_it_leads_to(tmp_path):
    """Its sources are those beside that file."""
    write_files(tmp_path, {"sub.cu": "", "real/sub.py": "", "real/sub.cu": '#include "../sub.cu"\n'})
    (tmp_path / "sub.py").symlink_to("real/sub.py")
    assert sources.files_of(tmp_path / "sub.py") == [tmp_path / "real" / "sub.py", tmp_path / "real" / "sub.cu"]


def test_an_include_of_a_file_elsewhere_is_a_compile_error(tmp_path, capsys):
    """The compiler names the submission's own file and line, and nothing of the other file."""
    builds = "from pathlib import Path\nfrom problems.common import build\nTARGETS = ('cpu',)\n"
    files = {
        "secret.h": "held by the judge\n",
        "mine/sub.py": f"{builds}build.cpp(Path(__file__).with_suffix('.cpp'))\n{PLAIN.decode()}",
        "mine/sub.cpp": f'extern "C" int f() {{ return 0; }}\n\n#include "{tmp_path}/secret.h"\n',
    }
    mine = write_files(tmp_path, files) / "mine"
    arguments = [str(VECTOR_ADD.folder), "--submission", str(mine / "sub.py"), "--mode", "test", "--device", "cpu"]
    assert run.main([*arguments, "--case", "n=1024"]) == 4
    said = capsys.readouterr().out
    assert f"{mine}/sub.cpp:3:10: fatal error: {tmp_path}/secret.h: " in said and "held by" not in said


FILES = {  # a task that imports a shared module, and a reference
    "common/helper.py": "ATOL = 1e-3\n",
    "p/task.py": '"""About."""\nfrom problems.common import helper\nCASES = [1]\n',
    "p/reference.py": "def ref_kernel(data):\n    return data\n",
    "p/task.yml": "tests:\n- {m: 1}\n",
}


@pytest.mark.parametrize(
    ("changes", "name", "content"),
    [
        (True, "p/task.py", '"""Other words."""\nfrom problems.common import helper\nCASES = [1, 2]\n'),
        (True, "p/reference.py", "def ref_kernel(data):\n    return -data\n"),
        (True, "p/task.yml", "tests:\n- {m: 2}\n"),
        (True, "common/helper.py", "ATOL = 1e-2\n"),
        (True, "p/reference.py", "def ref_kernel(data):\n    return f'{data!r}'\n"),
        (True, "p/reference.py", "def ref_kernel(data):\n    pass\nreturn_ = 1\n"),
        (False, "p/task.py", '"""Other\nwords."""\n\nfrom problems.common import helper  # why\n\nCASES = [\n  1\n]\n'),
        (False, "p/reference.py", 'def ref_kernel(data):\n    """What it is."""\n    return data\n'),
        (False, "p/task.yml", "# generated\ntests:\n  - m: 1\n"),
        (False, "p/variants.py", "x = 1\n"),
        (False, "common/other.py", "x = 1\n"),
    ],
)
def test_what_defines_a_problem_changes_its_hash_and_words_do_not(tmp_path, monkeypatch, changes, name, content):
    monkeypatch.setattr(build, "COMMON", tmp_path / "common")
    monkeypatch.setattr(load, "PROBLEMS", write_files(tmp_path, FILES))
    before = sources.problem_hash(tmp_path / "p")
    (tmp_path / name).write_text(content)
    assert (sources.problem_hash(tmp_path / "p") != before) is changes


def test_sources_go_along_if_a_text_of_the_submission_is_their_name(tmp_path):
    file = written(tmp_path, b"NAME = 'named.cpp'\nOTHER = 'un' + 'named.cpp'\nNOTES = 'notes.txt'\n")
    others = dict.fromkeys(("in.h", "unnamed.cpp", "sub.cu", "notes.txt"), "")
    write_files(tmp_path, {"named.cpp": '#include "in.h"\n'} | others)
    assert {path.name for path in sources.files_of(file)} == {"sub.py", "sub.cu", "named.cpp", "in.h"}


# --- whatever the files of a submission do to the judge, it costs that submission and no other one


# Of each `finally` the compiler makes two copies.
NESTED = "".join(f"{' ' * n}try:\n{' ' * n} pass\n{' ' * n}finally:\n" for n in range(20)) + " " * 20 + "pass\n"


@pytest.fixture
def submissions(tmp_path):
    texts = {"nested": NESTED, "named": f"up{'str'}eam = 1\n", "good": "def custom_kernel(data):\n    return data.z\n"}
    write_files(tmp_path, {f"{name}.py": text for name, text in texts.items()})
    return [folders.submission(VECTOR_ADD, tmp_path / f"{name}.py") for name in texts]


def test_judge_reads_a_source_that_compiles_to_gigabytes_as_text(submissions):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    nested, named, good = (refusal(submission, "cpu", "cpu") for submission in submissions)
    assert nested is None and good is None
    assert named.status == "RULE_BROKEN" and named.reason.startswith("named.py:1: ")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**17, "KiB that the judge itself took"


def test_a_path_too_long_for_the_runners_folder_costs_its_own_submission(submissions):
    long, _, good = (RunnerHandle(submission.name, submission, "cpu") for submission in submissions)
    folder = long.submission.file.parent
    name = os.path.join(*["n" * 250] * 20)[: 4089 - len(str(folder))]
    (folder / name).mkdir(parents=True)
    (folder / name / "x.h").touch()
    (folder / "nested.cpp").write_text(f'#include "{name}/x.h"\n')
    with warm.installed(), Session(VECTOR_ADD, "cpu") as session:
        session.start(long, good)
        assert good.process and not long.process and "x.h: File name too long" in long.broken.reason
    assert long.broken.status == "RUNTIME_ERROR"
