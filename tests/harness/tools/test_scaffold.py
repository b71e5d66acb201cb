"""harness/tools/scaffold.py: what the verb new writes works before anything in it is changed."""

import shutil
from pathlib import Path

import pytest

from harness import __main__ as command
from harness import run
from harness.problem import folders
from harness.tools import scaffold
from problems import wrong
from problems.common import load
from tests.support.marks import first, needs_nvcc

SMALL = {"nvfp4_gemv": "m=16 k=64", "fmha_decode": "batch=3 heads=20", "moe_gemm": "tokens=1 experts=1 topk=1"}


@pytest.fixture(scope="module")
def problems(tmp_path_factory) -> Path:
    """A copy of problems/, to write to."""
    copy = tmp_path_factory.mktemp("checkout") / "problems"
    shutil.copytree(load.PROBLEMS, copy, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


@pytest.fixture
def written(problems, monkeypatch) -> Path:
    monkeypatch.setattr(load, "PROBLEMS", problems)
    return problems


def tree(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_a_new_problem_passes_its_tests_and_the_linter_untouched(written, capsys):
    assert command.main(["new", "my_op"]) == 0
    said = capsys.readouterr().out
    assert "wrote problems/my_op/task.py\n" in said and "harness/run.py my_op --mode test" in said
    names = {path.relative_to(written / "my_op").as_posix() for path in tree(written / "my_op")}
    assert {"task.py", "task.yml", "reference.py", "submission.py", "README.md", "variants/cpu_plain.py"} <= names
    assert "wrong.py" in names and len(wrong.write(written / "my_op")) == 3
    assert not any(b"new_problem" in content for content in tree(written / "my_op").values())
    for words in (["run", "my_op", "--mode=test"], ["lint", "my_op"]):
        assert command.main([*words, "--device", "cpu"]) == 0, capsys.readouterr().out


@needs_nvcc
def test_a_new_problem_and_a_new_variant_compile_each_by_its_own_name(written):
    scaffold.new_problem("compiled")
    scaffold.new_variant(folders.find("nvfp4_gemv"), "sm90_again")
    for place, name in (("compiled", "sm90_plain"), ("nvfp4_gemv", "sm90_again")):
        (made,) = load.module(written / place, f"variants/{name}").compile_for("sm90")
        assert made.path.stem == name and [kernel.spill_bytes for kernel in made.kernels()] == [0]


def test_a_reserved_word_and_a_folder_elsewhere_get_no_variant(written, capsys, tmp_path):
    assert command.main(["new", "nvfp4_gemv", "cpu_streams"]) == 2
    assert "must not hold the reserved word" in capsys.readouterr().err
    shutil.copytree(scaffold.TEMPLATE, tmp_path / "mine")
    assert command.main(["new", str(tmp_path / "mine"), "cpu_x"]) == 2
    assert "mine is none of problems/" in capsys.readouterr().err


@pytest.mark.parametrize("name", first(sorted(SMALL, reverse=True)))
def test_a_new_variant_for_a_cpu_passes_untouched(written, name, capsys):
    assert command.main(["new", name, "cpu_mine"]) == 0
    assert f"wrote problems/{name}/variants/cpu_mine.cpp\n" in capsys.readouterr().out
    arguments = ["--variant", "cpu_mine", "--mode", "test", "--device", "cpu", "--case", SMALL[name]]
    assert run.main([name, *arguments]) == 0
    assert folders.find(name).variant("cpu_mine").summary.startswith("cpu_mine: cpu_portable as it was")


@pytest.mark.parametrize(
    ("name", "first"), [("nvfp4_gemv", "sm90_plain"), ("fmha_decode", "sm90_wgmma"), ("moe_gemm", "sm90_grouped")]
)
def test_a_new_variant_for_a_gpu_is_the_plain_one_under_another_name(written, name, first):
    """So it compiles as that one does, which the tests of the problem see."""
    script, source = scaffold.new_variant(folders.find(name), "sm90_mine")
    variants = written / name / "variants"
    assert source == variants / "sm90_mine.cu" and source.read_bytes() == (variants / f"{first}.cu").read_bytes()
    lines, before = (path.read_text().splitlines() for path in (script, variants / f"{first}.py"))
    assert lines[0].startswith('"""sm90_mine: ')
    assert [new for new, old in zip(lines[1:], before[1:], strict=True) if new != old] in ([], ['TARGETS = ("sm90",)'])


def test_a_variant_of_a_composition_has_one_target(written):
    (script,) = scaffold.new_variant(folders.find("dsv4_forward"), "sm100_mine")
    found = folders.find("nvfp4_gemv")
    assert load.constants(script, "TARGETS") == {"TARGETS": ("sm100",)}
    assert scaffold.plainest(found, "sm100").name == "sm100_native"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["moe_gemm"], "moe_gemm is there already, nothing was written"),
        (["common"], "common is there already"),
        (["My-Op"], "PROBLEM must have small letters, digits and _"),
        (["../x"], "PROBLEM must have"),
        (["lambda"], "no word of Python"),
        (["x" * 41], "at most 40"),
        ([], "PROBLEM must have"),
        (["nope", "cpu_x"], "PROBLEM must be a name in problems/"),
        (["moe_gemm", "fast"], "begin with cpu_, sm90_ or sm100_, for example cpu_mine"),
        (["moe_gemm", "cpu_" + "x" * 40], "at most 40"),
        (["moe_gemm", "../cpu_x"], "VARIANT must begin with"),
        (["moe_gemm", "cpu_avx2"], "is there already, nothing was written"),
    ],
)
def test_bad_use_is_one_line_and_writes_nothing(written, arguments, message, capsys):
    before = tree(written)
    assert command.main(["new", *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
    assert tree(written) == before
