"""--device model: the verdict on a right and on a wrong variant, and what is refused."""

import functools
import json
import math
import shutil
from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch

from harness import run as harness_run
from harness.problem import folders
from harness.results import record
from harness.tools import model_check
from leaderboard import pages
from problems.common import cubins
from ptx_model.tools import check
from tests.support import ROOT, copy_of, forked, json_lines, script
from tests.support.marks import needs_nvcc

CASE = "m=1 k=64"


def run(*arguments, problem="nvfp4_gemv"):
    return forked.run(["harness/run.py", problem, "--device", "model", *arguments])


@needs_nvcc
@pytest.mark.slow
def test_a_right_variant_is_recorded_as_model_checked_and_never_timed(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    words = ["nvfp4_gemv", "--device", "model", "--variant", "sm100_native", "--case", CASE]
    assert harness_run.main([*words, "--events", str(tmp_path / "events")]) == 0
    said = capfd.readouterr().out
    assert said.count("MODEL_CHECKED") == 7 and " us " not in said and "saved" in said
    compiled, checked = record.read("model", "nvfp4_gemv", tmp_path)
    assert (compiled["kind"], compiled["status"], compiled["target"]) == ("compile", "COMPILED", "sm100")
    case = {"m": 1, "k": 64, "l": 1}
    assert (checked["kind"], checked["status"], checked["case"]) == ("model", "MODEL_CHECKED", case)
    assert all(("sass" in kernel) == bool(cubins.disassembler()) for kernel in compiled["resources"])
    assert checked["orders"] == [order.policy for order in check.ORDERS]
    assert not [name for name in checked if name.endswith("_us")]
    last = [(one["status"], one["time_us"]) for one in json_lines(tmp_path / "events") if one["event"] == "verdict"]
    assert last == [("MODEL_CHECKED", None)]
    (found,) = pages.read(tmp_path, ["model"], []).boards
    assert found.standing.notes[0] == ["compiled, model-checked (1 test case), never run"]


@pytest.mark.slow
def test_a_case_that_takes_too_long_is_a_time_out_that_names_the_option():
    ran = run("--variant", "sm100_native", "--mode", "test", "--case", CASE, "--timeout", "0.01")
    assert ran.returncode == 5 and "give it longer: --timeout 0.02" in ran.stdout


@pytest.mark.slow
@needs_nvcc
def test_a_ring_that_waits_for_too_little_is_a_race_with_its_source_line(tmp_path):
    variants = ROOT / "problems" / "nvfp4_gemv" / "variants"
    for name in ("sm100_native.cu", "warp_ring.cuh", "sm100_native.py"):
        shutil.copy(variants / name, tmp_path)
    ring = tmp_path / "warp_ring.cuh"
    wait = "cp_async_wait<NUM_STAGES - 1>"
    assert wait in ring.read_text()
    ring.write_text(ring.read_text().replace(wait, "cp_async_wait<NUM_STAGES>"))
    case = json.dumps([{"m": 40, "k": 5184, "l": 1, "seed": 5}])
    file = tmp_path / "sm100_native.py"
    ran = forked.run(["-m", "ptx_model.tools.check", variants.parent, file, "sm100", case])
    replies = [json.loads(line) for line in ran.stdout.splitlines()]
    assert {reply["status"] for reply in replies} == {"RUNTIME_ERROR"}, ran.stdout + ran.stderr
    assert "race" in replies[0]["said"] and "warp_ring.cuh" in replies[0]["said"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--variant", "sm100_native", "--mode", "benchmark"), "--device model takes no times"),
        (("--variant", "cpu_portable", "--mode", "test"), "this one is for cpu: give --variant, got cpu_portable"),
        (("--all", "--mode", "test"), "--device model takes one submission"),
    ],
)
def test_what_it_refuses(arguments, said, capsys):
    assert harness_run.main(["nvfp4_gemv", "--device", "model", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("lines", [0, 1, 3, 5])
def test_a_process_that_ends_before_its_last_case_is_an_error(tmp_path, monkeypatch, lines):
    """As one does whose variant calls exit(0). lines: replies before that, three of each of two cases."""
    replies = [
        {"case": n // 3, "order": "x", "status": "MODEL_CHECKED", "said": "", "last": n % 3 == 2} for n in range(lines)
    ]
    said = "".join(f"echo '{json.dumps(one)}'\n" for one in replies)
    python = script(tmp_path / "python", f"cat > /dev/null\n{said}")
    monkeypatch.setattr(model_check.sys, "executable", str(python))
    gemv = folders.find("nvfp4_gemv")
    found = model_check.run(gemv, gemv.variant("sm100_native"), list(gemv.tests[:2]), lambda _: None, None)
    case, outcome = found[-1]
    assert case == gemv.tests[lines // 3] and outcome.status == "RUNTIME_ERROR"
    assert outcome.reason == "its process ended with status 0 before the call was done"


def test_what_cannot_be_executed_or_breaks_a_rule_is_refused_before_anything_runs(tmp_path):
    for problem, variant, said in (
        ("moe_gemm", "sm90_triton", "and no Triton, got sm90_triton"),
        ("dsv4_forward", "composed", "and no whole model, got composed"),
    ):
        with pytest.raises(model_check.UsageError, match=said):
            model_check.target_of(folders.find(problem).variant(variant))
    folder = copy_of(ROOT / "problems" / "nvfp4_gemv", tmp_path / "nvfp4_gemv")
    file = folder / "variants" / "sm100_native.py"
    file.write_text(file.read_text() + "\n\ndef unused():\n    return torch.cuda.Stream()\n")
    ran = run("--variant", "sm100_native", "--mode", "test", "--case", CASE, problem=str(folder))
    assert ran.returncode == 3 and "RULE_BROKEN" in ran.stdout and "MODEL_CHECKED" not in ran.stdout, ran.stdout


def test_an_input_that_a_call_changed_is_named():
    """The outputs, and what INOUT names, may change."""
    task = SimpleNamespace(OUTPUTS=("y",), INOUT=("state",))
    kind = namedtuple("Data", "x state y")
    changed = functools.partial(check.changed_input, task)
    before = kind(torch.zeros(3), torch.zeros(2), torch.zeros(1))
    assert changed(before, kind(torch.zeros(3), torch.ones(2), torch.ones(1))) == ""
    assert changed(before, kind(torch.tensor([0, -0.0, 0]), torch.zeros(2), torch.zeros(1))) == "x"
    whole = namedtuple("Whole", "weights inputs outputs")
    parts = (whole(None, kind(torch.full((3,), x), *before[1:]), None) for x in (math.nan, math.nan, 1.0))
    was, same, other = parts
    assert (changed(was, same), changed(was, other)) == ("", "x")
