"""What a run prints: live progress on a terminal, plain lines elsewhere, and the tables at its end.

Names, cases and reasons come from submissions and from foreign problems. All that is printed passes through
harness/results/text.py here, and rich takes none of it for markup. Every function raises ClosedError
(harness/results/output.py) once the reader of standard output has gone.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.table import Table
from rich.text import Text

from harness.judge.phases import Progress
from harness.judge.session import Outcome
from harness.judge.verdict import CaseTime, Judged
from harness.problem.folders import Case
from harness.results import ranking, stats, text
from harness.results.output import Screen

PLAIN_WIDTH = 160  # columns where the output is no terminal
PLAIN_EVERY_S = 15  # seconds between progress lines there

SAID = 200_000  # characters that are printed at once
REASON = 160  # characters of a reason in a table or summary

console = Screen(width=None if sys.stdout.isatty() else PLAIN_WIDTH, highlight=False, soft_wrap=True)


@contextmanager
def progress() -> Iterator[Progress]:
    """A function that shows what is being done now."""
    if console.is_terminal:
        with console.status("starting") as status:
            yield lambda said: status.update(_cell(said))
        return
    last = time.monotonic()

    def plain(said: str) -> None:
        nonlocal last
        if time.monotonic() - last >= PLAIN_EVERY_S:
            last = time.monotonic()
            say(f"... {text.line(said)}")

    yield plain


def say(said: str = "") -> None:
    """Print it clean, as it is: no markup, no names of emoji."""
    console.print(Text(text.clean(said, SAID)))


def test_line(name: str, case: Case, outcome: Outcome) -> None:
    """One line per case, and the reason in full where it did not pass."""
    error = f"  rel {outcome.error['rel']:.1e}" if outcome.error else ""
    say(f"{name:<20} test   {text.line(case):<28} {outcome.status}{error}")
    if outcome.status != "PASSED":
        say("    " + text.clean(outcome.reason).replace("\n", "\n    "))


def times(judged: list[Judged]) -> None:
    """One line per variant and case: time, interval, rate, share of the roof, error."""
    table = Table(
        title="Times, us (median of the calls, 95 % interval; roof: the best plain read of the same bytes or, where "
        "that takes longer, a matrix product of as many operations)"
    )
    own, shared = ranking.apart([str(t.case) for j in judged for t in j.times])
    table.add_column("variant", no_wrap=True)
    table.add_column("case", overflow="fold")  # gives way: figures are not to be cut
    for column in ("time", "interval", "GB/s", "roof", "of roof", "host", "untimed", "error", "tolerance"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("")
    for j in sorted(judged, key=_order):
        for t in j.times:
            table.add_row(*map(_cell, _time_row(j, t, own[str(t.case)])))
        table.add_section()
    console.print(table)
    if shared:
        say(f"All cases have {shared}.")


def _time_row(j: Judged, t: CaseTime, case: str) -> list[str]:
    if t.failure:
        return [j.entry.name, case, *[""] * 9, f"{t.failure.status}: {text.first_line(t.failure.reason, 80)}"]
    untimed, error = t.timing.flat("untimed_us"), t.timing.worst_error or {}
    host_bound = int(sum(t.timing.flat("host_bound")))
    return [
        j.entry.name, case, f"{t.median:.2f}", f"{t.interval[0]:.2f}..{t.interval[1]:.2f}",
        f"{t.ground.bytes / t.median / 1e3:.0f}", f"{t.ground.roof_us:.2f} {t.ground.roof_kind}",
        f"{t.ground.roof_us / t.median:.0%}",
        f"{stats.median(t.timing.flat('host_us')):.0f}", f"{stats.median(untimed):.0f}" if untimed else "",
        f"{error['rel']:.1e}" if error else "", f"{error['tol']:.1e}" if error else "",
        f"host-bound in {host_bound} calls" if host_bound else "",
    ]  # fmt: skip


def ground(judged: list[Judged]) -> None:
    """What the judge measured beside the variants."""
    times = next((j.times for j in judged if j.times), [])
    for t in times:
        read = f"{t.ground.bytes / t.ground.roof_us / 1e3:.0f} GB/s, " if t.ground.roof_kind == "read" else ""
        say(
            f"{text.line(t.case):<28} roof {t.ground.roof_us:.2f} us ({read}{t.ground.roof_config})   "
            f"empty call {t.ground.empty_us:.2f} us"
        )


def summary(judged: list[Judged], baseline: str | None = None) -> None:
    """The geomean line of each variant, and for what has no time why."""
    base = next((j.figure for j in judged if j.entry.name == baseline and j.figure), None)
    for j in sorted(judged, key=_order):
        limits = f"; {j.entry.limits}" if j.entry.only and not j.reason else ""
        kind = f" (peer, unranked{limits})" if j.entry.peer else ""
        if j.figure:
            value, lo, hi = j.figure
            roof = stats.geomean([t.ground.roof_us / t.median for t in j.times])
            ratio = f"   {base[0] / value:.1f}x {baseline}" if base and j.entry.name != baseline else ""
            name, tried = ranking.name(j.ranking_by), f"   attempt {j.attempt}" if j.attempt else ""
            said = f"{name} {value:.2f} us ({lo:.2f}..{hi:.2f}) over {len(j.times)} cases   {roof:.0%} of roof{ratio}"
            say(f"{j.entry.name:<20} {j.verdict:<14} {said}{tried}{kind}")
            for earlier in j.before:
                said = f"{earlier.figure[0]:.2f} us" if earlier.figure else earlier.verdict
                say(f"{'':<20} measured again to confirm a first place; superseded: {said}")
        elif j.verdict == "PASSED":
            right, timed = sum(o.status == "PASSED" for _, o in j.tests), sum(not t.failure for t in j.times)
            said = [f"{right} test cases right"] if j.tests else []
            said.append(f"timed on {timed} of {len(j.times)} cases" if j.times else "not timed in this mode")
            say(f"{j.entry.name:<20} PASSED         {'; '.join(said)}{kind}")
        else:
            say(f"{j.entry.name:<20} {j.verdict:<14} not timed: {_why(j)}{kind}")


def against(j: Judged) -> None:
    """The paired comparison: ratio of times by case, and their geomean."""
    for t, pair in zip(j.times, j.against, strict=True):
        say(f"{text.line(t.case):<28} {_ratio(j, pair) if pair else 'one of the two does not serve it'}")
    count = sum(pair is not None for pair in j.against)
    what = "geomean" if count == len(j.against) else f"geomean of {count} of {len(j.against)}"
    say(f"{what:<28} {_ratio(j, j.against_all)}")


def _ratio(j: Judged, pair: dict) -> str:
    lo, hi = pair["ci95"]
    return f"{j.entry.name} / {pair['variant']} = {pair['ratio']:.4f} ({lo:.4f}..{hi:.4f})   {pair['word']}"


def _why(j: Judged) -> str:
    if j.reason:
        return text.first_line(j.reason)
    bad = [(c, o) for c, o in j.tests if o.status != "PASSED"] + [(t.case, t.failure) for t in j.times if t.failure]
    bad = [(c, o) for c, o in bad if o.status != "UNSUPPORTED"] or bad
    if not bad:
        return "no reason given"
    case, outcome = bad[0]
    lines = text.clean(outcome.reason).strip().split("\n")
    # A traceback says what happened in its last line, every other report in its first.
    said = text.line(lines[-1] if lines[0].startswith("Traceback") else lines[0], REASON)
    many = f"{len(bad)} of {len(j.tests) + len(j.times)} cases failed"
    return f"{many}, first {text.line(case)}: {outcome.status}: {said}"


def _cell(said: str) -> Text:
    """For rich, which reads markup in a plain string of a table or a status line."""
    return Text(text.line(said))


def _order(j: Judged) -> tuple:
    return (j.figure is None, j.entry.peer, j.figure[0] if j.figure else 0.0, j.entry.name)
