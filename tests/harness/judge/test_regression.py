"""A variant in pairs with a file of its name, as it was before, and what became slower: --fail-on-regression."""

import json
import shutil
from types import SimpleNamespace

import pytest

from harness import run
from harness.judge import verdict
from harness.results import ranking, record
from tests.support import SUPPORT

ADDS = '''"""adds: and takes {us} us."""
import time
import torch

TARGETS = ("cpu",)


def custom_kernel(data):
    until = time.perf_counter() + {us} / 1e6
    torch.add(data.x, data.y, out=data.z)
    while time.perf_counter() < until:
        pass
    return data.z
'''


@pytest.mark.slow
def test_what_became_slower_is_a_regression_against_the_file_as_it_was(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results")
    folder, json_file = tmp_path / "vector_add", tmp_path / "records.jsonl"
    shutil.copytree(SUPPORT / "problems" / "vector_add", folder, ignore=shutil.ignore_patterns("__pycache__"))
    now, before = folder / "variants" / "adds.py", tmp_path / "before" / "adds.py"
    for file, us in ((now, 8000), (before, 2000)):
        file.parent.mkdir()
        file.write_text(ADDS.format(us=us))
    words = [str(folder), "--variant", "adds", "--device", "cpu", "--against", str(before), "--processes", "5"]
    code = run.main([*words, "--fail-on-regression", "2", "--json", str(json_file)])
    out = capsys.readouterr().out
    assert f"adds is {now}, adds#2 is {before}" in out
    lines = [json.loads(line) for line in json_file.read_text().splitlines()]
    assert {line["variant"] for line in lines} == {"adds", "adds#2"}
    assert {line["variant"] for line in ranking.timed(lines)} == {"adds"}, "the second is on no board"
    assert len({line["source_hash"] for line in lines}) == 2
    # On a busy machine there may be no times (6), or too few for a verdict.
    mine = next((line for line in lines if line.get("against")), None)
    assert code in (6, 8) or (code == 0 and mine and mine["against"]["ci99"][0] <= 1.02), out
    if code == 8:
        assert mine["against"]["ratio"] > 1.1
        assert "regression of more than 2 %: all cases together: " in out and "SLOWER" in out


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
