"""Every option of harness/run.py has an effect in a run of a kind, or is refused with it."""

import pytest

from harness import run
from harness.results import output

VALUES = {
    "problem": ["nvfp4_gemv"],
    "mode": ["--mode", "test"],
    "variant": ["--variant", "cpu_portable"],
    "submission": ["--submission", "mine.py"],
    "against": ["--against", "cpu_portable"],
    "processes": ["--processes", "4"],
    "same_within": ["--same-within", "1.5"],
    "fail_on_regression": ["--fail-on-regression", "0"],
    "all": ["--all"],
    "device": ["--device", "cpu"],
    "case": ["--case", "m=16"],
    "seed": ["--seed", "0"],
    "timeout": ["--timeout", "5"],
    "json": ["--json", "out.json"],
    "events": ["--events", "events"],
    "quiet": ["--quiet"],
    "resume": ["--resume"],
    "on": ["--on", "host"],
    "shard": ["--shard", "1/2"],
    "ray": ["--ray", "auto"],
    "check_only": ["--check-only"],
    "lint": ["--lint"],
    "sanitize": ["--sanitize"],
    "new": ["--new", "x"],
    "new_variant": ["--new-variant", "cpu_x"],
    "list": ["--list"],
    "print_completion": ["--print-completion", "bash"],
}
KINDS = {
    "--print-completion": "",
    "--list": "problem events",
    "--lint": "device events quiet on ray",
    "--check-only": "device events quiet on ray",
    "--sanitize": "variant submission all case device events quiet on ray",
    "--mode test": "variant submission all case seed timeout json shard device events quiet on ray",
    "--mode benchmark": "variant submission all case timeout json shard device events quiet on ray against processes",
    "--mode leaderboard": "variant submission all case seed timeout json shard device events quiet on ray against "
    "processes resume",
    "--mode profile": "variant submission case timeout device events quiet on ray",
    "--mode latency": "case json device events quiet on ray",
}
COMPARED = ("same_within", "fail_on_regression")  # effective beside --against, or with --resume
NEW = {"new", "new_variant"}  # refused with all others by tests/harness/tools/test_scaffold.py


def refused(words: list[str]) -> str | None:
    """What the command line alone says against these words; None: nothing."""
    from harness.problem.folders import UsageError

    args, further = run.parser().parse_known_args(words)
    try:
        run._without_torch(args, further)
    except UsageError as error:
        return str(error)
    return None


def test_every_option_is_listed_here():
    assert set(VALUES) == {action.dest for action in run.parser()._actions} - {"help"}
    assert set(KINDS) == set(run.EFFECTIVE)


@pytest.mark.parametrize("kind", KINDS)
def test_an_option_without_an_effect_is_refused(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = {"--print-completion": ["--print-completion", "bash"], "--list": ["--list"]}.get(
        kind, ["nvfp4_gemv", *kind.split()]
    )
    effective = set(KINDS[kind].split())
    for name, words in VALUES.items():
        if words[0] == kind or (kind.startswith("--mode") and name == "mode") or name in NEW:
            continue
        if name == "problem" and "nvfp4_gemv" in base:
            continue
        if name in ("lint", "check_only", "sanitize", "list", "print_completion") and kind.startswith("--mode"):
            continue  # the other way round: the kind is theirs
        said = refused([*base, *words])
        assert (said is None) == (name in effective), (kind, name, said)


@pytest.mark.parametrize("name", COMPARED)
@pytest.mark.parametrize("mode", ["benchmark", "leaderboard"])
def test_what_says_how_to_compare_needs_something_to_compare_with(name, mode):
    words = ["nvfp4_gemv", "--mode", mode, *VALUES[name]]
    assert "goes with --against" in (refused(words) or "")
    assert refused([*words, *VALUES["against"]]) is None
    assert "does not go with" in (refused(["nvfp4_gemv", "--mode", "test", *VALUES[name]]) or "")


def test_the_refusal_names_the_kind_and_the_options(capsys):
    assert run.main(["nvfp4_gemv", "--lint", "--case", "m=16", "--seed", "1", "--mode", "test"]) == output.USAGE_EXIT
    assert (
        "--lint does not go with --mode test, --case, --seed: leave --lint or the others out" in capsys.readouterr().err
    )
    assert refused(["nvfp4_gemv", "--lint", "--json", "-"]) is None
    assert refused(["--list", "--json", "-"]) == "--list does not go with --json: leave one of the two out"
    assert (
        refused(["nvfp4_gemv", "--list", "--json", "-"]) == "--list does not go with --json: leave one of the two out"
    )
    assert (
        refused(["--print-completion", "bash", "--json", "-"])
        == "--print-completion does not go with --json: leave one of the two out"
    )


def test_a_list_of_no_variants_says_so(tmp_path, capsys):
    (tmp_path / "task.yml").write_text("lang: py\n")
    (tmp_path / "reference.py").write_text("")
    assert run._list(str(tmp_path)) == 0
    assert capsys.readouterr().out == f"{tmp_path} has no variants/*.py: judge a file with --submission FILE\n"
