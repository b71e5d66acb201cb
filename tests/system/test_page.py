"""The page in headless Chromium: from the committed records, and of a submission that wants to be markup."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from leaderboard import report
from leaderboard.site import grids
from tests.support import browser
from tests.support.browser import Chromium
from tests.support.records import full, line, write

pytestmark = pytest.mark.system
WIDTHS = (360, 800, 1600)
BACKGROUND = "getComputedStyle(document.body).backgroundColor"
LIGHT, DARK = "rgb(255, 255, 255)", "rgb(13, 17, 23)"
COLUMN = """(key, name) => {
  const table = document.getElementById(key);
  const column = [...table.tHead.rows[0].cells].findIndex((cell) => cell.textContent.trim() === name);
  return [...table.tBodies[0].rows].filter((row) => !row.hidden).map((row) => row.cells[column].textContent.trim());
}"""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Chromium]:
    with browser.started() as found:
        yield found


@pytest.fixture(scope="module")
def site(chromium: Chromium, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of the committed records; after `chromium`, so that nothing is made where there is none."""
    folder = tmp_path_factory.mktemp("site")
    assert report.main(["--machine", "nvidia-h200", "--html", str(folder)]) == 0
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
            page.run("for (const part of document.querySelectorAll('details')) part.open = true")
            found = page.overlaps()
            where = f"{file.relative_to(folder)} at {width} px"
            assert found["boxes"] > 10 and found["found"] == [], where
            assert page.complaints == [], where
            assert page.run("document.documentElement.scrollWidth") <= width, where
    assert page.run("document.title") != "taken"


def test_no_page_of_the_committed_records_has_overlapping_text_or_an_error(chromium, site):
    looked_at(chromium, site, "light")


def test_no_page_of_hostile_records_has_either(chromium, hostile):
    looked_at(chromium, hostile, "dark")


def test_an_overlap_and_an_error_would_be_found(chromium, site):
    page = chromium.open((site / "problems" / "nvfp4_gemv.html").as_uri(), width=800)
    assert page.overlaps()["found"] == [] and page.complaints == []
    page.run("document.querySelector('h1').style.marginBottom = '-2rem'")
    assert page.overlaps()["found"], "text of HTML"
    page.go((site / "problems" / "nvfp4_gemv.html").as_uri())
    page.run("const [a, b] = document.querySelectorAll('svg.wide text'); b.replaceWith(a.cloneNode(true))")
    assert page.overlaps()["found"], "text of a picture"
    page.run("addEventListener('error', () => { window.thrown = true; })")
    page.run("console.error('said'); setTimeout(() => { throw new Error('thrown'); })")
    page.until("window.thrown")
    page.heard("said")
    page.heard("thrown")
    page.run("fetch('https://example.invalid/').catch(() => 0)")
    page.heard("Content Security Policy")


def test_a_click_or_a_key_sorts(chromium, site):
    page = chromium.open((site / "problems" / "nvfp4_gemv.html").as_uri())
    key = "nvfp4_gemv-sm90-nvidia-h200-variants"

    def column(name: str) -> list[str]:
        return page.run(f"({COLUMN})({key!r}, {name!r})")

    def press(name: str) -> str:
        find = f"[...document.querySelectorAll('#{key} .sort')].find((one) => one.textContent === {name!r})"
        page.run(f"{find}.focus()")
        page.key("Enter")
        return page.run(f"{find}.closest('th').getAttribute('aria-sort')")

    def us(said: str) -> float:
        return float(said.replace(",", ""))

    assert press("geomean us") == "ascending"
    times = [us(said) for said in column("geomean us")]
    assert times == sorted(times) and len(times) > 4
    assert press("geomean us") == "descending"
    assert [us(said) for said in column("geomean us")] == times[::-1], "2,513 is more than 63.17"
    assert press("variant") == "ascending" and column("variant") == sorted(column("variant"))
    assert press("rank") == "ascending"
    ranks = [rank for rank in column("rank") if rank.isdecimal()]
    assert len(ranks) > 2 and column("rank")[: len(ranks)] == [str(i + 1) for i in range(len(ranks))]


def test_words_filter_rows_and_a_link_opens_the_part_that_has_its_row(chromium, site):
    page = chromium.open((site / "judge.html").as_uri())
    page.run("""(() => {
      const field = document.querySelector("input[data-table=attacks]");
      field.value = "ahead REFUSED";
      field.dispatchEvent(new Event("input"));
    })()""")
    shown = page.run(f"({COLUMN})('attacks', 'outcome')")
    assert 10 < len(shown) < 200 and set(shown) == {"refused"}
    assert page.run("document.querySelector('.tools:has([data-table=attacks]) .count').textContent").startswith(
        f"{len(shown)} of "
    )
    page = chromium.open((site / "judge.html").as_uri() + "#planted-all-3")
    assert page.run("document.getElementById('planted-all-3').checkVisibility()")
    assert not page.run("document.getElementById('same-all-3').checkVisibility()")


def test_the_theme_follows_the_system_until_it_is_chosen(chromium, site):
    page = chromium.open((site / "problems" / "nvfp4_gemv.html").as_uri())
    ink = "getComputedStyle(document.querySelector('svg text')).fill"
    assert page.run(BACKGROUND) == LIGHT
    before = page.run(ink)
    page.prefers("dark")
    assert page.run(BACKGROUND) == DARK and page.run(ink) != before
    page.until("document.getElementById('theme').textContent === 'Light theme'")
    page.run("document.getElementById('theme').click()")
    assert page.run(BACKGROUND) == LIGHT and page.run(ink) == before
    page.go((site / "model.html").as_uri())
    assert page.run(BACKGROUND) == LIGHT, "it is chosen for every page"
    page.run("document.getElementById('theme').click()")
    page.prefers("light")
    assert page.run(BACKGROUND) == DARK
    page.run("localStorage.clear()")


def test_the_keyboard_reaches_the_content_first(chromium, site):
    page = chromium.open((site / "index.html").as_uri())
    page.key("Tab")
    assert page.run("document.activeElement.className") == "skip"
    page.key("Enter")
    assert page.run("location.hash") == "#main"
    reached = set()
    for _ in range(60):
        page.key("Tab")
        reached.add(page.run("document.activeElement.closest('table, header, main')?.id || ''"))
        shown = page.run("getComputedStyle(document.activeElement).outlineStyle")
        assert shown not in ("none", "hidden"), "what has the focus is seen"
    assert "first" in reached


def test_a_variant_named_script_is_shown_as_text(chromium, hostile):
    page = chromium.open((hostile / "index.html").as_uri())
    assert "<script>" in page.run(f"({COLUMN})('nvfp4_gemv-sm90-box', 'variant')")
    assert page.run("document.querySelectorAll('script').length") == 1
    page.go((hostile / "variants" / "nvfp4_gemv" / f"{grids.slug('<script>')}.html").as_uri())
    assert page.run("document.querySelector('h1').innerText") == "<script>"
    assert page.run("document.title") == "<script> · Leaderboard"
    assert page.run("document.querySelectorAll('script').length") == 1 and page.complaints == []
