"""harness/api.py: records for a program, and nothing on its terminal."""

import pytest

from harness.api import UsageError, judge
from tests.support import ADDS, SUPPORT

PROBLEM = SUPPORT / "problems" / "vector_add"


@pytest.mark.parametrize("show", [False, True])
def test_records_are_returned_and_nothing_is_printed_unless_asked(tmp_path, capfd, show):
    for name in ("mine", "other"):
        (tmp_path / f"{name}.py").write_text(ADDS)
    records = judge(PROBLEM, [tmp_path / "mine.py", tmp_path / "other.py"], "test", "cpu", show=show)
    assert {(one["variant"], one["status"]) for one in records} == {("mine", "PASSED"), ("other", "PASSED")}
    said = "".join(capfd.readouterr())
    assert ("PASSED" in said) if show else said == ""


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"mode": "bench"}, "did you mean benchmark"),
        ({"seeds": 1}, "did you mean seed"),
        ({"timeout": -1.0}, "positive"),
    ],
)
def test_bad_use_raises(more, said):
    with pytest.raises(UsageError, match=said):
        judge("nvfp4_gemv", **more)
