"""Times that depend on the order: calls that are shorter where another submission had their contents before.

All submissions of a round get equal contents, one after the other. The first one could pass its answer to a second one,
by whatever channel, and the second one would not read its data. Each outcome has the names of the submissions that were
called on its contents before it; phases.py balances the order. An honest time does not depend on it.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from harness.judge.outcome import Outcome, known
from harness.judge.readings import Timing
from harness.results import stats

# Of the median of the calls before another one's: what that of the calls after it must be below to say anything.
SHARE = 0.8
# The probability, in a run of two, that honest calls of a case are so far apart by chance: below the first one the
# times are refused, below the second one the calls after the other submission's have no score.
REFUSED, LEFT_OUT = 1e-4, 1e-2
# With more calls than that (of the one kind times of the other) the normal distribution is near enough.
EXACT = 2500


@dataclass(frozen=True)
class Split:
    """The times of a submission's calls on one case, in us: those on contents that another one had before, and the
    rest.
    """

    after: list[float]
    before: list[float]

    @property
    def shorter(self) -> bool:
        """Whether calls after the other one's are clearly shorter, however improbable that is by chance."""
        return bool(self.after and self.before) and stats.median(self.after) < SHARE * stats.median(self.before)


def settle(timings: dict[str, list[Timing]]) -> None:
    """Fail the times of submissions that are shorter after another one's calls, or leave those calls out where they
    are too few to be sure. timings: of all cases, by submission.
    """
    # Each of n submissions is compared with each other one: the probabilities are those of the whole run.
    pairs = max(1, math.comb(len(timings), 2))
    for name, of_cases in timings.items() if len(timings) > 1 else ():
        others = [other for other in timings if other != name]
        # Of more than two, any number may pass answers to each other: who is first of them all gets none.
        groups = [*([other] for other in others), *([others] if len(others) > 1 else [])]
        cases = [timing for timing in of_cases if not timing.failure]
        found = [_findings(cases, names, pairs) for names in groups]
        for timing, of_case in zip(cases, zip(*found, strict=True), strict=True):
            _judge(timing, list(zip(of_case, groups, strict=True)))


def _findings(cases: list[Timing], names: list[str], pairs: int) -> list[tuple[float, Split]]:
    """Return for each case how probable it is that calls after these are so much shorter by chance, and the times."""
    splits = [split(timing, names) for timing in cases]
    together = chance(splits)
    return [(pairs * min(together, chance([one])) if one.shorter else 1.0, one) for one in splits]


def _judge(timing: Timing, found: list[tuple[tuple[float, Split], list[str]]]) -> None:
    (p, worst), names = min(found, key=lambda one: one[0][0], default=((1.0, Split([], [])), []))
    if p < REFUSED:
        timing.failure = _refused(worst, names)
        return
    heard = [name for (p, _), names in found if p < LEFT_OUT for name in names]
    for group in timing.outcomes if heard else ():
        group[:] = [dataclasses.replace(o, unscored=_is_after(o, heard)) for o in group]


def split(timing: Timing, names: Sequence[str]) -> Split:
    """Return the scored times of a submission on a case, by whether one of these had the contents before."""
    calls = [o for group in timing.scored for o in group if o.after is not None]
    after = [known(o.us) for o in calls if _is_after(o, names)]
    return Split(after, [known(o.us) for o in calls if not _is_after(o, names)])


def _is_after(call: Outcome, names: Sequence[str]) -> bool:
    return any(name in names for name in call.after or ())


def _refused(found: Split, names: list[str]) -> Outcome:
    one = len(names) == 1
    who = names[0] if one else "another submission"
    return Outcome(
        "INVALID_MEASUREMENT",
        f"calls on contents that {who} had before take {stats.median(found.after):.4g} us, the others "
        f"{stats.median(found.before):.4g} us ({len(found.after)} and {len(found.before)} calls): the time of a call "
        f"must not depend on who was called before it; time it without {names[0] if one else 'the others'}",
    )


def chance(cases: Sequence[Split]) -> float:
    """Return the probability that calls after another one's are so much shorter by chance: of the sum over cases of
    Mann and Whitney's U, the pairs of which the call after is the longer one. 1: no case has calls of both kinds.
    """
    cases = [case for case in cases if case.after and case.before]
    if not cases:
        return 1.0
    longer = sum(_longer(case) for case in cases)
    sizes = [(len(case.after), len(case.before)) for case in cases]
    if sum(n * m for n, m in sizes) <= EXACT:
        ways = np.ones(1)
        for n, m in sizes:
            ways = np.convolve(ways, _ways(n, m))
        return float(ways[: math.ceil(longer) + 1].sum())
    mean = sum(n * m for n, m in sizes) / 2
    deviation = math.sqrt(sum(n * m * (n + m + 1) for n, m in sizes) / 12)
    return NormalDist().cdf((longer + 0.5 - mean) / deviation)


def _longer(case: Split) -> float:
    """Return U of a case; equal times count half."""
    differences = np.subtract.outer(case.after, case.before)
    return float((differences > 0).sum() + (differences == 0).sum() / 2)


def _ways(n: int, m: int) -> np.ndarray:
    """Return the probability of each U of n and m calls, all orders being equally likely."""
    ways = np.zeros((n + 1, n * m + 1))  # of i calls after, among those that were drawn
    ways[0, 0] = 1.0
    for drawn in range(1, n + m + 1):
        # The longest of the drawn calls is one after, over all before that were drawn, or one before.
        new = np.zeros_like(ways)
        for i in range(max(0, drawn - m), min(n, drawn) + 1):
            j = drawn - i
            if i:
                new[i, j:] += ways[i - 1, : n * m + 1 - j] * i / drawn
            if j:
                new[i] += ways[i] * j / drawn
        ways = new
    return ways[n]
