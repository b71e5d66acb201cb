"""What a run prints: its progress, each distinct failure once, a table of times, the verdicts, what to do next.

Names, cases and reasons come from submissions and foreign problems: harness/results/text.py cleans them. Every function
raises ClosedError (harness/results/output.py) once the reader is gone.
"""

import contextlib
import os
import re
import shlex
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from harness.judge.events import MISMATCH
from harness.judge.options import MOST_PROCESSES, Options
from harness.judge.outcome import Outcome
from harness.judge.session import Progress, Step
from harness.judge.verdict import CaseTime, Result, roofline_share
from harness.problem.folders import Case, Problem, Submission
from harness.results import output, ranking, text
from harness.results.ranking import Leader
from harness.sandbox.process import PRINTED, ROOT

EVERY_S, BAR_S = 10.0, 0.5  # between two lines of progress, and on a terminal between two changes of the bar
BAR = 12  # columns
PLAIN_WIDTH = 160  # columns where the output is no terminal
WIDE = 100  # columns from which a table of times has all it can have
SAID = 200_000  # characters that are printed at once
REASON = 160  # characters of a reason in a summary
MODEL = "--device model --mode test"
NEAR = 1.1  # times the leader's time: what only pairs can tell apart

# What GPU MODE's checkers, and ours, say ahead of the elements.
_COUNT = re.compile(
    r"(?:mismatch found! custom implementation doesn't match reference: )?Number of mismatched elements: "
)
_FIGURES = re.compile(r"0x[0-9a-f]+|(?<![\w.:])\d[\d.e+-]*")  # in which equal failures differ; not "my.py:12"
_TIMES = "Times in us: median and 95 % interval. Roofline: the time of reading the same bytes"
_TIMES += " (or of the same arithmetic) on this machine."
OVER = "over 100 %: the roofline is a plain read of {}, as measured in this run, which {} can beat"
_COLUMNS = ("", "time", "95 % interval", "GB/s", "roofline", "% of roofline", "rank", "error / allowed", " ")
_ONLY_WIDE = ("error / allowed", "GB/s", "roofline")  # the first is the first to go


_quiet = False
_bar = threading.Lock()  # held while something is written to a terminal that has a bar


@contextlib.contextmanager
def quiet(wanted: bool) -> Iterator[None]:
    """Within, nothing is printed if that is `wanted`, and everything if it is not."""
    global _quiet
    before, _quiet = _quiet, wanted
    try:
        yield
    finally:
        _quiet = before


def is_terminal() -> bool:
    """Whether standard output is a terminal that may have escapes."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def width() -> int:
    """The columns of standard output."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else PLAIN_WIDTH


@contextlib.contextmanager
def progress(also: Progress = lambda _: None) -> Iterator[Progress]:
    """Yield what passes a step on to `also` and shows it: a bar on a terminal, else a line every ten seconds."""
    present, over, began_s, bar = Step("starting", 0, 1, ""), threading.Event(), time.monotonic(), is_terminal()

    def show(step: Step) -> None:
        nonlocal present
        present = step
        also(step)

    def write() -> None:
        with contextlib.suppress(output.ClosedError):  # whoever prints next finds out too
            while not over.wait(BAR_S if bar else EVERY_S):
                step, passed_s = present, time.monotonic() - began_s
                line = f"{step.phase} {step.n}/{step.total}  {passed_s:.0f} s  {text.line(step.said)}"
                if not bar:
                    say(line)
                elif not _quiet:
                    drawn = "\u2501" * (BAR * step.n // max(1, step.total))
                    _write(f"{drawn:\u00b7<{BAR}} {line}"[: width() - 1], "")

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    try:
        yield show
    finally:
        over.set()
        writer.join()
        if bar and not _quiet:
            _write("", "")


def say(message: str = "") -> None:
    """Print clean text."""
    if not _quiet:
        _write(text.clean(message, SAID), "\n")


def _write(message: str, end: str) -> None:
    """Print in place of the bar that a terminal may show."""
    with _bar:
        output.say((f"\r\x1b[2K{message}" if is_terminal() else message) + "\n", end=end)  # of which one is taken off


def note(message: str) -> None:
    """Print a line that a quiet run shows too, on standard error: what it waits for, or what a verdict is not about."""
    if _quiet:
        output.complain(text.clean(message, SAID))
    else:
        say(message)


class Failures:
    """Prints each distinct failure once, and counts the others; of a wrong answer a line for each case."""

    def __init__(self) -> None:
        self._more: dict[tuple[str, str, str], int] = {}

    def add(self, name: str, case: Case, outcome: Outcome) -> None:
        """Print the failure of a submission on a case unless it was printed."""
        first, *rest = readable(outcome.reason.partition(PRINTED)[0])
        key = name, outcome.status, _FIGURES.sub("N", first)
        known, counts = key in self._more, first.endswith("elements differ")
        self._more[key] = self._more.get(key, -1) + (not known or not counts)
        if not known or counts:
            # A compiler's report, which says all, is of no case.
            report = outcome.status == "COMPILE_ERROR" and rest
            say(f"{name}  {outcome.status}:" if report else f"{name}  {text.line(case)}  {outcome.status}: {first}")
        if not known and rest:
            say(textwrap.indent("\n".join(rest), "    "))

    def close(self) -> None:
        """Print how often each failure came again."""
        for (name, status, reason), more in self._more.items():
            if more:
                again = "" if status == "COMPILE_ERROR" else f": {text.line(reason, REASON)}"
                say(f"{name}  and {text.counted(more, 'more case')}: {status}{again}")
        self._more.clear()


def readable(reason: str) -> list[str]:
    """Return the lines of a reason, the elements of a wrong answer as a small table: element, got, wanted."""
    lines = text.clean(reason).strip().split("\n")
    elements = [match for line in lines if (match := MISMATCH.fullmatch(line.strip()))]
    first, *rest = [line for line in lines if not MISMATCH.fullmatch(line.strip())] or [""]
    first, counted = _COUNT.subn("", first)
    unwritten = any(line.startswith("never written") for line in rest)
    rows = [
        (f"({at})", "never written" if unwritten and got == "nan" else got, want)
        for at, got, want in (e.groups() for e in elements)
    ]
    shown = _aligned([("element", "got", "wanted"), *rows]) if rows else []
    return [f"{first} elements differ" if counted else first, *shown, *rest]


def gist(reason: str) -> str:
    """Return the line of a report that says what happened, and of a wrong answer its first element."""
    first, *rest = readable(reason)
    if rest and first.startswith("Traceback"):
        first = rest[-1]
    elif match := MISMATCH.search(text.clean(reason)):
        got = "never written" if "never written" in reason and match[2] == "nan" else f"got {match[2]}"
        first += f", at ({match[1]}) {got}, wanted {match[3]}"
    return text.line(first, REASON)


def printed(name: str, lines: list[str], count: int) -> None:
    """Print the first ones of the `count` lines that a submission printed."""
    if lines:
        say(f"{name} printed:")
        say(textwrap.indent("\n".join(map(text.line, lines)), "    "))
    if count > len(lines):
        say(f"    ... {text.counted(count - len(lines), 'more line')}")


def times(judged: list[Result], places: dict[str, str], warnings: Callable[[CaseTime], list[str]]) -> None:
    """Print the table of times with its footnotes: a row for each submission and, if there is one or the terminal is
    wide, for each case. No number is cut. places: by submission its rank in words; warnings: of a case, in words.
    """
    judged, wide = sorted(judged, key=_order), width() >= WIDE
    labels = list(dict.fromkeys(text.line(t.case) for j in judged for t in j.times))
    distinct, shared = ranking.apart(labels)
    notes: list[str] = []
    rows = []

    def figures(us: tuple[float, float, float] | None, cases: list[CaseTime]) -> dict[str, str]:
        """Return the figures of a row by column. us: (time, low, high); None: not all `cases` were timed."""
        if us is None:
            return {"time": next((t.failure.status for t in cases if t.failure), "not timed")}
        share = roofline_share(cases)
        warned = dict.fromkeys(warning for t in cases for warning in warnings(t))
        if share and round(share, 2) > 1:
            stated = all(t.readings.stated for t in cases)
            read = "the same bytes" if stated else "all inputs and outputs (the problem states no bytes)"
            by = "another order of reads, or what stays in a cache," if stated else "a call that needs fewer"
            warned[OVER.format(read, by)] = None
        notes.extend(warning for warning in warned if warning not in notes)
        row = {"time": text.us(us[0]), "95 % interval": f"{text.us(us[1])}..{text.us(us[2])}"}
        row[" "] = "".join(f"[{notes.index(warning) + 1}]" for warning in warned)
        row["% of roofline"] = f"{share:.0%}" if share else ""
        if len(cases) == 1:
            readings, error = cases[0].readings, cases[0].timing.worst_error
            row["GB/s"] = f"{readings.bytes / us[0] / 1e3:.0f}"
            row["roofline"] = f"{text.us(readings.roofline_us)} {readings.roofline_kind}" if share else ""
            row["error / allowed"] = f"{error['max']:.1e} / {error['tol']:.1e}" if error else ""
        return row

    for j in judged:
        place = places.get(j.submission.name, "baseline" if j.submission.baseline else "")
        rows.append({"": j.submission.name, "rank": place} | figures(j.metric, j.times))
        for t in j.times if len(labels) > 1 and (wide or len(judged) == 1) else ():
            us = None if t.failure else (t.median, *t.interval)
            rows.append(figures(us, [t]) | {"case": distinct[text.line(t.case)]})
    columns = [name for name in _COLUMNS if any(row.get(name) for row in rows) and (wide or name not in _ONLY_WIDE)]
    for spare in ("", *_ONLY_WIDE):
        columns = [name for name in columns if name != spare or not spare]
        table = _aligned([tuple(columns), *(tuple(text.line(row.get(name, "")) for name in columns) for row in rows)])
        if len(table[0]) <= width():
            break
    cases = [f"Case: {labels[0]}"] if len(labels) == 1 else [f"All cases: {shared}"] if shared else []
    below = [f"[{number}] {note}" for number, note in enumerate(notes, 1)]
    costs = dict.fromkeys(map(text.us, sorted(t.readings.empty_us for t in judged[0].times)))
    off = ", already taken off" if judged[0].times[0].readings.resolution_us else ""
    below.append(f"The clock itself costs {' to '.join([*costs][:: len(costs) - 1 or 1])} us{off}.")
    say("\n".join(textwrap.fill(line, width()) for line in [_TIMES, *cases]))
    say("\n".join(f"{line}  {row.get('case', '')}".rstrip() for line, row in zip(table, [{}, *rows], strict=True)))
    say("\n".join(textwrap.fill(line, width(), subsequent_indent="    ") for line in below))


def bits(judged: list[Result]) -> None:
    """Print whose bits depend on earlier calls, or on what else is in the batch."""
    looked = [(j.submission.name, j.bits) for j in judged if j.bits]
    for case in dict.fromkeys(str(bits.case) for _, bits in looked):
        shown = [(name, bits) for name, bits in looked if str(bits.case) == case]
        rows = [(name, *(bits.said(kind) or "-" for kind in ("call", "batch"))) for name, bits in shown]
        say("\n".join([f"bits of {text.line(case)}:", *_aligned([("", "call", "batch"), *rows])]))


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Return rows of cells as lines of one length, names to the left and figures to the right. The first row names."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = ["<" if name in ("", " ", "element", "call", "batch") else ">" for name in rows[0]]
    return ["  ".join(map("{:{}{}}".format, row, sides, widths)) for row in rows]


def places(judged: list[Result]) -> dict[str, str]:
    """By submission its rank in this run, and the multiple of the leader's time, in words. {}: fewer than two."""
    ranked = [j for j in judged if not j.submission.baseline and not ranking.is_repeat(j.submission.name)]
    timed = sorted((j.metric, j.submission.name) for j in ranked if j.verdict == "PASSED" and j.metric)
    if len(timed) < 2:
        return {}
    ranks = ranking.ranks([(lo, hi) for (_, lo, hi), _ in timed])
    words = {name: f"{rank} ({us[0] / timed[0][0][0]:.2f}x)" for rank, (us, name) in zip(ranks, timed, strict=True)}
    return words | {timed[0][1]: "1"}


def verdicts(judged: list[Result], placed: dict[str, str], brief: bool) -> None:
    """Print the verdict of each submission: its time, or why it has none. brief: nothing else was printed."""
    width = max((len(j.submission.name) for j in judged), default=0)
    for j in sorted(judged, key=_order):
        say(f"{j.submission.name:<{width}}  {j.word}  {_verdict(j, placed.get(j.submission.name, ''), brief)}")


def _verdict(j: Result, place: str, brief: bool) -> str:
    if j.verdict != "PASSED":
        reason = why(j) if brief else why(j).partition(PRINTED)[0]
        at = re.match(r".*?\.\w+:\d+(?=: )", reason) if j.verdict == "COMPILE_ERROR" and not brief else None
        return f"{at[0]}, see above" if at else reason  # where the compiler's report was printed
    right, timed = sum(o.status == "PASSED" for _, o in j.tests), sum(not t.failure for t in j.times)
    if j.metric:
        value, lo, hi = j.metric
        parts = [f"{ranking.name(j.ranking_by)} {text.us(value)} us ({text.us(lo)}..{text.us(hi)})"]
        if share := roofline_share(j.times):
            parts.append(f"{share:.0%} of roofline")
    else:
        parts = [f"{text.counted(right, 'test case')} right"] if j.tests else []
        parts.append(
            f"timed on {timed} of {text.counted(len(j.times), 'case')}" if j.times else "not timed in this mode"
        )
    parts += [f"rank {place}"] if place else []
    parts += ["a baseline"] if j.submission.baseline else []
    parts += [remark for remark in (j.submission.limits if j.submission.only else "", j.remark, j.busy) if remark]
    return ", ".join(parts)


def against(j: Result) -> None:
    """Print the paired comparison: the ratio of times by case, and their geomean."""
    if not j.against_all:
        return
    for t, pair in zip(j.times, j.against, strict=True):
        say(f"{text.line(t.case):<28} {_ratio(j, pair) if pair else 'one of the two does not serve it'}")
    count = sum(pair is not None for pair in j.against)
    label = "geomean" if count == len(j.against) else f"geomean of {count} of {len(j.against)}"
    say(f"{label:<28} {_ratio(j, j.against_all)}\n")


def _ratio(j: Result, pair: dict) -> str:
    lo, hi = pair["ci95"]
    line = f"{j.submission.name} / {pair['variant']} = {pair['ratio']:.4f} ({lo:.4f}..{hi:.4f})   {pair['word']}"
    return f"{line}: {undecided(pair)}" if pair["word"] == "UNDECIDED" else line


def undecided(pair: dict) -> str:
    """Return what to do about a comparison that is UNDECIDED."""
    return f"too noisy. Try --processes {_more(pair)} (halves the interval) on a quiet machine"


def _more(pair: dict) -> int:
    """Return how many processes halve the interval."""
    return min(4 * pair["processes"], MOST_PROCESSES)


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
    many = f"{len(bad)} of {len(j.tests) + len(j.times)} cases, first " if len(bad) > 1 else ""
    return f"{many}{text.line(case)}: {gist(outcome.reason)}"


def _order(j: Result) -> tuple:
    return (j.metric is None, j.submission.baseline, j.metric[0] if j.metric else 0.0, j.submission.name)


def modelled(submission: Submission) -> bool:
    """Whether `--device model` can execute it: a variant for GPUs in CUDA C++ or CuTe DSL."""
    return submission.ours and "cpu" not in submission.targets and "triton" not in submission.requires


def unranked(j: Result, leader: Leader) -> str:
    """Return the line about the rank of a submission that was timed in another run than the board's first."""
    line = "rank: none yet, timed in a separate run; "
    if j.metric:
        line += f"{j.metric[0] / leader.value:.2f}x the time of {leader.variant} (from the records); "
    return f"{line}rank it with --all, a file beside others with a --submission for each"


def following(args: Options, problem: Problem, judged: list[Result], leader: Leader | None) -> tuple[str, str]:
    """Return the command that helps most behind a run with these results, and what for. leader: of the board."""
    here = "" if Path().samefile(ROOT) else f"{shlex.quote(str(ROOT))}/"  # so that the command can be pasted
    python = f"{here}.venv/bin/python {here}"
    failing = [j for j in judged if j.verdict not in ("PASSED", "COMPILED", "MODEL_CHECKED", "UNSUPPORTED")]
    j = failing[0] if failing else judged[0]
    is_variant = j.submission.file.parent.name == "variants"
    name = ["--variant", j.submission.name] if is_variant else ["--submission", str(j.submission.file)]
    there = args.device not in (None, "model") and j.verdict not in ("UNSUPPORTED", "COMPILED")
    device = ["--device", str(args.device)] if there else []

    def run(why: str, *words: str, chosen: list[str] = name) -> tuple[str, str]:
        return f"{python}harness/run.py {shlex.join([args.problem, *chosen, *device, *words])}", why

    case = ["--case", args.case] if args.case else []
    if failing and j.verdict != "INVALID_MEASUREMENT":
        bad = next((c for c, o in j.tests if o.status == j.verdict), None)
        first = [] if j.verdict in ("COMPILE_ERROR", "RULE_BROKEN") or not bad else ["--case", text.label(bad.params)]
        return run("when it is mended", "--mode", "test", *(first or case))
    if failing or any(j.word == "BUSY" for j in judged):
        chosen = ["--all"] if args.all else name
        mode = ["--mode", args.mode] if args.mode != "leaderboard" else []
        other = ["--against", str(args.against)] if args.against else []
        return run("when the machine is idle", *mode, *other, *case, chosen=chosen)
    if j.verdict in ("UNSUPPORTED", "COMPILED") and not args.all:
        if modelled(j.submission):
            return run("executes its PTX on the CPU", *MODEL.split())
        return f"{python}harness list {problem.name}", "which variants are for what"
    if args.mode == "test" or args.device == "model":
        return run("all test cases", "--mode", "test") if case else run("its times")
    if len(judged) > 1 and not args.against:
        chosen = [word for file in args.submission or () for word in ("--submission", file)] or ["--all"]
        return (
            run("all cases", chosen=chosen) if case else (f"{python}leaderboard/report.py {problem.name}", "the board")
        )
    pair = j.against_all or {}
    if pair.get("word") == "UNDECIDED":
        return run("narrows the interval", "--against", str(args.against), "--processes", str(_more(pair)), *case)
    if not pair and leader and j.metric and j.metric[0] < NEAR * leader.value and leader.variant != j.submission.name:
        return run("which of the two is faster", "--against", leader.variant, *case)
    return run("where the time goes", "--mode", "profile", *case)
