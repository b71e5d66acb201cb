"""Text of a submission is data: wherever it is shown it does nothing but show."""

import re

import pytest
from markdown_it import MarkdownIt

from harness.results import text
from leaderboard.tables import escape
from tests.support.hostile import HOSTILE, brief

PAGE = MarkdownIt("commonmark").enable(["table", "strikethrough"])
PLAIN = {"p", "table", "thead", "tbody", "tr", "th", "td"}


@pytest.mark.parametrize("said", HOSTILE, ids=brief)
def test_clean_text_holds_nothing_that_a_terminal_obeys(said):
    for found in (text.clean(said), text.line(said), text.first_line(said)):
        found.encode()
        assert all(char.isprintable() or char in "\n\t" for char in found)
        assert len(found) < text.LIMIT + 100
    assert "\n" not in text.line(said) and "\t" not in text.line(said)


@pytest.mark.parametrize(
    ("said", "left"),
    [
        ("a\x1b[31mred\x1b[0m\x1b]8;;http://x\x07b\x1b]0;title\x1b\\c\x1b", "aredbc"),
        ("a\0\b\x7f\x9bb", "ab"),
        ("\u202eab\u2066c\u200b\u200d\u2060\ufeff\u00add", "abcd"),
        ("a\r\nb\rc\u2028d\x85e", "a\nb\nc\nd\ne"),
        ("\ud800a\udfff", "\ufffda\ufffd"),
        ("a\u00a0b\tc", "a b\tc"),
        ("µs × é 漢 😀", "µs × é 漢 😀"),
        (None, "None"),
        ("\x1b[" * 3 + "m", ""),
    ],
    ids=brief,
)
def test_what_stays_of_a_text(said, left):
    assert text.clean(said) == left


def test_a_long_text_keeps_its_ends_and_says_how_much_is_missing():
    found = text.clean("first" + "x" * 100_000 + "last", 90)
    assert found.startswith("firstx") and found.endswith("xlast") and "(99919 characters left out)" in found
    assert text.clean("abc", 3) == "abc" and text.line("a\nb", 3) == "a b"
    assert text.clean("abcdef", 0) == " ... (6 characters left out) ... "
    assert text.first_line("") == text.first_line("\nb") == "" and text.first_line("a\x85b") == "a"


@pytest.mark.parametrize(
    "said", [*HOSTILE, "# x", "a@b.org", "www.x.org", "~~a~~", "_a_ __b__", "&lt;b&gt;", "`a`"], ids=brief
)
def test_markdown_shows_it_and_does_nothing_else(said):
    shown = escape(said)
    page = f"| a | b |\n| --- | --- |\n| {shown} | end |\n\nsaid {shown}\n\n{shown}\n"
    html = PAGE.render(page).replace("<!-- -->", "")
    assert set(re.findall(r"<(\w+)", html)) <= PLAIN, html
    assert html.count("<td>") == 2 and html.count("<tr>") == 2 and "<td>end</td>" in html
    assert not re.search(r"://|\w@|(?i:www\.)", shown)


def test_markdown_leaves_names_and_times_are_rounded_by_their_size():
    assert escape("sm90_dp4a#2  m__k=1 (84 %)\n-") == "sm90_dp4a#2 m__k=1 (84 %) -"
    assert escape("a|b_ $x$ <i>") == r"a\|b\_ \$x\$ \<i\>"
    shown = {0.0: "0.00", 1.234: "1.23", 99.994: "99.99", 99.996: "100.0", 100: "100.0", 999.94: "999.9"}
    shown |= {999.96: "1,000", 4168.22: "4,168", 781712.4: "781,712"}
    assert {value: text.us(value) for value in shown} == shown and text.us(float("nan")) == ""
