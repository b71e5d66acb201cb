"""The leaderboard's command line: what it prints and writes, and that a stale README is found out."""

import csv
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from harness.problem import sources
from harness.results import record
from leaderboard import board, pages, provenance, report, tables, terminal
from problems.common import load
from tests.support import ROOT
from tests.support.hostile import HOSTILE
from tests.support.records import CASES, full, line, run_line, write

README = f"# A title\n\n{pages.BEGIN}\nold\n{pages.END}\n\nThe end.\n"


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A GPU machine with a ranked variant, a baseline, a wrong one and compiled ones, and a CPU machine."""
    folder = tmp_path / "results"
    compiled = {"status": "COMPILED", "resources": [{"name": "k", "registers": 40, "spill_bytes": 16}], "case": None}
    gpu = [
        *full("sm90_v1", 1.1),
        *full("sm90_v2", 1.5),
        *full("peer_p", 2.2, baseline=True, setup_us=700.0),
        line("test", "sm90_bad", case=1, status="INCORRECT", reason="mismatch found! 3 | 4\nERROR AT (0, 0, 0): 1 2"),
        line("compile", "sm90_new", **compiled),
        line("compile", "sm100_v1", target="sm100", **compiled),
        *full("sm90_old", 1.0, run="r0", time="2025-12-31T00:00:00Z"),
    ]
    write(folder, "gpu-box", gpu)
    write(folder, "cpu-box", [record | {"target": "cpu"} for record in full("cpu_v1", 1.3) + full("cpu_v2", 4.0)])
    return folder


@pytest.fixture
def readme(tmp_path: Path, results: Path) -> list[str]:
    """The options for a README and a machines.txt of our own, in tmp_path."""
    (tmp_path / "README.md").write_text(README)
    (tmp_path / "leaderboard").mkdir()
    (tmp_path / "leaderboard" / "README.md").write_text(README)
    (tmp_path / "machines.txt").write_text("# committed\ngpu-box  # the GPU\n\n")
    where = ["--machines", str(tmp_path / "machines.txt"), "--results", str(results)]
    return ["--readme", str(tmp_path / "README.md"), *where]


def said(capsys, *arguments) -> tuple[int, str, str]:
    return report.main([str(argument) for argument in arguments]), *capsys.readouterr()


SHOWN = (
    *("gpu-box", "cpu-box", "Imaginary GPU", "driver 1.2", "CUDA 13.0", "torch 2.13", "by the judge", "r1"),
    *("2026-01-02 03:00:00 UTC", "0123456789ab", "measured roofline", "empty call", "18.00", "2.10", "2.00x"),
    *("sm90_v1", "sm90_v2", "peer_p", "sm90_bad", "sm90_new", "sm90_old", "sm100_v1", "cpu_v1", "cpu_v2"),
    *("INCORRECT", "compiled, not run", "set-up of 700.0 us", "40 registers", "spills 16 B", "[1]"),
    *(board.OTHER_RUN, provenance.ELSEWHERE),
)


@pytest.mark.parametrize("columns", ["60", "80", "200"])
def test_whole_boards_have_every_variant_and_whole_figures(capsys, results, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    code, out, err = said(capsys, "--results", results, "--all", "--cases")
    joined = " ".join(out.split())
    assert (code, err) == (0, "") and [word for word in SHOWN if word not in joined] == []
    (row,) = [one.split() for one in out.splitlines() if one.split()[:2] == ["1", "sm90_v1"]]
    assert {"19.72", "91", "2.00x"} <= {*row}


def overview(capsys, results, *more) -> list[str]:
    code, out, err = said(capsys, "--results", results, *more)
    assert (code, err) == (0, "")
    return [one.rstrip() for one in out.splitlines()]


def test_without_a_name_each_board_has_a_line_and_this_machines_are_first(capsys, results, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for mine, order in (("cpu-box", ["cpu-box", "gpu-box"]), ("gpu-box", ["gpu-box", "cpu-box"])):
        monkeypatch.setattr(terminal, "here", lambda mine=mine: [mine])
        lines = overview(capsys, results)
        assert [one for one in lines if one in order] == order and max(map(len, lines)) <= 80
        (line,) = [one.split() for one in lines if one.startswith("nvfp4_gemv sm90")]
        assert line[2:] == ["sm90_v1", "19.72", "us", "91", "%", "2.00x", "2026-01-02"]
        assert any(one.startswith("nvfp4_gemv sm100") and "none ranked" in one for one in lines)
    for number in range(60):
        write(results, f"box-{number}", full("a", 1.0))
    assert len(overview(capsys, results)) <= 100


def test_a_line_for_each_board_needs_no_matplotlib(results):
    """Which takes a second to import."""
    words = "import sys; from leaderboard import report; report.main(sys.argv[1:]); print(*sys.modules)"
    command = [sys.executable, "-c", words, "--results", results]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and "nvfp4_gemv sm90" in done.stdout
    assert "matplotlib" not in done.stdout.split()


def test_a_name_gives_this_machines_board_and_a_line_for_each_other(capsys, results, monkeypatch):
    monkeypatch.setattr(terminal, "here", lambda: ["cpu-box"])
    lines = overview(capsys, results, "nvfp4_gemv")
    assert lines[0] == "nvfp4_gemv, cpu, on cpu-box" and "gpu-box" in lines
    assert not any("sm90_v2" in one for one in lines)
    monkeypatch.setattr(terminal, "here", lambda: ["new-box"])  # which has none: the best machine's
    assert overview(capsys, results, "nvfp4_gemv")[0].endswith("on gpu-box")
    lines = overview(capsys, results, "nvfp4_gemv", "--machine", "gpu-box")
    assert any("sm90_v2" in one for one in lines) and not any("cpu_v1" in one for one in lines)


def test_here_is_this_machines_newest_board_and_what_to_do_next(capsys, results, monkeypatch):
    def brief() -> list[str]:
        lines = overview(capsys, results, "nvfp4_gemv", "--here")
        assert len(lines) <= terminal.MOST and re.match("next: .venv/bin/python .*nvfp4_gemv", lines[-1])
        return lines

    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(terminal, "here", lambda: ["gpu-box"])
    assert brief()[0] == "nvfp4_gemv, sm90, on gpu-box" and brief()[-1].endswith("--all   (ranks sm90_old too)")
    write(results, "gpu-box", [one for n in range(30) for one in full(f"sm90_x{n}", 1 + n, run="r5", minute=5)])
    assert any(one.startswith("... ") and "report.py nvfp4_gemv" in one for one in brief())
    monkeypatch.setattr(terminal, "here", lambda: ["cpu-box"])
    assert "new nvfp4_gemv cpu_mine" in brief()[-1]
    monkeypatch.setattr(terminal, "here", lambda: ["new-box"])
    assert len(brief()) == 2
    monkeypatch.setattr(provenance, "source_hash", lambda *_: "new")
    monkeypatch.setattr(terminal, "here", lambda: ["gpu-box"])
    assert any(one.endswith(provenance.STALE) for one in overview(capsys, results, "nvfp4_gemv"))


def test_machine_and_problem_choose_and_wrong_ones_are_named(capsys, results, tmp_path):
    write(results, "cpu-box", [record | {"problem": "other", "target": "cpu"} for record in full("x", 1.0)])
    _, out, _ = said(capsys, "--results", results, "--machine", "cpu-box", "problems/nvfp4_gemv")
    assert "cpu_v1" in out and "gpu-box" not in out and "other" not in out
    for words, message in (
        (["no_such_problem"], "no problem no_such_problem"),
        ([""], "PROBLEM must be a name or a folder, got ''"),
        (["--machine", "nowhere"], "(there are: cpu-box, gpu-box)"),
    ):
        code, out, err = said(capsys, "--results", results, *words)
        assert (code, out) == (2, "") and message in err and err.count("\n") == 1
    folder = tmp_path / "set" / "vector_sum"  # from elsewhere
    folder.mkdir(parents=True)
    name = sources.qualified(folder)
    file = write(tmp_path, "elsewhere", [one | {"problem": name, "target": "cpu"} for one in full("mine", 1.0)])
    file.rename(results / "cpu-box" / f"{name}.jsonl")
    code, out, _ = said(capsys, "--results", results, str(folder))
    assert code == 0 and "mine" in out and "cpu_v1" not in out
    code, _, err = said(capsys, "--results", results, "vector_sum")
    assert code == 2 and f"nor a file of records: there are records of {name}" in err


@pytest.mark.parametrize("form", ["terminal", "markdown", "csv"])
def test_no_records_is_one_line_and_no_failure(capsys, tmp_path, form):
    write(tmp_path, "box", [])
    code, out, err = said(capsys, "--results", tmp_path, "--machine", "box", "moe_gemm", "--format", form)
    assert code == 0 and (out if form == "terminal" else err).startswith("no records of moe_gemm on box: run ")
    assert (out + err).count("no records") == 1 and len(out.splitlines()) <= 1


def test_records_of_no_run_or_no_schema_are_left_out(capsys, results, tmp_path):
    write(results, "gpu-box", [line("test", "a", schema=99)] * 1000)
    write(results, "cpu-box", full("a", 1.0, target="sm999"))
    code, out, err = said(capsys, "--results", results)
    lines = err.splitlines()
    assert code == 0 and "sm90_v1" in out and err.count(": skipped: target: ") == 3
    assert re.search(r"^warning: gpu-box/nvfp4_gemv.jsonl:\d+: skipped: schema: .*, got 99$", err, re.M)
    assert f"warning: ... and {1000 - record.MOST} more in gpu-box/nvfp4_gemv.jsonl" in lines
    for machine, end in (("box", ['{"kind": "end"}']), ("bare-box", [])):
        lines = [run_line(problem="nvfp4_gemv"), *full("a", 1.1)]
        (tmp_path / machine / "nvfp4_gemv").mkdir(parents=True)
        file = tmp_path / machine / "nvfp4_gemv" / "20260101T000000-00000001.jsonl"
        file.write_text("\n".join([*map(json.dumps, lines), *end, '{"kind": "torn']))
    code, out, err = said(capsys, "--results", tmp_path)
    assert (code, err) == (0, "") and "\nbox" in out and "bare-box" not in out


def test_csv_has_a_row_per_variant_and_case(capsys, results):
    code, out, _ = said(capsys, "--results", results, "--format", "csv")
    lines = list(csv.DictReader(io.StringIO(out)))
    mine = [row for row in lines if row["variant"] == "sm90_v1"]
    assert code == 0 and [row["case"] for row in mine] == ["geomean", *map(board.case_label, CASES)]
    assert mine[0]["rank"] == "1" and float(mine[1]["time_us"]) == pytest.approx(19.8)
    assert float(mine[1]["roofline_share"]) == pytest.approx(1 / 1.1, rel=1e-4)
    (wrong,) = [row for row in lines if row["variant"] == "sm90_bad" and row["case"] == "geomean"]
    assert wrong["rank"] == wrong["time_us"] == "" and "ERROR AT (0, 0, 0): 1 2" in wrong["reason"]


def test_attempts_superseded_times_and_the_mean_are_shown(capsys, tmp_path):
    again = [record | {"superseded": True} for record in full("b", 0.8)] + full("b", 1.0, attempt=3)
    write(tmp_path, "box", full("a", 1.1) + again)
    write(tmp_path, "mean-box", [record | {"ranking_by": "mean"} for record in full("a", 1.0)])
    _, out, _ = said(capsys, "--results", tmp_path, "--format", "markdown")
    assert "| geomean us |" in out and "| mean us |" in out and "| 20.00 |" in out  # (18 + 32 + 10) / 3
    (first,) = [text for text in out.splitlines() if text.startswith("| 1 | b")]
    assert "timed twice" in first and "| 3 |" in first


@pytest.mark.parametrize("form", ["markdown", "terminal"])
def test_cases_have_a_row_each(capsys, monkeypatch, tmp_path, form):
    monkeypatch.setenv("COLUMNS", "200")
    baseline = [one | {"baseline": True} for one in full("peer_x", 2.2)]
    write(tmp_path, "box", [*full("a", 1.1), *baseline, line("test", "bad", status="INCORRECT")])
    _, out, _ = said(capsys, "--results", tmp_path, "--format", form, "--all", "--cases")
    words = [re.sub(r"\s*\|?\s+\|?\s*", " ", text.strip(" |")) for text in out.splitlines()]
    assert "case a peer_x leader x baseline measured roofline empty call" in words
    assert [text for text in words if text.startswith("m=")] == [
        "m=7168 k=16384 l=1 19.80 (91 %, 11.8 TFLOP/s) 39.60 (45 %, 5.91 TFLOP/s) 2.00x 18.00 2.10",
        "m=4096 k=7168 l=8 35.20 (91 %, 6.65 TFLOP/s) 70.40 (45 %, 3.32 TFLOP/s) 2.00x 32.00 2.10",
        "m=7168 k=2048 l=4 11.00 (91 %, 21.3 TFLOP/s) 22.00 (45 %, 10.6 TFLOP/s) 2.00x 10.00 2.10",
    ]
    (found,) = board.build([one | {"case": one["case"] | {"k": 64}} for one in full("a", 1.1)], "box", {})
    above, table = tables.section(found).tables[1]
    assert above == "By case, us. All have k=64."
    assert [row[0] for row in table.rows] == ["m=7168 l=1", "m=4096 l=8", "m=7168 l=4"]


def test_readme_is_filled_in_and_a_stale_one_found_out(capsys, tmp_path, results, readme):
    """By its own text, by a new record, by a removed machine; --check writes nothing."""
    file = tmp_path / "README.md"

    def check() -> tuple[int, str]:
        before = file.read_text()
        code, out, _ = said(capsys, *readme, "--check")
        assert file.read_text() == before and ("stale" in out) == bool(code)
        return code, out

    assert check()[0] == 1 and said(capsys, *readme)[0] == 0 and check()[0] == 0
    fresh = file.read_text()
    assert fresh.startswith(f"# A title\n\n{pages.BEGIN}\n") and fresh.endswith(f"{pages.END}\n\nThe end.\n")
    assert "sm90_v1" in fresh and "old\n" not in fresh and "cpu-box" not in fresh  # machines.txt does not list it
    file.write_text(fresh.replace("sm90_v1", "sm90_v9"))
    assert check()[0] == 1
    file.write_text(fresh)
    write(results, "gpu-box", full("sm90_v1", 1.05, run="r9", minute=9) + full("sm90_v2", 1.4, run="r9", minute=9))
    code, out = check()
    assert code == 1 and "r9" in out and said(capsys, *readme)[0] == 0 and check()[0] == 0
    (tmp_path / "machines.txt").write_text("# none\n")
    assert check()[0] == 1 and said(capsys, *readme)[0] == 0
    assert "No machine's records are committed yet." in file.read_text()


@pytest.mark.parametrize(
    ("machines", "text", "message"),
    [
        ("gpu-box\n", "# no markers\n", "README.md must hold the lines"),
        ("gpu-box\nghost\n", README, "machines.txt lists ghost, which has no records"),
    ],
)
def test_readme_that_cannot_be_filled_in_stays(capsys, tmp_path, readme, machines, text, message):
    (tmp_path / "README.md").write_text(text)
    (tmp_path / "machines.txt").write_text(machines)
    for more in ([], ["--check"]):
        code, _, err = said(capsys, *readme, *more)
        assert code == 2 and message in err
    assert (tmp_path / "README.md").read_text() == text


def test_the_readme_of_this_project_is_current(capsys):
    """`make board` renders it. That a stale one is found out is shown above, on a README of the test's own."""
    file = ROOT / "README.md"
    if not file.is_file() or pages.BEGIN not in file.read_text(encoding="utf-8"):
        pytest.skip("README.md has no board")
    code, out, err = said(capsys, "--check")
    assert code == 0, out + err


def test_newest_latency_of_each_case_is_shown_beside_the_boards(capsys, results, monkeypatch):
    one = line("latency", "composed", problem="model") | {"case": {"config": "small", "batch": 1}, "median_us": 4000.0}
    failed = {"status": "INVALID_MEASUREMENT", "reason": "replay_equals_eager"}
    bad = one | {"case": {"config": "large", "batch": 1}} | failed
    (results / "gpu-box" / "model.jsonl").write_text("".join(json.dumps(x) + "\n" for x in (one | {"n": 1}, one, bad)))
    for form, title in (("markdown", "### model, sm90, on gpu-box"), ("terminal", "model, sm90, on gpu-box")):
        code, out, err = said(capsys, "--results", results, "--format", form, "--all")
        assert (code, err) == (0, "") and f"{title}: time per decode step" in out and "sm90_v1" in out
        assert out.count("4,000") == 2 and out.replace("\\", "").count("INVALID_MEASUREMENT: replay_equals_eager") == 1
    monkeypatch.setattr(terminal, "here", lambda: ["gpu-box"])
    lines = overview(capsys, results, "model", "--here")
    assert len(lines) <= terminal.MOST and "4,000" in "".join(lines) and lines[-1].endswith("model --mode latency")


def hostile(number: int) -> str:
    """As a name that a record may have: without what parts folders."""
    return HOSTILE[number].replace("/", "").replace("\0", "")[:150] + f"x{number}"


@pytest.fixture
def bad_results(tmp_path: Path) -> Path:
    """Every text of a record, a submission's or not, in turn each of the hostile ones."""
    lines = []
    for number, said in enumerate(HOSTILE):
        name = hostile(number)
        more = {
            "environment": {"gpu": said, "driver": said},
            "clock": {"name": said, "cold": [said], "warnings": [said]},
            "commit": said,
            "roofline_kind": said,
            "throttle": [said],
            "run": f"r{hostile(number % 3)}",
            "problem": "foreign",
        }
        times = full(name, 1.0 + number / 10, **more)
        for one in times:
            one["case"] = {"m": one["case"]["m"], "said": said}
            one["against"] = {"variant": said, "ratio": 1.0, "ci95": [0.9, 1.1], "word": said}
        lines += times
        lines.append(line("test", f"wrong{name}", status="INCORRECT", reason=said, case=number % 3))
        lines.append(line("test", f"odd{name}", problem=f"p{number}{name}", status="TIMEOUT", reason=said))
        lines.append(line("compile", name, target="sm100", status="COMPILED", resources=[{"target": f"t{name}"}]))
        case = {"config": said, "format": said, "batch": 1, "context": number}
        lines.append(line("latency", "x", problem="model", status="TIMEOUT", reason=said) | {"case": case})
    write(tmp_path / "bad", "box", lines)
    return tmp_path / "bad"


@pytest.mark.parametrize("form", ["terminal", "markdown", "csv"])
def test_hostile_records_are_shown_as_text(capsys, bad_results, form):
    short = said(capsys, "--results", bad_results)[1]
    code, out, err = said(capsys, "--results", bad_results, "--format", form, "--all", "--cases")
    out = short + out if form == "terminal" else out
    assert (code, err) == (0, "")
    out.encode()
    assert all(char.isprintable() or char == "\n" for char in out) and "[link=http" in out.replace("\\", "")
    if form == "markdown":
        html = MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(out).replace("<!-- -->", "")
        known = {"h3", "ul", "li", "p", "table", "thead", "tbody", "tr", "th", "td"}
        assert set(re.findall(r"<(\w+)", html)) <= known
        assert not re.search(r"://|\w@\w", out)
    if form == "csv":
        rows = list(csv.DictReader(io.StringIO(out)))
        assert {row["machine"] for row in rows} == {"box"} and all(None not in row for row in rows)


def test_a_record_names_no_file_outside(capsys, tmp_path):
    """Neither a folder of problems to load code from, nor a picture to write."""
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil" / "task.py").write_text("raise SystemExit(99)\n")
    places = [f"../../../../../../../../{tmp_path}/evil", str(tmp_path / "evil"), "..", "../x"]
    write(tmp_path / "r", "box", full("a", 1.0) + [one | {"problem": p} for p in places for one in full("b", 1.0)])
    write(tmp_path / "r", "box", [one | {"target": p} for p in places for one in full("b", 1.0)])
    code, out, err = said(capsys, "--results", tmp_path / "r", "--html", tmp_path / "out")
    assert code == 0 and "evil" not in out, out
    assert f"... and {2 * 3 * len(places) - record.MOST} more in box/nvfp4_gemv.jsonl" in err


def test_what_cannot_be_read_or_loaded_is_one_line(capsys, tmp_path, results, readme, monkeypatch):
    (tmp_path / "file").touch()
    none = tmp_path / "none"
    for options, message in (
        (["--results", tmp_path / "file"], "--results: not a folder: "),
        (["--results", none], f"--results: no folder {none}"),
        ([*readme, "--readme", none / "README.md"], f"--readme: cannot read {none / 'README.md'}: No such file"),
        ([*readme, "--machines", none], f"--machines: cannot read {none}: No such file"),
        (["--results", results, "--html", "/proc/x"], "--html: cannot write /proc/x: "),
        (["--results", results, "--html", tmp_path / "file"], f"--html: cannot write {tmp_path / 'file'}: "),
    ):
        code, out, err = said(capsys, *options)
        assert (code, out) == (2, "") and err.startswith(f"leaderboard/report.py: {message}") and err.count("\n") == 1
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "task.py").write_text("raise KeyError('x')\n")
    monkeypatch.setattr(load, "PROBLEMS", tmp_path)
    write(tmp_path / "r", "box", [one | {"problem": "broken"} for one in full("a", 1.0)])
    code, _, err = said(capsys, "--results", tmp_path / "r")
    assert code == 2 and "broken/task.py cannot be loaded: KeyError('x')" in err and err.count("\n") == 1
