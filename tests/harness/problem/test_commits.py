"""Variants of other commits: REV:VARIANT in pairs, its errors, and that nothing of the worktree is left."""

import json
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness import run
from harness.judge import verdict
from harness.problem import commits, folders, sources
from harness.problem.folders import UsageError
from harness.results import ranking, record
from problems.common import build, load
from tests.support import SUPPORT

# Adds, and takes as long as it is told by a module of problems/common that only its own commit has.
THEN = '''"""adds: a helper of this commit adds."""
from task import input_t, output_t
from problems.common import adding

TARGETS = ("cpu",)


def custom_kernel(data: input_t) -> output_t:
    from problems.common.adding import add  # a late import is of that commit too
    assert add is adding.add
    return add(data, US)


US = 2000
'''
HELPER = """import time
import torch


def add(data, us):
    until = time.perf_counter() + us / 1e6
    torch.add(data.x, data.y, out=data.z)
    while time.perf_counter() < until:
        pass
    return data.z
"""
NOW = '"""adds: alone."""\nimport time\nimport torch\nTARGETS = ("cpu",)\n' + HELPER.partition("\n\n\n")[2].replace(
    "def add(data, us)", "def custom_kernel(data, us=8000)"
)


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout of two commits: `adds` takes four times as long, and needs nothing of problems/common any more."""
    top = tmp_path / "checkout"
    folder = top / "problems" / "vector_add"
    shutil.copytree(SUPPORT / "problems" / "vector_add", folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "variants").mkdir()
    shutil.copytree(build.COMMON, top / "problems" / "common", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(load, "PROBLEMS", top / "problems")
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results")
    git(top, "init", "-q")
    (folder / "variants" / "adds.py").write_text(THEN)
    (top / "problems" / "common" / "adding.py").write_text(HELPER)
    commit(top)
    (folder / "variants" / "adds.py").write_text(NOW)
    (top / "problems" / "common" / "adding.py").unlink()
    commit(top)
    return top


def git(top: Path, *words: str) -> str:
    command = ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-C", str(top), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def commit(top: Path) -> str:
    git(top, "add", "-A")
    git(top, "commit", "-qm", "a version")
    return git(top, "rev-parse", "HEAD")


def arguments(*words: str) -> list[str]:
    return ["vector_add", "--variant", "adds", "--device", "cpu", *words]


@pytest.mark.slow
def test_what_became_slower_is_a_regression_against_the_commit_before(checkout, tmp_path, capsys):
    json_file = tmp_path / "records.jsonl"
    words = ["--against", "HEAD~1:adds", "--processes", "5", "--fail-on-regression", "2", "--json", str(json_file)]
    code = run.main(arguments(*words))
    out = capsys.readouterr().out
    then = git(checkout, "rev-parse", "HEAD~1")
    assert f"adds#{then[:10]} is the variant of HEAD~1 ({then}), built with that commit's problems/common" in out
    assert git(checkout, "worktree", "list").count("\n") == 0, "the worktree is gone"
    lines = [json.loads(line) for line in json_file.read_text().splitlines()]
    assert {line["variant"] for line in lines} == {"adds", f"adds#{then[:10]}"}
    assert {line["variant"] for line in ranking.timed(lines)} == {"adds"}, "that of the commit is on no board"
    assert {line["variant"]: line["commit"] == then for line in lines} == {"adds": False, f"adds#{then[:10]}": True}
    assert len({line["source_hash"] for line in lines}) == 2
    # On a busy machine there may be no times (6), or too few for a verdict.
    mine = next((line for line in lines if line.get("against")), None)
    assert code in (6, 8) or (code == 0 and mine and mine["against"]["ci99"][0] <= 1.02), out
    if code == 8:
        assert mine["against"]["commit"] == then and mine["against"]["ratio"] > 1.1
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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("nowhere:adds", r"git rev-parse .* nowhere\^{commit}: there is no such commit in this clone"),
        ("--help:adds", r"--help\^{commit}: there is no such commit"),
        ("HEAD:lost", "VARIANT must be one of [0-9a-f]{10}, which has adds, got 'lost'"),
        ("HEAD:../adds", "VARIANT must be one of"),
    ],
)
def test_missing_commit_or_variant_is_named(checkout, words, message):
    with pytest.raises(UsageError, match=message):
        commits.find(load.PROBLEMS / "vector_add", *commits.split(words))


def test_missing_variant_is_refused_before_the_run_begins(checkout, capsys):
    assert run.main(arguments("--against", "HEAD:lost")) == 2
    assert "got 'lost'" in capsys.readouterr().err


def test_folder_without_git_is_refused(tmp_path, monkeypatch):
    shutil.copytree(SUPPORT / "problems" / "vector_add", tmp_path / "problems" / "vector_add")
    monkeypatch.setattr(load, "PROBLEMS", tmp_path / "problems")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(UsageError, match="not a git repository"):
        commits.find(tmp_path / "problems" / "vector_add", "HEAD", "adds")
    with pytest.raises(UsageError, match="REV:VARIANT is for the problems in"):
        commits.find(SUPPORT / "problems" / "vector_add", "HEAD", "adds")


def test_opponent_is_of_its_commit_for_as_long_as_the_block(checkout, tmp_path, monkeypatch):
    """Its files and the modules of problems/common that it uses."""
    monkeypatch.setattr(build, "COMMON", checkout / "problems" / "common")
    (checkout / ".git" / "hooks" / "post-checkout").write_text("#!/bin/sh\nexit 1\n")
    (checkout / ".git" / "hooks" / "post-checkout").chmod(0o755)
    problem, tree = folders.find("vector_add"), tmp_path / "tree"
    with commits.opponent(problem, "HEAD~1", "adds", tree) as found:
        assert found.file.read_text() == THEN
        with sources.rooted(found.tree):
            assert sources.shared([found.file]) == [tree / "problems" / "common" / "adding.py"]
    assert not tree.exists() and git(checkout, "worktree", "list").count("\n") == 0


def test_composition_is_refused_with_what_to_do_instead(tmp_path):
    with (
        pytest.raises(UsageError, match=r"compare records, with leaderboard/compare\.py"),
        commits.opponent(folders.find("dsv4_forward"), "HEAD", "composed", tmp_path),
    ):
        pass


def test_names_and_files_are_no_commits():
    assert commits.split("HEAD~1:adds") == ("HEAD~1", "adds")
    assert commits.split(":/words: more:v") == (":/words: more", "v")
    assert commits.split("adds") is None and commits.split("a:b/adds.py") is None
