"""leaderboard/compare.py: unpaired ratios of records, what differs between the runs, and the exit code for CI."""

import re

import pytest

from harness.results import stats
from leaderboard import compare
from tests.support.records import CASES, bench, full, samples, write


@pytest.fixture
def results(tmp_path):
    folder = tmp_path / "results"
    write(folder, "gpu-box", [*full("sm90_v1", 1.1), *full("sm90_v2", 1.5, run="r2", minute=1)])
    other = {"environment": {"gpu": "Another GPU", "driver": "9"}, "commit": "fedcba9876543210", "harness_hash": "h2"}
    write(folder, "other-box", full("sm90_v1", 1.32, run="r3", minute=2, **other))
    return folder


def said(capsys, results, *words) -> tuple[int, str, str]:
    return compare.main([*words, "--results", str(results)]), *capsys.readouterr()


def test_two_variants_are_compared_case_by_case_and_in_the_geomean(capsys, results):
    code, out, _ = said(capsys, results, "variant=sm90_v2", "variant=sm90_v1 machine=gpu-box")
    assert code == 0 and "nvfp4_gemv, sm90: time of A / time of B; below 1 A is faster" in out
    rows = re.findall(r"^  (m=\S+ k=\S+ l=\S+|geomean) .*?(\d\.\d+) \((\d\.\d+)\.\.(\d\.\d+)\)$", out, re.MULTILINE)
    assert [row[0] for row in rows] == [" ".join(f"{k}={v}" for k, v in case.items()) for case in CASES] + ["geomean"]
    for _, ratio, lo, hi in rows:
        assert float(lo) < float(ratio) < float(hi) and float(ratio) == pytest.approx(1.5 / 1.1, rel=1e-3)


def test_it_says_that_it_is_unpaired_and_what_differs(capsys, results):
    _, out, _ = said(capsys, results, "variant=sm90_v1 machine=other-box", "variant=sm90_v1 machine=gpu-box")
    assert "on Another GPU, commit fedcba987654" in out and "on Imaginary GPU, commit 0123456789ab" in out
    (line,) = [line for line in out.splitlines() if "UNPAIRED" in line]
    for words in ("runs at other times", "gpu", "commit", "driver"):
        assert words in line
    assert "problem_hash" not in line and "source_hash" not in line
    _, out, _ = said(capsys, results, "run=r1", "run=r1")
    assert "UNPAIRED: one run, but not its pairs" in out


@pytest.mark.parametrize(
    ("a", "b", "percent", "code"),
    [("r3", "r1", "5", 8), ("r3", "r1", "25", 0), ("r1", "r3", "0", 0), ("r1", "r1", "0", 0), ("r3", "r1", None, 0)],
)
def test_the_exit_code_of_a_regression(capsys, results, a, b, percent, code):
    words = [] if percent is None else ["--fail-on-regression", percent]
    found, out, _ = said(capsys, results, f"run={a}", f"run={b}", *words)
    assert found == code and (f"regression of more than {percent} %: nvfp4_gemv" in out) == (code == 8)


def test_single_cases_are_regressions_and_failed_or_missing_ones_have_a_code(capsys, results):
    slow = full("sm90_v1", 1.1, run="r4", minute=3)
    slow[1] = bench("sm90_v1", 1, 1.1 * 32.0 * 1.2, run="r4", minute=3)
    write(results, "gpu-box", slow)
    code, out, _ = said(capsys, results, "run=r4", "run=r1 variant=sm90_v1", "--fail-on-regression", "10")
    assert code == 8 and out.count("regression of more than") == 1 and "m=4096" in out.splitlines()[-1]
    write(results, "gpu-box", [bench("sm90_v1", i, 9.0, run="r5", minute=4, status="INCORRECT") for i in range(3)])
    code, out, _ = said(capsys, results, "run=r5", "run=r1", "--fail-on-regression", "10")
    assert code == 1 and "INCORRECT" in out
    write(results, "gpu-box", full("sm90_v1", 1.1, run="r6", minute=5)[:1])
    words = ("run=r6", "run=r1 variant=sm90_v1")
    code, out, _ = said(capsys, results, *words, "--fail-on-regression", "10")
    assert code == 8 and out.count("B was timed on it, A was not") == 2
    assert said(capsys, results, *words)[0] == 0
    assert said(capsys, results, *reversed(words), "--fail-on-regression", "10")[0] == 0


def test_a_file_with_and_without_words(capsys, results, tmp_path):
    file = tmp_path / "a file.jsonl"
    file.write_bytes((results / "gpu-box" / "nvfp4_gemv.jsonl").read_bytes() + b"no record\n")
    code, out, err = said(capsys, results, str(file), "machine=gpu-box")
    assert code == 0 and out.count("UNPAIRED") == 2 and "a file.jsonl:7: skipped: " in err
    plain = file.rename(tmp_path / "file.jsonl")
    code, out, _ = said(capsys, results, f"{plain} variant=sm90_v1", f"variant=sm90_v2 {plain}")
    assert code == 0 and out.count("UNPAIRED") == 1


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ("nothing.jsonl", "run=r1", ": A must be a file of records, or words problem=, .*, got 'nothing.jsonl'$"),
        ("run=r1", "variants=x", ": B must be a file of records, .*, got 'variants=x'$"),
        ("run=r1", "", ": B must be .*, got ''$"),
        ("/", "run=r1", ": A must be .*, got '/'$"),
        ("run=r1", "/proc/self/mem", "Input/output error: /proc/self/mem$"),
        ("run=r1", "run=r9", ": B: no timed benchmark record matches 'run=r9' in "),
    ],
)
def test_bad_use_is_one_line(capsys, results, a, b, message):
    code, out, err = said(capsys, results, a, b)
    assert code == 2 and re.search(message, err) and err.count("\n") == 1 and not out


def test_shares_and_problems_that_cannot_be_compared_are_named(capsys, results):
    for percent in ("-1", "nan", "inf"):
        with pytest.raises(SystemExit):
            compare.main(["run=r1", "run=r1", "--fail-on-regression", percent])
        assert "--fail-on-regression must be 0 or more" in capsys.readouterr().err
    write(results, "gpu-box", [record | {"problem": "moe_gemm"} for record in full("sm90_x", 1.0, run="r6", minute=5)])
    code, _, err = said(capsys, results, "problem=moe_gemm", "problem=nvfp4_gemv")
    assert code == 2 and "A has moe_gemm sm90 sm90_x; B has nvfp4_gemv sm90 sm90_v1" in err


def test_equal_samples_give_1_and_an_interval_as_wide_as_their_scatter():
    near, wide = (stats.compare_unpaired([(samples(10.0, s), samples(10.0, s))]) for s in (0.004, 0.04))
    assert near.ratio == wide.ratio == 1.0 and near.ci99[0] < near.ci95[0] < 1 < near.ci95[1] < near.ci99[1]
    assert wide.ci95[1] - wide.ci95[0] > 5 * (near.ci95[1] - near.ci95[0])
