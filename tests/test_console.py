"""What a run prints at its end: every figure can be read, whatever the cases are called."""

import pytest

from harness import console, phases, problem, ranking, verdict
from harness.problem import Case
from harness.session import Outcome

MOE = problem.find("moe_gemm")


def printed(monkeypatch, capsys, cases: list[Case], names: list[str], failing: str = "") -> str:
    """The table of times of variants of moe_gemm that took 1234.56 us in every case."""
    plain = console.Console(width=console.PLAIN_WIDTH, highlight=False, soft_wrap=True)
    monkeypatch.setattr(console, "console", plain)
    ground = phases.Ground(800.25, 790.0, "matmul at 795 TFLOP/s", "flops", 3.0, 10**9, ["1"], None, None)
    judged = []
    for name in names:
        judged.append(verdict.Judged(MOE.variant(name), "cpu"))
        for case in cases:
            calls = [Outcome("PASSED", us=1234.56, host_us=210.0, error={"rel": 1.7e-3, "max": 1.0, "tol": 2.0})] * 3
            failure = Outcome("INCORRECT", "mismatch found!") if name == failing else None
            timing = phases.Timing(case, [calls, calls], failure)
            judged[-1].times.append(verdict.weigh(timing, ground))
    console.times(judged)
    return capsys.readouterr().out


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_no_figure_is_cut_off_by_long_names_of_cases(monkeypatch, capsys, device):
    cases = list(MOE.benchmarks[device])
    said = printed(monkeypatch, capsys, cases, ["cpu_avx512", "torch_grouped"])
    assert said.count("1234.56..1234.56") == said.count(" 1234.56 ") == 2 * len(cases)
    assert said.count("800.25 flops") == 2 * len(cases) and said.count(" 65% ") == 2 * len(cases)
    assert "cpu_avx512" in said and "torch_grouped" in said and "\u2026" not in said
    assert max(map(len, said.splitlines())) <= console.PLAIN_WIDTH


def test_what_all_cases_share_is_said_once(monkeypatch, capsys):
    said = printed(monkeypatch, capsys, list(MOE.benchmarks["cpu"]), ["cpu_avx512"])
    assert said.count("tokens=256") == 1 and said.count("hidden=1024") == said.count("content=plain") == 1
    assert said.splitlines()[-1].startswith("All cases have experts=8 topk=2 hidden=1024")


def test_a_case_alone_is_named_in_full(monkeypatch, capsys):
    case = MOE.benchmarks["cuda"][0]
    said = printed(monkeypatch, capsys, [case], ["cpu_avx512", "torch_grouped"], failing="torch_grouped")
    assert all(said.count(f"{key}={value}") == 2 for key, value in case.params.items())
    assert "All cases" not in said and all(word in said for word in ("INCORRECT:", "mismatch", "found!"))


def test_cases_without_parameters_have_a_name_too(monkeypatch, capsys):
    assert "(no parameters)" in printed(monkeypatch, capsys, [Case({}, 1)], ["cpu_avx512"])


@pytest.mark.parametrize(
    ("labels", "own", "shared"),
    [
        (["m=1 k=2 l=1", "m=3 k=2 l=1"], ["m=1", "m=3"], "k=2 l=1"),
        (["m=1 k=2", "k=1 m=2"], ["m=1 k=2", "k=1 m=2"], ""),
        (["s=[1, 2] k=2", "s=[1, 3] k=2"], ["s=[1, 2]", "s=[1, 3]"], "k=2"),
        (["m=1", "m=1 k=2"], ["m=1", "k=2"], "m=1"),  # a name is never empty
        (["m=1 k=2"], ["m=1 k=2"], ""), (["m=1"] * 2, ["m=1"] * 2, ""), ([], [], ""),
    ],
)  # fmt: skip
def test_cases_are_told_apart_by_what_they_do_not_share(labels, own, shared):
    mine, common = ranking.apart(labels)
    assert ([mine[label] for label in labels], common) == (own, shared)
