"""Verdicts: their words, exit codes, and the records that they become."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from dataclasses import dataclass, field

from harness.judge import session
from harness.judge.invariance import Bits
from harness.judge.outcome import Outcome
from harness.judge.readings import ReferenceReadings, Timing, ratios, sol_us
from harness.problem import sources
from harness.problem.folders import Case, Problem, Submission, reading
from harness.results import environment, hashes, ranking, record, schema, stats, text
from harness.results.status import EXIT_CODES, STATUSES
from harness.sandbox import policy, process

SELF_TIMED = "events in the submission's process"  # the clock of what cannot be recorded
REGRESSION_EXIT = 8  # of --fail-on-regression, where no verdict has another code


@dataclass(frozen=True)
class CaseTime:
    """A case that was timed and found valid, or `failure`. Times in us."""

    case: Case
    timing: Timing
    readings: ReferenceReadings
    failure: Outcome | None = None
    median: float = float("nan")
    interval: tuple[float, float] = (float("nan"), float("nan"))


def roofline_share(cases: list[CaseTime]) -> float | None:
    """Return the geomean of roofline over time; None where a roofline is too short for the clock to resolve."""
    if any(t.readings.unresolved for t in cases):
        return None
    return stats.geomean([t.readings.roofline_us / t.median for t in cases])


@dataclass
class Result:
    """All that came out for one submission. reason: of a verdict on it as a whole. source_hash: of its closure when it
    was chosen. ranking_by: the problem's. attempt: how many runs timed a variant of this name here, this one included;
    None for a run that does not count. confirms: of times that confirm a first place, the leader then. before: the
    submission at each earlier, superseded measurement of this run. audit, bits: as in the record.
    remark: what the verdict PASSED does not show, in words.
    """

    submission: Submission
    target: str
    status: str = ""
    reason: str = ""
    tests: list[tuple[Case, Outcome]] = field(default_factory=list)
    times: list[CaseTime] = field(default_factory=list)
    artefacts: list[dict] = field(default_factory=list)
    # By case {variant, ratio, ci95}; None: one of the two does not serve it.
    against: list[dict | None] = field(default_factory=list)
    against_all: dict | None = None  # the geomean over the cases that have a ratio
    source_hash: str = ""
    ranking_by: str = "geom"
    attempt: int | None = None
    confirms: dict | None = None  # {variant, run_id, source_hash, paired}
    before: list[Result] = field(default_factory=list)
    audit: dict | None = None
    bits: Bits | None = None
    remark: str = ""

    def __post_init__(self) -> None:
        self.source_hash = self.source_hash or source_hash(self.submission)

    @property
    def right(self) -> bool:
        """Whether it passed every test case that it was called on."""
        return all(outcome.status in ("PASSED", "UNSUPPORTED") for _, outcome in self.tests)

    @property
    def verdict(self) -> str:
        tests = [o.status for _, o in self.tests]
        times = [t.failure.status if t.failure else "PASSED" for t in self.times]
        # Single cases that are not served say nothing about the others, but without any that is timed nothing passed.
        ignored = {"UNSUPPORTED"} if set(times) != {"UNSUPPORTED"} else {"UNSUPPORTED", "PASSED"}
        statuses = [status for status in tests + times if status not in ignored] + [self.status] * bool(self.status)
        return min(statuses, key=STATUSES.index) if statuses else "UNSUPPORTED"

    @property
    def busy(self) -> str:
        """Why the times are not to be relied on: most calls waited for a processor; "" if they did not."""
        calls = [call for t in self.times for group in t.timing.outcomes for call in group]
        waited = sum(call.busy for call in calls)
        return f"{_waited(waited, len(calls))}: run again when the machine is idle" if 2 * waited > len(calls) else ""

    @property
    def word(self) -> str:
        """The verdict as a run prints it: BUSY in place of PASSED where the machine was, which no status says."""
        return "BUSY" if self.busy and self.verdict == "PASSED" else self.verdict

    @property
    def metric(self) -> tuple[float, float, float] | None:
        """(what the problem ranks by, lo, hi) in us over all benchmark cases; None unless every one was timed."""
        if not self.times or any(t.failure for t in self.times):
            return None
        lo, hi = ranking.interval(self.ranking_by, [t.timing.samples for t in self.times])
        return ranking.metric(self.ranking_by, [t.median for t in self.times]), lo, hi


def source_hash(submission: Submission) -> str:
    """Of the submission, what it is made of and what it uses of problems/common, as it is now."""
    return sources.source_hash(submission.file, submission.folder)


def exit_code(verdicts: list[str], everything: bool) -> int:
    """Of one verdict its code; for --all that of the gravest, other machines' aside. BUSY times are no measurement."""
    verdicts = ["INVALID_MEASUREMENT" if v == "BUSY" else v for v in verdicts]
    if everything:
        verdicts = [v for v in verdicts if v != "UNSUPPORTED"] or ["UNSUPPORTED"]
    return EXIT_CODES[min(verdicts, key=STATUSES.index)]


def aggregate(timing: Timing, readings: ReferenceReadings) -> CaseTime:
    """The time of a case, or why it has none."""
    if timing.failure:
        return CaseTime(timing.case, timing, readings, timing.failure)
    median = timing.median_us
    sol = sol_us(timing.case, readings, environment.describe()["gpu"])
    if not median > sol:
        text = f"median {median:.3f} us is under the physical floor of {sol:.3f} us"
        return CaseTime(timing.case, timing, readings, Outcome("INVALID_MEASUREMENT", text))
    return CaseTime(timing.case, timing, readings, None, median, stats.mean_interval([timing.samples]))


def pair(first: Result, second: Result) -> None:
    """Give `first` the ratios of its times to the second's, in the cases that both serve; none where one failed."""
    if any(t.failure and t.failure.status != "UNSUPPORTED" for j in (first, second) for t in j.times):
        return
    both = zip(first.times, second.times, strict=True)
    cases = [None if a.failure or b.failure else ratios(a.timing, b.timing) for a, b in both]
    if served := [case for case in cases if case]:
        first.against = [_against(second, stats.compare([case])) if case else None for case in cases]
        first.against_all = _against(second, stats.compare(served))


def regressions(j: Result, percent: float) -> list[str]:
    """Return where `j` is slower than its opponent by more than `percent` %, in words: cases, and all together."""
    cases = [(str(t.case), pair) for t, pair in zip(j.times, j.against, strict=True)] if j.against else []
    slower = []
    for name, pair in [*cases, ("all cases together", j.against_all)]:
        if pair and stats.Ratio(pair["ratio"], pair["ci95"], pair["ci99"], pair["processes"]).regressed(percent):
            lo, hi = pair["ci99"]
            slower.append(f"{name}: {pair['ratio']:.4f} of the time of {pair['variant']} (99 %: {lo:.4f}..{hi:.4f})")
    return slower


def _against(other: Result, ratio: stats.Ratio) -> dict:
    """Return `against` of a record."""
    fields = {"variant": other.submission.name, **dataclasses.asdict(ratio), "word": ratio.word()}
    fields["same_within"] = stats.SAME_WITHIN
    return fields


class Recorder:
    """Makes the records of one run, and the first line of its file. warnings: limits of all its times, in words."""

    def __init__(self, problem: Problem, device: str, run_id: str | None = None) -> None:
        self.problem, self.device = problem, device
        self.run_id = run_id or record.new_run_id()
        self.warnings: list[str] = []
        self.sandbox = policy.probe()
        self._code_hashes: dict[tuple[str, str], str | None] = {}

    def run(
        self, machine: str, target: str, options: dict, judged: list[Result], tests: list[Case], benchmarks: list[Case]
    ) -> dict:
        """Return the first line of the run's file. options: as resume.options gives them."""
        line = {
            "kind": "run",
            "time": record.now(),
            **self._shared(),
            "machine": machine,
            "target": target,
            "arguments": options,
            "submissions": [self._of(j) for j in judged],
            "tests": [dataclasses.asdict(case) for case in tests],
            "benchmarks": [dataclasses.asdict(case) for case in benchmarks],
            "clock": self.clock(),
        }
        self._code_hashes.clear()  # what has none yet is built in the run
        if part := options.get("shard"):
            number, of = map(int, part.split("/"))
            alike = [of, line["problem_hash"], line["harness_hash"], line["commit"], line["dirty"]]
            alike += [(j.submission.name, j.source_hash) for j in judged]
            alike += [(name, value) for name, value in options.items() if name != "shard"]
            digest = hashlib.sha256(json.dumps(alike).encode()).hexdigest()
            line["shard"] = {"part": number, "of": of, "set": digest[:8]}
        return line

    @functools.cached_property
    def problem_hash(self) -> str:
        with reading(self.problem.name):
            return sources.problem_hash(self.problem.folder, self.problem.files.values())

    def _code_hash(self, judged: Result) -> str | None:
        """Of the GPU code that the compile step left, which is what the runners start from; None: there is none."""
        key = (judged.source_hash, judged.target)
        if key not in self._code_hashes:
            self._code_hashes[key] = session.code_hash(self.problem, judged.submission.file, judged.target)
        return self._code_hashes[key]

    def lines(self, judged: Result) -> list[dict]:
        """The records of `judged`, as plain JSON: of its cases, superseded times first, and of a verdict on it all."""
        lines = [self.of_call(judged, "test", case, call) | {"error": call.error} for case, call in judged.tests]
        for earlier in judged.before:
            lines += [self._benchmark(earlier, i) | {"superseded": True} for i in range(len(earlier.times))]
        lines += [self._benchmark(judged, i) for i in range(len(judged.times))]
        if judged.status:  # a verdict on the whole submission: a rule broken, unsupported here, compiled
            kind = "compile" if judged.artefacts or judged.status in ("COMPILED", "COMPILE_ERROR") else "test"
            line = self.base(judged, kind, {}) | {"status": judged.status, "reason": judged.reason}
            lines.append(line | ({"resources": judged.artefacts} if kind == "compile" else {}))
        return [text.plain(schema.known(line)) for line in lines]

    def base(self, judged: Result, kind: str, case: dict) -> dict:
        """Return the fields that every record has, but for the verdict."""
        return {**self._shared(), "time": record.now(), "kind": kind, "case": case, **self._of(judged)}

    def _shared(self) -> dict:
        commit, dirty = environment.commit()
        return {
            "schema": schema.SCHEMA,
            "run_id": self.run_id,
            "problem": self.problem.name,
            "device": self.device,
            "environment": environment.describe(),
            "commit": commit,
            "dirty": dirty,
            "problem_hash": self.problem_hash,
            "harness_hash": hashes.harness_hash(),
            "sandbox": self.sandbox,
        }

    def _of(self, judged: Result) -> dict:
        return {
            "variant": judged.submission.name,
            "target": judged.target,
            "baseline": judged.submission.baseline,
            "source_hash": judged.source_hash,
            "code_hash": self._code_hash(judged),
        }

    def of_call(self, judged: Result, kind: str, case: Case, outcome: Outcome) -> dict:
        """Return the record of a call whose contents have the case's own seed."""
        reason = judged.remark if outcome.status == "PASSED" else outcome.reason
        fields = {"status": outcome.status, "reason": reason, "seeds": [str(case.seed)]}
        return self.base(judged, kind, case.params) | fields

    def _benchmark(self, judged: Result, index: int) -> dict:
        time = judged.times[index]
        timing, readings = time.timing, time.readings
        line = {
            **self.base(judged, "benchmark", time.case.params),
            "status": time.failure.status if time.failure else "PASSED",
            "reason": time.failure.reason if time.failure else judged.remark,
            "roofline_us": readings.roofline_us,
            "roofline_kind": readings.roofline_kind,
            "roofline_config": readings.roofline_config,
            "empty_call_us": readings.empty_us,
            "bytes": readings.bytes,
            "flops": time.case.flops,
            "seeds": readings.seeds,
            **readings.state._asdict(),
            "error": timing.worst_error,
            "clock": self.clock(bool(timing.self_timed)) | {"warnings": self.warnings_of(time)},
            "ranking_by": judged.ranking_by,
            "attempt": judged.attempt,
            "audit": judged.audit,
            "bits": judged.bits.record() if judged.bits else None,
        }
        if judged.confirms:
            line["confirms"] = judged.confirms
        if timing.samples:  # of a failed case too: they are the evidence
            line |= {
                "n": len(timing.flat("us")),
                "samples_us": [[round(us, 4) for us in group] for group in timing.samples],
                "host_us": stats.median(host) if (host := timing.flat("host_us")) else None,
            }
        if time.failure is None:
            line |= {"median_us": time.median, "ci95_us": list(time.interval)}
        if judged.against and judged.against[index]:
            line["against"] = judged.against[index]
        return line

    def clock(self, self_timed: bool = False) -> dict:
        """Return how times are taken. self_timed: in the submission's process."""
        if self_timed or self.device == "cpu":
            return {"name": SELF_TIMED if self_timed else process.CLOCK}
        from harness.player import player  # no run on a CPU needs it

        return {"name": player.CLOCK}

    def warnings_of(self, time: CaseTime) -> list[str]:
        """Return the limits of the times of a case, in words."""
        timing, resolution_us, warnings = time.timing, time.readings.resolution_us, list(self.warnings)
        if timing.self_timed:
            warnings.append(f"self-timed: not protected against forging ({timing.self_timed})")
        if self.device == "cuda" and environment.gpu_state().clocks_mhz is None:
            warnings.append("no NVML: clocks and throttle reasons unknown")
        if busy := int(sum(timing.flat("busy"))):
            warnings.append(f"machine busy: {_waited(busy, len(timing.flat('us')))}")
        if time.readings.unresolved:
            warnings.append(f"roofline below the clock's resolution, {resolution_us:.1f} us")
        if under := sum(us <= resolution_us for us in timing.flat("us")):
            warnings.append(f"{under} calls read less than the clock resolves, {resolution_us:.1f} us")
        return warnings


def _waited(busy: int, calls: int) -> str:
    return f"{busy} of {calls} calls waited for a processor"
