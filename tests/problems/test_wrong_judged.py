"""Every file in a problem's wrong/ gets INCORRECT from the judge itself, and no other verdict."""

import pytest

from harness.judge import phases
from harness.judge.handle import RunnerHandle
from harness.judge.session import Session
from harness.problem import folders

AT_ONCE = 4  # processes with torch in each
LARGEST = 2**20  # bytes of a test case; the small ones catch every file


def judge(names: list[str]) -> dict[str, set[str]]:
    """Statuses that each file got over the small test cases."""
    gemv = folders.find("nvfp4_gemv")
    cases = [case for case in gemv.tests if case.bytes <= LARGEST]
    statuses = {}
    with Session(gemv, "cpu") as session:
        for start in range(0, len(names), AT_ONCE):
            handles = [
                RunnerHandle(name, folders.submission(gemv, gemv.folder / "wrong" / f"{name}.py"), "cpu")
                for name in names[start : start + AT_ONCE]
            ]
            results = phases.run_tests(session, handles, cases, lambda *_: None, lambda _: None)
            statuses |= {name: {o.status for o in outcomes} for name, outcomes in results.items()}
    return statuses


def names() -> list[str]:
    return sorted(file.stem for file in (folders.find("nvfp4_gemv").folder / "wrong").glob("*.py"))


def check(chosen: list[str]) -> None:
    statuses = judge(chosen)
    assert len(statuses) == len(chosen) > 0
    for name, got in statuses.items():
        assert "INCORRECT" in got and got <= {"INCORRECT", "PASSED"}, (name, got)


def test_some_wrong_files_are_incorrect():
    check(["high_nibble_first", "skips_last_rows", "truncates_output", "zeros"])


@pytest.mark.slow
def test_every_wrong_file_is_incorrect():
    assert len(names()) >= 10
    check(names())
