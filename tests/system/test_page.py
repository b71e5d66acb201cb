"""The page in headless Chromium: from the committed records, and of a submission that wants to be markup."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from leaderboard import report
from leaderboard.site import build
from tests.support import browser
from tests.support.browser import Chromium
from tests.support.records import full, line, write

pytestmark = pytest.mark.system
WIDTHS = (360, 800, 1920)
OPEN = "for (const part of document.querySelectorAll('details')) part.open = true"
CUT = """[...document.querySelectorAll('table, th, td, p, li, figure, summary, nav')]
  .filter((one) => one.checkVisibility() && one.getBoundingClientRect().right > innerWidth + 0.5)
  .map((one) => one.textContent.trim().slice(0, 40))"""
SHOWN = "[...document.querySelectorAll('.board')].filter((one) => one.checkVisibility()).map((one) => one.id)"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Chromium]:
    with browser.started() as found:
        yield found


@pytest.fixture(scope="module")
def site(chromium: Chromium, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of the committed records; after `chromium`, so that nothing is made where there is none."""
    folder = tmp_path_factory.mktemp("site")
    assert report.main(["--html", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def hostile(chromium: Chromium, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    names = ["<script>", "<script>document.title = 'taken'</script>", "a_name_without_an_end_" * 9]
    records = [one for n, name in enumerate(names) for one in full(name, 1.1 + n)]
    records += [line("test", "wrong", status="INCORRECT", reason="<img src=x onerror=console.error(1)> " * 9)]
    write(folder / "results", "box", records)
    assert report.main(["--results", str(folder / "results"), "--html", str(folder / "site")]) == 0
    return folder / "site"


def looked_at(chromium: Chromium, folder: Path, theme: str) -> None:
    """Open each page at each width: no complaint of the browser, no two texts that overlap, nothing beyond the edge."""
    page = chromium.open(theme=theme)
    for file in sorted(folder.rglob("*.html")):
        for width in WIDTHS:
            page.size(width)
            page.go(file.as_uri())
            page.run(OPEN)
            found = page.overlaps()
            where = f"{file.relative_to(folder)} at {width} px"
            assert found["boxes"] > 10 and found["found"] == [], where
            assert page.complaints == [], where
            assert page.run(CUT) == [] and page.run("document.documentElement.scrollWidth") <= width, where


def test_no_page_of_the_committed_records_has_overlapping_text_or_an_error(chromium, site):
    looked_at(chromium, site, "light")


def test_no_page_of_hostile_records_has_either(chromium, hostile):
    looked_at(chromium, hostile, "dark")
    page = chromium.open((hostile / "variants" / "nvfp4_gemv" / f"{build.slug('<script>')}.html").as_uri())
    assert page.run("document.querySelector('h1').innerText") == "<script>"
    assert page.run("document.title") == "<script> · Leaderboard"
    assert page.run("document.querySelectorAll('script').length") == 0


def test_one_board_is_seen_at_a_time_and_an_address_chooses_it(chromium, site):
    address = (site / "problems" / "nvfp4_gemv.html").as_uri()
    page = chromium.open(address)
    every = page.run("[...document.querySelectorAll('.board')].map((one) => one.id)")
    assert len(every) > 2 and page.run(SHOWN) == every[:1]
    page.run("document.querySelector('.board .tabs a:nth-of-type(2)').click()")
    page.until(f"({SHOWN})[0] === {every[1]!r}")
    assert page.run(SHOWN) == every[1:2] and page.run("scrollY") == 0
    page = chromium.open(f"{address}#{every[1]}-variants-note-1")
    assert page.run(SHOWN) == every[1:2], "a footnote is part of its board"
