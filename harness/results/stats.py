"""Medians, geometric means and 95 % intervals of samples that were taken in several processes.

A group is the samples of one process. Samples of one process share its memory layout and clock state, so intervals come
from a bootstrap in two levels: processes are drawn with replacement, then samples within each. Seeded: equal samples
give equal intervals. With three processes the outer level is coarse, and with one it says nothing.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

RESAMPLES = 2000
LEVELS = (95, 99)  # of a ratio's intervals, in %
MANY = 10  # processes, of whose ratios the outermost do not count
SAME_WITHIN = 0.015  # a ratio whose 95 % interval is nearer to 1 is called SAME

Groups = Sequence[Sequence[float]]


def median(xs: Sequence[float]) -> float:
    """Middle value, or the mean of the two middle ones. ValueError if empty or not finite."""
    return float(np.median(_values(xs, "xs")))


def geomean(xs: Sequence[float]) -> float:
    """Geometric mean, in log space. ValueError if empty, not finite, or not positive: no such time may be averaged."""
    return float(np.exp(np.log(_positive(xs, "xs")).mean()))


@dataclass(frozen=True)
class Ratio:
    """Of one variant's times to another's. ci95, ci99: (lo, hi). processes: of each that were compared."""

    ratio: float
    ci95: tuple[float, float]
    ci99: tuple[float, float]
    processes: int

    def word(self, band: float = SAME_WITHIN) -> str:
        """Return FASTER or SLOWER if ci99 excludes 1, else SAME if ci95 is within 1 -+ `band`, else UNDECIDED."""
        if self.ci99[1] < 1 or self.ci99[0] > 1:
            return "FASTER" if self.ci99[1] < 1 else "SLOWER"
        return "SAME" if self.ci95[0] >= 1 - band and self.ci95[1] <= 1 + band else "UNDECIDED"

    def regressed(self, percent: float) -> bool:
        """Whether the 99 % interval is wholly over 1 + `percent` %: what --fail-on-regression calls a regression."""
        return self.ci99[0] > 1 + percent / 100


def compare(cases: Sequence[Sequence[Sequence[tuple[float, float]]]], seed: int = 0) -> Ratio:
    """Geometric mean over cases and processes of the midmean of a / b in each. cases: of each, one list of (a, b) per
    process, taken one right after the other, so that what drifts falls on both. Each process has a different level (an
    H200: +-1 % of 13 us), so processes are averaged: from MANY on as a trimmed mean with its interval by Yuen
    (Biometrika 61, 1974), since a busy machine spoils some; of fewer the interval, a bootstrap in two levels, is as
    wide as Student's t asks for. From one process it says what calls differ by alone. ValueError for no case, process
    or pair, and a time that is not positive.
    """
    if not len(cases) or not all(len(case) for case in cases):
        raise ValueError("cases must hold at least one process each")
    rng = np.random.default_rng(seed)
    count = max(map(len, cases))
    processes = rng.random((RESAMPLES, count))
    center, drawn, mids = 0.0, np.zeros(RESAMPLES), []
    for case in cases:
        logs = [np.log([a / b for a, b in (_positive(pair, "pair") for pair in group)]) for group in case]
        if not all(map(len, logs)):
            raise ValueError("every process must hold at least one pair")
        mids.append([_midmean(group) for group in logs])
        center += float(np.mean(mids[-1])) / len(cases)
        resamples = [group[rng.integers(len(group), size=(RESAMPLES, len(group)))] for group in logs]
        levels = np.stack([_midmean(drawn_calls) for drawn_calls in resamples], axis=1)  # (RESAMPLES, processes)
        chosen = (processes[:, : len(case)] * len(case)).astype(int)
        # Each draw of a process takes a resample of its own, at random.
        drawn += levels[rng.integers(RESAMPLES, size=chosen.shape), chosen].mean(axis=1) / len(cases)

    if count >= MANY and all(len(case) == count for case in cases):
        return _trimmed(np.mean(mids, axis=0))
    return _ratio(center, drawn, count)


def _trimmed(levels: np.ndarray) -> Ratio:
    """Return the ratio of levels, the logarithm of one for each process, without the fifth of them at each end."""
    count, cut = len(levels), len(levels) // 5
    inner = np.sort(levels)[cut : count - cut]
    error = np.clip(levels, inner[0], inner[-1]).std(ddof=1) * ((count - 1) / len(inner) / (len(inner) - 1)) ** 0.5
    halves = [_students_t(len(inner) - 1, level) * error for level in LEVELS]
    return _between(inner.mean(), [(-half, half) for half in halves], count)


def compare_unpaired(cases: Sequence[tuple[Groups, Groups]], seed: int = 0) -> Ratio:
    """Geometric mean over cases of median(a) / median(b). cases: of each (a, b), one list of samples per process, from
    runs that were not interleaved. The interval is that of the scatter within each run: what differs between runs, a
    clock or a machine, is in the ratio alone. ValueError as in geomean_interval.
    """
    if not len(cases):
        raise ValueError("cases must not be empty")
    sides = [[case[side] for case in cases] for side in (0, 1)]
    drawn = np.log(_case_medians(sides[0], seed)) - np.log(_case_medians(sides[1], seed + 1))
    medians = [[median([us for group in groups for us in group]) for groups in side] for side in sides]
    center = float(np.mean(np.log(medians[0]) - np.log(medians[1])))
    return _ratio(center, drawn.mean(axis=0), min(len(groups) for side in sides for groups in side))


def _ratio(center: float, drawn: np.ndarray, count: int) -> Ratio:
    """center, drawn: the logarithm of a ratio, and its resamples; count: of the processes behind it."""
    ends = [np.percentile(drawn, [50 - level / 2, 50 + level / 2]) - center for level in LEVELS]
    return _between(center, [_widening(count, level) * both for level, both in zip(LEVELS, ends, strict=True)], count)


def _between(center: float, ends: Sequence[Sequence[float]], count: int) -> Ratio:
    """center: the logarithm of a ratio; ends: of its interval at each of LEVELS how far they are from it."""
    ci95, ci99 = ((float(np.exp(center + lo)), float(np.exp(center + hi))) for lo, hi in ends)
    return Ratio(float(np.exp(center)), ci95, ci99, count)


def _midmean(values: np.ndarray) -> np.ndarray:
    """Mean of the middle half along the last axis: deaf to outliers, and steadier than the median."""
    cut = max(values.shape[-1] // 4, values.shape[-1] > 2)
    return np.sort(values, axis=-1)[..., cut : values.shape[-1] - cut].mean(axis=-1)


def _widening(count: int, level: float) -> float:
    """Return Student's t over the normal quantile, times the bootstrap's missing root of count / (count - 1)."""
    if count < 2:
        return 1.0
    return _students_t(count - 1, level) / NormalDist().inv_cdf(0.5 + level / 200) * (count / (count - 1)) ** 0.5


@functools.cache
def _students_t(free: int, level: float) -> float:
    """Return how far from 0 `level` % of Student's t reaches; t is root(free) times the tangent of an angle."""
    if free > 10_000:
        return NormalDist().inv_cdf(0.5 + level / 200)
    angle = np.linspace(0, np.pi / 2, 50_001)
    density = np.cos(angle) ** (free - 1)
    mass = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return float(free**0.5 * np.tan(np.interp(level / 100 * mass[-1], mass, angle)))


def mean_interval(cases: Sequence[Groups], seed: int = 0) -> tuple[float, float]:
    """95 % interval (lo, hi) of the mean of the cases' medians; of one case, of its median. cases: the groups of each.
    The draw of processes is common to all cases, since process i of one is, or ran beside, process i of another: what
    it adds to all does not average out. ValueError: no case or group, an empty one, a sample not finite or positive.
    """
    return _bounds(_case_medians(cases, seed).mean(axis=0))


def geomean_interval(cases: Sequence[Groups], seed: int = 0) -> tuple[float, float]:
    """The same of the geometric mean of the cases' medians."""
    return _bounds(np.exp(np.log(_case_medians(cases, seed)).mean(axis=0)))


def _case_medians(cases: Sequence[Groups], seed: int) -> np.ndarray:
    """Resampled medians of every case, (cases, RESAMPLES), the draw of processes common to them."""
    if not len(cases):
        raise ValueError("cases must not be empty")
    rng = np.random.default_rng(seed)
    processes = rng.random((RESAMPLES, max(map(len, cases))))
    for number, groups in enumerate(cases):
        for group in groups:
            _positive(group, f"case {number}")
    return np.array([_medians(groups, processes, rng, f"case {number}") for number, groups in enumerate(cases)])


def _medians(groups: Groups, processes: np.ndarray, rng: np.random.Generator, name: str) -> np.ndarray:
    """Resampled medians, (RESAMPLES,). processes: uniform draws in [0, 1), (RESAMPLES, groups or more)."""
    if not len(groups):
        raise ValueError(f"{name} must hold at least one process")
    values = [_values(group, name) for group in groups]
    sizes = np.array([len(group) for group in values])
    table = np.full((len(values), sizes.max()), np.nan)
    for row, group in zip(table, values, strict=True):
        row[: len(group)] = group
    chosen = (processes[:, : len(values)] * len(values)).astype(int)  # (RESAMPLES, processes)
    size = sizes[chosen][..., None]
    drawn = table[chosen[..., None], (rng.random((*chosen.shape, table.shape[1])) * size).astype(int)]
    if (sizes == sizes[0]).all():
        return np.median(drawn.reshape(RESAMPLES, -1), axis=1)
    drawn[np.arange(table.shape[1]) >= size] = np.nan  # a process counts with as many samples as it has
    return np.nanmedian(drawn.reshape(RESAMPLES, -1), axis=1)


def _bounds(resampled: np.ndarray) -> tuple[float, float]:
    lo, hi = np.percentile(resampled, (2.5, 97.5))
    return float(lo), float(hi)


def _values(xs: Sequence[float], name: str) -> np.ndarray:
    values = np.asarray(xs, dtype=np.float64)
    if values.ndim != 1 or not len(values):
        raise ValueError(f"{name} must be a list of at least one number, got shape {values.shape}")
    if not np.isfinite(values).all():
        raise ValueError(f"{name} must be finite, got {values[~np.isfinite(values)][0]}")
    return values


def _positive(xs: Sequence[float], name: str) -> np.ndarray:
    values = _values(xs, name)
    if (values <= 0).any():
        raise ValueError(f"{name} must be positive, got {values.min()}")
    return values
