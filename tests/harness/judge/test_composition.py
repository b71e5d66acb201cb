"""A composition: what its submissions bring along, and what stays away from the runner.

tests/support/problems/composed stands in for one; each test has its own copy of the folders that it needs.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.judge import verdict
from harness.judge.session import kind
from harness.problem import folders, sources
from harness.problem.folders import UsageError
from harness.results import record
from harness.sandbox import workdir
from problems.common import build, load
from tests.harness.sandbox.test_workdir import runner
from tests.support import ROOT, SUPPORT, copy_of, write_files

FIXTURE = SUPPORT / "problems" / "composed"
# Of the submission of `composed`, from problems/.
OWN = {"composed/submission.py"}
MODULES = {"composed/model.py", "composed/kernels.py", "composed/state.py"}
VARIANTS = load.PROBLEMS / "nvfp4_gemv" / "variants"
NAMED = {name for named in load.winners(VARIANTS.parent).values() for name in named}
SOURCES = {path for path in VARIANTS.iterdir() if path.stem in NAMED}
INCLUDED = {VARIANTS / word for path in SOURCES for word in re.findall(r'#include "(.+)"', path.read_text())}
BROUGHT = {VARIANTS.parent / f"{name}.py" for name in ("task", "submission", "in_model")} | SOURCES | INCLUDED
WINNERS = {str(path.relative_to(load.PROBLEMS)) for path in BROUGHT if path.is_file()}


@pytest.fixture
def problems(tmp_path, monkeypatch) -> Iterator[Path]:
    """A problems/ of this test's own, with composed and nvfp4_gemv."""
    before = set(sys.modules)
    folder = tmp_path / "problems"
    for source in (FIXTURE, load.PROBLEMS / "nvfp4_gemv"):
        copy_of(source, folder / source.name)
    monkeypatch.setattr(load, "PROBLEMS", folder)
    yield folder
    for name in set(sys.modules) - before:
        if name.startswith("problems."):
            del sys.modules[name]


def winner(name: str = "composed") -> folders.Submission:
    found = folders.find(name)
    return folders.submission(found, found.folder / "submission.py")


def brought(submission: folders.Submission, top: Path) -> set[str]:
    return {str(file.relative_to(top)) for file in sources.closure(submission.file, submission.folder)}


def below(folder: Path) -> set[str]:
    """Files within a folder of problems/, by their places in problems/."""
    return {str(file.relative_to(folder.parent)) for file in folder.rglob("*") if file.is_file()}


def add(file: Path, text: str) -> None:
    file.write_text(file.read_text() + text)


def test_a_composition_brings_modules_and_winners_and_no_other_problem_any(problems):
    """Also where a file imports what only a composition may: then it is not there when it runs."""
    submission = winner()
    assert brought(submission, problems) == OWN | MODULES | WINNERS
    files = sources.closure(submission.file, submission.folder)
    assert len(files) == len(set(files)) and files[0] == submission.file
    assert sources.closure(submission.file) == [submission.file], "without a folder: the file alone"
    add(problems / "composed" / "task.py", "\nCOMPOSITION = False\n")
    (problems / "composed" / "submission.py").write_text("from problems.composed import model\n")
    assert brought(winner(), problems) == OWN


def test_modules_are_found_at_any_distance_and_however_they_are_imported(problems):
    files = {
        "submission.py": "from problems.composed import a\n",
        "a.py": "import problems.composed.b\n",
        "b.py": "def f():\n    from problems.composed.c import X\n",
        "c.py": "import importlib\nX = importlib.import_module('problems.composed.d')\n",
        "d.py": "from problems.composed import e, f\nfrom problems.composed import a\nimport problems.other.lonely\n"
        "from problems.composed.inner import g\nfrom problems.composed.inner.deep.h import Y\n",
        "e.cpp": '#include "e_tools.h"\n',
    } | dict.fromkeys(("e.py", "f.py", "e_tools.h"), "")
    inner = ("inner/g.py", "inner/deep/h.py", "inner/deep/k.py")
    files |= dict.fromkeys(inner, "import problems.composed.inner.deep.k as k\n")
    folder = write_files(problems / "composed", files | {"lonely.py": "", "inner/lonely.py": ""})
    assert brought(winner(), folder) == set(files)


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
    write_files(problems / "composed", {"broken.py": "x = (\n", "submission.py": f"{line}\n"})
    with pytest.raises(UsageError, match=message):
        winner()


def test_what_cannot_compose_is_named(problems):
    (problems / "nvfp4_gemv" / "variants" / "mine.py").write_text('COMPOSES = ("nvfp4_gemv",)\n')
    with pytest.raises(UsageError, match=r"mine\.py: COMPOSES is for compositions, nvfp4_gemv/task\.py"):
        folders.find("nvfp4_gemv").variant("mine")
    name = min(NAMED)
    (problems / "nvfp4_gemv" / "variants" / f"{name}.py").unlink()
    with pytest.raises(UsageError, match=rf"nvfp4_gemv/submission\.py: WINNERS names '{name}'"):
        winner()
    with pytest.raises(UsageError, match=r"composed is a composition: it must stand in"):
        folders.find(str(FIXTURE))


def test_one_folder_of_ours_at_most_is_a_composition():
    """The one that may name other problems."""
    assert {name for name in folders.problem_names() if folders.find(name).composition} <= {"dsv4_forward"}


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
    add(problems / "composed" / "model.py", line + "\n")
    assert brought(winner(), problems) == OWN | MODULES | WINNERS


def test_hash_and_key_are_of_all_of_it(problems):
    submission = winner()
    found = folders.find("composed")

    def known_by() -> tuple[str, str]:
        return verdict.source_hash(submission), workdir.key(submission.file, found, "cpu")

    start = known_by()
    others = ("reference.py", "check.py", "wrong/forgets_the_state.py", "../nvfp4_gemv/reference.py")
    for name in (*others, "../nvfp4_gemv/variants/torch_dequant.py"):
        add(problems / "composed" / name, "\n# a change\n")
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


def test_the_runner_gets_the_closure_in_its_places(problems, make):
    box = make(winner().file, folders.find("composed"))
    top = box.jail.code / "problems"
    seen = {name for folder in top.iterdir() if folder.name != "common" for name in below(folder)}
    assert seen == OWN | MODULES | WINNERS | {"composed/task.py"}
    assert box.restore(f"{top}/nvfp4_gemv/submission.py:3") == f"{problems}/nvfp4_gemv/submission.py:3"
    runner(box).close()


def test_a_submission_from_elsewhere_gets_it_too(problems, make, tmp_path):
    """Its file has a separate place; what it brings along lies as in problems/."""
    file = tmp_path / "mine.py"
    file.write_text('from problems.composed import state\nCOMPOSES = ("nvfp4_gemv",)\n')
    submission = folders.submission(folders.find("composed"), file)
    box = make(submission.file, folders.find("composed"))
    assert box.file == box.folder / "submission" / "mine.py" and (box.folder / "state.py").is_file()
    assert not (box.folder / "model.py").exists() and not (box.folder / "submission.py").exists()
    assert below(box.folder.parent / "nvfp4_gemv") == WINNERS


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


@pytest.mark.slow
def test_it_is_timed_and_recorded(tmp_path):
    """In a checkout with it in problems/; what compiles is shared with this one. The state that each call overwrites is
    fresh in every timed one.
    """
    checkout = tmp_path / "checkout"
    for name in ("harness", "problems/common", "problems/nvfp4_gemv"):
        copy_of(ROOT / name, checkout / name)
    copy_of(FIXTURE, checkout / "problems" / "composed")
    files = ("problems/__init__.py", "problems/wrong.py", "tests/support/short_run.py", "tests/support/warm.py")
    write_files(checkout, {name: (ROOT / name).read_text() for name in files})
    environment = os.environ | {"KERNEL_BUILD_DIR": str(build.directory()), "PYTHONPATH": ""}
    words = [str(tmp_path / "results"), "1", "composed", "--device", "cpu"]
    command = [sys.executable, "tests/support/short_run.py", *words]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode in (0, 6), done.stdout + done.stderr  # 6: the machine was busy
    (machine,) = (tmp_path / "results").iterdir()
    records = record.read(machine.name, "composed", machine.parent)
    assert {r["status"] for r in records} == {"PASSED"} and [r["kind"] for r in records].count("benchmark") == 1
