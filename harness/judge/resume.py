"""--resume: which run goes on, with which options, and whether all that it depends on is as it was."""

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path

from harness.judge import readings
from harness.judge.options import Options, spelled
from harness.problem.folders import UsageError
from harness.results.record import Contents
from harness.results.run_file import RunFile

# Options that say what a run judges, and how. The others choose what is printed or are refused in a recorded run.
SUBMISSIONS = ("variant", "submission", "against", "all")
OPTIONS = ("mode", *SUBMISSIONS, "processes", "fail_on_regression", "seed", "timeout", "shard")
_DEPENDS_ON = {
    "schema": "the records' schema",
    "target": "the target",
    "tests": "the test cases",
    "benchmarks": "the benchmark cases",
    "problem_hash": "the problem's own files",
    "harness_hash": "the judge",
    "environment": "the environment",
}


def options(arguments: Options) -> dict:
    """Return the options as the run's file has them: paths mean the same from any folder."""
    return {name: _absolute(getattr(arguments, name)) for name in OPTIONS}


def chosen(files: Iterable[Contents], run_id: str, where: str) -> RunFile:
    """The file of run `run_id`, "": the newest that is free. where: of these. UsageError: none such, or it is held."""
    unfinished = [file for file in files if file.unfinished]
    busy = []
    for file in reversed(unfinished):
        if run_id in ("", file.run_id):
            try:
                return RunFile.reopen(file.path, readings.check)
            except BlockingIOError:
                busy.append(file.run_id)
    if busy:
        raise UsageError(f"--resume: {', '.join(busy)} of {where} is being run by another process")
    known = ", ".join(file.run_id for file in unfinished) or "none"
    raise UsageError(f"--resume: no unfinished run{' ' * bool(run_id)}{run_id} of {where} (unfinished: {known})")


def left(files: Iterable[Contents]) -> list[str]:
    """Return the ids of the unfinished runs that no process holds."""
    run_ids = []
    for file in files:
        if file.unfinished:
            with contextlib.suppress(BlockingIOError):
                RunFile.reopen(file.path, readings.check).close()
                run_ids.append(file.run_id)
    return run_ids


def adopt(file: RunFile, arguments: Options) -> None:
    """Give `arguments` the options that the run began with. UsageError: another option is given."""
    began = file.contents.run.get("arguments") or {}
    if missing := [name for name in OPTIONS if name not in began]:
        raise UsageError(f"--resume: {file.contents.path} lacks {', '.join(missing)} in `arguments`; start a new run")
    for name in OPTIONS:
        now, before = _absolute(getattr(arguments, name)), began[name]
        if now != getattr(Options, name) and now != before:
            change = f"{spelled(name)} was {before!r}, got {now!r}"
            raise UsageError(f"--resume goes on with the options of that run: {change}")
        setattr(arguments, name, before)


def see_unchanged(file: RunFile, now: dict) -> None:
    """Raise UsageError, which says what changed, unless `now`, a new run's first line, says the same as the run's."""
    was, now = file.contents.run, json.loads(json.dumps(now))
    changed = [words for key, words in _DEPENDS_ON.items() if was.get(key) != now[key]]
    before, after = ({j.get("variant"): j.get("source_hash") for j in run["submissions"]} for run in (was, now))
    changed += [name for name in {**before, **after} if before.get(name) != after.get(name)]
    if changed:
        error = UsageError(
            f"--resume: run {was['run_id']} cannot go on, because these changed since it began: {', '.join(changed)}. "
            f"Start a new run; to forget this one, remove {file.contents.path}"
        )
        error.resumable = False
        raise error


def _absolute(value: object) -> object:
    """Return paths as ones that mean the same from any folder, and any other value as it is."""
    if isinstance(value, list):
        return [_absolute(item) for item in value]
    return str(Path(value).resolve()) if isinstance(value, str) and value.endswith(".py") else value
