"""Medians, geometric means and two-level bootstrap intervals."""

import math
import statistics

import numpy as np
import pytest

from harness.judge import phases
from harness.results import stats


def test_median_and_geomean():
    for xs in ([3.0], [4, 1], [5.0, 1.0, 9.0], [2, 8, 4, 6]):
        assert stats.median(xs) == statistics.median(xs)
        assert stats.geomean(xs) == pytest.approx(statistics.geometric_mean(xs))
    assert stats.geomean([1e-200, 1e200, 1e200, 1e-200]) == pytest.approx(1.0)  # the product would be 0 or inf


NO_TIMES = {
    stats.geomean: ([], [1.0, 0.0], [1.0, -2.0], [1.0, math.nan], [math.inf]),
    stats.mean_interval: ([[]], [[[]]], [[[1.0], []]], [[[1.0, math.nan]]], [[[math.inf]]]),
    stats.geomean_interval: ([], [[]], [[[1.0]], [[0.0]]], [[[1.0]], [[math.nan]]]),
    stats.compare: ([[]], [[[]]], [[[(1.0, 0.0)]]], [[[(-1.0, 1.0)]]], [[[(1.0, math.nan)]]]),
}


@pytest.mark.parametrize(("call", "bad"), [(call, bad) for call, every in NO_TIMES.items() for bad in every])
def test_what_is_no_time_or_missing_is_refused(call, bad):
    with pytest.raises(ValueError):
        call(bad)


def test_interval_is_deterministic_and_depends_on_the_seed():
    rng = np.random.default_rng(3)
    groups = rng.normal(100, 5, (3, 40)).tolist()
    assert stats.mean_interval([groups], 1) == stats.mean_interval([groups], 1)
    assert len({stats.mean_interval([groups], seed) for seed in range(5)}) > 1


def test_equal_samples_give_a_point_and_others_an_interval_around_the_median():
    assert stats.mean_interval([[[5.0] * 4, [5.0] * 4]], 0) == (5.0, 5.0)
    assert stats.geomean_interval([[[2.0], [2.0]], [[8.0, 8.0]]], 0) == pytest.approx((4.0, 4.0))
    groups = [[10.0, 11.0, 12.0], [10.5, 11.5], [9.5, 10.0, 12.5, 13.0]]  # processes of unequal length
    flat = sorted(x for group in groups for x in group)
    lo, hi = stats.mean_interval([groups], 0)
    assert flat[0] <= lo < stats.median(flat) < hi <= flat[-1]
    groups = np.random.default_rng(1).normal(100, 5, (3, 10)).tolist()
    assert stats.geomean_interval([groups], 5) == pytest.approx(stats.mean_interval([groups], 5))


def test_processes_that_disagree_widen_the_interval():
    """Resampling all samples as one list would give about +-1 % here; between the processes lie 10 %."""
    rng = np.random.default_rng(0)
    groups = [(level + rng.normal(0, 0.5, 30)).tolist() for level in (95.0, 100.0, 105.0)]
    lo, hi = stats.mean_interval([groups], 0)
    low, high = stats.mean_interval([[[x for group in groups for x in group]]], 0)
    assert lo < 96 and hi > 104 and hi - lo > 1.5 * (high - low)


def test_interval_covers_the_true_median():
    """One process, 30 samples: of 95 % intervals about 95 % hold the truth. 88 % of 200 is 4 sigma below."""
    rng = np.random.default_rng(7)
    found = [stats.mean_interval([[rng.normal(50, 2, 30).tolist()]], seed) for seed in range(200)]
    assert 176 <= sum(lo <= 50 <= hi for lo, hi in found) < 200


def test_a_ratio_is_that_of_pairs_and_levels_and_cancels_drift():
    """Both sides drift by 2x; a process with ten times the calls counts as another one does."""
    found = stats.compare([[[(1.25 * base, base) for base in np.linspace(10, 20, 10)] for _ in range(3)]])
    assert (found.ratio, *found.ci95) == pytest.approx((1.25, 1.25, 1.25)) and found.word() == "SLOWER"
    found = stats.compare([[[(10 + 0.1 * i, 10.0) for i in range(-4, 5)] for _ in range(3)]])
    assert abs(found.ratio - 1) < 1e-3 and found.ci95[0] < 1 < found.ci95[1] and found.word() == "UNDECIDED"
    assert stats.compare([[[(1.0, 1.0)] * 100, [(1.21, 1.0)] * 10]]).ratio == pytest.approx(1.1)


def _comparisons(processes, calls, true, seeds):
    """Comparisons of two variants whose processes have levels of their own (1 %) and whose calls scatter by 2 %."""
    rng = np.random.default_rng(11)
    for seed in range(seeds):
        levels = rng.normal(0, 0.01, (2, processes, 1))
        a, b = 13.5 * np.exp(levels + rng.normal(0, 0.02, (2, processes, calls)))
        yield stats.compare([[list(zip(true * x, y, strict=True)) for x, y in zip(a, b, strict=True)]], seed)


@pytest.mark.parametrize("processes", [3, 12])
def test_ratio_interval_covers_the_truth_for_any_number_of_processes(processes):
    """Of 95 % intervals about 95 % hold the truth, of three processes too; 0.87 of 80 is 3 sigma below."""
    found = list(_comparisons(processes, 15, 1.0, 80))
    assert sum(one.ci95[0] <= 1 <= one.ci95[1] for one in found) >= 0.87 * 80
    assert sum(one.word() in ("SAME", "UNDECIDED") for one in found) >= 0.93 * 80
    assert all(one.ci99[0] <= one.ci95[0] <= one.ratio <= one.ci95[1] <= one.ci99[1] for one in found)


def test_a_few_processes_that_load_has_spoilt_do_not_hide_five_percent():
    """Two of 20 are off by a factor of 2 and 4, to one side."""
    rng = np.random.default_rng(5)
    levels = np.log(1.05) + rng.normal(0, 0.01, (20, 1))
    levels[:2] -= np.log([[2.0], [4.0]])
    pairs = [[(float(x), 1.0) for x in group] for group in np.exp(levels + rng.normal(0, 0.005, (20, 3)))]
    found = stats.compare([pairs])
    assert found.word() == "SLOWER" and found.regressed(1) and abs(found.ratio - 1.05) < 0.01


@pytest.mark.parametrize(
    ("levels", "drawn", "student"),
    [  # of processes; of means of as many draws the percentiles 2.5 and 0.5, in units of the largest level; Student's t
        ((-1, 1), (1, 1), (12.7062, 63.6567)),  # the least mean: 1 in 4
        ((-1, 0, 1), (1, 1), (4.30265, 9.92484)),  # 1 in 27
        # 1 in 64, and a mean of -2/3 or less 7 in 64
        ((-1, -1, -1, 1, 1, 1), (2 / 3, 1), (2.57058, 4.03214)),
    ],
)
def test_ratio_intervals_are_as_wide_as_the_formula_says(levels, drawn, student):
    """Processes whose calls are all alike: the bootstrap has few values, whose places are known."""
    found = stats.compare([[[(1.1 * math.exp(0.01 * level), 1.0)] * 3 for level in levels]])
    count = len(levels)
    quantiles = zip((found.ci95, found.ci99), (1.959963985, 2.575829304), student, drawn, strict=True)
    for interval, z, t, far in quantiles:
        half = 0.01 * far * t / z * math.sqrt(count / (count - 1))
        assert interval == pytest.approx((1.1 * math.exp(-half), 1.1 * math.exp(half)), rel=1e-5)


def test_interval_of_many_processes_is_yuens():
    """Of 10 the outer two at each end do not count: Student's t has 5 degrees of freedom, one fewer than are left."""
    found = stats.compare([[[(math.exp(0.01 * level), 1.0)] for level in (3, 9, 0, 8, 1, 7, 2, 6, 4, 5)]])
    error = 0.01 * statistics.stdev([2, 2, 2, 3, 4, 5, 6, 7, 7, 7]) * math.sqrt(9 / (6 * 5))
    for interval, student in ((found.ci95, 2.57058), (found.ci99, 4.03214)):
        ends = math.exp(0.045 - student * error), math.exp(0.045 + student * error)
        assert interval == pytest.approx(ends, rel=1e-6)


@pytest.mark.parametrize(
    ("ci95", "ci99", "word"),
    [
        ((0.98, 0.99), (0.97, 0.999), "FASTER"),
        ((1.01, 1.02), (1.0001, 1.03), "SLOWER"),
        ((0.99, 1.01), (0.98, 1.02), "SAME"),
        ((0.98, 1.0), (0.97, 1.01), "UNDECIDED"),
    ],
)
def test_the_word_says_what_the_intervals_hold(ci95, ci99, word):
    assert stats.Ratio(math.sqrt(ci95[0] * ci95[1]), ci95, ci99, 40).word() == word


def _busy(processes, true, seed):
    """One comparison on a busy CPU: three calls a process, a third of them up to eight times as long."""
    rng = np.random.default_rng(seed)
    us = np.exp(rng.normal(0, 0.3, (2, processes, 3)))
    us *= np.where(rng.random(us.shape) < 1 / 3, rng.uniform(1, 8, us.shape), 1)
    return stats.compare([[list(zip(true * x, y, strict=True)) for x, y in zip(*us, strict=True)]], seed)


def test_ratios_are_told_by_the_processes_of_a_paired_run():
    count = phases.COUNTS["cpu", True].processes
    assert [_busy(3, 13, seed).word() for seed in range(60)].count("UNDECIDED") > 10, "three are too few there"
    assert [_busy(count, 13, seed).word() for seed in range(60)].count("SLOWER") >= 57
    same = [_busy(count, 1, seed).word() for seed in range(300)]
    assert same.count("SLOWER") + same.count("FASTER") <= 9, "about 1 in 100 of comparisons with itself"
    assert sum(one.word() == "SLOWER" for one in _comparisons(24, 15, 1.02, 20)) >= 19


def test_geomean_interval_keeps_what_a_process_adds_to_all_its_cases():
    """A process 10 % slow in every case moves the geomean by 10 %; drawn case by case that would average out."""
    common = [[[scale * level] * 5 for scale in (0.9, 1.0, 1.1)] for level in (10.0, 20.0, 40.0, 80.0)]
    lo, hi = stats.geomean_interval(common, 0)
    middle = stats.geomean([10.0, 20.0, 40.0, 80.0])
    assert (lo / middle, hi / middle) == pytest.approx((0.9, 1.1))
