"""Whatever the files of a submission do to the judge, it costs that submission and no other one."""

import os
import resource

import pytest

from harness.judge.handle import RunnerHandle
from harness.judge.selection import refusal
from harness.judge.session import Session
from harness.problem import folders
from tests.harness.problem.test_sources import VECTOR_ADD
from tests.support import warm

# Of each `finally` the compiler makes two copies.
NESTED = "".join(f"{' ' * n}try:\n{' ' * n} pass\n{' ' * n}finally:\n" for n in range(20)) + " " * 20 + "pass\n"


@pytest.fixture
def submissions(tmp_path):
    texts = {"nested": NESTED, "named": f"up{'str'}eam = 1\n", "good": "def custom_kernel(data):\n    return data.z\n"}
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
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
