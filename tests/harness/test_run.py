"""The command line: what it prints, records and returns."""

import json

import pytest

from harness import invocation, run
from harness.api import UsageError, judge
from harness.problem import folders, task_yml
from harness.results import output, record
from problems.common import load
from tests.support import ADDS, ROOT, VECTOR_ADD, copy_of, json_lines, write_files
from tests.support.marks import needs_nvcc

MINE = (ROOT / "problems/nvfp4_gemv/variants/torch_dequant.py").read_text()
SMALL = "m=16 k=64"


def right_and_wrong(folder):
    """Write right.py and wrong.py, for vector_add."""
    return write_files(folder, {"right.py": ADDS, "wrong.py": ADDS.replace("data.y", "data.x"), "more/right.py": ADDS})


def lines_of(folder):
    return [one for file in folder.rglob("*.jsonl") for one in record.contents_of(file, folder).records]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such_problem"], "PROBLEM must be a name in problems/"),
        (["nvfp4"], "did you mean nvfp4_gemv?"),
        (["nvfp4-gemv"], "did you mean nvfp4_gemv?"),
        (["elsewhere/problems/nvfp4_gemv"], "did you mean nvfp4_gemv?"),
        (["nvfp4_gemv", "--variant", "nothing"], "--variant must be a variant of nvfp4_gemv"),
        (["nvfp4_gemv", "--variant", "sm90_dp4"], "did you mean sm90_dp4a?"),
        (["nvfp4_gemv", "--variant", "../wrong/zeros"], "--variant must be a variant"),
        (["nvfp4_gemv", "--variant", "./cpu_portable"], "--variant must be a variant"),
        (["nvfp4_gemv", "--variant", "cpu_portable.py"], "--variant must be a variant"),
        (["nvfp4_gemv", "--against", "HEAD~1:cpu_avx2"], "did you mean cpu_avx2?"),
        (["nvfp4_gemv", "--submission", "nothing.py"], "--submission must be a Python file, found none at nothing.py"),
        (["nvfp4_gemv", "--against", "cpu_avx2", "--mode", "test"], "--against is about times"),
        (["nvfp4_gemv", "--processes", "4", "--mode", "test"], "--processes is about times"),
        (["nvfp4_gemv", "--all", "--variant", "cpu_avx2"], "one of --variant, --submission and --all"),
        (["nvfp4_gemv", "--all", "--against", "cpu_avx2"], "--against takes one submission"),
        (["nvfp4_gemv", "--mode", "profile", "--all"], "--mode profile takes one submission"),
        (["nvfp4_gemv", "--mode", "benchmark", "--seed", "0"], "--seed is of test cases"),
        (["nvfp4_gemv", "--fail-on-regression", "0"], "--fail-on-regression goes with --against"),
        (["nvfp4_gemv", "--timeout", "nan"], "--timeout must be positive"),
        (["nvfp4_gemv", "--seed", "-1"], "--seed must be 0 to 2^63 - 1"),
        (["nvfp4_gemv", "--device", "cpu", "--resume", "x"], "no unfinished run x of nvfp4_gemv"),
        (["nvfp4_gemv", "--device", "cpu", "--resume"], "no unfinished run of nvfp4_gemv"),
        (["nvfp4_gemv", "--device", "cpu", "--resume", "--mode", "test"], "--resume continues a recorded run"),
        ([], "PROBLEM is missing: one of dsv4_forward"),
    ],
)
def test_bad_use_is_one_clear_line_and_status_2(arguments, message, capsys, results):
    assert run.main(arguments) == output.USAGE_EXIT
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--processes", "abc"], "--processes must be 2 to 1000, got 'abc'"),
        (["--mode", "bench"], "did you mean benchmark?"),
        (["--verbose"], "unknown option --verbose"),
        (["--mod", "test"], "did you mean --mode?"),
        (["b.py"], "unexpected argument b.py"),
    ],
)
def test_an_unknown_word_names_what_was_meant(words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        run.main(["nvfp4_gemv", *words])
    said = capsys.readouterr().err
    assert ended.value.code == output.USAGE_EXIT and message in said and said.count("\n") == 1


def test_several_files_are_judged_in_one_run(tmp_path, capsys):
    right_and_wrong(tmp_path)
    command = [str(VECTOR_ADD), "--device", "cpu", "--mode", "test", "--json", "-"]

    def judged(*names: str) -> int:
        return run.main([*command, *(f"--submission={tmp_path / name}" for name in names)])

    assert judged("right.py", "wrong.py") == 1
    found = {(one["variant"], one["status"]) for one in map(json.loads, capsys.readouterr().out.splitlines())}
    assert ("right", "PASSED") in found and ("wrong", "INCORRECT") in found
    assert judged("right.py", "more/right.py") == output.USAGE_EXIT
    assert "several files have the name right" in capsys.readouterr().err


def test_test_mode_says_what_is_right_and_records_nothing(results, tmp_path, capsys):
    file, out = tmp_path / "right.py", tmp_path / "out.json"
    file.write_text(MINE)
    arguments = ["nvfp4_gemv", "--submission", str(file), "--mode", "test", "--device", "cpu", "--case", SMALL]
    assert run.main([*arguments, "--json", str(out), "--seed", "77"]) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("cores", "torch", "1 of 1 test case right", "PASSED", "next: "))
    (line,) = json_lines(out)
    assert line["status"] == "PASSED" and line["kind"] == "test" and line["seeds"] == ["77"]
    assert line["case"] == {"m": 16, "k": 64, "l": 1} and line["error"]["rel"] < 1e-3
    assert not results.exists()


@pytest.mark.parametrize(
    ("source", "more", "code", "first"),
    [
        ("def custom_kernel(data):\n    return data.no_such_field\n", [], 4, "mine.py:2: AttributeError: "),
        ("def custom_kernel(data, more):\n    pass\n", [], 4, "mine.py:1: TypeError: custom_kernel() missing 1 "),
        ("import sys\n\n\ndef custom_kernel(data):\n    sys.exit('enough')\n", [], 4, "mine.py:5: SystemExit: enough"),
        ("raise KeyboardInterrupt\n", [], 4, "mine.py:1: KeyboardInterrupt"),
        ("def kernel(data):\n    pass\n", [], 4, "mine.py: AttributeError: "),
        ("import time\ndef custom_kernel(data):\n    time.sleep(600)\n", ["--timeout", "1"], 5, "no answer within 1 s"),
    ],
    ids=["field", "signature", "exit", "interrupt", "function", "time"],
)
def test_an_error_is_shown_with_the_users_own_line_first(tmp_path, capsys, source, more, code, first):
    (tmp_path / "mine.py").write_text(source)
    command = ["nvfp4_gemv", "--submission", str(tmp_path / "mine.py"), "--mode", "test", "--device", "cpu"]
    assert run.main([*command, "--case", SMALL, *more]) == code
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("mine  m=16 k=64 l=1  ") and f": {first}" in line]
    assert first in lines[-2] and lines[-1].startswith("next: "), "and in the verdict"
    assert code != 5 or "--timeout 2" in lines[-2]


@pytest.mark.parametrize(
    ("more", "code", "status", "said"),
    [
        ("# on a side str" + "eam", 3, "RULE_BROKEN", f"odd.py:{MINE.count(chr(10)) + 2}: "),
        ('REQUIRES = ("no_such_package",)', 7, "UNSUPPORTED", "no_such_package"),
    ],
)
def test_a_file_that_is_not_run_says_why(tmp_path, results, capsys, more, code, status, said):
    file = tmp_path / "odd.py"
    file.write_text(f"{MINE}\n{more}\n")
    assert run.main(["nvfp4_gemv", "--submission", str(file), "--device", "cpu"]) == code
    (line,) = lines_of(results)
    assert said in capsys.readouterr().out and line["status"] == status and said in line["reason"]


def test_a_variant_for_another_machine_is_unsupported_and_the_others_are_named(capsys):
    for mode in ("test", "profile"):
        assert run.main(["nvfp4_gemv", "--variant", "sm90_plain", "--mode", mode, "--device", "cpu"]) == 7
        assert "made for sm90, this run is on cpu, where nvfp4_gemv has cpu_" in capsys.readouterr().out


COMPILES = """from pathlib import Path
from problems.common import build
TARGETS = ("sm90", "sm100")
def compile_for(target):
    return [build.cuda(Path(__file__).with_suffix(".cu"), target)]
"""


@needs_nvcc
def test_a_file_for_a_gpu_alone_is_compiled_and_not_run(tmp_path, results):
    source = 'extern "C" int launch() { return 0; }\n__global__ void k(int* p) { *p = 1; }\n'
    write_files(tmp_path, {"tiny.py": COMPILES, "tiny.cu": source})
    assert run.main(["nvfp4_gemv", "--submission", str(tmp_path / "tiny.py"), "--device", "cpu"]) == 0
    (line,) = lines_of(results)
    assert line["kind"] == "compile" and line["status"] == "COMPILED"
    assert [a["target"] for a in line["resources"]] == ["sm90", "sm100"]
    assert all(a["registers"] > 0 and a["spill_bytes"] == 0 for a in line["resources"])


@needs_nvcc
def test_a_broken_source_is_compile_error_with_the_compilers_words(tmp_path, results, capsys):
    write_files(tmp_path, {"broken.py": COMPILES.replace(', "sm100"', ","), "broken.cu": "__global__ void k( {}\n"})
    assert run.main(["nvfp4_gemv", "--submission", str(tmp_path / "broken.py"), "--device", "cpu"]) == 4
    out = capsys.readouterr().out
    assert "broken.cu(1): error: " in out and "broken.cu:1: error: " not in out
    assert "\nbroken  COMPILE_ERROR  broken.cu:1, see above\n" in out
    assert [line["status"] for line in lines_of(results)] == ["COMPILE_ERROR"]


def test_a_run_warns_of_malformed_lines(monkeypatch, results, capsys):
    monkeypatch.setattr(invocation.Run, "machine", "box")
    name = "box/nvfp4_gemv/20260101T000000-00000001.jsonl"
    write_files(results, {name: "garbage\n"})
    assert run.main(["nvfp4_gemv", "--device", "cpu", "--submission", "lost.py"]) == output.USAGE_EXIT
    assert f"warning: {name}:1: skipped: Expecting value" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("task.py", "task.py would hide a module"),
        ("reference.py", "reference.py would hide a module"),
        ("cpu_portable.py", "has a variant cpu_portable"),
    ],
)
def test_a_submission_with_a_name_that_the_problem_has_is_refused(tmp_path, capsys, name, said):
    (tmp_path / name).write_text("def custom_kernel(data):\n    pass\n")
    assert run.main(["nvfp4_gemv", "--submission", str(tmp_path / name), "--device", "cpu"]) == output.USAGE_EXIT
    assert said in capsys.readouterr().err


def test_task_yml_is_what_task_py_says():
    for name in folders.problem_names():
        found = folders.find(name)
        if found.ours and not found.composition:
            assert (load.PROBLEMS / name / "task.yml").read_text() == task_yml.render(found)


def test_beside_a_wrong_one_a_right_one_is_not_timed_and_the_reason_says_so(tmp_path, results, capsys):
    """Of a pair both count or none: that is no fault of the machine."""
    right_and_wrong(tmp_path)
    files = [str(tmp_path / f"{name}.py") for name in ("right", "wrong")]
    for mine, other in (files, files[::-1]):
        words = [str(VECTOR_ADD), "--device", "cpu", "--mode", "benchmark", "--quiet", "--processes", "2"]
        assert run.main([*words, "--submission", mine, "--against", other]) == 1
        said = capsys.readouterr().out
        assert "not timed: wrong is INCORRECT, and of a pair both count or none" in said and "too busy" not in said


def test_more_bytes_than_the_judge_can_read_are_a_fault_of_the_problem(tmp_path, capsys):
    task = (VECTOR_ADD / "task.py").read_text().replace("return 3 * 2 * self.n", "return 10**15")
    made = copy_of(VECTOR_ADD, tmp_path / "vector_add", {"task.py": task, "variants/right.py": ADDS})
    argv = [str(made), "--device", "cpu", "--mode", "benchmark", "--variant", "right", "--processes", "2"]
    assert run.main(argv) == 2
    assert "bytes_moved() of n=1048576 says 1000000000000000 bytes" in capsys.readouterr().err


# --- harness/api.py


@pytest.mark.parametrize("show", [False, True])
def test_records_are_returned_and_nothing_is_printed_unless_asked(tmp_path, capfd, show):
    write_files(tmp_path, {"mine.py": ADDS, "other.py": ADDS})
    records = judge(VECTOR_ADD, [tmp_path / "mine.py", tmp_path / "other.py"], "test", "cpu", show=show)
    assert {(one["variant"], one["status"]) for one in records} == {("mine", "PASSED"), ("other", "PASSED")}
    said = "".join(capfd.readouterr())
    assert ("PASSED" in said) if show else said == ""


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"mode": "bench"}, "did you mean benchmark"),
        ({"seeds": 1}, "did you mean seed"),
        ({"timeout": -1.0}, "positive"),
    ],
)
def test_bad_use_raises(more, said):
    with pytest.raises(UsageError, match=said):
        judge("nvfp4_gemv", **more)
