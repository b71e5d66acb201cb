"""A composition: what its submissions bring along, and what stays away from the runner.

tests/support/problems/composed stands in for one; each test has its own copy of the folders that it needs.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.judge import verdict
from harness.judge.session import kind
from harness.problem import folders, scan, sources
from harness.problem.folders import UsageError
from harness.results import record
from harness.sandbox import process, reaper, workdir
from harness.sandbox.workdir import Workdir
from problems.common import build, load
from tests.harness.sandbox.test_workdir import runner
from tests.support import SUPPORT

FIXTURE = SUPPORT / "problems" / "composed"
WORD = "str" + "eam"
# Of the submission of `composed`, from problems/.
OWN = {"composed/submission.py"}
MODULES = {"composed/model.py", "composed/kernels.py", "composed/state.py"}
GEMV = load.PROBLEMS / "nvfp4_gemv"
NAMED = {name for named in load.winners(GEMV).values() for name in named}
SOURCES = [path for path in (GEMV / "variants").iterdir() if path.stem in NAMED]
INCLUDED = {word for path in SOURCES for word in re.findall(r'#include "(.+)"', path.read_text())}
WINNERS = {f"nvfp4_gemv/{name}.py" for name in ("task", "submission", "in_model")} | {
    f"nvfp4_gemv/variants/{path.name}"
    for path in (GEMV / "variants").iterdir()
    if path in SOURCES or path.name in INCLUDED
}


@pytest.fixture
def problems(tmp_path, monkeypatch) -> Iterator[Path]:
    """A problems/ of this test's own, with composed and nvfp4_gemv."""
    before = set(sys.modules)
    folder = tmp_path / "problems"
    for source in (FIXTURE, load.PROBLEMS / "nvfp4_gemv"):
        shutil.copytree(source, folder / source.name, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(load, "PROBLEMS", folder)
    yield folder
    for name in set(sys.modules) - before:
        if name.startswith("problems."):
            del sys.modules[name]


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that other users may pass through, as pytest's may not be: a runner may be one."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o711)
    yield folder
    reaper.remove_tree(str(folder))


def winner(name: str = "composed") -> folders.Submission:
    found = folders.find(name)
    return folders.submission(found, found.folder / "submission.py")


def names(files: list[Path], top: Path) -> set[str]:
    return {str(file.relative_to(top)) for file in files}


def add(file: Path, text: str) -> None:
    file.write_text(file.read_text() + text)


# What it is made of.


def test_a_composition_brings_modules_and_winners(problems):
    submission = winner()
    files = sources.closure(submission.file, submission.folder)
    assert names(files, problems) == OWN | MODULES | WINNERS
    assert len(files) == len(set(files)) and files[0] == submission.file
    assert sources.closure(submission.file) == [submission.file], "without a folder: the file alone"


def test_modules_are_found_at_any_distance_and_however_they_are_imported(problems):
    folder = problems / "composed"
    for name, text in {
        "a": "import problems.composed.b",
        "b": "def f():\n    from problems.composed.c import X",
        "e": "",
        "f": "",
        "c": "import importlib\nX = importlib.import_module('problems.composed.d')",
        "lonely": "",
        "d": "from problems.composed import e, f\nfrom problems.composed import a\nimport problems.other.lonely\n"
        "from problems.composed.inner import g\nfrom problems.composed.inner.deep.h import Y",
    }.items():
        (folder / f"{name}.py").write_text(text + "\n")
    (folder / "inner" / "deep").mkdir(parents=True)
    for name in ("g", "lonely", "deep/h", "deep/k"):
        (folder / "inner" / f"{name}.py").write_text("import problems.composed.inner.deep.k as k\n")
    (folder / "e.cpp").write_text('#include "e_tools.h"\n')
    (folder / "e_tools.h").write_text("\n")
    (folder / "submission.py").write_text("from problems.composed import a\n")
    files = names(sources.closure(folder / "submission.py", folder), folder)
    inner = {f"inner/{name}.py" for name in ("g", "deep/h", "deep/k")}
    assert files == {"submission.py", *(f"{name}.py" for name in "abcdef"), "e.cpp", "e_tools.h", *inner}


def test_another_problem_brings_nothing(problems):
    """Also where a file imports what only a composition may: then it is not there when it runs."""
    add(problems / "composed" / "task.py", "\nCOMPOSITION = False\n")
    (problems / "composed" / "submission.py").write_text("from problems.composed import model\n")
    submission = winner()
    assert sources.closure(submission.file, submission.folder) == [submission.file]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('COMPOSES = ("no_such",)', "got 'no_such'"),
        ('COMPOSES = ("composed",)', "no compositions, got 'composed'"),
        ('COMPOSES = ("../problems/nvfp4_gemv",)', "got '../problems/nvfp4_gemv'"),
        ('COMPOSES = "nvfp4_gemv"', "must be a tuple"),
        ("COMPOSES = tuple(names)", "COMPOSES must be a literal"),
        ("from problems.composed import broken", r"broken\.py:1: not Python"),
    ],
)
def test_a_bad_declaration_is_named(problems, line, message):
    (problems / "composed" / "broken.py").write_text("x = (\n")
    (problems / "composed" / "submission.py").write_text(line + "\n")
    with pytest.raises(UsageError, match=message):
        winner()


def test_only_a_composition_may_compose(problems):
    (problems / "nvfp4_gemv" / "variants" / "mine.py").write_text('COMPOSES = ("nvfp4_gemv",)\n')
    with pytest.raises(UsageError, match=r"mine\.py: COMPOSES is for compositions, nvfp4_gemv/task\.py"):
        folders.find("nvfp4_gemv").variant("mine")


def test_a_winner_that_is_missing_is_named(problems):
    name = min(NAMED)
    (problems / "nvfp4_gemv" / "variants" / f"{name}.py").unlink()
    with pytest.raises(UsageError, match=rf"nvfp4_gemv/submission\.py: WINNERS names '{name}'"):
        winner()


def test_a_composition_stands_in_problems():
    with pytest.raises(UsageError, match=r"composed is a composition: it must stand in"):
        folders.find(str(FIXTURE))


def test_one_folder_of_ours_at_most_is_a_composition():
    """The one that may name other problems."""
    assert {name for name in folders.problem_names() if folders.find(name).composition} <= {"dsv4_forward"}


# What is read, and what it is known by.


@pytest.mark.parametrize("name", sorted(OWN | MODULES | WINNERS))
def test_the_scan_reads_all_of_it(problems, name):
    submission = winner()
    assert scan.findings(sources.closure(submission.file, submission.folder)) == []
    lines = len((problems / name).read_text().splitlines())
    add(problems / name, f"# up{WORD}\n" if name.endswith(".py") else f"// up{WORD}\n")
    (found,) = scan.findings(sources.closure(submission.file, submission.folder))
    assert (found.file, found.line) == (problems / name, lines + 1)


@pytest.mark.parametrize(
    "line",
    [
        "from problems.composed import reference",
        "import problems.nvfp4_gemv.reference as r",
        "from problems.composed.reference import ref_kernel",
        "from problems.composed import check",
        "from problems.composed.wrong import forgets_the_state",
        "from problems.nvfp4_gemv.variants import torch_dequant",
    ],
)
def test_what_nobody_gets_to_see_is_not_brought_along(problems, line):
    file = problems / "composed" / "model.py"
    add(file, line + "\n")
    submission = winner()
    assert names(sources.closure(submission.file, submission.folder), problems) == OWN | MODULES | WINNERS


def test_hash_and_key_are_of_all_of_it(problems):
    submission = winner()
    found = folders.find("composed")

    def known_by() -> tuple[str, str]:
        return verdict.source_hash(submission), workdir.key(submission.file, found, "cpu")

    start = known_by()
    others = (
        "composed/reference.py",
        "composed/check.py",
        "composed/wrong/forgets_the_state.py",
        "nvfp4_gemv/reference.py",
        "nvfp4_gemv/variants/torch_dequant.py",
    )
    for name in others:
        add(problems / name, "\n# a change\n")
        assert known_by() == start, name
    seen = [start]
    for name in sorted(OWN | MODULES | WINNERS):
        add(problems / name, "\nchanged = 1\n" if name.endswith(".py") else "\n// a change\n")
        seen.append(known_by())
    assert all(len(set(part)) == len(seen) for part in zip(*seen, strict=True))


def test_it_is_compiled_as_what_it_brings_asks_for(problems):
    """A winner that builds makes the composition one that is compiled by a call, or by its own compile_for."""
    submission = winner()
    assert kind(submission.file) == "" and kind(submission.file, submission.folder) == "call"
    add(submission.file, "\n\ndef compile_for(target):\n    return []\n")
    assert kind(submission.file, submission.folder) == "compile_for"


# What the runner gets.


def test_the_runner_gets_the_closure_in_its_places(problems, place):
    box = Workdir.make(winner().file, folders.find("composed"), base=place)
    try:
        top = box.jail.code / "problems"
        seen = names([path for path in top.rglob("*") if path.is_file()], top)
        seen = {name for name in seen if name.partition("/")[0] not in ("common", "__init__.py")}
        assert seen == OWN | MODULES | WINNERS | {"composed/task.py"}
        assert box.restore(f"{top}/nvfp4_gemv/submission.py:3") == f"{problems}/nvfp4_gemv/submission.py:3"
        runner(box).close()
    finally:
        box.remove()


def test_a_submission_from_elsewhere_gets_it_too(problems, place, tmp_path):
    """Its file has a separate place; what it brings along lies as in problems/."""
    file = tmp_path / "mine.py"
    file.write_text('from problems.composed import state\nCOMPOSES = ("nvfp4_gemv",)\n')
    submission = folders.submission(folders.find("composed"), file)
    box = Workdir.make(submission.file, folders.find("composed"), base=place)
    try:
        assert box.file == box.folder / "submission" / "mine.py" and (box.folder / "state.py").is_file()
        assert not (box.folder / "model.py").exists() and not (box.folder / "submission.py").exists()
        other = box.folder.parent / "nvfp4_gemv"
        assert names([path for path in other.rglob("*") if path.is_file()], other.parent) == WINNERS
    finally:
        box.remove()


def test_a_problem_that_is_not_composed_is_named(problems):
    for made in (lambda: load.variant("moe_gemm", "cpu_plain"), lambda: load.module(problems / "moe_gemm", "task")):
        with pytest.raises(FileNotFoundError, match=r"no file .*moe_gemm.*: a submission .* names it in COMPOSES"):
            made()


def test_a_resumed_run_depends_on_the_modules_of_the_reference(problems):
    """state.py alone is what composed's reference.py imports."""
    found = folders.find("composed")

    def planned() -> str:
        return verdict.Recorder(found, "cpu").problem_hash

    start = planned()
    add(problems / "composed" / "model.py", "\nchanged = 1\n")
    assert planned() == start
    add(problems / "composed" / "state.py", "\nchanged = 1\n")
    assert planned() != start


# As a user sees it.


@pytest.fixture
def checkout(tmp_path) -> Path:
    """The judge, and composed in its problems/. What compiles is shared with this checkout."""
    made = tmp_path / "checkout"
    for name in ("harness", "problems/common", "problems/nvfp4_gemv"):
        shutil.copytree(process.ROOT / name, made / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("__init__.py", "wrong.py"):
        shutil.copy(process.ROOT / "problems" / name, made / "problems")
    shutil.copytree(FIXTURE, made / "problems" / "composed", ignore=shutil.ignore_patterns("__pycache__"))
    (made / "tests" / "support").mkdir(parents=True)
    for name in ("short_run.py", "warm.py"):
        shutil.copy(SUPPORT / name, made / "tests" / "support")
    return made


def run_in(checkout: Path, *command: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "KERNEL_BUILD_DIR": str(build.directory()), "PYTHONPATH": ""}
    words = [sys.executable, *command, "--device", "cpu"]
    return subprocess.run(words, cwd=checkout, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_it_is_linted(checkout):
    """Tokens, a state of bytes, weights, and no variants: its submission has to pass."""
    done = run_in(checkout, "harness/__main__.py", "lint", "composed")
    assert done.returncode == 0, done.stdout + done.stderr
    opaque = r"^inputs\.state shifted +0/0 +not applicable: the inputs stay as they are$"
    assert re.search(opaque, done.stdout, re.MULTILINE)
    assert re.search(r"^submission .* 3/3 cases right", done.stdout, re.MULTILINE)
    assert re.search(r"^wrong/forgets_the_state .* INCORRECT", done.stdout, re.MULTILINE)


@pytest.mark.slow
def test_it_is_timed_and_recorded(checkout, tmp_path):
    """The state that each call overwrites is fresh in every timed one."""
    done = run_in(checkout, "tests/support/short_run.py", str(tmp_path / "results"), "1", "composed")
    assert done.returncode in (0, 6), done.stdout + done.stderr  # 6: the machine was busy
    (machine,) = (tmp_path / "results").iterdir()
    records = record.read(machine.name, "composed", machine.parent)
    assert {r["status"] for r in records} == {"PASSED"} and [r["kind"] for r in records].count("benchmark") == 1
