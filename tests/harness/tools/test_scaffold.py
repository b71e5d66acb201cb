"""harness/tools/scaffold.py: what --new and --new-variant write works before anything in it is changed."""

import shutil
from pathlib import Path

import pytest

from harness import run
from harness.problem import folders
from harness.tools import scaffold
from problems.common import load
from tests.support.marks import first

SMALL = {"nvfp4_gemv": "m=16 k=64", "fmha_decode": "batch=1 queries=1 heads=8", "moe_gemm": "tokens=1 experts=1 topk=1"}
needs_nvcc = pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")


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


def test_a_new_problem_passes_its_tests_and_the_linter_untouched(written, capsys):
    assert run.main(["--new", "my_op"]) == 0
    said = capsys.readouterr().out
    assert "wrote problems/my_op/task.py\n" in said and "harness/run.py my_op --mode test" in said
    names = {path.relative_to(written / "my_op").as_posix() for path in tree(written / "my_op")}
    assert {"task.py", "task.yml", "reference.py", "submission.py", "README.md", "variants/cpu_plain.py"} <= names
    assert sum(name.startswith("wrong/") for name in names) >= 3
    assert not any(b"new_problem" in content for content in tree(written / "my_op").values())
    for what in ("--mode=test", "--lint"):
        assert run.main(["my_op", what, "--device", "cpu"]) == 0, capsys.readouterr().out


@needs_nvcc
def test_the_kernels_of_a_new_problem_compile(written):
    scaffold.new_problem("compiled")
    (made,) = load.module(written / "compiled", "variants/sm90_plain").compile_for("sm90")
    assert [kernel.spill_bytes for kernel in made.kernels()] == [0]


def test_a_name_with_the_reserved_word_is_refused(written, capsys):
    assert run.main(["nvfp4_gemv", "--new-variant", "cpu_streams"]) == 2
    assert "must not hold the reserved word" in capsys.readouterr().err


@pytest.mark.parametrize("name", first(sorted(SMALL, reverse=True)))
def test_a_new_variant_for_a_cpu_passes_untouched(written, name, capsys):
    assert run.main([name, "--new-variant", "cpu_mine"]) == 0
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


@needs_nvcc
def test_it_compiles_by_its_own_name(written):
    scaffold.new_variant(folders.find("nvfp4_gemv"), "sm90_again")
    (made,) = load.module(written / "nvfp4_gemv", "variants/sm90_again").compile_for("sm90")
    assert made.path.stem == "sm90_again"


def test_a_variant_of_a_composition_has_one_target(written):
    (script,) = scaffold.new_variant(folders.find("dsv4_forward"), "sm100_mine")
    found = folders.find("nvfp4_gemv")
    assert load.constants(script, "TARGETS") == {"TARGETS": ("sm100",)}
    assert scaffold.plainest(found, "sm100").name == "sm100_native"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--new", "moe_gemm"], "moe_gemm is there already, nothing was written"),
        (["--new", "common"], "common is there already"),
        (["--new", "My-Op"], "--new: the name must be small letters, digits and _"),
        (["--new", "../x"], "--new: the name must be"),
        (["--new", "lambda"], "no word of Python"),
        (["--new", "x" * 41], "at most 40"),
        (["--new", ""], "--new: the name must be"),
        (["moe_gemm", "--new", "x"], "--new does not go with PROBLEM"),
        (["--new", "x", "--all"], "--new does not go with --all"),
        (["--new-variant", "cpu_x"], "--new-variant: give PROBLEM too, one of"),
        (["nope", "--new-variant", "cpu_x"], "PROBLEM must be one of"),
        (["moe_gemm", "--new-variant", "fast"], "the name must be one of cpu, sm90, sm100, _, and an idea"),
        (["moe_gemm", "--new-variant", "cpu_" + "x" * 40], "at most 40"),
        (["moe_gemm", "--new-variant", "../cpu_x"], "the name must be"),
        (["moe_gemm", "--new-variant", "cpu_avx2"], "is there already, nothing was written"),
        (["moe_gemm", "--new-variant", "cpu_x", "--word"], "--new-variant does not go with --word"),
    ],
)
def test_bad_use_is_one_line_and_writes_nothing(written, arguments, message, capsys):
    before = tree(written)
    assert run.main(arguments) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
    assert tree(written) == before


def test_a_folder_elsewhere_gets_no_variant(tmp_path, capsys):
    shutil.copytree(scaffold.TEMPLATE, tmp_path / "mine")
    assert run.main([str(tmp_path / "mine"), "--new-variant", "cpu_x"]) == 2
    assert "mine is none of problems/" in capsys.readouterr().err
