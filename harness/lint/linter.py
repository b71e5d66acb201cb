"""The linter of problems: what a problem's check lets through that it should not. `harness/run.py PROBLEM --lint`.

Three parts. Trivial answers (harness/lint/trivial.py) go through the problem's own check, in every test case and one
benchmark case; every file of wrong/ and every honest variant go through the whole judge. It holds if each trivial
answer is refused, each wrong file gets a failing verdict in some case and each variant passes all cases (a baseline
those that its ONLY names). A trivial answer that is the right one in some case (the mean of a single element), or is
accepted by the luck of a seed (one element that happens to need no more bits), is named with the case.

What task.py may say of itself, as literals:

    PRECISION = "bf16"  (or another of trivial.LADDER) the narrowest format that a kernel may compute in, where that is
                        not the type of its data. An answer in the next narrower one must be refused.
    INOUT = ("state",)  inputs that a call may overwrite. They are inputs here like others: the answer depends on them.
    OPAQUE = ("state",) inputs or weights of integers and bytes that mean something only as a whole, such as a buffer
                        with a layout or a table of offsets: they are not zeroed or shifted. A tensor of floating-point
                        values cannot be OPAQUE.

Integers and packed values are never scaled or rounded, but moved on by one element where floating-point ones are
shifted, so token ids stay such. An answer that cannot be made for a case is shown as not applicable, with the reason.
"""

import importlib.util
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field

from harness.judge import console, phases
from harness.judge.handle import ProblemError, RunnerHandle
from harness.judge.limits import CHECKER_LIMIT_S
from harness.judge.phases import Progress
from harness.judge.session import Session
from harness.lint import trivial
from harness.problem import scan
from harness.problem.folders import Case, Problem, Submission, UsageError, submission
from harness.sandbox.process import Child, Died
from problems.common import load

AT_ONCE = 4  # submissions judged side by side, each a process with torch in it
SMALL_BYTES = 2**20  # of a case: these come first, and the short form has no others
FEW_CASES = 2  # of a problem with large test cases only, or that does not say how large they are
FEW_FILES = 4  # of wrong/ in the short form
LUCK_SEEDS = 8  # further seeds of a case in which an answer got through; if it does in half of them, it is a hole
# Verdicts on what a wrong file did. COMPILE_ERROR and UNSUPPORTED mean that it was not judged.
CAUGHT = {"INCORRECT", "RULE_BROKEN", "CHEAT_SUSPECTED", "RUNTIME_ERROR", "TIMEOUT", "INVALID_MEASUREMENT"}

MISMATCH = "mismatch found! custom implementation doesn't match reference: "  # how most reports of a check begin

Say = Callable[[str], None]
Ask = Callable[[dict], dict]  # a message to harness/lint/trivial.py and its reply; Died if the process is lost


@dataclass
class Row:
    """What became of one candidate. Lists hold the names of cases."""

    name: str
    kind: str
    formed: int = 0
    refused: int = 0
    baseline_formed: int = 0
    baseline_refused: int = 0
    right: list[str] = field(default_factory=list)  # accepted, since it is the answer or its neighbour
    luck: list[str] = field(default_factory=list)  # accepted with the case's seed, refused with most others
    missed: list[str] = field(default_factory=list)  # holes
    absent: dict[str, list[str]] = field(default_factory=dict)  # by reason

    def hole(self) -> str:
        """What is wrong, or ""."""
        if self.kind == trivial.EXACT:
            return f"refused: {self.missed[0]}" if self.missed else ""
        if self.missed:
            return f"accepted in {len(self.missed)} cases, first {self.missed[0]}"
        # A blind answer that is right in most cases shows that the cases say little, whatever the tolerance.
        if self.kind in (trivial.BLIND, trivial.NEAR) and 2 * len(set(self.right + self.luck)) > max(self.formed, 1):
            return f"the right answer in {len(set(self.right + self.luck))} of {self.formed} cases"
        return ""


class Helper:
    """`ask` of a process of harness/lint/trivial.py, which is started when needed: also after it was lost."""

    def __init__(self, problem: Problem, device: str) -> None:
        self.problem, self.device = problem, device
        self.target = ""
        self._child: Child | None = None

    def __call__(self, message: dict) -> dict:
        if self._child is None:
            self._child = Child("harness.lint.trivial", {"OMP_WAIT_POLICY": "PASSIVE"})
            utils = str(self.problem.utils) if self.problem.utils else None
            start = {"folder": str(self.problem.folder), "own": self.problem.own, "device": self.device}
            self.target = self._request({**start, "utils": utils})["target"]
        return self._request(message)

    def close(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None

    def _request(self, message: dict) -> dict:
        try:
            reply, _ = self._child.request(message, CHECKER_LIMIT_S)
        except Died:
            self._child = None
            raise
        if "failed" in reply:
            raise ProblemError(f"{self.problem.name}'s own code failed:\n{reply['text']}")
        return reply


def run(problem: Problem, device: str, say: Say, short: bool = False) -> bool:
    """Lint `problem` on `device`, printing tables through `say`. -> whether all holds. short: only small cases and
    some files, for CI. ProblemError: the problem's own code raises.
    """
    cases = chosen(problem, device, short)
    holes: list[str] = []
    ask = Helper(problem, device)
    with console.progress() as progress:
        try:
            rows, faults = survey(ask, cases, has_peers(problem), progress)
        except Died as died:
            raise ProblemError(f"{problem.name}: the linter's process {died.reason}") from None
        finally:
            ask.close()
        size = f"one input at a time only where data has up to {trivial.SMALL_BYTES // 2**20} MiB"
        say(f"{problem.name} on {device}: {len(rows)} trivial answers, {len(cases)} cases ({size})")
        if opaque := load.constants(problem.folder / "task.py", "OPAQUE").get("OPAQUE") if problem.own else None:
            say(f"left as they are, since task.py calls them OPAQUE: {', '.join(opaque)}")
        show(rows, say)
        holes += faults + [f"{row.name}: {hole}" for row in rows if (hole := row.hole())] + left_out(rows)
        with Session(problem, device) as session:
            holes += wrong_files(session, ask.target, say, progress, short)
            holes += variants(session, ask.target, say, progress, short)
    say("")
    for hole in holes:
        say(f"HOLE {hole}")
    say(f"{problem.name}: {f'{len(holes)} holes' if holes else 'no hole'} found by the linter")
    return not holes


def chosen(problem: Problem, device: str, short: bool) -> list[tuple[str, Case]]:
    """(name, case): every test, or the small ones, and the smallest benchmark."""
    tests = small(problem) if short else list(problem.tests)
    twice = [str(case) for case in tests]
    cases = [(f"{case} seed={case.seed}" if twice.count(str(case)) > 1 else str(case), case) for case in tests]
    if not short and problem.benchmarks[device]:
        benchmark = min(problem.benchmarks[device], key=lambda case: case.bytes or 0)
        cases.append((f"benchmark {benchmark}", benchmark))
    return cases


def small(problem: Problem) -> list[Case]:
    sized = [case for case in problem.tests if case.bytes is not None and case.bytes <= SMALL_BYTES]
    return sized or list(problem.tests[:FEW_CASES])


def has_peers(problem: Problem) -> bool:
    return problem.own and any(file.stem.startswith("peer_") for file in (problem.folder / "variants").glob("*.py"))


# ---------------------------------------------------------------- trivial answers


def survey(
    ask: Ask, cases: list[tuple[str, Case]], baselines: bool, progress: Progress = lambda _: None
) -> tuple[list[Row], list[str]]:  # fmt: skip
    """Every candidate on every case, at a baseline's tolerance too if there are `baselines`. -> (rows, what else is
    wrong).
    """
    rows: dict[str, Row] = {}
    faults: list[str] = []
    for name, case in cases:
        progress(f"lint {name}")
        reply = ask(_made(case))
        if reply["fault"]:
            faults.append(f"{name}: {reply['fault']}")
        accepted: list[tuple[Row, bool]] = []
        for candidate, kind in reply["candidates"].items():
            row = rows.setdefault(candidate, Row(candidate, kind))
            _attempt(ask, row, name, case, False, accepted)
            if baselines and kind in trivial.BASELINE_KINDS and trivial.BY_CHECK not in candidate:
                _attempt(ask, row, name, case, True, accepted)
        if accepted:
            _try_luck(ask, name, case, accepted)
    return list(rows.values()), faults


def _attempt(ask: Ask, row: Row, name: str, case: Case, baseline: bool, accepted: list[tuple[Row, bool]]) -> None:
    """One candidate on the present case; where it gets through and is not the answer, it joins `accepted`."""
    try:
        reply = ask({"op": "attempt", "candidate": row.name, "baseline": baseline})
    except Died as died:
        ask(_made(case))
        reply = {"status": "absent", "text": f"the reference's process was lost: {died.reason}"}
    status = reply["status"]
    if status == "absent":
        if not baseline:
            row.absent.setdefault(reply["text"].partition("\n")[0], []).append(name)
        return
    refused = status == "refused"
    if baseline:
        row.baseline_formed += 1
        row.baseline_refused += refused
    else:
        row.formed += 1
        row.refused += refused
    if row.kind == trivial.EXACT:
        if refused:
            row.missed.append(f"{name}: {reply['text']}")
    elif status == "right":
        if name not in row.right:
            row.right.append(name)
    elif status == "accepted":
        accepted.append((row, baseline))


def _try_luck(ask: Ask, name: str, case: Case, accepted: list[tuple[Row, bool]]) -> None:
    """Put what got through to the same case with other seeds, to tell a lax check from an element that fits."""
    through = [0] * len(accepted)
    for turn in range(1, LUCK_SEEDS + 1):
        made = ask(_made(case, case.seed + turn))
        for i, (row, baseline) in enumerate(accepted):
            if row.name in made["candidates"]:
                reply = ask({"op": "attempt", "candidate": row.name, "baseline": baseline})
                through[i] += reply["status"] in ("accepted", "right")
    for (row, baseline), count in zip(accepted, through, strict=True):
        said = f"{name}{' as a baseline' if baseline else ''}"
        lucky = row.kind != trivial.FORM and 2 * count < LUCK_SEEDS
        (row.luck if lucky else row.missed).append(f"{said} ({count} of {LUCK_SEEDS} other seeds)")


def _made(case: Case, seed: int | None = None) -> dict:
    return {"op": "case", "case": case.params, "seed": case.seed if seed is None else seed}


def left_out(rows: list[Row]) -> list[str]:
    """Inputs that the reference reads and that no case needs: zero or constant wherever it looks."""
    by_name = {row.name: row for row in rows}
    found = []
    for row in rows:
        stem, change, of = row.name.partition(" zero")
        if row.kind != trivial.ALONE or not change:
            continue
        shifted = by_name[f"{stem} shifted{of}"]
        if not row.refused and not row.missed and shifted.refused:
            found.append(f"{stem}{of}: the answer depends on it, but not on whether it is left out, in any case")
    return found


def show(rows: list[Row], say: Say) -> None:
    """One line a candidate: cases refused of those it could be formed in, at a baseline's tolerance too; what to
    know.
    """
    baselines = any(row.baseline_formed for row in rows)
    width = max(len(row.name) for row in rows)
    say(f"{'answer':<{width}}  refused  {'as baseline  ' if baselines else ''}note")
    for row in rows:
        refused = f"{row.refused}/{row.formed}"
        baseline = f"{row.baseline_refused}/{row.baseline_formed}" if row.baseline_formed else ""
        say(f"{row.name:<{width}}  {refused:>7}  {f'{baseline:>7}  ' if baselines else ''}{_note(row)}".rstrip())


def _note(row: Row) -> str:
    notes = [f"HOLE: {row.hole()}"] if row.hole() else []
    if row.kind == trivial.EXACT and not row.missed:
        notes.append("accepted, as it must be")
    if row.right:
        all_of_them = len(row.right) == row.formed
        derived = row.kind in (trivial.COARSE, trivial.DERIVED, trivial.ALONE)
        what = "leaves the answer as it is" if derived else "is the answer"
        notes.append(f"{what} in {'every case' if all_of_them else _cases(row.right)}")
    if row.luck:
        notes.append(f"fits by luck in {_cases(row.luck)}")
    for reason, names in row.absent.items():
        # A candidate that the folder's outputs cannot have at all is said once, without its cases.
        notes.append(f"not applicable{f' in {_cases(names)}' if row.formed else ''}: {reason}")
    return "; ".join(notes)


def _cases(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{', '.join(names[:3])} and {len(names) - 3} more"


# ---------------------------------------------------------------- through the judge


def wrong_files(session: Session, target: str, say: Say, progress: Progress, short: bool) -> list[str]:
    """Every file of wrong/ through the judge, small cases first, until one catches it. -> holes."""
    problem = session.problem
    files = sorted([*problem.folder.glob("wrong/*.py"), *problem.folder.glob("solutions/wrong/*.py")])
    if not files:
        say("\nno wrong/ folder")
        return [f"{problem.name} has no file that must be rejected"] if problem.own else []
    if short:
        files = files[:: -(-len(files) // FEW_FILES)]
    holes: list[str] = []
    submissions, others = _fit([submission(problem, file) for file in files], session.device, target)
    first = small(problem)
    rest = [] if short else [case for case in problem.tests if case not in first]
    caught: dict[str, str] = {}
    passed = {e.name: 0 for e in submissions}
    for cases in filter(None, (first, rest)):
        todo = [e for e in submissions if e.name not in caught]
        for name, outcomes in _judged(session, target, todo, cases, progress).items():
            for case, outcome in zip(cases, outcomes, strict=True):
                if outcome.status != "PASSED" and name not in caught:
                    caught[name] = f"{outcome.status:<15} {case}: {_line(outcome.reason)}"
                    if outcome.status not in CAUGHT:
                        holes.append(f"wrong/{name}.py: was not judged: {outcome.status}")
                passed[name] += name not in caught
    say(f"\nwrong/ through the judge: {len(files)} files")
    for e in submissions:
        said = caught.get(e.name, f"PASSED {passed[e.name]} cases")
        say(f"{e.name:<32} {said}")
        if e.name not in caught:
            holes.append(f"wrong/{e.name}.py: passes all {passed[e.name]} cases")
    for e, why in others:
        say(f"{e.name:<32} {why}")
    return holes


def variants(session: Session, target: str, say: Say, progress: Progress, short: bool) -> list[str]:
    """Every honest variant that can run here through the judge on all tests. -> holes."""
    problem = session.problem
    submissions = honest(problem)
    if short and problem.own:
        submissions = [problem.winner(target)]
    cases = small(problem) if short else list(problem.tests)
    fit, others = _fit(submissions, session.device, target)
    say(f"\nhonest variants through the judge: {len(fit)} of {len(submissions)} can run here")
    holes = []
    for name, outcomes in _judged(session, target, fit, cases, progress).items():
        left = [o.reason for o in outcomes if o.status == "UNSUPPORTED"]  # by what a baseline says of itself
        bad = [(case, o) for case, o in zip(cases, outcomes, strict=True) if o.status not in ("PASSED", "UNSUPPORTED")]
        said = f"{bad[0][1].status} on {bad[0][0]}: {_line(bad[0][1].reason)}" if bad else left[0] if left else ""
        say(f"{name:<32} {len(cases) - len(bad) - len(left)}/{len(cases)} cases right  {said}".rstrip())
        if bad:
            holes.append(f"{name}: {said}")
    for e, why in others:
        if why.startswith("RULE_BROKEN"):
            holes.append(f"{e.name}: {why}")
        say(f"{e.name:<32} {why}")
    if not fit:
        holes.append(f"no variant of {problem.name} can run on {target}: nothing shows that the check can be passed")
    return holes


def honest(problem: Problem) -> list[Submission]:
    """The folder's variants; of GPU MODE's its correct solutions; without such the submission that comes with it."""
    if problem.own and (submissions := problem.submissions()):
        return submissions
    files = sorted(problem.folder.glob("solutions/correct/*.py")) or [problem.folder / "submission.py"]
    return [submission(problem, file) for file in files if file.is_file()]


def _judged(
    session: Session, target: str, submissions: list[Submission], cases: list[Case], progress: Progress
) -> dict[str, list]:  # fmt: skip
    """Outcomes of each submission by name, in the order of `cases`."""
    results: dict[str, list] = {}
    for start in range(0, len(submissions), AT_ONCE):
        handles = [RunnerHandle(e.name, e, target) for e in submissions[start : start + AT_ONCE]]
        results |= phases.run_tests(session, handles, cases, lambda *_: None, progress)
    return results


def _fit(
    submissions: list[Submission], device: str, target: str
) -> tuple[list[Submission], list[tuple[Submission, str]]]:
    """-> (what can be judged here, the others with the reason)."""
    if device == "cuda" and not shutil.which("nvcc"):
        raise UsageError("nvcc is not on PATH: the judge's own kernels need the CUDA toolkit")
    fit, others = [], []
    for e in submissions:
        if findings := scan.findings(scan.closure(e.file, e.folder), e.baseline):
            others.append((e, f"RULE_BROKEN     {findings[0]}"))
        elif target not in e.targets:
            others.append((e, f"made for {', '.join(e.targets)}"))
        elif missing := [name for name in e.requires if importlib.util.find_spec(name) is None]:
            others.append((e, f"needs the Python package {', '.join(missing)}"))
        elif flags := load.missing_cpu_flags(e.file):
            others.append((e, f"needs a CPU with {', '.join(flags)}"))
        else:
            fit.append(e)
    return fit, others


def _line(text: str) -> str:
    lines = text.strip().splitlines() or [""]
    # A traceback says what happened in its last line, every other report in its first.
    line = lines[-1] if lines[0].startswith("Traceback") else lines[0]
    return line.removeprefix(MISMATCH)[:110]
