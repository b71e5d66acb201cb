"""Peers that serve some cases of a problem alone, as their literal ONLY says: called on those, shown on all."""

import dataclasses
import re
from pathlib import Path

import pytest

from harness import run
from harness.judge import phases, verdict
from harness.problem import folders
from harness.problem.folders import UsageError
from harness.results import environment, record
from leaderboard import board, tables
from tests.support import VECTOR_ADD, copy_of, write_files
from tests.support.marks import first

KERNEL = '''"""{name}."""
TARGETS = ("cpu",)
{only}

def custom_kernel(data):
    if {refuses}:
        raise ValueError("no such kernel")
    return data.z.copy_(data.x.double() + data.y.double())
'''
ONLY = f'ONLY = {{"n": (1024, {2**20})}}'
CALLS = [("test", 4099), ("test", 1024), ("benchmark", 2**19), ("benchmark", 2**20)]
CASES = [{"n": 2**19}, {"n": 2**20}]
SAYS = f"serves only n=1024 or {2**20}"


@pytest.fixture
def folder(tmp_path, monkeypatch, results) -> Path:
    """vector_add with two tests and two benchmarks, a variant for all and a baseline for one of each; short runs."""
    counts = dataclasses.replace(phases.COUNTS["cpu", False], processes=1, samples=2)
    monkeypatch.setitem(phases.COUNTS, ("cpu", False), counts)
    text = (VECTOR_ADD / "task.py").read_text().replace("(1024, 1, 1025, 4099)", "(4099, 1024)")
    files = {"task.py": text.replace("[Case(2**20, seed=20)]", "[Case(2**19, seed=19), Case(2**20, seed=20)]")}
    for name, only, refuses in (("whole", "", "False"), ("peer_part", ONLY, "len(data.x) in (4099, 2**19)")):
        files[f"variants/{name}.py"] = KERNEL.format(name=name, only=only, refuses=refuses)
    return copy_of(VECTOR_ADD, tmp_path / "vector_add", files)


def outcomes(lines: list[dict]) -> dict[str, list[tuple]]:
    """(kind, n, status, reason) by variant."""
    found: dict[str, list[tuple]] = {}
    for one in lines:
        found.setdefault(one["variant"], []).append((one["kind"], one["case"].get("n"), one["status"], one["reason"]))
    return found


def test_a_run_calls_it_on_what_it_serves_and_tells_the_rest(folder, capsys):
    """Beside a variant that is confined, as ONLY_BY_TARGET allows for a target whose benchmarks are all such cases, and
    ranked; another literal is refused.
    """
    allowed = {"n": (1024, 2**19, 2**20)}
    text = (folder / "task.py").read_text()
    task = f"{text}ONLY_BY_TARGET = {{'cpu': {allowed}}}\n"
    confined = KERNEL.format(name="confined", only=f"ONLY = {allowed}", refuses="len(data.x) == 4099")
    write_files(folder, {"task.py": task, "variants/cpu_confined.py": confined})
    assert run.main([str(folder), "--device", "cpu", "--all"]) in (0, 6)  # 6: BUSY
    printed, lines = capsys.readouterr().out, record.read(environment.machine("cpu"), "vector_add")
    found = outcomes(lines)
    assert found["whole"] == [(kind, n, "PASSED", "") for kind, n in CALLS]
    # Checked where it is timed.
    assert found["peer_part"] == [("benchmark", 2**19, "UNSUPPORTED", SAYS), ("benchmark", 2**20, "PASSED", "")]
    assert [status for _, _, status, _ in found["cpu_confined"]] == ["UNSUPPORTED", "PASSED", "PASSED", "PASSED"]
    assert re.search(rf"peer_part +(PASSED|BUSY) +timed on 1 of 2 cases, a baseline, {SAYS}", printed)
    (made,) = board.build(lines, "box", {("vector_add", "cpu"): CASES})
    standing = made.standing.set_index("variant")
    assert standing["rank"][["whole", "cpu_confined"]].notna().all() and standing["rank"].isna()["peer_part"]
    assert standing.status["peer_part"] == "PASSED"
    shown = tables.markdown(tables.section(made))
    assert "UNSUPPORTED" in shown and SAYS in shown
    for admitted, only, said in (
        ({"n": 1024}, 'ONLY = {"n": 1024}', "must admit each timed case, it leaves out n=524288"),
        (allowed, 'ONLY = {"n": (524288, 1048576)}', r"peer_\* files .* and for cpu .* got .*\(524288, "),
    ):
        task = f"{text}ONLY_BY_TARGET = {{'cpu': {admitted}}}\n"
        write_files(folder, {"task.py": task, "variants/cpu_confined.py": f"TARGETS = ('cpu',)\n{only}\n"})
        with pytest.raises(UsageError, match=said):
            folders.find(str(folder)).variant("cpu_confined")


@pytest.mark.parametrize(("mine", "other"), first([("whole", "peer_part"), ("peer_part", "whole")]))
@pytest.mark.slow
def test_in_a_case_that_only_one_of_a_pair_serves_that_one_has_its_time(folder, capsys, mine, other):
    words = [str(folder), "--device", "cpu", "--variant", mine, "--against", other, "--processes", "2"]
    assert run.main(words) in (0, 6)  # 6: BUSY
    text, lines = capsys.readouterr().out, record.read(environment.machine("cpu"), "vector_add")
    timed = {(line["variant"], line["case"]["n"]): line for line in lines if line["kind"] == "benchmark"}
    wanted = {(name, case["n"]): ("PASSED", "") for name in ("whole", "peer_part") for case in CASES}
    wanted["peer_part", 2**19] = ("UNSUPPORTED", SAYS)
    assert {key: (line["status"], line["reason"]) for key, line in timed.items()} == wanted
    assert len(timed["whole", 2**19]["samples_us"]) == 2 and all(timed["whole", 2**19]["samples_us"])
    assert [key for key, line in timed.items() if line.get("against")] == [(mine, 2**20)]
    assert re.search(rf"n={2**19} +one of the two does not serve it\nn={2**20} +{mine} / {other} = ", text)
    assert re.search(r"whole +(PASSED|BUSY) +geomean ", text)


def test_without_a_case_that_it_serves_it_is_unsupported_and_not_started(folder, capsys):
    (folder / "variants" / "peer_part.py").write_text(f"raise SystemExit('started')\n{ONLY}\n")
    arguments = [str(folder), "--device", "cpu", "--variant", "peer_part"]
    for more in (["--mode", "test", "--case", "n=4099"], ["--mode", "profile", "--case", f"n={2**19}"]):
        code = run.main([*arguments, *more])
        assert code == verdict.EXIT_CODES["UNSUPPORTED"] and SAYS in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("peer_x", 'ONLY = {"k": 1}', r"peer_x\.py: ONLY must name fields of the case \(n\), got 'k'"),
        ("peer_x", 'ONLY = {"n": [1, 2]}', r"must map fields of the case to a value or a tuple of values, got \{'n'"),
        ("peer_x", "ONLY = {}", "must map fields"),
        ("peer_x", 'ONLY = ("n",)', "must map fields"),
        ("peer_x", "ONLY = dict(n=1)", r"peer_x\.py:1: ONLY must be a literal"),
        ("sm90_x", 'ONLY = {"n": 1}', r"sm90_x\.py: ONLY is for peer_\* files of variants/"),
    ],
)
def test_a_literal_that_cannot_be_is_bad_use(folder, name, line, message):
    (folder / "variants" / f"{name}.py").write_text(f"{line}\n")
    with pytest.raises(UsageError, match=message):
        folders.find(str(folder)).variant(name)


def test_what_it_serves_is_read_from_the_file(folder):
    (folder / "variants" / "peer_one.py").write_text('ONLY = {"n": 1024}\n')
    found = folders.find(str(folder))
    one, whole = found.variant("peer_one"), found.variant("whole")
    assert [one.serves(case) for case in found.tests] == [False, True] and one.limits == "serves only n=1024"
    assert all(map(whole.serves, found.tests)) and whole.only == ()
