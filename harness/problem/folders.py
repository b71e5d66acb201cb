"""Problem folders: ours (task.py names OUTPUTS) and GPU MODE's (harness/problem/gpu_mode.py), as one type."""

import contextlib
import dataclasses
import functools
import numbers
import random
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.problem import sources
from harness.results import text
from problems.common import build, load, terminal

TARGETS = ("cpu", "sm90", "sm100")
DRAWN, AT_TIMED = 16, 2  # test cases that only one run has, and those of the smallest timed shapes
_TASKS = ("task.py", "task.yml", "task.yaml")  # of which a problem folder has one
_NAMED = 5  # problem folders in a message


class UsageError(ValueError):
    """Bad use: the argument, what was wanted and what came. resumable: a run that had begun can go on."""

    resumable = True


class ProblemError(RuntimeError):
    """The problem's own code failed, and would again. resumable: as of UsageError."""

    resumable = False


@contextlib.contextmanager
def reading(source: str, named: bool = False) -> Iterator[None]:
    """Turn what goes wrong in files into a UsageError of one line. named: an error of values says which file."""
    try:
        yield
    except UsageError:
        raise
    except SyntaxError as error:
        name = Path(error.filename or source).name
        place = name if name == source else f"{source}: {name}"
        raise UsageError(f"{place}:{error.lineno}: not Python: {error.msg}") from error
    except Exception as error:
        if named and isinstance(error, ValueError | build.BuildError) and not isinstance(error, UnicodeError):
            raise UsageError(str(error)) from error
        reason = text.line(f"{type(error).__name__}: {error}".rstrip(": "), 300)
        at = traceback.extract_tb(error.__traceback__)[-1]
        where = "" if isinstance(error, build.BuildError) else f" ({Path(at.filename).name}:{at.lineno})"
        raise UsageError(f"{source} cannot be read: {reason}{where}") from error


def has_words(case: str, words: str) -> bool:
    """Whether a case has all these words, in any order: key=value as a whole, any other word as a part of its text."""
    return all(word in case.split() if "=" in word else word in case for word in words.split())


@dataclass(frozen=True)
class Case:
    """One argument set of generate_input. bytes: least traffic, None: not said; flops likewise; weight_bytes: or 0."""

    params: dict
    seed: int
    bytes: int | None = None
    flops: int | None = None
    weight_bytes: int = 0
    rows: tuple[int, ...] | None = None  # only these of the call, in this order (harness/judge/invariance.py)

    def __str__(self) -> str:
        return text.label(self.params) or "(no parameters)"


@dataclass(frozen=True)
class Submission:
    """A submission file and its literals. folder, ours: its problem's. only: (field of the case, values); (): all."""

    name: str
    file: Path
    targets: tuple[str, ...]
    requires: tuple[str, ...] = ()
    baseline: bool = False
    summary: str = ""
    folder: Path | None = None
    only: tuple[tuple[str, tuple], ...] = ()
    ours: bool = True

    def serves(self, case: Case) -> bool:
        return all(case.params.get(field) in values for field, values in self.only)

    @property
    def limits(self) -> str:
        """Why other cases are UNSUPPORTED: "serves only activation=bf16"."""
        parts = (f"{field}={' or '.join(map(str, values))}" for field, values in self.only)
        return f"serves only {', '.join(parts)}"


@dataclass(frozen=True)
class Problem:
    name: str
    folder: Path
    ours: bool  # ours: outputs allocated by the judge, baselines and prepared weights possible
    tests: tuple[Case, ...]
    benchmarks: dict[str, tuple[Case, ...]]  # by device type, or by a target that has separate ones; see timed
    files: dict[str, Path] = dataclasses.field(default_factory=dict)  # GPU MODE's: what a submission may import
    ranking_by: str = "geom"
    composition: bool = False  # see harness/problem/sources.py

    def timed(self, target: str) -> tuple[Case, ...]:
        """Return the cases that submissions for `target` are timed on."""
        return self.benchmarks.get(target, self.benchmarks["cpu" if target == "cpu" else "cuda"])

    def drawn(self, seed: int, target: str) -> tuple[Case, ...]:
        """Return test cases that `seed` draws, of timed shapes with contents of test cases too; none without axes."""
        task = load.module(self.folder, "task") if self.ours else None
        if not hasattr(task, "tests"):
            return ()
        contents = sorted({case.params["content"] for case in self.tests if "content" in case.params})
        small = sorted(self.timed(target), key=lambda case: case.bytes or 0)[: AT_TIMED if contents else 0]
        chosen = zip(small, random.Random(seed).choices(contents or [""], k=len(small)), strict=True)
        hard = (dataclasses.replace(case, params=case.params | {"content": fill}, seed=seed) for case, fill in chosen)
        return (*_cases(self.folder, task.tests(seed)[:DRAWN]), *hard)

    def submissions(self) -> list[Submission]:
        """Return every file in variants/, by name."""
        return [submission(self, file) for file in sorted((self.folder / "variants").glob("*.py"))]

    def winner(self, target: str) -> Submission:
        """What runs when nothing is named: the winner for `target` of our problems, else submission.py."""
        file = self.folder / "submission.py"
        if not file.is_file():
            raise UsageError(f"{self.name} has no submission.py: name one with --submission FILE")
        with reading(file.name, named=True):
            named = load.winners(self.folder)
        if not named:
            return submission(self, file)
        try:
            return self.variant(load.winner(self.folder, target))
        except ValueError as error:
            raise UsageError(f"{self.name}: {error}: name a --variant") from None

    def variant(self, name: str, option: str = "--variant") -> Submission:
        """Return the file of that name in variants/, which `option` names. UsageError: there is none."""
        return submission(self, variant_file(self.folder, name, option))


def place(name: str) -> Path:
    """The folder of that problem; nothing of it is read. UsageError: there is none."""
    for folder in (load.PROBLEMS / name, Path(name)):
        if any((folder / file).is_file() for file in _TASKS):
            return folder.resolve()
    near, there, hint = Path(name), list[Path](), ""
    with contextlib.suppress(OSError, ValueError):  # a name that is no path, a folder that cannot be read
        near = near.parent if near.is_file() else near
        there = sorted({file.parent for at in ("", "*/", "*/*/") for task in _TASKS for file in near.glob(at + task)})
    if there:
        hint = f": give the folder, {', '.join(map(str, there[:_NAMED]))}{', ...' * (len(there) > _NAMED)}"
    hint = hint or terminal.nearest(Path(name).name, problem_names())
    raise UsageError(f"PROBLEM must be a name in problems/, or a folder with a task.py or task.yml, got {name!r}{hint}")


def variant_file(folder: Path, name: str, option: str) -> Path:
    """The file of that name in variants/, which `option` names. UsageError: there is none; a path is no name."""
    files = {file.stem: file for file in (folder / "variants").glob("*.py")}
    if name not in files:
        hint = terminal.nearest(name, sorted(files), f"python -m harness list {folder.name} prints them")
        raise UsageError(f"{option} must be a variant of {folder.name}, got {name!r}{hint}")
    return files[name]


def listing(folder: Path) -> Iterator[tuple[str, tuple[str, ...], str]]:
    """(name, targets, summary) of every file in variants/, by name; none is run. UsageError: one is no submission."""
    for file in sorted((folder / "variants").glob("*.py")):
        if not text.can_name(file.stem):
            raise UsageError(f"a submission's file must have a plain name, got {file.stem!r}: rename it")
        with reading(file.name, named=True):
            entry = file.stem, _targets(file, load.constants(file, "TARGETS")), load.summary(file)
        yield entry


def problem_names() -> list[str]:
    return sorted(p.parent.name for p in load.PROBLEMS.glob("*/task.py"))


def submission(problem: Problem, file: Path, option: str = "--submission") -> Submission:
    """What the file that `option` names says of itself. UsageError: it is no submission, or its literals are wrong."""
    if not file.is_file():
        raise UsageError(f"{option} must be a Python file, found none at {file}")
    if file.suffix != ".py":
        raise UsageError(f"{option} must be a Python file, whose name ends in .py, got {file}: rename it")
    modules = {name: problem.folder / name for name in ("task.py", "reference.py")} | problem.files
    if file.name in modules and modules[file.name].resolve() != file.resolve():
        raise UsageError(f"{option}: {file.name} would hide a module of {problem.name} of that name: rename the file")
    with reading(file.name, named=True):
        literals = load.constants(file, "TARGETS", "REQUIRES", "ONLY", "CPU_FLAGS")
        summary = load.summary(file)
        if file.resolve() in sources.helpers(problem.folder.resolve()).values():
            raise UsageError(f"{option}: {file.name} is a module of {problem.name}, whose reference imports it")
        for path in (*sources.files_of(file), *sources.brought(file, problem.folder)):
            if path.suffix == ".py":
                load.parse(path)
        requires, _ = _names(file, literals, "REQUIRES"), _names(file, literals, "CPU_FLAGS")
        targets = _targets(file, literals)
        baseline = file.stem.startswith("peer_") and file.resolve().parent == problem.folder / "variants"
        only = _only(problem, file, literals["ONLY"], () if baseline else targets) if "ONLY" in literals else ()
    name, path, folder = file.stem, file.resolve(), problem.folder
    return Submission(name, path, targets, requires, baseline, summary, folder, only, problem.ours)


def _targets(file: Path, literals: dict[str, Any]) -> tuple[str, ...]:
    targets = _names(file, literals, "TARGETS") or TARGETS
    if unknown := set(targets) - set(TARGETS):
        raise UsageError(f"{file.name}: TARGETS must be of {TARGETS}, got {sorted(unknown)}")
    return targets


def _names(file: Path, literals: dict[str, Any], literal: str) -> tuple[str, ...]:
    words = literals.get(literal, ())
    if not isinstance(words, tuple | list) or not all(isinstance(w, str) and w.isidentifier() for w in words):
        raise UsageError(f"{file.name}: {literal} must be a tuple of names, got {words!r:.80}")
    return tuple(words)


def _only(problem: Problem, file: Path, spec: object, targets: tuple[str, ...]) -> tuple[tuple[str, tuple], ...]:
    """The literal ONLY as Submission has it. targets: () of a baseline. UsageError: malformed, or not allowed."""
    allowed = {}
    if targets and problem.ours:
        allowed = load.constants(problem.folder / "task.py", "ONLY_BY_TARGET").get("ONLY_BY_TARGET", {})
    if any(allowed.get(target) != spec for target in targets):
        known = "".join(f", and for {target} {value}" for target, value in allowed.items())
        wanted = f"ONLY is for peer_* files of variants/{known}, a submission must serve every case"
        raise UsageError(f"{file.name}: {wanted}, got {spec!r}")
    if not isinstance(spec, dict) or not spec or any(isinstance(v, list | set | dict) for v in spec.values()):
        raise UsageError(f"{file.name}: ONLY must map fields of the case to a value or a tuple of values, got {spec!r}")
    cases = [*problem.tests, *(case for cases in problem.benchmarks.values() for case in cases)]
    known = list(dict.fromkeys(field for case in cases for field in case.params))
    if unknown := [field for field in spec if field not in known]:
        raise UsageError(f"{file.name}: ONLY must name fields of the case ({', '.join(known)}), got {unknown[0]!r}")
    only = tuple((field, value if isinstance(value, tuple) else (value,)) for field, value in spec.items())
    for case in (case for target in targets for case in problem.timed(target)):
        if not all(case.params.get(field) in values for field, values in only):
            raise UsageError(f"{problem.name}/task.py: ONLY_BY_TARGET must admit each timed case, it leaves out {case}")
    return only


def is_own(folder: Path) -> bool:
    """Whether a problem folder is one of our format, and not GPU MODE's. UsageError: it is of neither."""
    if (folder / "task.py").is_file() and "OUTPUTS" in load.constants(folder / "task.py", "OUTPUTS"):
        return True
    if sources.task_yml(folder).is_file():
        return False
    if not (folder / "reference.py").is_file():
        raise UsageError(f"{folder.name}/task.py names no OUTPUTS, and there is no task.yml: no problem folder")
    cases = "`tests: [{size: 128, seed: 1}]` and `benchmarks: [{size: 4096, seed: 2}]`"
    raise UsageError(f"{folder.name} has no task.yml: write one, with the arguments of generate_input as in {cases}")


def _count(folder: Path, method: Any) -> Any:
    """Return what a method of a case says. UsageError: it is no count."""
    count = method()
    if isinstance(count, bool) or not isinstance(count, numbers.Real) or not 0 <= count < float("inf"):
        raise UsageError(f"{folder.name}/task.py: {method.__name__}() of a case must be a number from 0, got {count!r}")
    return count


def _cases(folder: Path, specs: list) -> tuple[Case, ...]:
    return tuple(
        Case(
            {k: v for k, v in dataclasses.asdict(spec).items() if k != "seed"},
            spec.seed,
            _count(folder, spec.bytes_moved),
            _count(folder, spec.flops) if hasattr(spec, "flops") else None,
            _count(folder, spec.weight_bytes) if hasattr(spec, "weight_bytes") else 0,
        )
        for spec in specs
    )


def find(name: str) -> Problem:
    """The problem of that name in problems/, or the problem folder at that path. UsageError: neither, or malformed."""
    folder = place(name)
    if is_own(folder):
        with reading(folder.name, named=True):
            literals = load.constants(folder / "task.py", "INOUT", "OPAQUE")
        for literal in literals:
            _names(folder / "task.py", literals, literal)
        task = load.module(folder, "task")
        cases = functools.partial(_cases, folder)
        benchmarks = {"cuda": cases(task.BENCHMARKS), "cpu": cases(task.BENCHMARKS_CPU)}
        if hasattr(task, "BENCHMARKS_SM100"):
            benchmarks["sm100"] = cases(task.BENCHMARKS_SM100)
        composition = sources.is_composition(folder)
        if composition and folder.parent != load.PROBLEMS:
            raise UsageError(f"{folder} is a composition: it must stand in {load.PROBLEMS}, as its imports say")
        ours = load.PROBLEMS / folder.name
        # A copy of one of ours, whose task and reference may be others, has no place among our records.
        name = sources.qualified(folder) if folder != ours and (ours / "task.py").is_file() else folder.name
        return Problem(name, folder, True, cases(task.TESTS), benchmarks, composition=composition)
    from harness.problem import gpu_mode  # which needs this module, and pydantic, which takes a tenth of a second

    return gpu_mode.read(folder)
