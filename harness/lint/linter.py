"""The linter of problems: what a problem's check lets through that it should not. `harness/run.py PROBLEM --lint`.

It has three parts. Trivial answers (harness/lint/trivial.py) are put to the problem's own check, in every test case and
one benchmark case. Every file of wrong/ and every honest variant are put to the whole judge. The problem passes if each
trivial answer is refused, each wrong file gets a failing verdict in some case, and each variant passes all cases (a
baseline those that its ONLY names). Where a trivial answer is right (the mean of a single element), or passes by the
luck of a seed (one element that happens to need no more bits), the linter names the case. Where it cannot know whether
an answer is right (the order of a set, the sign of an eigenvector), it asks: a QUESTION is no hole.

docs/adding_a_kernel.md has the literals of task.py that the linter reads: PRECISION, INOUT and OPAQUE. Integers and
packed values are never scaled or rounded. Where floating-point values are shifted they move on by one element, so token
ids stay token ids. An answer that cannot be made for a case is not applicable, and the reason is shown.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness.judge import console, phases, selection
from harness.judge.events import Progress, Step
from harness.judge.handle import CheckerHandle, CheckerLost, RunnerHandle
from harness.judge.outcome import Outcome
from harness.judge.session import Session
from harness.lint import trivial
from harness.problem import folders
from harness.problem.folders import Case, Problem, Submission, submission
from harness.results import text

AT_ONCE = 4  # submissions judged side by side, each a process with torch in it
SMALL_BYTES = 2**20  # of a case: wrong files are judged on these first
FEW_CASES = 2  # that come first where all are large, or the problem does not say how large they are
LUCK_SEEDS = 8  # further seeds of a case in which an answer got through; if it does in half of them, it is a hole
NEARLY_ALL = 7  # of LUCK_SEEDS: a blind answer that is right with so many is no chance, even of a truth value
# Verdicts on what a wrong file did. COMPILE_ERROR and UNSUPPORTED mean that it was not judged.
CAUGHT = {"INCORRECT", "RULE_BROKEN", "CHEAT_SUSPECTED", "RUNTIME_ERROR", "TIMEOUT", "INVALID_MEASUREMENT"}
MISMATCH = "mismatch found! custom implementation doesn't match reference: "  # how most reports of a check begin
KEEPS = (trivial.DERIVED, trivial.ALONE, trivial.PART)  # kinds that may leave the answer as it is
REASON = 110  # characters of a reason

Say = Callable[[str], None]
Ask = Callable[[dict], dict]  # a message to harness/lint/trivial.py and its reply; CheckerLost if the process is lost


@dataclass
class Row:
    """What became of one candidate. Lists hold the names of cases."""

    name: str
    kind: str
    formed: int = 0
    refused: int = 0
    right: list[str] = field(default_factory=list)  # accepted, since it is the answer or its neighbour
    same: int = 0  # of these, in how many an input is the answer bit for bit
    others: bool = False  # of a copy of an input: the answer depends on another input too
    luck: list[str] = field(default_factory=list)  # accepted with the case's seed, refused with most others
    chance: list[str] = field(default_factory=list)  # right with the case's seed, and not with nearly all others
    missed: list[str] = field(default_factory=list)  # holes
    absent: dict[str, list[str]] = field(default_factory=dict)  # by reason
    about: str = ""  # what to know of it, of the first case in which it got through

    def hole(self) -> str:
        """Return what is wrong, or ""."""
        if self.kind == trivial.EXACT:
            return f"refused: {self.missed[0]}" if self.missed else ""
        if self.kind == trivial.QUESTION or self._is_the_answer():
            return ""
        if self.missed:
            return self._accepted()
        # A blind answer that is right in most cases shows that the cases say little, whatever the tolerance.
        fits = len({*self.right, *self.luck})
        if self.kind in (trivial.BLIND, trivial.COPY, trivial.NEAR) and 2 * fits > max(self.formed, 1):
            return f"the right answer in {fits} of {text.counted(self.formed, 'case')}"
        return ""

    def question(self) -> str:
        """Return what the author must say, since the linter cannot know whether it is right, or ""."""
        if self._is_the_answer():
            return "is the answer, bit for bit, in every case: need a submission do no more? If it must, add cases"
        return self._accepted() if self.kind == trivial.QUESTION and self.missed else ""

    def _is_the_answer(self) -> bool:
        """Return whether the answer is an input in all cases, and no other input counts. If one does, it is a weakness
        of the cases.
        """
        return self.kind == trivial.COPY and 0 < self.formed == self.same and not self.others

    def _accepted(self) -> str:
        many = f"accepted in {text.counted(len(self.missed), 'case')}, first {self.missed[0]}"
        return f"{many}: {self.about}" if self.about else many

    def note(self) -> str:
        """Return what to know of it, for the table."""
        notes = [f"HOLE: {self.hole()}"] if self.hole() else []
        notes += [f"QUESTION: {self.question()}"] if self.question() else []
        if self.kind == trivial.EXACT and not self.missed:
            notes.append("accepted, as it must be")
        if self.right and not self._is_the_answer():
            what = "leaves the answer as it is" if self.kind in KEEPS else "is the answer"
            notes.append(f"{what} in {'every case' if len(self.right) == self.formed else _cases(self.right)}")
        if self.luck:
            notes.append(f"fits by luck in {_cases(self.luck)}")
        if self.chance:
            notes.append(f"is the answer by chance in {_cases(self.chance)}")
        for reason, names in self.absent.items():
            # A candidate that the folder's outputs cannot have at all is said once, without its cases.
            notes.append(f"not applicable{f' in {_cases(names)}' if self.formed else ''}: {reason}")
        return "; ".join(notes)


class Helper:
    """`ask` of a process of harness/lint/trivial.py, which is started when needed: also after it was lost."""

    def __init__(self, problem: Problem, device: str) -> None:
        self.problem, self.device = problem, device
        self.handle: CheckerHandle | None = None

    def __call__(self, message: dict) -> dict:
        if self.handle is None:
            self.handle = CheckerHandle(self.problem, self.device, "harness.lint.trivial")
        try:
            return self.handle.ask(message)
        except CheckerLost:
            self.handle = None
            raise

    def close(self) -> None:
        if self.handle:
            self.handle.close()


def run(problem: Problem, device: str, target: str, say: Say) -> bool:
    """Lint `problem` on `device`, a GPU of architecture `target` or "cpu", and print tables through `say`. Return
    whether it passes. ProblemError: the problem's own code raises.
    """
    cases = chosen(problem, device)
    baselines = problem.own and any((problem.folder / "variants").glob("peer_*.py"))
    ask = Helper(problem, device)
    with console.progress() as progress:
        try:
            rows, holes = survey(ask, cases, baselines, progress)
        finally:
            ask.close()
        size = f"one input at a time only where data has up to {trivial.SMALL_BYTES // 2**20} MiB"
        say(f"{problem.name} on {device}: {len(rows)} trivial answers, {text.counted(len(cases), 'case')} ({size})")
        if problem.own and (opaque := folders.names(problem.folder / "task.py", "OPAQUE")):
            say(f"left as they are, since task.py calls them OPAQUE: {', '.join(opaque)}")
        width = max(len(row.name) for row in rows)
        say(f"{'answer':<{width}}  refused  note")
        for row in rows:
            say(f"{row.name:<{width}}  {f'{row.refused}/{row.formed}':>7}  {row.note()}".rstrip())
        holes += [f"{row.name}: {hole}" for row in rows if (hole := row.hole())] + left_out(rows)
        with Session(problem, device) as session:
            holes += wrong_files(session, target, say, progress)
            holes += variants(session, target, say, progress)
    say("")
    with console.quiet(False):
        for hole in holes:
            say(f"HOLE {hole}")
        for row in rows:
            if question := row.question():
                say(f"QUESTION {row.name}: {question}")
        many = text.counted(len(holes), "hole") if holes else "no hole"
        say(f"{problem.name}: {many} found by the linter")
    return not holes


def chosen(problem: Problem, device: str) -> list[tuple[str, Case]]:
    """Return (name, case) of every test and of the smallest benchmark."""
    twice = [str(case) for case in problem.tests]
    cases = [(f"{case} seed={case.seed}" if twice.count(str(case)) > 1 else str(case), case) for case in problem.tests]
    if problem.benchmarks[device]:
        benchmark = min(problem.benchmarks[device], key=lambda case: case.bytes or 0)
        cases.append((f"benchmark {benchmark}", benchmark))
    return cases


def small(problem: Problem) -> list[Case]:
    sized = [case for case in problem.tests if case.bytes is not None and case.bytes <= SMALL_BYTES]
    return sized or list(problem.tests[:FEW_CASES])


# ---------------------------------------------------------------- trivial answers


def survey(
    ask: Ask, cases: list[tuple[str, Case]], baselines: bool, progress: Progress = lambda _: None
) -> tuple[list[Row], list[str]]:
    """Put every candidate to the check in every case, with a baseline's tolerance too if there are `baselines`. Return
    the rows, and what else is wrong.
    """
    rows: dict[str, Row] = {}
    faults: list[str] = []
    for number, (name, case) in enumerate(cases):
        progress(Step("trivial answers", number, len(cases), name))
        reply = ask(_made(case, case.seed, baselines))
        if reply["fault"]:
            faults.append(f"{name}: {reply['fault']}")
        accepted: list[Row] = []
        for candidate, kind in reply["candidates"].items():
            row = rows.setdefault(candidate, Row(candidate, kind))
            try:
                said = ask({"op": "attempt", "candidate": candidate})
            except CheckerLost as lost:
                ask(_made(case, case.seed, baselines))
                said = {"status": "absent", "text": f"the reference's process was lost: {lost}"}
            if _enter(row, name, said["status"], said["text"], said.get("same") is True):
                accepted.append(row)
        if accepted:
            _try_luck(ask, name, case, accepted, baselines)
    for row in rows.values():
        row.others = row.kind == trivial.COPY and _needs_others(row, list(rows.values()))
    if suspects := [row for row in rows.values() if not row.missed and row.hole()]:
        _try_chance(ask, cases, suspects, baselines)
    return list(rows.values()), faults


def _enter(row: Row, name: str, status: str, text: str, same: bool = False) -> bool:
    """Note what became of a candidate in one case. Return whether the check took it for the answer, which it is not."""
    if status == "absent":
        row.absent.setdefault(text.partition("\n")[0], []).append(name)
        return False
    row.formed += 1
    row.refused += status == "refused"
    if row.kind == trivial.EXACT:
        row.missed += [f"{name}: {text}"] if status == "refused" else []
        return False
    row.right += [name] if status == "right" else []
    row.same += same
    row.about = row.about or (text if status == "accepted" else "")
    return status == "accepted"


def _try_luck(ask: Ask, name: str, case: Case, accepted: list[Row], baselines: bool) -> None:
    """Put what got through to the same case with other seeds, to tell a lax check from an element that fits."""
    through = _through(ask, case, accepted, baselines)
    for row in accepted:
        lucky = row.kind != trivial.FORM and 2 * through[row.name] < LUCK_SEEDS
        (row.luck if lucky else row.missed).append(f"{name} ({through[row.name]} of {LUCK_SEEDS} other seeds)")


def _try_chance(ask: Ask, cases: list[tuple[str, Case]], suspects: list[Row], baselines: bool) -> None:
    """Put what is the answer in most cases to these with other seeds, to tell cases that say little from an answer of
    few values, such as a truth value, which a blind one meets by chance.
    """
    for name, case in cases:
        if met := [row for row in suspects if name in row.right]:
            through = _through(ask, case, met, baselines)
            for row in met:
                if through[row.name] < NEARLY_ALL:
                    row.right.remove(name)
                    row.chance.append(f"{name} ({through[row.name]} of {LUCK_SEEDS} other seeds)")


def _needs_others(copy: Row, rows: list[Row]) -> bool:
    """Return whether a change of another input than the copied one changes the same output."""
    name = copy.name.removeprefix(trivial.COPY_OF).removesuffix(trivial.AS_BASELINE)
    copied, bracket, of = name.partition(" [")
    for row in (row for row in rows if row.kind == trivial.ALONE and row.refused):
        other, _, change = row.name.removesuffix(f"{bracket}{of}").rpartition(" ")
        if row.name.endswith(f"{bracket}{of}") and change in trivial.CHANGES and other != copied:
            return True
    return False


def _through(ask: Ask, case: Case, rows: list[Row], baselines: bool) -> dict[str, int]:
    """Return with how many of LUCK_SEEDS other seeds of a case the check accepts each candidate, by name."""
    through = dict.fromkeys((row.name for row in rows), 0)
    for turn in range(1, LUCK_SEEDS + 1):
        made = ask(_made(case, case.seed + turn, baselines))
        for candidate in through.keys() & made["candidates"].keys():
            through[candidate] += ask({"op": "attempt", "candidate": candidate})["status"] in ("accepted", "right")
    return through


def _made(case: Case, seed: int, baselines: bool) -> dict:
    return {"op": "case", "case": case.params, "seed": seed, "baselines": baselines}


def left_out(rows: list[Row]) -> list[str]:
    """Return the inputs that the reference reads and that no case needs: zero or constant wherever it looks. If zeros
    could not be tried in a case, nothing is shown.
    """
    by_name = {row.name: row for row in rows}
    found = []
    for row in rows:
        stem, change, of = row.name.partition(" zero")
        if row.kind != trivial.ALONE or not change or row.absent.keys() - {trivial.UNCHANGED}:
            continue
        if not row.refused and not row.missed and by_name[f"{stem} shifted{of}"].refused:
            found.append(f"{stem}{of}: the answer depends on it, but not on whether it is left out, in any case")
    return found


def _cases(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{', '.join(names[:3])} and {len(names) - 3} more"


# ---------------------------------------------------------------- through the judge


def wrong_files(session: Session, target: str, say: Say, progress: Progress) -> list[str]:
    """Put every file of wrong/ to the judge, small cases first, until one catches it. Return the holes."""
    problem = session.problem
    files = wrong(problem)
    if not files:
        say("\nno wrong/ folder")
        return [f"{problem.name} has no file that must be rejected"] if problem.own else []
    holes: list[str] = []
    submissions, others = _fit(session, _named(problem, files), target)
    places = {e.name: _place(problem, e) for e in submissions}
    first = small(problem)
    rest = [case for case in problem.tests if case not in first]
    caught: dict[str, str] = {}
    passed = {e.name: 0 for e in submissions}
    for cases in filter(None, (first, rest)):
        todo = [e for e in submissions if e.name not in caught]
        for name, outcomes in _judged(session, target, todo, cases, progress).items():
            for case, outcome in zip(cases, outcomes, strict=True):
                if outcome.status != "PASSED" and name not in caught:
                    caught[name] = f"{outcome.status:<15} {case}: {_line(outcome.reason)}"
                    if outcome.status not in CAUGHT:
                        holes.append(f"{places[name]}: was not judged: {outcome.status}")
                passed[name] += name not in caught
    say(f"\nwrong/ through the judge: {text.counted(len(files), 'file')}")
    for e in submissions:
        many = text.counted(passed[e.name], "case")
        say(f"{e.name:<32} {caught.get(e.name, f'PASSED {many}')}")
        if e.name not in caught:
            holes.append(f"{places[e.name]}: passes all {many}")
    for name, refused in others.items():
        say(f"{name:<32} {refused.status:<15} {_line(refused.reason)}")
    return holes


def variants(session: Session, target: str, say: Say, progress: Progress) -> list[str]:
    """Put every honest variant that can run here to the judge on all tests. Return the holes."""
    problem, cases = session.problem, list(session.problem.tests)
    submissions = honest(problem)
    fit, others = _fit(session, submissions, target)
    say(f"\nhonest variants through the judge: {len(fit)} of {len(submissions)} can run here")
    holes = []
    for name, outcomes in _judged(session, target, fit, cases, progress).items():
        left = [o.reason for o in outcomes if o.status == "UNSUPPORTED"]  # by what a baseline says of itself
        bad = [(case, o) for case, o in zip(cases, outcomes, strict=True) if o.status not in ("PASSED", "UNSUPPORTED")]
        said = f"{bad[0][1].status} on {bad[0][0]}: {_line(bad[0][1].reason)}" if bad else left[0] if left else ""
        say(f"{name:<32} {len(cases) - len(bad) - len(left)}/{len(cases)} cases right  {said}".rstrip())
        if bad:
            holes.append(f"{name}: {said}")
    for name, refused in others.items():
        if refused.status == "RULE_BROKEN":
            holes.append(f"{name}: RULE_BROKEN {_line(refused.reason)}")
        say(f"{name:<32} {refused.status:<15} {_line(refused.reason)}")
    if not fit:
        holes.append(f"no variant of {problem.name} can run on {target}: nothing shows that the check can be passed")
    return holes


def wrong(problem: Problem) -> list[Path]:
    """Return the files that the judge must reject."""
    return sorted([*problem.folder.glob("wrong/*.py"), *problem.folder.glob("solutions/wrong/*.py")])


def honest(problem: Problem) -> list[Submission]:
    """Return the folder's variants; of GPU MODE's its correct solutions and the submission that comes with it."""
    if problem.own and (submissions := problem.submissions()):
        return submissions
    files = [*sorted(problem.folder.glob("solutions/correct/*.py")), problem.folder / "submission.py"]
    return _named(problem, [file for file in files if file.is_file()])


def _named(problem: Problem, files: list[Path]) -> list[Submission]:
    """Return the submissions in `files`. Of several files of one name each is called by its place in the folder."""
    found = [submission(problem, file) for file in files]
    stems = [one.name for one in found]
    return [
        replace(one, name=file.relative_to(problem.folder).with_suffix("").as_posix())
        if stems.count(one.name) > 1
        else one
        for one, file in zip(found, files, strict=True)
    ]


def _place(problem: Problem, one: Submission) -> str:
    """Return the place of a file in the folder of its problem, for messages."""
    return one.file.relative_to(problem.folder).as_posix() if one.file.is_relative_to(problem.folder) else one.file.name


def _judged(
    session: Session, target: str, submissions: list[Submission], cases: list[Case], progress: Progress
) -> dict[str, list[Outcome]]:
    """Return the outcomes of each submission by name, in the order of `cases`."""
    results: dict[str, list[Outcome]] = {}
    for start in range(0, len(submissions), AT_ONCE):
        handles = [RunnerHandle(e.name, e, target) for e in submissions[start : start + AT_ONCE]]
        results |= phases.run_tests(session, handles, cases, lambda *_: None, progress)
    return results


def _fit(
    session: Session, submissions: Iterable[Submission], target: str
) -> tuple[list[Submission], dict[str, Outcome]]:
    """Return what can be judged here, and by name why the others cannot."""
    refused = {e: selection.refusal(e, session.device, target) for e in submissions}
    return [e for e, why in refused.items() if not why], {e.name: why for e, why in refused.items() if why}


def _line(reason: str) -> str:
    return console.gist(reason).removeprefix(MISMATCH)[:REASON]
