"""The linter of problems: what a problem's check lets through that it should not. `python -m harness lint PROBLEM`.

Trivial answers (harness/lint/trivial.py) are put to the problem's own check in its small tests, every file of wrong/
and every honest variant to the whole judge. Each trivial answer must be refused, each wrong file be INCORRECT in some
case (a crash shows nothing of the check), each variant pass all cases that it serves, or for another machine compile,
and task.yml say what task.py says. Where a trivial answer is right, or passes by the luck of a seed, the linter names
the case; where it cannot know whether one is right (the order of a set, a sign), it asks: a QUESTION is no hole.
PRECISION, INOUT and OPAQUE of task.py are in docs/adding_a_problem.md.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness.judge import console, selection
from harness.judge.handle import CheckerHandle, RunnerHandle
from harness.judge.judging import phases_of
from harness.judge.outcome import Outcome
from harness.judge.session import Progress, Session, Step
from harness.judge.verdict import Result
from harness.lint import trivial
from harness.lint.trivial import Tried
from harness.problem import task_yml
from harness.problem.folders import Case, Problem, Submission, find, submission
from harness.results import text
from harness.tools import modes
from problems import wrong

AT_ONCE = 4  # submissions judged side by side, each a process with torch in it
SMALL_BYTES = 2**20  # of a case: trivial answers get these only, wrong files first
FEW_CASES = 2  # taken for the small ones where all are large
MISMATCH = "mismatch found! custom implementation doesn't match reference: "  # how most reports of a check begin
REASON = 110  # characters of a reason
ABOUT = {  # what to know of a candidate that is let through, by a part of its name
    "precision": "a tolerance that is too wide, or in our problems a PRECISION of task.py that is too narrow",
    "negated": "may its sign be either? If not, the check must compare it",
    "axis": "may its places come in any order? If not, the check must compare it",
    "one element": "is every element compared? If not, the check must compare it",
}

Say = Callable[[str], None]


@dataclass
class Row:
    """What became of one candidate, by the name of the case."""

    name: str
    kind: str
    tried: dict[str, Tried] = field(default_factory=dict)

    def cases(self, status: str) -> list[str]:
        return [case for case, trial in self.tried.items() if trial.status == status]

    @property
    def formed(self) -> int:
        return len(self.tried) - len(self.cases("absent"))

    def hole(self) -> str:
        """Return what is wrong, or ""."""
        right = self.cases("right")
        # What knows nothing of the inputs and is right in most cases shows that the cases say little.
        if self.kind == trivial.WRONG and 2 * len(right) > max(self.formed, 1) and not self.cases("accepted"):
            return f"the right answer in {len(right)} of {text.counted(self.formed, 'case')}"
        return self._through({trivial.EXACT: "refused", trivial.QUESTION: ""}.get(self.kind, "accepted"))

    def question(self) -> str:
        """Return what the author must say, since the linter cannot know whether it is right, or ""."""
        return self._through("accepted") if self.kind == trivial.QUESTION else ""

    def _through(self, status: str) -> str:
        if not (cases := self.cases(status)):
            return ""
        many = f"{status} in {text.counted(len(cases), 'case')}, first {cases[0]} ({self.tried[cases[0]].text})"
        return ": ".join([many, *(hint for part, hint in ABOUT.items() if part in self.name)])

    def note(self) -> str:
        """Return what to know of it, for the table."""
        notes = ["HOLE"] * bool(self.hole()) + ["QUESTION"] * bool(self.question())
        for status, meaning in {"right": "is the answer", "luck": "fits by luck"}.items():
            if cases := self.cases(status):
                notes.append(f"{meaning} in {'every case' if len(cases) == self.formed else _few(cases)}")
        for why in dict.fromkeys(self.tried[case].text for case in self.cases("absent")):
            cases = [case for case in self.cases("absent") if self.tried[case].text == why]
            notes.append(f"not applicable{f' in {_few(cases)}' if self.formed else ''}: {why}")
        return "; ".join(notes)


def run(problem: Problem, device: str, target: str, say: Say) -> bool:
    """Lint `problem` for `target`, print tables through `say`. Return whether it passes. ProblemError: it raises."""
    helper = CheckerHandle(problem, device, "harness.lint.trivial")
    with console.progress() as progress:
        try:
            rows, holes = survey(helper.ask, small(problem), progress)
        finally:
            helper.close()
        say(f"{problem.name} on {device}: {len(rows)} trivial answers, {text.counted(len(small(problem)), 'case')}")
        width = max(len(row.name) for row in rows)
        say(f"{'answer':<{width}}  refused  note")
        for row in rows:
            say(f"{row.name:<{width}}  {len(row.cases('refused')):>3}/{row.formed:<3}  {row.note()}".rstrip())
        holes += [f"{row.name}: {hole}" for row in rows if (hole := row.hole())] + left_out(rows)
        with Session(problem, device) as session:
            session.progress = progress
            holes += wrong_files(session, target, say)
            holes += variants(session, target, say)
    if (problem.folder / "task.yml").is_file() and task_yml.is_stale(find(str(problem.folder))):
        holes.append("task.yml is stale: python -m harness.problem.task_yml writes it")
    say("")
    with console.quiet(False):
        questions = [f"QUESTION {row.name}: {question}" for row in rows if (question := row.question())]
        for line in [*(f"HOLE {hole}" for hole in holes), *questions]:
            say(line)
        say(f"{problem.name}: {text.counted(len(holes), 'hole') if holes else 'no hole'} found by the linter")
    return not holes


def small(problem: Problem) -> list[Case]:
    """Return the small tests; all where the problem does not say how large they are."""
    return [case for case in problem.tests if (case.bytes or 0) <= SMALL_BYTES] or list(problem.tests[:FEW_CASES])


# ---------------------------------------------------------------- trivial answers


def survey(
    ask: Callable[[dict], dict], cases: list[Case], progress: Progress = lambda _: None
) -> tuple[list[Row], list[str]]:
    """Put every candidate to the check in every case, by messages to `ask`. Return rows, and faults of cases."""
    rows: dict[str, Row] = {}
    faults: list[str] = []
    for number, case in enumerate(cases):
        progress(Step("trivial answers", number, len(cases), str(case)))
        reply = ask({"op": "lint", "case": case.params, "seed": case.seed})
        faults += [f"{case}: {reply['fault']}"] if reply["fault"] else []
        for trial in (Tried(**fields) for fields in reply["tried"]):
            rows.setdefault(trial.name, Row(trial.name, trial.kind)).tried[f"{case} seed={case.seed}"] = trial
    return list(rows.values()), faults


def left_out(rows: list[Row]) -> list[str]:
    """Return the inputs that the reference reads and no case needs: zero or constant in all, where that was tried."""
    by_name = {row.name: row for row in rows}
    faults = []
    for row in rows:
        stem, change, of = row.name.partition(" zero")
        other = by_name.get(f"{stem} shifted{of}")
        untried = {trial.text for trial in row.tried.values() if trial.status == "absent"} - {trivial.UNCHANGED}
        counts = untried or row.cases("refused") or row.cases("accepted")
        if change and other and other.cases("refused") and not counts:
            faults.append(f"{stem}{of}: the answer depends on it, but not on whether it is left out, in any case")
    return faults


def _few(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{', '.join(names[:3])} and {len(names) - 3} more"


# ---------------------------------------------------------------- through the judge


def wrong_files(session: Session, target: str, say: Say) -> list[str]:
    """Put every file of wrong/ to the judge, small cases first, until one catches it. Return the holes."""
    problem, at = session.problem, session.problem.folder
    files = sorted([*(wrong.write(at) if problem.ours else at.glob("wrong/*.py")), *at.glob("solutions/wrong/*.py")])
    if not files:
        return [f"{problem.name} has no file that must be rejected"] if problem.ours else []
    fit, others = _fit(session, _named(problem, files), target)
    caught = {sub.name: Outcome("PASSED", "in every case") for sub in fit}
    first = small(problem)
    for cases in (first, [case for case in problem.tests if case not in first]):
        todo = [sub for sub in fit if caught[sub.name].status == "PASSED"]
        for name, outcomes in _judged(session, target, todo, cases).items() if cases else ():
            failed = [(case, res) for case, res in zip(cases, outcomes, strict=False) if res.status != "PASSED"]
            for case, outcome in sorted(failed, key=lambda pair: pair[1].status != "INCORRECT")[:1]:
                caught[name] = replace(outcome, reason=f"{case}: {_line(outcome.reason)}")
    say(f"\nwrong/ through the judge: {text.counted(len(files), 'file')}")
    for name, outcome in (caught | others).items():
        say(f"{name:<38} {outcome.status:<15} {outcome.reason}")
    return [
        f"{name}.py: {'passes every case' if res.status == 'PASSED' else f'{res.status} shows nothing of the check'}"
        for name, res in (caught | others).items()
        if res.status != "INCORRECT" and not (res.status == "UNSUPPORTED" and name in others)
    ]


def variants(session: Session, target: str, say: Say) -> list[str]:
    """Put every honest variant that can run here to the judge on all tests. Return the holes."""
    problem, cases = session.problem, list(session.problem.tests)
    submissions = honest(problem)
    fit, others = _fit(session, submissions, target)
    say(f"\nhonest variants through the judge: {len(fit)} of {len(submissions)} can run here")
    later = [Result(sub, sub.targets[0]) for sub in submissions if sub.name in others and target not in sub.targets]
    modes.compile_only(problem, session.device, later, session.progress)
    refused = {name: (why.status, why.reason) for name, why in others.items()}
    refused |= {j.submission.name: (j.status, j.reason) for j in later if j.status}
    bad = {name: why for name, why in refused.items() if why[0] not in ("UNSUPPORTED", "COMPILED")}
    holes = [f"{name}: {status} {_line(reason)}" for name, (status, reason) in bad.items()]
    for name, outcomes in _judged(session, target, fit, cases).items():
        left = [o.reason for o in outcomes if o.status == "UNSUPPORTED"]  # by what a baseline says of itself
        bad = [(case, o) for case, o in zip(cases, outcomes, strict=False) if o.status not in ("PASSED", "UNSUPPORTED")]
        note = f"{bad[0][1].status} on {bad[0][0]}: {_line(bad[0][1].reason)}" if bad else left[0] if left else ""
        say(f"{name:<32} {len(outcomes) - len(bad) - len(left)}/{len(cases)} cases right  {note}".rstrip())
        holes += [f"{name}: {note}"] if bad else []
    for name, (status, reason) in refused.items():
        say(f"{name:<32} {status:<15} {_line(reason)}")
    if not fit:
        holes.append(f"no variant of {problem.name} can run on {target}: nothing shows that the check can be passed")
    return holes


def honest(problem: Problem) -> list[Submission]:
    """Return the folder's variants; of GPU MODE's its correct solutions and the submission that comes with it."""
    if problem.ours and (submissions := problem.submissions()):
        return submissions
    files = [*sorted(problem.folder.glob("solutions/correct/*.py")), problem.folder / "submission.py"]
    return _named(problem, [file for file in files if file.is_file()])


def _named(problem: Problem, files: list[Path]) -> list[Submission]:
    """Return the submissions in `files`, called by their places in the folder: two may have one name."""
    places = [file.relative_to(problem.folder).with_suffix("").as_posix() for file in files]
    return [replace(submission(problem, file), name=place) for file, place in zip(files, places, strict=True)]


def _judged(
    session: Session, target: str, submissions: list[Submission], cases: list[Case]
) -> dict[str, list[Outcome]]:
    """Return the outcomes of each submission by name, in the order of `cases`."""
    results: dict[str, list[Outcome]] = {}
    for start in range(0, len(submissions), AT_ONCE):
        handles = [RunnerHandle(sub.name, sub, target) for sub in submissions[start : start + AT_ONCE]]
        results |= phases_of(session.device).run_tests(session, handles, cases, lambda *_: None)
    return results


def _fit(session: Session, submissions: list[Submission], target: str) -> tuple[list[Submission], dict[str, Outcome]]:
    """Return what can be judged here, and by name why the others cannot."""
    refused = {sub: selection.refusal(sub, session.device, target) for sub in submissions}
    return [sub for sub, why in refused.items() if not why], {sub.name: why for sub, why in refused.items() if why}


def _line(reason: str) -> str:
    return console.gist(reason).removeprefix(MISMATCH)[:REASON]
