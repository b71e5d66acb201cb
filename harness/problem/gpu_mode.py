"""Problem folders in GPU MODE's format, read as they are (docs/gpu_mode.md says what is honoured).

task.yml has the cases, whose values generate_input receives, and the import names of files; eval.py is ignored.
"""

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, Field, StrictInt, StrictStr, ValidationError

from harness.problem import sources
from harness.problem.folders import Case, Problem, UsageError
from harness.results import output, schema, text

_UNUSED = ("submission.py", "eval.py", "reference.py")  # a place, the judge's part, and where every folder has it
# Keys for GPU MODE's own service.
_OTHER_KEYS = ("description", "config", "templates", "test_timeout", "benchmark_timeout", "ranked_timeout", "gpus")
_OURS = ("harness", "problems", "leaderboard", "ptx_model")


def _passed(case: dict) -> dict:
    """Return a case as GPU MODE passes it, in a line of text: only numbers, and lists of them, are no words."""
    for name, value in case.items():
        if not isinstance(value, bool | int | float | str | list | None):
            raise ValueError(f"{name}: wanted a number, a text, true, false or a list")
    if type(seed := case.get("seed", 0)) is not int or not 0 <= seed < 2**63:
        raise ValueError("seed: must be 0 to 2^63 - 1")
    return {name: str(value) if value is None or isinstance(value, bool) else value for name, value in case.items()}


_Case = Annotated[dict[StrictStr, Any], AfterValidator(_passed)]


class _File(BaseModel):
    name: StrictStr
    source: StrictStr = ""


class _Task(BaseModel):
    """The keys of task.yml that are read."""

    tests: list[_Case]
    benchmarks: list[_Case] = []
    files: list[_File] = []
    lang: Literal["py"] = "py"
    multi_gpu: Literal[False] = False
    ranking_by: Literal["last", "mean", "geom"] = "last"
    seed: Annotated[StrictInt, Field(ge=0, lt=2**63)] = 0

    def cases(self, specs: list[dict]) -> tuple[Case, ...]:
        params = [{name: value for name, value in case.items() if name != "seed"} for case in specs]
        return tuple(Case(param, case.get("seed", self.seed)) for param, case in zip(params, specs, strict=True))


def read(folder: Path) -> Problem:
    """Return the problem in `folder`. UsageError: task.yml is missing or malformed (it names the key), or a file is."""
    file = sources.task_yml(folder)
    try:
        content = yaml.safe_load(file.read_text())
        task = _Task.model_validate(content)
    except yaml.YAMLError as error:
        raise UsageError(f"{file}: not YAML: {' '.join(str(error).split())}") from error
    except ValidationError as error:
        raise UsageError(f"{file}: {schema.said_of(error)}") from None
    for key in content.keys() - {*_Task.model_fields, *_OTHER_KEYS}:
        near = difflib.get_close_matches(str(key), [*_Task.model_fields, *_OTHER_KEYS], 1)
        hint = f": is it {near[0]}?" if near else ""
        output.complain(text.line(f"warning: {file}: the key {key!r} is unknown and ignored{hint}"))
    benchmarks = task.cases(task.benchmarks)
    if task.ranking_by == "last":
        benchmarks = benchmarks[-1:]
    by_device = {"cuda": benchmarks, "cpu": benchmarks}
    name, tests, files = sources.qualified(folder), task.cases(task.tests), _files(folder, task.files)
    return Problem(name, folder, False, tests, by_device, files, task.ranking_by)


def _files(folder: Path, listed: list[_File]) -> dict[str, Path]:
    """Return the Python files that task.yml lists, task.py and utils.py, by import name. UsageError: a wrong one."""
    unlisted = [folder.parent / "utils.py", folder / "utils.py", folder / "task.py"]
    files = {path.name: path for path in unlisted if path.is_file()}
    files |= {file.name: folder / (file.source or file.name) for file in listed if "@" not in file.source}
    reference = {"reference.py": files.get("reference.py", folder / "reference.py")}
    files = {name: path.resolve() for name, path in files.items() if name not in _UNUSED}
    for name, path in {**files, **reference}.items():
        where = f"{sources.task_yml(folder)}: files: {name} ({path})"
        if name.partition("/")[0].removesuffix(".py") in _OURS:
            raise UsageError(f"{where} has the name of a package of this judge: rename it")
        if not path.is_file():
            raise UsageError(f"{where} is not there")
        if name.endswith(".py") and path.suffix != ".py":
            raise UsageError(f"{where} must be a file whose name ends in .py")
    return {name: path for name, path in files.items() if path.suffix == ".py"}
