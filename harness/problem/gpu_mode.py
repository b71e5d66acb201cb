"""Problem folders in GPU MODE's format, read as they are (docs/gpu_mode.md says what is honoured).

task.yml names the cases, whose values generate_input receives; eval.py is ignored, and the other files are imported by
the names that task.yml gives them.
"""

import ast
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, Field, StrictInt, StrictStr, ValidationError

from harness.problem import sources
from harness.problem.folders import Case, Problem, UsageError
from problems.common import build, load

_UNUSED = ("submission.py", "eval.py")  # of the files that a task.yml lists: a place, and the judge's part
_OURS = ("harness", "problems", "leaderboard", "ptx_model")
_DEFAULT_TIMEOUT_S = 180  # GPU MODE's, for each of its three phases
MOST_VALUES = 1_000_000  # of a task.yml


def _plain(value: Any) -> Any:
    if not isinstance(value, bool | int | float | str | list | None):
        raise ValueError("wanted a number, a text, true, false or a list")
    return value


_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Case = dict[StrictStr, Annotated[Any, AfterValidator(_plain)]]


class _File(BaseModel):
    name: StrictStr
    source: StrictStr = ""


class _Task(BaseModel):
    """The keys of task.yml that are read. Others are for GPU MODE's own service."""

    tests: list[_Case]
    benchmarks: list[_Case] = []
    files: list[_File] = []
    lang: Literal["py"] = "py"
    multi_gpu: Literal[False] = False
    ranking_by: Literal["last", "mean", "geom"] = "last"
    seed: StrictInt = 0
    test_timeout: _Seconds = _DEFAULT_TIMEOUT_S
    benchmark_timeout: _Seconds = _DEFAULT_TIMEOUT_S
    ranked_timeout: _Seconds = _DEFAULT_TIMEOUT_S


def read(folder: Path) -> Problem:
    """Return the problem in `folder`. UsageError: task.yml is missing or malformed (it names the key), or a file is."""
    file = folder / "task.yml"
    if not file.is_file():
        raise UsageError(f"{folder.name}/task.py names no OUTPUTS, and there is no task.yml: no problem folder")
    task = _task(file)
    benchmarks = _cases(file, task, "benchmarks")
    if task.ranking_by == "last":
        benchmarks = benchmarks[-1:]
    files = _files(folder, task.files)
    elsewhere = files.pop("reference.py", None)
    return Problem(
        sources.qualified(folder),
        folder,
        False,
        _cases(file, task, "tests"),
        {"cuda": benchmarks, "cpu": benchmarks},
        files,
        task.ranking_by,
        {"test": task.test_timeout, "benchmark": task.benchmark_timeout, "leaderboard": task.ranked_timeout},
        elsewhere=elsewhere,
        helpers=_helpers(folder, elsewhere or folder / "reference.py", files),
    )


def _task(file: Path) -> _Task:
    try:
        said = yaml.safe_load(file.read_text())
    except yaml.YAMLError as error:
        raise UsageError(f"{file}: not YAML: {' '.join(str(error).split())}") from error
    _see_size(file, said)
    if not isinstance(said, dict):
        raise UsageError(f"{file}: wanted a mapping with a list of tests, got {type(said).__name__}")
    said = {key: value for key, value in said.items() if value is not None}  # a key with nothing behind it
    if said.get("benchmarks"):
        said.setdefault("tests", said["benchmarks"])
    try:
        return _Task.model_validate(said)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        got = "" if first["type"] == "missing" else f", got {first['input']!r:.80}"
        hint = {"lang": " (only Python folders are judged)", "multi_gpu": " (only one GPU is used)"}.get(place, "")
        raise UsageError(f"{file}: {place}: {first['msg'].removeprefix('Value error, ')}{got}{hint}") from None


def _see_size(file: Path, said: object) -> None:
    """UsageError: aliases make more of a few lines than can be read."""
    todo, count = [said], 0
    while todo:
        value, count = todo.pop(), count + 1
        if count > MOST_VALUES:
            raise UsageError(f"{file}: wanted at most {MOST_VALUES} values, each alias counted in full")
        todo += [*value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []


def _cases(file: Path, task: _Task, key: str) -> tuple[Case, ...]:
    found = []
    for number, case in enumerate(getattr(task, key)):
        seed = case.get("seed", task.seed)
        if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63:
            raise UsageError(f"{file}: {key}.{number}.seed: must be 0 to 2^63 - 1, got {seed!r}")
        found.append(Case({name: _passed(value) for name, value in case.items() if name != "seed"}, seed))
    return tuple(found)


def _passed(value: object) -> object:
    """Return a value of a case as GPU MODE's judge passes it to generate_input: from a line of text, in which only
    numbers, and lists of them, are more than words.
    """
    return str(value) if value is None or isinstance(value, bool) else value


def _files(folder: Path, listed: list[_File]) -> dict[str, Path]:
    """Return the files that task.yml lists, and task.py and utils.py where it does not, by the name that they are
    imported by, and reference.py where it is elsewhere. UsageError: one is missing.
    """
    file = folder / "task.yml"
    found = {item.name: (folder / (item.source or item.name)).resolve() for item in listed}
    found = {name: path for name, path in found.items() if "@" not in path.name and name not in _UNUSED}
    for name, places in {"task.py": (folder,), "utils.py": (folder, folder.parent)}.items():
        there = [place / name for place in places if (place / name).is_file()]
        found |= {name: there[0]} if there and name not in found else {}
    if taken := [name for name in found if name.partition("/")[0].removesuffix(".py") in _OURS]:
        raise UsageError(f"{file}: files: {taken[0]} has the name of a package of this judge: rename it")
    if missing := [f"{name} ({path})" for name, path in found.items() if not path.is_file()]:
        raise UsageError(f"{file}: files: {missing[0]} is not there")
    if odd := [f"{name} ({path})" for name, path in found.items() if name.endswith(".py") and path.suffix != ".py"]:
        raise UsageError(f"{file}: files: {odd[0]} must be a file whose name ends in .py")
    if found.get("reference.py", folder / "reference.py") == (folder / "reference.py").resolve():
        found.pop("reference.py", None)
        if not (folder / "reference.py").is_file():
            raise UsageError(f"{file}: files: reference.py must stand in the folder, found none at {folder}")
    return {name: path for name, path in found.items() if path.suffix == ".py"}


def _helpers(folder: Path, reference: Path, files: dict[str, Path]) -> dict[str, Path]:
    """Return the modules of the folder that the reference and the listed files import and task.yml does not list, by
    the name that they are imported by.
    """
    found: dict[str, Path] = {}
    todo = [(reference, ""), *((path, name.rpartition("/")[0]) for name, path in files.items())]
    while todo:
        file, package = todo.pop()
        for name in _imported(file, package):
            parts = name.split(".")
            places = ["/".join(parts[:n]) for n in range(1, len(parts) + 1)]
            for place in (one for stem in places for one in (f"{stem}.py", f"{stem}/__init__.py")):
                known = place in files or place in found or place in ("reference.py", *_UNUSED)
                if not known and parts[0] not in _OURS and (folder / place).is_file():
                    found[place] = (folder / place).resolve()
                    todo.append((found[place], place.rpartition("/")[0]))
    return found


def _imported(file: Path, package: str) -> list[str]:
    """Return the dotted names of what a file imports, as far as it can be read. package: its folder, / between."""
    try:
        nodes = list(ast.walk(load.parse(file)))
    except (SyntaxError, OSError, build.BuildError):  # what is wrong with it is said where it is run
        return []
    found = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    for node in (node for node in nodes if isinstance(node, ast.ImportFrom)):
        above = package.split("/")[: len(package.split("/")) + 1 - node.level] if node.level and package else []
        stem = ".".join([*above, *([node.module] if node.module else [])])
        found += [f"{stem}.{alias.name}" if stem else alias.name for alias in node.names]
    return found
