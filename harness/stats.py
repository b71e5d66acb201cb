"""Medians, geometric means and 95 % intervals of samples that were taken in several processes.

A group is the samples of one process. Samples of one process share its memory layout and clock state, so intervals come
from a bootstrap in two levels: processes are drawn with replacement, then samples within each. Seeded: equal samples
give equal intervals. With three processes the outer level is coarse, and with one it says nothing.
"""

from collections.abc import Sequence

import numpy as np

RESAMPLES = 2000
LEVEL = (2.5, 97.5)  # percentiles: the bounds of a 95 % interval

Groups = Sequence[Sequence[float]]


def median(xs: Sequence[float]) -> float:
    """Middle value, or the mean of the two middle ones. ValueError if empty or not finite."""
    return float(np.median(_values(xs, "xs")))


def geomean(xs: Sequence[float]) -> float:
    """Geometric mean, in log space. ValueError if empty, not finite, or not positive: no such time may be averaged."""
    return float(np.exp(np.log(_positive(xs, "xs")).mean()))


def bootstrap_interval(groups: Groups, seed: int = 0) -> tuple[float, float]:
    """95 % interval (lo, hi) of the median over all samples.  groups: one list of samples per process.

    ValueError if there is no group, a group is empty, or a sample is not finite.
    """
    rng = np.random.default_rng(seed)
    return _bounds(_medians(groups, _draws(rng, [groups]), rng, "groups"))


def ratio_interval(pairs: Sequence[Sequence[tuple[float, float]]], seed: int = 0) -> tuple[float, float, float]:
    """-> (ratio, lo, hi): the median of a / b over the pairs, with its 95 % interval.  pairs: one list of (a, b) per
    process, taken one right after the other, so that what drifts falls on both.

    ValueError as in bootstrap_interval, and for a time that is not positive.
    """
    groups = [[float(a) / float(b) for a, b in (_positive(pair, "pair") for pair in group)] for group in pairs]
    lo, hi = bootstrap_interval(groups, seed)
    return median([ratio for group in groups for ratio in group]), lo, hi


def geomean_interval(cases: Sequence[Groups], seed: int = 0) -> tuple[float, float]:
    """95 % interval (lo, hi) of the geometric mean of the cases' medians.  cases: the groups of each case.

    The draw of processes is common to all cases, since process i of one case is, or ran beside, process i of another:
    what a process adds to all of its cases does not average out. ValueError as in bootstrap_interval, and for no case
    or a sample that is not positive.
    """
    if not len(cases):
        raise ValueError("cases must not be empty")
    rng = np.random.default_rng(seed)
    processes = _draws(rng, cases)
    total = np.zeros(RESAMPLES)
    for number, groups in enumerate(cases):
        for group in groups:
            _positive(group, f"case {number}")
        total += np.log(_medians(groups, processes, rng, f"case {number}"))
    return _bounds(np.exp(total / len(cases)))


def _draws(rng: np.random.Generator, cases: Sequence[Groups]) -> np.ndarray:
    """Uniform draws in [0, 1), (RESAMPLES, most processes of a case), to be scaled by a case's number of processes."""
    return rng.random((RESAMPLES, max(map(len, cases))))


def _medians(groups: Groups, processes: np.ndarray, rng: np.random.Generator, name: str) -> np.ndarray:
    """Resampled medians, (RESAMPLES,)."""
    if not len(groups):
        raise ValueError(f"{name} must hold at least one process")
    values = [_values(group, name) for group in groups]
    sizes = np.array([len(group) for group in values])
    table = np.full((len(values), sizes.max()), np.nan)
    for row, group in zip(table, values, strict=True):
        row[: len(group)] = group
    chosen = (processes[:, : len(values)] * len(values)).astype(int)  # (RESAMPLES, processes)
    size = sizes[chosen][..., None]
    sample = (rng.random((*chosen.shape, table.shape[1])) * size).astype(int)
    drawn = table[chosen[..., None], sample]
    if (sizes == sizes[0]).all():
        return np.median(drawn.reshape(RESAMPLES, -1), axis=1)
    drawn[np.arange(table.shape[1]) >= size] = np.nan  # a process counts with as many samples as it has
    return np.nanmedian(drawn.reshape(RESAMPLES, -1), axis=1)


def _bounds(resampled: np.ndarray) -> tuple[float, float]:
    lo, hi = np.percentile(resampled, LEVEL)
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
