"""The page: whole without a network, every link leads somewhere, and what a submission has written is text."""

import collections
import contextlib
import html.parser
import json
import time
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from harness.tools import endtoend, modes
from leaderboard import report
from leaderboard.site import build, grids
from tests.support.records import bench, full, line, write

HOSTILE = ("<script>", '"><img src=x onerror=alert(1)>', "{{ 7 * 7 }}", "a b#c?d%2e", "$x$", "漢字", "x" * 200)


class Parsed(html.parser.HTMLParser):
    """ids, links, tags and the shown text of a page."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.ids, self.links, self.tags, self.text = [], [], collections.Counter(), []
        self.unlabelled, self.rows = [], []
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.tags[tag] += 1
        self.ids += [given["id"]] if "id" in given else []
        self.links += [given[key] for key in ("href", "src") if tag in ("a", "link", "script", "img") and key in given]
        if tag == "svg" and not (given.get("role") == "img" and given.get("aria-label")):
            self.unlabelled.append(given)
        if tag == "tr":
            self.rows.append(given.get("id"))

    def handle_data(self, data):
        self.text.append(data)


def site(results: Path, folder: Path, *more: str) -> dict[str, Parsed]:
    assert report.main(["--results", str(results), "--html", str(folder), *more]) == 0
    return {str(file.relative_to(folder)): Parsed(file) for file in sorted(folder.rglob("*.html"))}


@pytest.fixture(scope="module")
def hostile(tmp_path_factory) -> tuple[Path, dict[str, Parsed]]:
    """Submissions that want to be markup, one that failed, one only compiled, and a line that is no record."""
    folder = tmp_path_factory.mktemp("hostile")
    patch = pytest.MonkeyPatch()
    patch.setattr(modes, "OUT", folder / "none")
    patch.setattr(endtoend, "OUT", folder / "none")
    records = [one for n, name in enumerate(HOSTILE) for one in full(name, 1.1 + n)]
    records += full("peer_p", 2.0, baseline=True)
    said = "<b>mismatch</b> </script><script>alert(2)</script>"
    records += [line("test", "wrong", status="INCORRECT", reason=said)]
    resources = [{"name": "<i>kernel</i>", "registers": 40, "spill_bytes": 0}]
    records += [line("compile", "made", case=None, status="COMPILED", resources=resources)]
    write(folder / "results", "box", records, tail="<script>alert(3)</script>\n")
    (folder / "results" / "<b>box").mkdir()
    (folder / "results" / "<b>box" / "nvfp4_gemv.jsonl").write_text(json.dumps(bench("only", 0, 20.0)) + "\n")
    with contextlib.ExitStack() as stack:
        stack.callback(patch.undo)
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
        assert page.rows.count(None) == page.tags["thead"], name
        assert all(f"#{row}" in page.links for row in page.rows if row) and page.unlabelled == [], name
    assert sum(page.tags["svg"] for page in found.values()) > 20


def test_text_of_a_submission_is_escaped(hostile):
    folder, found = hostile
    for name, page in found.items():
        assert page.tags["script"] == 1 and page.tags["img"] == page.tags["b"] == 0, name
    shown = "".join(found["index.html"].text)
    assert all(name in shown for name in HOSTILE) and "49" not in found["index.html"].text
    assert "<b>mismatch</b> </script><script>alert(2)</script>" in shown
    assert "1 lines were left out" in shown
    mine = f"variants/nvfp4_gemv/{grids.slug('<script>')}.html"
    assert "<script>" in "".join(found[mine].text) and grids.slug("<script>").isascii()
    svg = (folder / "site" / "pictures").glob("*.svg")
    assert all("<script" not in file.read_text() for file in svg)


def test_what_is_not_recorded_is_said(hostile):
    _, found = hostile
    made = "".join(found["variants/nvfp4_gemv/made.html"].text)
    assert "No record: it was not run here." in made and "<i>kernel</i>: 40 registers a thread" in made
    assert "this checkout has no variant of this name" in made and "No record: no profile" in made
    model = "".join(found["model.html"].text)
    assert "No record: no decode step was timed yet." in model and "Error by layer" in model


def test_variant_page_has_source_samples_and_profile(tmp_path, monkeypatch):
    monkeypatch.setattr(modes, "OUT", tmp_path / "profiles")
    (tmp_path / "profiles").mkdir()
    for name in ("sm90_plain-1.txt", "sm90_plain-1.trace.json", "sm90_plain-1.ncu-rep", "sm90_plainer-1.txt", "x.txt"):
        (tmp_path / "profiles" / f"nvfp4_gemv-{name}").write_text(f"what {name} said")
    write(tmp_path / "r", "box", [*full("sm90_plain", 1.1), *full("sm90_plainer", 1.2)])
    shown = site(tmp_path / "r", tmp_path / "s")
    page = shown["variants/nvfp4_gemv/sm90_plain.html"]
    text = "".join(page.text)
    assert "what sm90_plain-1.txt said" in text and "plainer-1" not in text and "sm90_plain.cu" in text
    assert "custom_kernel" in text and "Imaginary GPU" in text and "code hash" in text
    folder = tmp_path / "s" / "variants" / "nvfp4_gemv"
    assert {file.name for file in (folder / "sm90_plain.files").iterdir()} == {
        f"nvfp4_gemv-sm90_plain-1.{kind}" for kind in ("txt", "trace.json", "ncu-rep")
    }
    samples = (folder / "sm90_plain.samples.csv").read_text().splitlines()
    assert samples[0] == "machine,target,run_id,case,process,call,us" and len(samples) == 1 + 3 * 15
    times = (folder / "sm90_plain.csv").read_text().splitlines()
    assert len(times) == 1 + 4 and all(",sm90_plain," in one for one in times[1:])
    assert len((folder / "sm90_plain.jsonl").read_text().splitlines()) == 3


def test_model_page_has_what_the_check_left(tmp_path, monkeypatch):
    monkeypatch.setattr(endtoend, "OUT", tmp_path / "checks")
    (tmp_path / "checks" / "dsv4_forward").mkdir(parents=True)
    layer = {"after": "layers.2", "alone": 0.02, "alone_budget": 0.2, "drift": None, "drift_budget": 0.3}
    left = {"problem": "dsv4_forward", "config": "tiny", "format": "<b>", "device": "cpu", "right": False, "context": 9}
    left |= {"time": "2026-01-02T03:04:05+00:00", "kernels": {"fmha": "x/y"}, "step_us": 200.0, "layers": [layer]}
    left |= {"ops_us": {"fmha": 150.0, "linear": 40.0}}
    folder = tmp_path / "checks" / "dsv4_forward"
    (folder / "a.json").write_text(json.dumps(left))
    (folder / "b.json").write_text(json.dumps(left | {"step_us": "x"}))
    write(tmp_path / "r", "box", full("a", 1.0))
    shown = site(tmp_path / "r", tmp_path / "s")
    text = " ".join("".join(shown["model.html"].text).split())
    assert "tiny in <b>, on cpu" in text and "the check failed" in text and "150.0 75 % x/y" in text
    assert "between the ops 10.00 5.0 %" in text and "not finite" in text and "2.00e-02" in text
    assert "dsv4_forward/b.json: not what a check leaves (step_us: " in "".join(shown["index.html"].text)


def test_folder_without_records_has_a_page_that_says_so(tmp_path):
    (tmp_path / "r").mkdir()
    shown = site(tmp_path / "r", tmp_path / "s")
    assert set(shown) == {"index.html", "model.html", "judge.html"}
    assert "No record: no variant was judged yet." in "".join(shown["index.html"].text)


def test_page_replaces_a_page_and_no_other_files(capsys, tmp_path):
    write(tmp_path / "r", "box", full("a", 1.0))
    words = ["--results", str(tmp_path / "r"), "--html", str(tmp_path / "s")]
    assert report.main(words) == report.main(words) == 0
    (tmp_path / "s" / build.MARK).unlink()
    (tmp_path / "s" / "index.html").write_text("mine")
    capsys.readouterr()
    assert report.main(words) == 2 and (tmp_path / "s" / "index.html").read_text() == "mine"
    assert "--html must name a new or empty folder, or one with an earlier page: " in capsys.readouterr().err


def test_slug_is_short_and_different_for_different_names():
    names = [*HOSTILE, "a", "A/b", "a~2f~b", "~", ".", "..", "x" * 199, "é" * 100, "é" * 101]
    slugs = [grids.slug(name) for name in names]
    assert len(set(slugs)) == len(names)
    assert all(len(one) <= grids.LONGEST and one.isascii() and not one.startswith(".") for one in slugs)
    assert grids.slug("sm90_dp4a") == "sm90_dp4a"


@pytest.mark.slow
def test_page_takes_time_in_proportion_to_its_records(tmp_path):
    stamps = [time.process_time()]
    for count in (25, 100):
        for n in range(count):
            write(tmp_path / f"{count}", "box", [*full(f"v{n}", 1 + n / 100), line("test", f"v{n}")])
        assert len(site(tmp_path / f"{count}", tmp_path / f"site {count}")) == count + 4
        stamps.append(time.process_time())
    assert stamps[2] - stamps[1] < 6 * (stamps[1] - stamps[0])
