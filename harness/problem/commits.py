"""Variants of other commits: copies of a commit's files, taken with git, and what must fit the problem of today."""

import ast
import dataclasses
import io
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

from harness.problem import folders, sources
from harness.problem.folders import Problem, Submission, UsageError
from problems.common import load

SHOWN = 10  # digits of a commit in the name of its variant


class GitError(RuntimeError):
    """git is missing, or refused. The message has its words."""


def git(root: Path, *arguments: str) -> bytes:
    """What a git command prints in the folder `root`. GitError: see there."""
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True)
    except FileNotFoundError:
        raise GitError("git is not installed") from None
    if done.returncode:
        raise GitError(f"git {' '.join(arguments)}: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout


def export(root: Path, commit: str, folder: Path, *paths: str) -> None:
    """Copy the files of a commit below `paths` into `folder`. GitError: there is no such commit or path."""
    with tarfile.open(fileobj=io.BytesIO(git(root, "archive", commit, *paths))) as archive:
        archive.extractall(folder, filter="data")


def split(words: str) -> tuple[str, str] | None:
    """(REV, VARIANT) of "REV:VARIANT"; None where `words` are a variant's name or the path of a file."""
    rev, colon, variant = words.rpartition(":")
    return (rev, variant) if colon and not words.endswith(".py") else None


def see_there(folder: Path, rev: str, variant: str) -> str:
    """Return the hash of the commit `rev`, which has that variant of the problem `folder`. UsageError: there is no git
    checkout, commit, problem or variant.
    """
    given, root = f"--against {rev}:{variant}", load.PROBLEMS.parent
    if folder.parent != load.PROBLEMS:
        raise UsageError(f"{given}: REV:VARIANT is for the problems in {load.PROBLEMS}, got {folder}")
    try:
        git(root, "rev-parse", "--git-dir")
    except GitError as error:
        raise UsageError(
            f"{given}: {root} must be a git checkout for REV:VARIANT ({error}): clone it with git, or name a variant "
            "or a file"
        ) from None
    try:
        commit = git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{rev}^{{commit}}").decode().strip()
    except GitError:
        shallow = git(root, "rev-parse", "--is-shallow-repository").decode().strip() == "true"
        hint = "this clone is shallow: `git fetch --unshallow` gets the others" if shallow else "`git log` lists them"
        raise UsageError(f"{given}: REV must be a commit of this clone, got {rev!r}; {hint}") from None
    place = f"problems/{folder.name}/variants/"
    files = git(root, "ls-tree", "--name-only", commit, place).decode().split("\n")
    names = sorted(Path(file).stem for file in files if file.endswith(".py"))
    if variant not in names:
        there = f"has {', '.join(names)}" if names else f"has no {place}"
        raise UsageError(f"{given}: VARIANT must be one of that commit's, got {variant!r}; {commit[:SHOWN]} {there}")
    return commit


def opponent(problem: Problem, rev: str, variant: str, place: Callable[[], Path]) -> Submission:
    """Return the variant of `problem` as it was at the commit `rev`, named VARIANT#COMMIT, with that commit's
    problems/common. place: makes the folder for the copy. UsageError: as see_there says, or it does not fit the
    problem of today.
    """
    commit = see_there(problem.folder, rev, variant)
    given = f"--against {rev}:{variant}"
    if problem.composition:
        raise UsageError(
            f"{given}: {problem.name} is a composition, whose task is made of the modules that a variant brings along: "
            "compare its records instead, with leaderboard/compare.py"
        )
    tree = place().resolve()
    name = problem.folder.name
    try:
        export(load.PROBLEMS.parent, commit, tree, "problems/common", f"problems/{name}")
    except GitError as error:
        raise UsageError(f"{given}: {error}") from None
    then = dataclasses.replace(problem, folder=tree / "problems" / name)
    file = then.folder / "variants" / f"{variant}.py"
    with sources.rooted(tree):
        found = folders.submission(then, file)
    if changes := _changes(problem.folder / "task.py", then.folder / "task.py", file):
        raise UsageError(
            f"{given}: {name} has changed since {commit[:SHOWN]} so that its variants of then cannot be called as they "
            f"are now: {'; '.join(changes)}"
        )
    return dataclasses.replace(found, name=f"{variant}#{commit[:SHOWN]}", tree=tree, commit=commit)


def has_changed(problem: Problem, submission: Submission) -> bool:
    """Whether the problem is another one than at the submission's commit: its cases, tolerances, task or reference."""
    if submission.tree is None or submission.folder is None:
        return False
    now = sources.problem_hash(problem.folder, problem.others)
    with sources.rooted(submission.tree):
        return sources.problem_hash(submission.folder) != now


def _changes(now: Path, then: Path, variant: Path) -> list[str]:
    """Return what changed in task.py that a variant of that commit relies on, in words."""
    if not then.is_file():
        return ["that commit has no task.py"]
    found = []
    data_now, data_then = (data_classes(file) for file in (now, then))
    for name in data_now:
        if list(data_now[name]) != list(data_then.get(name, {})):
            before = ", ".join(data_then.get(name, {})) or "nothing"
            found.append(f"{name} had {before}, now {', '.join(data_now[name])}")
    for literal in ("OUTPUTS", "INOUT", "OPAQUE"):
        was, is_ = (load.constants(file, literal).get(literal, ()) for file in (then, now))
        if was != is_:
            found.append(f"{literal} was {was}, now {is_}")
    defined = {name for node in load.parse(now).body for name in _bound(node)}
    wanted = [
        alias.name
        for node in ast.walk(load.parse(variant))
        if isinstance(node, ast.ImportFrom) and node.module == "task" and not node.level
        for alias in node.names
    ]
    found += [f"the variant imports {name} from task, which has none" for name in wanted if name not in defined]
    return found


def data_classes(task: Path) -> dict[str, dict[str, str]]:
    """Return the NamedTuples that a call's data is made of, input_t's first: {class: {field: its annotation}}. {}: it
    is made of none.
    """
    parsed = load.parse(task)
    classes = {node.name: node for node in parsed.body if isinstance(node, ast.ClassDef)}
    todo = [
        node.value.id
        for node in parsed.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name)
        if ast.unparse(node.targets[0]) == "input_t"
    ]
    found: dict[str, dict[str, str]] = {}
    while todo:
        name = todo.pop(0)
        if name in classes and name not in found and "NamedTuple" in map(ast.unparse, classes[name].bases):
            fields = [node for node in classes[name].body if isinstance(node, ast.AnnAssign)]
            found[name] = {ast.unparse(field.target): ast.unparse(field.annotation) for field in fields}
            todo += [part.id for field in fields for part in ast.walk(field.annotation) if isinstance(part, ast.Name)]
    return found


def _bound(node: ast.stmt) -> list[str]:
    """The names that a statement of a module binds."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [(alias.asname or alias.name).partition(".")[0] for alias in node.names]
    return [part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)]
