"""problems/common/load.py: folders side by side, their bare names, literals without running code, targets."""

import sys

import pytest
import torch

from problems.common import load
from problems.common.winner import Winner


@pytest.fixture
def folders(tmp_path):
    """Two problem folders whose modules have the same names and different contents; forgotten afterwards."""
    before = set(sys.modules)
    made = []
    for name, number in (("one", 1), ("two", 2)):
        folder = tmp_path / name / "same"
        (folder / "variants").mkdir(parents=True)
        (folder / "task.py").write_text(f"NUMBER = {number}\n")
        (folder / "reference.py").write_text("from task import NUMBER\nTWICE = 2 * NUMBER\n")
        (folder / "variants/fast.py").write_text("import task\n\n\ndef answer():\n    return task.NUMBER\n")
        made.append(folder)
    yield made
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_two_folders_live_side_by_side(folders):
    one, two = folders
    assert load.module(one, "reference").TWICE == 2 and load.module(two, "reference").TWICE == 4
    first, second = load.module(one, "variants/fast"), load.module(two, "variants/fast")
    assert first is not second and (first.answer(), second.answer()) == (1, 2)
    assert first.task is load.module(one, "task")


def test_bare_names_are_bound_only_while_a_module_loads_and_a_submission_has_no_reference(folders):
    stranger = sys.modules["task"] = type(sys)("task")
    try:
        load.module(folders[0], "reference")
        assert sys.modules["task"] is stranger
    finally:
        del sys.modules["task"]
    load.module(folders[1], "reference")
    assert not {"task", "utils", "reference"} & set(sys.modules)
    (folders[0] / "variants/peeks.py").write_text("import reference\n")
    with pytest.raises(ModuleNotFoundError, match="reference"):
        load.module(folders[0], "variants/peeks")


def test_a_module_is_loaded_once(folders, monkeypatch):
    monkeypatch.setattr(sys, "loads", [], raising=False)
    (folders[0] / "counts.py").write_text("import sys\nsys.loads.append(1)\n")
    assert load.module(folders[0], "counts") is load.from_file(folders[0], folders[0] / "counts.py")
    assert sys.loads == [1]


def test_a_file_outside_the_folders_gets_the_task_of_the_one_it_serves(folders, tmp_path):
    (tmp_path / "mine.py").write_text("from task import NUMBER\n")
    assert [load.from_file(folder, tmp_path / "mine.py").NUMBER for folder in folders] == [1, 2]


def test_extra_bare_names_go_again(folders):
    (folders[0] / "variants/uses.py").write_text("import helper\nimport utils\nVALUE = utils.VALUE + helper.VALUE\n")
    utils, helper = type(sys)("utils"), type(sys)("helper")
    utils.VALUE, helper.VALUE = 9, 1
    assert load.module(folders[0], "variants/uses", extra={"utils": utils, "helper": helper}).VALUE == 10
    assert not {"utils", "helper"} & set(sys.modules)


def test_a_module_that_raises_leaves_nothing_behind(folders):
    file = folders[0] / "variants/breaks.py"
    file.write_text("raise OSError('half way')\n")
    before = set(sys.modules)
    with pytest.raises(OSError, match="half way"):
        load.from_file(folders[0], file)
    assert not [name for name in set(sys.modules) - before if "breaks" in name or name == "task"]
    file.write_text("VALUE = 3\n")
    assert load.from_file(folders[0], file).VALUE == 3
    with pytest.raises(FileNotFoundError, match=r"no file .*variants/absent\.py"):
        load.module(folders[0], "variants/absent")


def test_our_problems_are_named_by_their_folder():
    task = load.module(load.PROBLEMS / "nvfp4_gemv", "task")
    assert task.__name__ == "problems.nvfp4_gemv.task" and sys.modules["problems.nvfp4_gemv.task"] is task


CONSTANTS = '''
"""A summary line.

More of it.
"""
raise SystemExit("this file must not run")
TARGETS = ("cpu", "sm90")
REQUIRES: tuple[str, ...] = ("humming",)
WINNERS = {"cpu": "a"}
declared: int
COMPUTED = len(TARGETS)
if True:
    HIDDEN = 1
'''


def test_constants_and_the_first_docstring_line_are_read_without_running_the_file(tmp_path):
    file = tmp_path / "variant.py"
    file.write_text(CONSTANTS.lstrip())
    assert load.constants(file, "TARGETS", "REQUIRES", "WINNERS", "ABSENT", "HIDDEN", "declared") == {
        "TARGETS": ("cpu", "sm90"),
        "REQUIRES": ("humming",),
        "WINNERS": {"cpu": "a"},
    }
    assert load.constants(file, "ABSENT") == {}
    with pytest.raises(ValueError, match=r"variant\.py:10: COMPUTED must be a literal"):
        load.constants(file, "COMPUTED")
    assert load.summary(file) == "A summary line."
    file.write_text("X = 1\n")
    assert load.summary(file) == ""
    file.write_text("TARGETS = (\n")
    with pytest.raises(SyntaxError) as caught:
        load.constants(file, "TARGETS")
    assert caught.value.filename == str(file)


def test_target_of_a_device(monkeypatch):
    assert load.device_target("cpu") == "cpu"
    for capability, target in (((9, 0), "sm90"), ((10, 0), "sm100"), ((10, 3), "sm100")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, known=capability: known)
        assert load.device_target("cuda") == load.device_target(torch.device("cuda:0")) == target
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ValueError, match="sm_90 or sm_100, got sm_80"):
        load.device_target("cuda")


@pytest.mark.parametrize("device", ["", "tpu", "cuda:x", "mps", "meta", "cuda:99"])
def test_a_device_that_is_none_is_named(device):
    with pytest.raises(ValueError, match=r"device must be cpu, cuda or cuda:N|device cuda:99 is no GPU that torch can"):
        load.device_target(device)


def test_the_winner_is_the_first_that_the_cpu_can_run(tmp_path, monkeypatch):
    (tmp_path / "variants").mkdir()
    (tmp_path / "variants" / "wide.py").write_text('CPU_FLAGS = ("avx9000",)\n')
    (tmp_path / "variants" / "any.py").write_text("")
    said = tmp_path / "submission.py"
    said.write_text('WINNERS = {"cpu": ("wide", "any")}\n')
    assert load.winners(tmp_path) == {"cpu": ("wide", "any")} and load.winner(tmp_path, "cpu") == "any"
    with monkeypatch.context() as patch:
        patch.setattr(load, "_cpu_flags", lambda: frozenset({"avx9000"}))
        assert load.winner(tmp_path, "cpu") == "wide"
    with pytest.raises(ValueError, match=r"one of \['cpu'\], for which there is a winner, got 'sm90'"):
        load.winner(tmp_path, "sm90")
    said.write_text('WINNERS = {"cpu": ("wide",)}\n')
    with pytest.raises(ValueError, match="can run none"):
        Winner(str(said)).custom_kernel((torch.zeros(1),))
    said.write_text("")
    assert load.winners(tmp_path) == {}
