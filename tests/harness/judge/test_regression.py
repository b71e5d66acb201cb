"""A variant in pairs with a file of its name, as it was before, and what became slower: --fail-on-regression."""

import json
from types import SimpleNamespace

from harness.judge import verdict
from harness.results import ranking
from tests.support.recorded import SOURCE, judge


def test_what_became_slower_is_a_regression_against_the_file_as_it_was(world, folder, tmp_path, capsys):
    now, before, json_file = folder / "variants" / "good.py", tmp_path / "before" / "good.py", tmp_path / "json"
    before.parent.mkdir()
    before.write_text(SOURCE.format(name="as it was"))
    world.us["good#2"] = 8.0
    words = ["--variant", "good", "--against", str(before), "--json", str(json_file), "--fail-on-regression"]
    assert judge(folder, *words, "2") == verdict.REGRESSION_EXIT
    out = capsys.readouterr().out
    assert f"good is {now}, good#2 is {before}" in out and "SLOWER" in out
    assert "regression of more than 2 %: all cases together: " in out
    lines = [json.loads(line) for line in json_file.read_text().splitlines()]
    assert {line["variant"] for line in lines} == {"good", "good#2"} and len({x["source_hash"] for x in lines}) == 2
    assert {line["variant"] for line in ranking.timed(lines)} == {"good"}, "the second is on no board"
    assert {round(line["against"]["ratio"], 2) for line in lines if line.get("against")} == {1.25}
    assert judge(folder, *words, "30") == 0


def paired(*ratios: tuple[float, float, float]) -> SimpleNamespace:
    """What a comparison leaves: (ratio, and its 99 % interval) of each case, and of all together."""
    found = [{"variant": "w", "ratio": r, "ci95": [lo, hi], "ci99": [lo, hi], "processes": 3} for r, lo, hi in ratios]
    times = [SimpleNamespace(case=f"m={i}") for i in range(len(ratios) - 1)]
    return SimpleNamespace(times=times, against=found[:-1], against_all=found[-1])


def test_a_regression_is_an_interval_wholly_over_the_share():
    slow, maybe, fast = (1.06, 1.04, 1.08), (1.06, 0.99, 1.2), (0.9, 0.8, 0.95)
    assert verdict.regressions(paired(fast, maybe, fast), 0) == []
    (said,) = verdict.regressions(paired(fast, slow, maybe), 3)
    assert said == "m=1: 1.0600 of the time of w (99 %: 1.0400..1.0800)", "a single case is enough"
    (said,) = verdict.regressions(paired(maybe, slow), 3)
    assert said.startswith("all cases together: ")
    assert verdict.regressions(paired(slow, slow), 4) == []
    assert verdict.regressions(SimpleNamespace(times=[], against=[], against_all=None), 0) == []
    assert verdict.REGRESSION_EXIT not in verdict.EXIT_CODES.values()
