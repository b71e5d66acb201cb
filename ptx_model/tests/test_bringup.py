"""The stages for the owner of a B200, as far as they run without one: in the model, and where something fails."""

import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from problems.common import load
from ptx_model.tools import bringup_sm100, bringup_stages, bringup_variants

ROOT = bringup_sm100.ROOT
nvcc = pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
NO_GPU = bringup_sm100._gpu() is None


@nvcc
@pytest.mark.skipif(not NO_GPU, reason="for a machine without a B200")
@pytest.mark.slow
def test_without_a_b200_every_stage_is_right_in_the_model_and_the_file_says_what_did_not_run(tmp_path):
    out = tmp_path / "new folder" / "b.json"
    command = [sys.executable, "ptx_model/tools/bringup_sm100.py", "--out", str(out)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 7, ran.stdout + ran.stderr
    found = json.loads(out.read_text())
    assert [one["name"] for one in found["stages"]] == list(bringup_stages.STAGES)
    assert all(one["model"]["status"] == "equal" and not one["model"]["report"] for one in found["stages"]), found
    assert all(one["gpu"] == {"status": "not run"} for one in found["stages"])
    compiled = {one["compiled"]["word"] for one in found["variants"] if "test" not in one}
    assert {"yes"} <= compiled <= {"yes", "needs triton"} and len(found["variants"]) > 15, ran.stdout
    assert "no GPU of compute capability 10.x" in ran.stdout and found["gpu"] is None and "release" in found["nvcc"]


def stage(name, flags, tmp_path, policy="lazy"):
    """The result of a stage in the model, in another process."""
    arguments = f"[{name!r}], 'model', {str(tmp_path / 'r')!r}, {flags!r}, {policy!r}"
    code = f"from ptx_model.tools import bringup_stages; bringup_stages.run({arguments})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
    return json.loads((tmp_path / "r").read_text())[name]


@pytest.mark.slow
@nvcc
def test_a_wait_in_vain_writes_role_barrier_phase_and_tile_before_it_traps(tmp_path):
    found = stage("ring", ("-DWAIT_NS=0ull",), tmp_path)  # so short that every wait is in vain
    assert found["status"] == "trapped" and "the kernel trapped" in found["said"]
    assert found["report"] == ["multiplier (block 0, warp 2) at barrier full[0], phase 0, tile 0"]


@nvcc
@pytest.mark.slow
@pytest.mark.parametrize("policy", ["eager", "late-tma", "late-tensor-core", "random:1"])
@pytest.mark.parametrize("name", ["ring", "nvfp4", "pair"])
def test_the_stages_are_right_under_every_order(name, policy, tmp_path):
    assert stage(name, (), tmp_path, policy)["status"] == "equal"


@pytest.mark.skipif(not NO_GPU, reason="for a machine without a B200")
def test_a_process_that_dies_is_a_failed_stage_with_its_words():
    found = bringup_sm100._process("echo", "gpu", 60)
    assert found["status"] == "failed" and "Error" in found["said"] and found["seconds"] > 0


def test_a_process_that_hangs_is_killed():
    assert bringup_sm100._process("echo", "model", 0)["status"] == "timeout"


def test_outputs_that_differ_are_kept_whole():
    want = np.arange(8, dtype=np.uint32)
    found = bringup_stages._compared(want ^ (want == 3), want)
    assert (found["status"], found["wrong"]) == ("different", 1)
    assert found["first"] == ["word 3: got 0x00000002, wanted 0x00000003"] and found["got"]


def test_a_report_has_no_more_entries_than_it_has_room_for():
    words = [1000] + [0] * 7 + [1, 2, 1, 3, 9, 1, 4, 0] * 127
    lines = bringup_stages.read_report(words)
    assert len(lines) == 127 and lines[0] == "producer (block 1, warp 4) at barrier empty[1], phase 3, tile 9"


def test_every_variant_for_sm100_is_taken_those_for_it_first():
    rows = bringup_variants.variants()
    places = [(row["problem"], f"variants/{row['variant']}.py") for row in rows]
    assert all("sm100" in load.constants(load.PROBLEMS.joinpath(*one), "TARGETS")["TARGETS"] for one in places)
    assert {"sm100_native", "sm90_columns", "sm90_mma", "torch_eager"} < {row["variant"] for row in rows}
    assert [row["variant"].startswith("sm100") for row in rows] == [True] * 4 + [False] * (len(rows) - 4)
    assert rows[0]["case"] and not any("peer" in row["variant"] for row in rows)


@nvcc
@pytest.mark.slow
def test_a_variant_is_compiled_run_and_judged_with_limits(monkeypatch):
    """On what devices there are: the model of a GPU, and a CPU."""
    monkeypatch.setattr(bringup_variants, "JUDGE_S", 0.5)
    native, portable, missing = (
        {"problem": "nvfp4_gemv", "variant": name, "requires": (), "case": "m=16 k=64 l=1"}
        for name in ("sm100_native", "cpu_portable", "sm100_missing")
    )
    kept = []
    bringup_variants.take([native], "model", True, lambda: kept.append(dict(native)))
    bringup_variants.take([portable, missing], "cpu", True, lambda: None)
    assert list(map(bringup_variants.is_fault, (native["test"], portable["judged"], missing["compiled"]))) == [0, 1, 1]
    assert [len(row) for row in kept] == [5, 6]
    rows = bringup_variants.table([native, portable, missing]).splitlines()
    wanted = ("yes +runs in the model +not run", "yes +runs +hung", "killed after 0.5 s", "no +not run", "no file")
    for row, said in zip(rows[1:], wanted, strict=True):
        assert re.search(f" {said}", row), rows


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "word", "said"),
    [
        ("return data[-1].fill_(3)", "wrong", "elements"),
        ("import os; os.abort()", "crashed", "SIGABRT"),
        ("while True: pass", "hung", "no answer within"),
    ],
)
def test_what_ails_a_variant_is_said_in_a_word_and_a_message(call, word, said, tmp_path):
    file = tmp_path / "draft.py"
    file.write_text(f'TARGETS = ("cpu",)\n\n\ndef custom_kernel(data):\n    {call}\n')
    words = ["nvfp4_gemv", "--submission", str(file), "--device", "cpu", "--mode", "test", "--timeout", "3"]
    found = bringup_variants.judged([*words, "--case", "m=16 k=64 l=1"], 100)
    assert found["word"] == word and said in found["said"], found


def test_a_run_without_a_verdict_has_its_exit_code_and_last_line():
    found = bringup_variants.judged(["nvfp4_gemv", "--variant", "none"], 60)
    assert found["word"] == "exit code 2" and "--variant" in found["said"]


def test_bad_use_is_refused(capsys, monkeypatch):
    with pytest.raises(SystemExit) as ended:
        bringup_sm100.main(["--stage", "nothing"])
    assert ended.value.code == 2 and "--stage must be one of echo, copy" in capsys.readouterr().err
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert bringup_sm100.main([]) == 2 and "nvcc must be on PATH" in capsys.readouterr().err
