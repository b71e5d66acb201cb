"""Records to ranked tables: what ranks, what does not and why, and that nothing is left out silently."""

import math

import pandas as pd
import pytest

from harness.results import ranking, stats
from leaderboard import board, tables
from leaderboard.provenance import Provenance
from tests.support.records import CASES, ROOFS, bench, full, line, samples

EXPECTED = {("nvfp4_gemv", "sm90"): [{**case, "seed": 1111} for case in CASES]}


def one(records: list[dict], expected: dict = EXPECTED) -> board.Board:
    """The sm90 board of `records`."""
    (found,) = [b for b in board.build(records, "box", expected) if b.target == "sm90"]
    return found


def rows(found: board.Board) -> dict[str, pd.Series]:
    return {row.variant: row for _, row in found.standing.iterrows()}


def ranks(found: board.Board) -> dict[str, int | None]:
    return {name: None if row["rank"] is pd.NA else int(row["rank"]) for name, row in rows(found).items()}


@pytest.mark.parametrize(
    ("intervals", "ranks"),
    [
        ([(1, 2), (1.9, 3), (3.5, 4)], [1, 1, 3]),
        ([(1, 2), (2, 3)], [1, 1]),  # touching is overlapping
        ([(3, 4), (1, 2)], [1, 2]),  # an interval may lie off its own geomean
        ([(1, 2), (1.5, 3), (2.5, 4), (3.9, 5)], [1, 1, 3, 3]),  # a tie is with the group's leader, not the neighbour
        ([], []),
    ],
)
def test_ranks_are_shared_where_intervals_overlap(intervals, ranks):
    assert board.ranks(intervals) == ranks


def test_board_ranks_by_geomean_and_shares_ranks():
    found = one(full("slow", 2.0) + full("tied", 1.101, spread=0.02) + full("first", 1.1, spread=0.02))
    assert list(ranks(found).items()) == [("first", 1), ("tied", 1), ("slow", 3)]
    slow = rows(found)["slow"]
    assert (slow.geomean_us, slow.roofline_share) == pytest.approx((2 * stats.geomean(ROOFS), 0.5))
    assert (slow.lo_us, slow.hi_us) == stats.geomean_interval([samples(2 * roofline) for roofline in ROOFS])


def test_times_follow_the_standing_whatever_the_order_of_lines():
    records = [record for variant in "cbad" for record in full(variant, 1 + ord(variant) / 100)]
    found = one(records)
    assert found.cases == [board.case_label(case) for case in CASES]
    places = list(zip(found.times.variant, found.times.case, strict=True))
    assert places == [(name, case) for name in "abcd" for case in found.cases]
    pd.testing.assert_frame_equal(found.standing, one(records[::-1]).standing)


def test_what_another_clock_timed_has_no_rank():
    other = {"clock": {"name": "another clock", "warnings": []}}
    found = one(full("a", 1.1) + full("b", 1.2) + full("c", 1.0, **other))
    assert ranks(found) == {"a": 1, "b": 2, "c": None}
    assert rows(found)["c"].notes == ["not ranked, timed by another clock: another clock"]
    partly = full("q", 2.2, baseline=True)
    partly[-1] |= other
    found = rows(one(full("a", 1.1) + full("p", 0.9, baseline=True, **other) + partly))["a"]
    assert found["rank"] == 1 and found.baseline_ratio == pytest.approx(2.0) and found.baseline_cases == len(CASES) - 1


def test_a_confirmation_by_another_clock_does_not_lead():
    """And a record without a clock's name counts by its device."""
    clocks = [{"warnings": []}, {"name": "event pair behind a spin", "warnings": []}, {"name": "x", "warnings": []}]
    base = full("a", 1.2, device="cuda", clock=clocks[0]) + full("b", 1.5, device="cuda", clock=clocks[0])
    for clock, leads in ((clocks[1], True), (clocks[2], False)):
        later = {"run": "r2", "minute": 1, "device": "cuda", "clock": clock}
        confirms = {"variant": "a", "run_id": "r1", "paired": True}
        mine = full("c", 1.0, **later, confirms=confirms, against={"variant": "a", "ratio": 0.8})
        found = ranks(one(base + mine + full("a", 1.2, **later)))
        assert found["c"] == 1 if leads else (found["c"], found["a"]) == (None, 1)


FAILED = {1: line("benchmark", "b", case=1, status="TIMEOUT", reason="no answer in 60 s")}
UNSERVED = line("benchmark", "b", case=2, status="UNSUPPORTED", reason="k below 4096")
LATER = {"run": "r2", "minute": 9}


@pytest.mark.parametrize(
    ("records", "status", "done", "reason"),
    [
        (full("b", 1.05)[:2], "MISSING", 2, "not timed: m=7168 k=2048 l=4"),
        ([FAILED.get(i, one) for i, one in enumerate(full("b", 1.0))], "TIMEOUT", 2, "no answer in 60 s"),
        ([*full("b", 1.0), line("test", "b", case=2, status="INCORRECT", reason="off")], "INCORRECT", 3, "off"),
        ([*full("b", 1.0), line("test", "b", **LATER, status="INCORRECT", reason="new seed")], "INCORRECT", 0, "seed"),
        ([*full("b", 1.0)[:2], UNSERVED], "UNSUPPORTED", 2, "k below 4096"),
        ([line("test", "b", case=None, status="RULE_BROKEN", reason="b.py:3")], "RULE_BROKEN", 0, "all cases: b.py:3"),
        ([line("test", "b", **LATER)], "MISSING", 0, "tested, not timed"),
        ([line("test", "b", **LATER, case=None, status="UNSUPPORTED", reason="no GPU")], "UNSUPPORTED", 0, "no GPU"),
    ],
)
def test_variant_with_gap_or_failure_has_no_rank_and_says_why(records, status, done, reason):
    found = one(full("a", 1.1) + records)
    row = rows(found)["b"]
    assert ranks(found)["b"] is None and math.isnan(row.geomean_us)
    assert (row.status, row.done, row.wanted) == (status, done, 3) and reason in row.reason


@pytest.mark.parametrize(
    "records",
    [
        [line("test", "b", run="r0", status="INCORRECT"), *full("b", 1.0, minute=5), *full("a", 1.1, minute=5)],
        [*full("a", 1.1), *full("b", 1.0), line("test", "b", **LATER, case=None, status="UNSUPPORTED")],
        [*full("a", 1.1), line("benchmark", "b", case=0, status="INVALID_MEASUREMENT"), *full("b", 1.0)],
    ],
)
def test_earlier_failures_and_other_machines_do_not_undo_a_result(records):
    row = rows(one(records))["b"]
    assert row["rank"] == 1 and row.status == "PASSED"


def test_case_that_nobody_timed_is_missing_from_all_where_cases_are_known():
    found = one(full("a", 1.1)[:2] + full("b", 1.2)[:2])
    assert ranks(found) == {"a": None, "b": None}
    assert all((row.done, row.wanted) == (2, 3) for row in rows(found).values())
    found = one(full("a", 1.1) + full("b", 1.05)[:2], {})  # else those of the base run count
    assert ranks(found) == {"a": 1, "b": None} and rows(found)["b"].wanted == 3


NO_TIME = {"median_us": (math.nan, math.inf, 0.0, -3.0, None, "18.0", True)}
NO_TIME["samples_us"] = (None, [], [[]], [[1.0, math.nan]], [[-1.0]], "x")  # without an interval there is no rank


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, every in NO_TIME.items() for value in every])
def test_what_is_no_time_never_ranks(field, value):
    bad = full("b", 1.0)
    bad[0][field] = value
    found = one(full("a", 1.1) + bad)
    row = rows(found)["b"]
    timed, said = row.status == "PASSED", row.reason + " ".join(row.notes)
    assert timed == (field == "samples_us") and ("no interval" if timed else "no time") in said
    assert ranks(found)["b"] is None


NEWER = full("a", 1.2, run="r2", minute=5) + full("b", 1.1, run="r2", minute=5)


@pytest.mark.parametrize("records", [full("a", 1.0) + full("b", 1.5) + NEWER, NEWER + full("a", 1.0) + full("b", 1.5)])
def test_newest_run_of_several_variants_is_the_board(records):
    found = one(records)
    assert found.run["run_id"] == "r2" and found.run["time"] == "2026-01-02 03:05:00 UTC"
    assert list(rows(found)) == ["b", "a"]
    gap = [*NEWER[:5], NEWER[5] | {"status": "UNSUPPORTED", "baseline": True}]  # a baseline's is none
    assert one(full("a", 1.0) + full("b", 1.5) + gap).run["run_id"] == "r2"


def test_variant_from_another_run_is_shown_and_not_ranked():
    alone = full("c", 0.9, run="r2", minute=5) + full("a", 0.5, run="r3", minute=6, source_hash="new")
    found = one(full("a", 1.1) + full("b", 1.2) + alone)
    a, c = rows(found)["a"], rows(found)["c"]
    assert ranks(found) == {"a": 1, "b": 2, "c": None} and found.run["run_id"] == a.run_id == "r1"
    assert c.run_id == "r2" and not c.base and board.OTHER_RUN in c.notes
    assert c.geomean_us == pytest.approx(0.9 * stats.geomean(ROOFS))  # shown, though
    assert a.notes == ["also in a newer run of another source, not comparable, r3: PASSED"]


def test_pairs_displace_no_field_and_the_newest_count():
    faster = {"variant": "b", "ratio": 0.9, "ci95": [0.89, 0.91]}
    paired = full("a", 0.9, run="r2", minute=5, against=faster) + full("b", 1.0, run="r2", minute=5)
    found = one(full("a", 1.1) + full("b", 1.2) + full("c", 1.3) + paired)
    assert found.run["run_id"] == "r1" and list(found.pairs.case) == list(found.cases)
    assert list(found.pairs.iloc[0]) == ["a", "b", "m=7168 k=16384 l=1", 0.9, 0.89, 0.91, "FASTER", "r2"]

    def pair(run, minute, ratio):
        against = {"variant": "a#2", "ratio": ratio, "ci95": [ratio - 0.01, ratio + 0.01]}
        return full("a", 1.1, run=run, minute=minute, against=against) + full("a#2", 1.1, run=run, minute=minute)

    newest = [record for ratio in (1.4, 1.001) for record in pair("r3", 6, ratio) if record["case"] != CASES[2]]
    found = one(full("a", 1.1) + full("b", 1.2) + pair("r2", 5, 1.5) + newest)
    assert list(found.pairs.ratio) == [1.001] * 2  # nothing of r2's third case, nor of r3's first attempt
    assert set(found.pairs.run_id) == {"r3"} and list(rows(found)) == ["a", "b"]


def test_a_run_that_failed_or_is_incomplete_does_not_become_the_board():
    """Even where it is the newest, and no run has more than one variant."""
    failed = full("b", 1.0, run="r2", minute=5)
    failed[2] |= {"status": "INVALID_MEASUREMENT", "median_us": None}
    for expected in (EXPECTED, {}):
        found = one(full("a", 1.1) + failed, expected)
        assert found.run["run_id"] == "r1" and ranks(found) == {"a": 1, "b": None}
        assert rows(found)["b"].status == "INVALID_MEASUREMENT"
    assert ranks(one(full("a", 1.0) + full("b", 1.1, run="r2", minute=5))) == {"b": 1, "a": None}
    part = full("a", 0.9, run="r2", minute=5)[:1] + full("b", 0.8, run="r2", minute=5)[:1]
    assert one(full("a", 1.1) + full("b", 1.2) + part).run["run_id"] == "r1"


def test_baselines_are_unranked_and_the_fastest_in_each_case_measures_the_others():
    records = full("a", 1.0) + full("b", 3.0) + full("peer_slow", 4.0, baseline=True)
    found = one(records + full("peer_fast", 2.0, baseline=True, setup_us=812.0))
    assert ranks(found) == {"a": 1, "b": 2, "peer_fast": None, "peer_slow": None}
    assert rows(found)["peer_fast"].notes == ["its set-up of 812.0 us a call is not in the time"]
    assert [rows(found)[name].baseline_ratio for name in "ab"] == pytest.approx([2.0, 2 / 3])
    assert list(found.times[found.times.variant == "a"].baseline_ratio) == pytest.approx([2.0] * 3)
    other = [bench("peer_q", case, factor * ROOFS[case], baseline=True) for case, factor in enumerate((1.0, 4.0, 4.0))]
    a = rows(one(full("a", 1.0) + full("peer_p", 2.0, baseline=True) + other))["a"]
    assert a.baseline_ratio == pytest.approx(4 ** (1 / 3)) and a.baseline_cases == 3
    assert tables.times_baseline(a) == "1.59x"


def test_a_peer_that_failed_or_is_from_another_run_is_no_measure():
    wrong = [*full("peer_w", 0.5, baseline=True), line("test", "peer_w", status="INCORRECT", baseline=True)]
    other = full("peer_o", 0.5, baseline=True, run="r0", minute=0)
    records = [record | {"time": "2026-01-02T04:00:00Z"} for record in full("a", 1.0) + full("b", 1.1) + wrong]
    found = one(other + records)
    assert found.standing.baseline_ratio.isna().all() and found.times.baseline_ratio.isna().all()
    assert board.OTHER_RUN in rows(found)["peer_o"].notes
    right = full("a", 1.0) + full("peer_r", 2.0, baseline=True)
    assert rows(one(right))["a"].baseline_ratio == pytest.approx(2.0)
    assert one(right + wrong).standing.baseline_ratio.isna().all()  # peer_w may be the fastest


def test_baseline_that_serves_some_cases_measures_in_those_alone():
    says = {"status": "UNSUPPORTED", "reason": "serves l=1 or 8 alone", "baseline": True}
    gaps = [line("test", "peer_p", case=2, **says), line("benchmark", "peer_p", case=2, **says)]
    part = [*full("a", 1.0), *full("peer_p", 2.0, baseline=True)[:2], *gaps]
    found = one(part)
    a, baseline = rows(found)["a"], rows(found)["peer_p"]
    assert (baseline.status, baseline.done, baseline.notes) == ("PASSED", 2, ["serves l=1 or 8 alone"])
    assert ranks(found) == {"a": 1, "peer_p": None} and math.isnan(baseline.geomean_us)
    assert tables.times_baseline(a) == "2.00x in 2 of 3"
    ratios = list(found.times[found.times.variant == "a"].baseline_ratio)
    assert ratios[:2] == pytest.approx([2.0] * 2) and math.isnan(ratios[2])
    assert list(found.times[found.times.variant == "peer_p"].status) == ["PASSED", "PASSED", "UNSUPPORTED"]
    whole = rows(one(full("a", 1.0) + full("peer_p", 2.0, baseline=True) + gaps[:1]))  # of the tests alone
    assert whole["peer_p"].geomean_us > 0 and whole["a"].baseline_ratio == pytest.approx(2.0)
    wrong = line("test", "peer_p", case=1, status="INCORRECT", baseline=True)
    assert rows(one([*part, wrong]))["peer_p"].status == "INCORRECT"


def test_compiled_variant_is_not_run_and_a_later_compile_error_is_its_state():
    kernels = [{"name": "k1", "registers": 40, "spill_bytes": 0}, {"name": "k2", "registers": 64, "spill_bytes": 8}]
    compiled = line("compile", "b", case=None, status="COMPILED", resources=kernels)
    row = rows(one([*full("a", 1.1), compiled]))["b"]
    assert (row["rank"], row.status, row.notes) == (pd.NA, "COMPILED", ["compiled, not run"])
    assert (row.registers, row.spill_bytes) == (64, 8)
    found = one([compiled | {"resources": []}, line("test", "b", **LATER, case=None, status="UNSUPPORTED")])
    assert not found.timed and found.times.empty
    failed = line("compile", "a", run="r2", minute=5, case=None, status="COMPILE_ERROR", reason="no such instruction")
    found = one([*full("a", 1.1), failed])
    assert ranks(found) == {"a": None}
    assert (rows(found)["a"].status, rows(found)["a"].reason) == ("COMPILE_ERROR", "no such instruction")


COMPILED = line("compile", "b", status="COMPILED", resources=[], target="sm100", case=None)
RIGHT = [line("model", "b", status="MODEL_CHECKED", target="sm100", case=case) for case in (0, 1, 1)]
RACE = line("model", "b", status="RUNTIME_ERROR", reason="eager: a race", target="sm100", minute=1)
MENDED = line("model", "b", status="MODEL_CHECKED", target="sm100", minute=3)


@pytest.mark.parametrize(
    ("records", "status", "said"),
    [
        ([COMPILED, *RIGHT], "MODEL_CHECKED", "compiled, model-checked (2 test cases), never run"),
        (RIGHT, "MODEL_CHECKED", "model-checked (2 test cases), never run"),
        ([COMPILED, RACE], "RUNTIME_ERROR", "in the model, m=7168 k=16384 l=1: eager: a race"),
        ([COMPILED, RACE, MENDED], "MODEL_CHECKED", "compiled, model-checked (1 test case), never run"),
        ([COMPILED, MENDED | {"source_hash": "before"}], "COMPILED", "compiled, not run"),
    ],
)
def test_compiled_variant_has_the_state_of_the_model(records, status, said):
    (found,) = board.build(records, "box", {})
    row = rows(found)["b"]
    assert ranks(found) == {"b": None} and not found.timed
    assert (row.status, [*row.notes, row.reason][0]) == (status, said)


def test_model_says_nothing_of_what_has_run():
    wrong = line("model", "a", status="INCORRECT", minute=9)
    assert rows(one([*full("a", 1.1), wrong]))["a"].status == "PASSED"
    known = Provenance([line("test", "b", target="sm100"), MENDED])
    row = rows(board.build([COMPILED], "box", {}, known)[0])["b"]
    assert row.notes == ["compiled, model-checked (1 test case), not run here"]


def test_targets_and_problems_have_boards_of_their_own():
    kernels = [{"target": target, "registers": n, "spill_bytes": 0} for target, n in (("sm90", 40), ("sm100", 50))]
    boards = board.build([line("compile", "b", case=None, status="COMPILED", resources=kernels)], "box", {})
    assert {b.target: b.standing.iloc[0].registers for b in boards} == {"sm90": 40, "sm100": 50}
    boards = board.build(full("a", 1.1) + full("a", 9.0, target="cpu") + full("a", 2.0, problem="other"), "box", {})
    assert board.build([], "box", EXPECTED) == []
    assert [(b.problem, b.target) for b in boards] == [("nvfp4_gemv", "cpu"), ("nvfp4_gemv", "sm90"), ("other", "sm90")]
    assert all(b.standing.iloc[0]["rank"] == 1 for b in boards)


def test_oddities_of_the_run_and_of_its_cases_are_noted():
    found = one(full("a", 1.1, throttle=["hot"]) + full("b", 1.2, environment={"gpu": "another"}))
    assert any("environment changed" in note for note in found.notes)
    assert rows(found)["a"].notes == ["the GPU's clocks were throttled (hot)"] and rows(found)["b"].notes == []
    found = one([*full("a", 1.1), bench("a", 0, 5.0) | {"case": {"m": 1, "k": 64, "l": 1}}])
    assert any("m=1 k=64 l=1" in note for note in found.notes) and ranks(found) == {"a": 1}


CONFIRMS = {"variant": "a", "run_id": "r1", "source_hash": "abc", "paired": True}


def confirmed(factor: float, of_leader: float = 1.1, **more) -> list[dict]:
    """Run r2: `b` first seemed to take 0.9 times the measured roofline; its confirmation, in pairs with `a`, gave
    `factor`.
    """
    where = {"run": "r2", "minute": 9}
    ratio = factor / of_leader
    against = {"variant": "a", "ratio": ratio, "ci95": [ratio * 0.99, ratio * 1.01]}
    first = [record | {"superseded": True} for record in full("b", 0.9, **where)]
    second = full("b", factor, confirms=CONFIRMS | more, against=against, **where)
    return first + second + full("a", of_leader, **where)


FIELD = full("a", 1.1) + full("c", 1.5) + full("d", 2.0)


def test_a_confirmed_variant_takes_the_lead_without_displacing_the_field():
    found = one(FIELD + confirmed(1.0))
    assert list(ranks(found)) == ["b", "a", "c", "d"] and list(ranks(found).values()) == [1, 2, 3, 4]
    row = rows(found)["b"]
    assert found.run["run_id"] == "r1"
    assert row.geomean_us == pytest.approx(stats.geomean(ROOFS)) and row.run_id == "r2"
    assert "leads by its pairs with a: 0.9091 (" in row.notes[0]
    assert any(note.startswith("timed twice") for note in row.notes)


@pytest.mark.parametrize(
    ("records", "why"),
    [
        (confirmed(1.1), "no faster in the pairs"),
        (confirmed(1.0, paired=False), "not paired with the leader"),
        (confirmed(1.0, variant="c"), "paired with one who does not lead"),
        (confirmed(1.0)[:3], "nothing but the first measurement"),
        (confirmed(1.0)[:5] + confirmed(1.0)[6:], "a case of the confirmation is missing"),
        ([*confirmed(1.0), line("test", "b", run="r3", minute=10, status="INCORRECT")], "wrong since"),
    ],
)
def test_what_is_not_confirmed_does_not_lead(records, why):
    found = ranks(one(FIELD + records))
    assert list(found)[:3] == ["a", "c", "d"], why
    assert found == {"a": 1, "c": 2, "d": 3} | ({"b": None} if len(records) > 3 else {})


def test_each_confirmation_counts_against_who_leads_then():
    """b beats a, then a beats b, then c claims to have beaten a, who does lead; a newer field decides anew."""
    back = full("a", 0.9, run="r3", minute=10, confirms=CONFIRMS | {"variant": "b"}, against={"variant": "b"})
    back += full("b", 1.0, run="r3", minute=10)
    assert list(one(FIELD + confirmed(1.0) + back).standing.variant) == ["a", "b", "c", "d"]
    third = full("c", 0.8, run="r4", minute=11, confirms=CONFIRMS, against={"variant": "a"})
    third += full("a", 0.9, run="r4", minute=11)
    found = ranks(one(FIELD + confirmed(1.0) + back + third))
    assert list(found) == ["c", "a", "b", "d"] and list(found.values()) == [1, 2, 3, 4]
    newer = full("a", 1.1, run="r9", minute=30) + full("b", 1.2, run="r9", minute=30)
    found = ranks(one(FIELD + confirmed(1.0) + newer))
    assert (found["a"], found["b"]) == (1, 2)


@pytest.mark.parametrize(
    "records",
    [
        FIELD,
        FIELD + confirmed(1.0),
        FIELD + confirmed(1.1),
        [*FIELD, line("test", "a", run="r5", minute=20, status="INCORRECT", reason="wrong")],
        full("a", 1.1)[:2],
        [],
        FIELD + full("peer_p", 0.9, baseline=True),
        FIELD + full("e", 0.5, run="r6", minute=21),
        confirmed(1.0),
        full("a", 1.1) + full("a#2", 1.0),
    ],
)
def test_judge_and_board_agree_on_the_leader(records):
    chain = ranking.leaders(records, [board.case_label(case) for case in CASES])
    boards = [b for b in board.build(records, "box", EXPECTED) if b.target == "sm90"]
    first = boards[0].standing.iloc[0] if boards else None
    assert bool(chain) == (first is not None and first["rank"] is not pd.NA)
    if chain:
        told = (chain[-1].variant, chain[-1].run_id, chain[-1].value, chain[-1].lo, chain[-1].hi)
        assert told == (first.variant, first.run_id, first.geomean_us, first.lo_us, first.hi_us)


def test_attempts_are_the_runs_that_timed_it_and_no_fewer_than_a_record_says():
    again = full("a", 1.1, run="r2", minute=5, attempt=7)
    found = rows(one(full("a", 1.2) + again + full("b", 2.0) + [line("test", "c", run="r3")]))
    assert [found[name].attempts for name in "abc"] == [7, 1, 0]


def test_a_problem_that_ranks_by_the_mean_is_ranked_by_the_mean():
    """`a` is better by the geomean, `b` by the mean."""
    by = {"ranking_by": "mean"}
    a = [bench("a", case, us, **by) for case, us in enumerate((10.0, 100.0, 1.0))]
    b = [bench("b", case, us, **by) for case, us in enumerate((20.0, 50.0, 9.0))]
    found = one(a + b)
    assert found.metric == "mean" and list(found.standing.variant) == ["b", "a"]
    assert list(found.standing.geomean_us) == pytest.approx([79 / 3, 37.0])
    without = [{key: value for key, value in record.items() if key != "ranking_by"} for record in a + b]
    assert one(without).metric == "geomean" and list(one(without).standing.variant) == ["a", "b"]
