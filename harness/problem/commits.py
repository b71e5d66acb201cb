"""REV:VARIANT, the variant of another commit: a git worktree of that commit for as long as a run lasts."""

import contextlib
import dataclasses
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from harness.problem import folders, sources
from harness.problem.folders import Problem, Submission, UsageError
from problems.common import load

SHOWN = 10  # digits of a commit in the name of its variant


def split(words: str) -> tuple[str, str] | None:
    """(REV, VARIANT) of "REV:VARIANT"; None where `words` are a variant's name or the path of a file."""
    rev, colon, variant = words.rpartition(":")
    return (rev, variant) if colon and not words.endswith(".py") else None


def find(folder: Path, rev: str, variant: str) -> str:
    """Return the hash of commit `rev`, which has that variant of `folder`. UsageError: one of them is not there."""
    if folder.parent != load.PROBLEMS:
        raise UsageError(f"--against REV:VARIANT is for the problems in {load.PROBLEMS}, got {folder}")
    commit = _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{rev}^{{commit}}").strip()
    files = _git("ls-tree", "--name-only", commit, f"problems/{folder.name}/variants/").splitlines()
    names = sorted(Path(file).stem for file in files if file.endswith(".py"))
    if variant not in names:
        known = ", ".join(names) or f"no variants of {folder.name}"
        raise UsageError(f"--against: VARIANT must be one of {commit[:SHOWN]}, which has {known}, got {variant!r}")
    return commit


@contextlib.contextmanager
def opponent(problem: Problem, rev: str, variant: str, tree: Path) -> Iterator[Submission]:
    """The variant of `problem` as it was at the commit `rev`, named VARIANT#COMMIT, with that commit's problems/common.
    Within, the commit's files are in `tree`, an empty folder, which is removed. UsageError: as for find; a composition.
    """
    if problem.composition:
        instead = "compare records, with leaderboard/compare.py"
        raise UsageError(f"--against {rev}:{variant}: {problem.name} brings modules of its task along: {instead}")
    commit = find(problem.folder, rev, variant)
    try:
        _git("-c", "core.hooksPath=/dev/null", "worktree", "add", "--detach", str(tree), commit)
        then = dataclasses.replace(problem, folder=tree / "problems" / problem.folder.name)
        with sources.rooted(tree):
            found = folders.submission(then, then.folder / "variants" / f"{variant}.py", "--against")
        yield dataclasses.replace(found, name=f"{variant}#{commit[:SHOWN]}", tree=tree, commit=commit)
    finally:
        shutil.rmtree(tree, ignore_errors=True)
        _git("worktree", "prune")


def _git(*arguments: str) -> str:
    """Return what a git command prints in this checkout. UsageError: git is missing, or refused."""
    try:
        done = subprocess.run(["git", *arguments], cwd=load.PROBLEMS.parent, capture_output=True, text=True)
    except FileNotFoundError:
        raise UsageError("--against REV:VARIANT needs git, which is not installed") from None
    if done.returncode:
        said = done.stderr.strip() or "there is no such commit in this clone (a shallow one lacks most)"
        raise UsageError(f"--against REV:VARIANT: git {' '.join(arguments)}: {said}")
    return done.stdout
