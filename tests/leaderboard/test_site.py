"""The page: whole without a network or a script, every link leads somewhere, and what a submission wrote is text."""

import collections
import html.parser
import json
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from harness.tools import modes
from leaderboard import board, report, tables
from leaderboard.site import build
from tests.support.records import bench, full, line, write

HOSTILE = ("<script>", '"><img src=x onerror=alert(1)>', "{{ 7 * 7 }}", "a b#c?d%2e", "$x$", "漢字", "x" * 200)


class Parsed(html.parser.HTMLParser):
    """ids, links, tags and the shown text of a page."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.ids, self.links, self.tags, self.said = [], [], collections.Counter(), []
        self.feed(file.read_text(encoding="utf-8"))

    @property
    def text(self) -> str:
        return " ".join("".join(self.said).split())

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.tags[tag] += 1
        self.ids += [given["id"]] if "id" in given else []
        self.links += [given[key] for key in ("href", "src") if tag in ("a", "link", "img") and key in given]
        assert tag != "svg" or (given.get("role") == "img" and given.get("aria-label"))

    def handle_data(self, data):
        self.said.append(data)


def site(results: Path, folder: Path) -> dict[str, Parsed]:
    assert report.main(["--results", str(results), "--html", str(folder)]) == 0
    return {str(file.relative_to(folder)): Parsed(file) for file in sorted(folder.rglob("*.html"))}


@pytest.fixture(scope="module")
def hostile(tmp_path_factory) -> tuple[Path, dict[str, Parsed]]:
    """Submissions that want to be markup, one that failed, one only compiled, and a line that is no record."""
    folder = tmp_path_factory.mktemp("hostile")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modes, "OUT", folder / "none")
        records = [one for n, name in enumerate(HOSTILE) for one in full(name, 1.1 + n)]
        records += full("peer_p", 2.0, baseline=True)
        said = "<b>mismatch</b> </script><script>alert(2)</script>"
        records += [line("test", "wrong", status="INCORRECT", reason=said)]
        resources = [{"name": "<i>kernel</i>", "registers": 40, "spill_bytes": 0}]
        records += [line("compile", "made", case=None, status="COMPILED", resources=resources)]
        write(folder / "results", "box", records, tail="<script>alert(3)</script>\n")
        (folder / "results" / "<b>box").mkdir()
        (folder / "results" / "<b>box" / "nvfp4_gemv.jsonl").write_text(json.dumps(bench("only", 0, 20.0)) + "\n")
        return folder, site(folder / "results", folder / "site")


def test_links_lead_somewhere_and_ids_are_unique(hostile):
    folder, found = hostile
    assert len(found) == 1 + 1 + len(HOSTILE) + 4 + 2
    for name, page in found.items():
        twice = [one for one, count in collections.Counter(page.ids).items() if count > 1]
        assert not twice, (name, twice)
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme == "data":
                continue
            assert not parts.scheme and not parts.netloc, (name, link)
            target = (folder / "site" / name).parent / unquote(parts.path) if parts.path else folder / "site" / name
            assert target.is_file(), (name, link)
            if parts.fragment:
                other = found[str(target.resolve().relative_to(folder / "site"))]
                assert unquote(parts.fragment) in other.ids, (name, link)
    assert found["problems/nvfp4_gemv.html"].tags["svg"] == 2


def test_text_of_a_submission_is_escaped_and_what_is_not_recorded_is_said(hostile):
    folder, found = hostile
    assert all(page.tags["script"] == page.tags["img"] == 0 for page in found.values())
    board = found["problems/nvfp4_gemv.html"]
    assert all(name[:100] in board.text for name in HOSTILE) and "49" not in found["index.html"].text
    assert "<b>mismatch</b> </script><script>alert(2)</script>" in board.text
    assert "1 lines were left out" in found["index.html"].text
    mine = f"variants/nvfp4_gemv/{build.slug('<script>')}.html"
    assert "<script>" in found[mine].text and build.slug("<script>").isascii()
    assert all("<script" not in file.read_text() for file in (folder / "site" / "pictures").glob("*.svg"))
    _, found = hostile
    made = found["variants/nvfp4_gemv/made.html"].text
    assert "it was not run here" in made and "name: <i>kernel</i>; registers: 40" in made
    assert "this checkout has no variant of this name" in made and "no profile of this variant" in made
    assert "no decode step was timed yet" in found["model.html"].text


def test_the_best_machine_comes_first_and_leads_the_page(tmp_path):
    (compiled,) = board.build([line("compile", "made", case=None, status="COMPILED")], "compiled", {})
    (cpu,) = board.build(full("fast", 0.1, target="cpu"), "cpu", {})
    gpus = [board.build(full("mine", factor), f"gpu {factor}", {})[0] for factor in (2.0, 1.0)]
    assert tables.best_first([compiled, cpu, *gpus]) == [*reversed(gpus), cpu, compiled]
    for machine, factor in (("a-slow", 2.0), ("b-fast", 1.0)):
        write(tmp_path / "r", machine, [*full("mine", factor), *full("peer_p", 3.0, baseline=True)])
    write(tmp_path / "r", "c-model", [line("compile", "made", case=None, status="COMPILED", target="sm100")])
    page = site(tmp_path / "r", tmp_path / "s")["index.html"]
    assert "nvfp4_gemv, sm90 mine 17.93 us 100 % 3.00x b-fast changed since" in page.text
    assert "a-slow" not in page.text, "each problem once"
    assert page.tags["table"] == 1


def test_board_has_footnotes_in_place_of_the_columns_that_say_them():
    warned = full("mine", 1.0, clock={"name": "x", "warnings": ["self-timed: not protected"]})
    wrong = line("test", "wrong", status="INCORRECT", reason="mismatch")
    peer = full("peer", 2.0, baseline=True, clock={"name": "x"})
    (found,) = board.build([*warned, *peer, wrong], "box", {})
    table = tables.standing(found)
    (refs, notes), shown = table.footnotes(), table.beside_footnotes()
    assert "state" not in shown.header and [row[1] for row in shown.rows] == ["mine", "peer", "wrong"]
    assert list(table.kinds) == ["leader", "baseline", "failed"]
    assert any("self-timed" in notes[ref - 1] for ref in refs[0])
    assert any("INCORRECT" in notes[ref - 1] for ref in refs[2])
    narrow = ["rank", "variant", "geomean us", "% of roofline", "x baseline"]
    assert list(table.beside_footnotes(narrow=True).header) == narrow


def test_variant_page_has_source_samples_and_profile(tmp_path, monkeypatch):
    monkeypatch.setattr(modes, "OUT", tmp_path / "profiles")
    (tmp_path / "profiles").mkdir()
    for name in ("sm90_plain-1.txt", "sm90_plain-1.trace.json", "sm90_plain-1.ncu-rep", "sm90_plainer-1.txt", "x.txt"):
        (tmp_path / "profiles" / f"nvfp4_gemv-{name}").write_text(f"what {name} said")
    write(tmp_path / "r", "box", [*full("sm90_plain", 1.1), *full("sm90_plainer", 1.2)])
    text = site(tmp_path / "r", tmp_path / "s")["variants/nvfp4_gemv/sm90_plain.html"].text
    assert "what sm90_plain-1.txt said" in text and "plainer-1" not in text and "custom_kernel" in text
    folder = tmp_path / "s" / "variants" / "nvfp4_gemv"
    profiles = {f"nvfp4_gemv-sm90_plain-1.{kind}" for kind in ("txt", "trace.json", "ncu-rep")}
    assert {file.name for file in (folder / "sm90_plain.files").iterdir()} >= profiles | {"sm90_plain.cu"}
    assert len((folder / "sm90_plain.jsonl").read_text().splitlines()) == 3


def test_folder_without_records_has_a_page_that_replaces_no_other_files(tmp_path, capsys):
    (tmp_path / "r").mkdir()
    shown = site(tmp_path / "r", tmp_path / "s")
    assert set(shown) == {"index.html", "model.html", "judge.html"} and "No record" in shown["index.html"].text
    words = ["--results", str(tmp_path / "r"), "--html", str(tmp_path / "s")]
    assert report.main(words) == report.main(words) == 0
    (tmp_path / "s" / build.MARK).unlink()
    (tmp_path / "s" / "index.html").write_text("mine")
    assert report.main(words) == 2 and (tmp_path / "s" / "index.html").read_text() == "mine"
    assert "--html must name a new or empty folder" in capsys.readouterr().err


def test_slug_is_short_and_different_for_different_names():
    names = [*HOSTILE, "a", "A/b", "a~2f~b", "~", ".", "..", "x" * 199, "é" * 100, "é" * 101]
    slugs = [build.slug(name) for name in names]
    assert len(set(slugs)) == len(names)
    assert all(len(one) <= build.LONGEST and one.isascii() and not one.startswith(".") for one in slugs)
    assert build.slug("sm90_dp4a") == "sm90_dp4a"
