"""The output of a run: a bar on a terminal, a line for each test case, and the tables at the end.

Names, cases and reasons come from submissions and foreign problems: harness/results/text.py cleans them, and rich does
not read them as markup. Every function raises ClosedError (harness/results/output.py) once the reader is gone.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

from harness.judge import limits
from harness.judge.events import Progress, Step
from harness.judge.outcome import Outcome
from harness.judge.verdict import CaseTime, Result
from harness.problem.folders import Case
from harness.results import output, ranking, stats, text
from harness.results.screen import Screen

BAR, BAR_LINE = 12, 55  # columns of a progress bar, and of its line without the words at the end
PLAIN_WIDTH = 160  # columns where the output is no terminal
SAID = 200_000  # characters that are printed at once
REASON = 160  # characters of a reason in a table or summary

console = Screen(width=None if sys.stdout.isatty() else PLAIN_WIDTH, highlight=False, soft_wrap=True)


@contextmanager
def quiet(wanted: bool) -> Iterator[None]:
    """Within, nothing is printed if that is `wanted`, and everything if it is not."""
    before, console.quiet = console.quiet, wanted
    try:
        yield
    finally:
        console.quiet = before


@contextmanager
def progress(also: Progress = lambda _: None) -> Iterator[Progress]:
    """Yield a function that shows the present step, as a bar on a terminal, and passes it to `also`."""
    if not console.is_terminal or console.quiet:
        yield also
        return
    columns = (
        TextColumn("{task.fields[phase]}"),
        BarColumn(BAR),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
    )
    # What goes to standard error elsewhere stays there.
    with Bars(*columns, console=console, transient=True, redirect_stderr=sys.stderr.isatty()) as bars:
        task = bars.add_task("", total=None, phase="starting")

        def show(step: Step) -> None:
            also(step)
            if step.phase != bars.tasks[0].fields["phase"]:
                bars.reset(task, phase=step.phase)
            said = text.line(step.said)[: max(0, console.width - BAR_LINE)]
            bars.update(task, completed=step.n, total=step.total, description=said)

        yield show


def say(said: str = "") -> None:
    """Print clean text without markup and names of emoji."""
    console.print(Text(text.clean(said, SAID)))


def note(said: str) -> None:
    """Print a line that a quiet run shows too, on standard error: what it waits for, or what a verdict is not about."""
    if console.quiet:
        output.complain(text.clean(said, SAID))
    else:
        say(said)


def test_line(name: str, case: Case, outcome: Outcome) -> None:
    """Print one line per case, and the whole reason if it did not pass."""
    error = f"  rel {outcome.error['rel']:.1e}" if outcome.error else ""
    say(f"{name:<20} test   {text.line(case):<28} {outcome.status}{error}")
    if outcome.status != "PASSED":
        say("    " + text.clean(outcome.reason).replace("\n", "\n    "))


def times(judged: list[Result]) -> None:
    """Print one line per variant and case: time, interval, rate, share of the measured roofline, error."""
    rate = "the best plain read of the same bytes or, where that takes longer, a matrix product of as many operations"
    table = Table(title=f"Times, us (median, 95 % interval; roofline: {rate})")
    distinct, shared = ranking.apart([str(t.case) for j in judged for t in j.times])
    table.add_column("variant", no_wrap=True)
    table.add_column("case", overflow="fold")  # gives way: figures are not to be cut
    for column in ("time", "interval", "GB/s", "roofline", "% of\nroofline", "error", "tolerance"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("")
    for j in sorted(judged, key=_order):
        for t in j.times:
            cells = _time_row(j, t, distinct[str(t.case)])
            table.add_row(*(Text(text.line(cell)) for cell in cells))  # rich reads markup in a plain string
        table.add_section()
    console.print(table)
    if shared:
        say(f"All cases have {shared}.")


def _time_row(j: Result, t: CaseTime, case: str) -> list[str]:
    if t.failure:
        return [j.submission.name, case, *[""] * 7, f"{t.failure.status}: {text.first_line(t.failure.reason, 80)}"]
    error = t.timing.worst_error or {}
    return [
        j.submission.name,
        case,
        f"{t.median:.2f}",
        f"{t.interval[0]:.2f}..{t.interval[1]:.2f}",
        f"{t.readings.bytes / t.median / 1e3:.0f}",
        f"{t.readings.roofline_us:.2f} {t.readings.roofline_kind}",
        f"{t.readings.roofline_us / t.median:.0%}",
        f"{error['rel']:.1e}" if error else "",
        f"{error['tol']:.1e}" if error else "",
        "self-timed: not protected against forging" if t.timing.self_timed else "",
    ]


def readings(judged: list[Result]) -> None:
    """Print the reference readings of each case."""
    times = next((j.times for j in judged if j.times), [])
    for t in times:
        of = t.readings
        read = f"{of.bytes / of.roofline_us / 1e3:.0f} GB/s, " if of.roofline_kind == "read" else ""
        roofline = f"roofline {of.roofline_us:.2f} us ({read}{of.roofline_config})"
        say(f"{text.line(t.case):<28} {roofline}   empty call {of.empty_us:.2f} us")


def summary(judged: list[Result], baseline: str | None = None) -> None:
    """Print the geomean of each variant, or why it has no time."""
    base = next((j.metric for j in judged if j.submission.name == baseline and j.metric), None)
    for j in sorted(judged, key=_order):
        limits = f"; {j.submission.limits}" if j.submission.only and not j.reason else ""
        kind = f" (baseline, unranked{limits})" if j.submission.baseline else ""
        kind += f"; {j.remark}" if j.remark and j.verdict == "PASSED" else ""
        if j.metric:
            value, lo, hi = j.metric
            roofline = stats.geomean([t.readings.roofline_us / t.median for t in j.times])
            ratio = f"   {base[0] / value:.1f}x {baseline}" if base and j.submission.name != baseline else ""
            name, tried = ranking.name(j.ranking_by), f"   attempt {j.attempt}" if j.attempt else ""
            many = text.counted(len(j.times), "case")
            said = f"{name} {value:.2f} us ({lo:.2f}..{hi:.2f}) over {many}   {roofline:.0%} of roofline"
            say(f"{j.submission.name:<20} {j.verdict:<14} {said}{ratio}{tried}{kind}")
        elif j.verdict == "PASSED":
            right, timed = sum(o.status == "PASSED" for _, o in j.tests), sum(not t.failure for t in j.times)
            said = [f"{text.counted(right, 'test case')} right"] if j.tests else []
            many = text.counted(len(j.times), "case")
            said.append(f"timed on {timed} of {many}" if j.times else "not timed in this mode")
            say(f"{j.submission.name:<20} PASSED         {'; '.join(said)}{kind}")
        else:
            say(f"{j.submission.name:<20} {j.verdict:<14} not timed: {why(j)}{kind}")


def against(j: Result) -> None:
    """Print the paired comparison: the ratio of times by case, and their geomean."""
    for t, pair in zip(j.times, j.against, strict=True):
        say(f"{text.line(t.case):<28} {_ratio(j, pair) if pair else 'one of the two does not serve it'}")
    count = sum(pair is not None for pair in j.against)
    what = "geomean" if count == len(j.against) else f"geomean of {count} of {len(j.against)}"
    if j.against_all:
        say(f"{what:<28} {_ratio(j, j.against_all)}")


def _ratio(j: Result, pair: dict) -> str:
    lo, hi = pair["ci95"]
    said = f"{j.submission.name} / {pair['variant']} = {pair['ratio']:.4f} ({lo:.4f}..{hi:.4f})   {pair['word']}"
    return f"{said}: {undecided(pair)}" if "needed" in pair else said


def undecided(pair: dict) -> str:
    """Return how many processes would decide, in words."""
    needed, limit = pair["needed"], limits.MOST_PROCESSES
    if needed > limit:
        return f"more than --processes {limit} would decide: try when the machine is idle"
    return f"about --processes {needed} would decide, {needed / pair['processes']:.1f} times as long"


def why(j: Result) -> str:
    """Return the reason of a verdict that is not PASSED, on one line; of cases, that of the first with this verdict."""
    if j.reason:
        return text.first_line(j.reason)
    bad = [(c, o) for c, o in j.tests if o.status not in ("PASSED", "MODEL_CHECKED")]
    bad += [(t.case, t.failure) for t in j.times if t.failure]
    bad = [(c, o) for c, o in bad if o.status != "UNSUPPORTED"] or bad
    if not bad:
        return "no reason given"
    case, outcome = next(((c, o) for c, o in bad if o.status == j.verdict), bad[0])
    many = f"{len(bad)} of {text.counted(len(j.tests) + len(j.times), 'case')} failed"
    return f"{many}, first {text.line(case)}: {outcome.status}: {gist(outcome.reason)}"


def gist(reason: str) -> str:
    """Return the line of a report that says what happened: the last one of a traceback, the first of any other."""
    lines = text.clean(reason).strip().split("\n")
    return text.line(lines[-1] if lines[0].startswith("Traceback") else lines[0], REASON)


def _order(j: Result) -> tuple:
    return (j.metric is None, j.submission.baseline, j.metric[0] if j.metric else 0.0, j.submission.name)
