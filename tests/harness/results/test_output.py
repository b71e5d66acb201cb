"""Files of which a program writes the part between two marks."""

import pytest

from harness.judge import verdict
from harness.results import output

MARKS = "<!-- x:begin -->", "<!-- x:end -->"
PAGE = "# A title\n\n<!-- x:begin -->\nold\n<!-- x:end -->\n\nThe end.\n"


def test_the_part_between_two_marks_is_replaced_and_the_rest_stays(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    for _ in range(2):  # a second time changes nothing
        output.splice(page, MARKS, "| new |\n| --- |")
        assert page.read_text() == PAGE.replace("\nold\n", "\n\n| new |\n| --- |\n")


@pytest.mark.parametrize(
    "text", ["", PAGE.replace(MARKS[0], ""), PAGE.replace(MARKS[1], ""), f"{MARKS[1]}\n{MARKS[0]}", PAGE + MARKS[1]]
)
def test_a_file_without_its_marks_is_an_error_and_stays(tmp_path, text):
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(ValueError, match=r"page\.md must hold the lines <!-- x:begin --> and <!-- x:end --> once"):
        output.splice(page, MARKS, "new")
    assert page.read_text() == text


def test_a_bug_has_an_exit_code_that_is_no_verdict(capsys):
    assert output.script(lambda: int("x")) == output.CRASH_EXIT
    assert capsys.readouterr().err.startswith("Traceback") and output.CRASH_EXIT not in verdict.EXIT_CODES.values()
