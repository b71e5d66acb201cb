"""No reply of a runner ends a run, touches another submission, or leaves a record that cannot be read.

The judge is the real one, on fake runners (tests/support/fake_runner.py): some hostile submissions and an honest one
in one session, from the first request to the tables of the leaderboard. Then a few with real processes.
"""

import argparse
import contextlib
import dataclasses
import gc
import io
import os
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from harness.judge import console, phases, replies, work
from harness.judge.events import Events
from harness.judge.handle import RunnerHandle
from harness.judge.judging import Judging
from harness.judge.outcome import Outcome
from harness.judge.session import Session
from harness.judge.verdict import Recorder, Result
from harness.problem import folders
from harness.problem.folders import Case, Problem, Submission
from harness.results import record
from harness.results.run_file import RunFile
from harness.runner import flush
from harness.tools import modes
from leaderboard import pages
from tests.support import SUPPORT, fake_runner
from tests.support.scripted import BROKEN, HARMLESS, OTHERS, SILENT, Script

FOLDERS = {
    "vector_add": SUPPORT / "problems" / "vector_add",
    "linear": SUPPORT / "problems" / "linear",
    "vectoradd": SUPPORT / "gpu_mode" / "vectoradd",
}
# Small ones: what is fuzzed is the judge, not the kernels.
CASES = {
    "vector_add": [{"n": 5}, {"n": 64}],
    "linear": [{"m": 4, "k": 4}, {"m": 3, "k": 8}],
    "vectoradd": [{"sizes": [3, 4], "scale": 1}, {"sizes": [5, 2, 9], "scale": 2}],
}
ASKED = {
    "vector_add": ("start", "open", "ready", "call", "compile", "profile"),
    "linear": ("start", "open", "hold", "trim", "ready", "call"),
    "vectoradd": ("ready", "call"),
    "gpu": (
        "start",
        "open",
        "hold",
        "trim",
        "warm",
        "ready",
        "call",
        "enqueued",
        "batch",
        "sealed",
        "compile",
        "profile",
    ),
}
HOSTILE = 16  # submissions in a run
SHORT, LONG = 100, 10_000  # replies
RENDERED = 40  # runs whose records one board shows
MEMORY = Path("/dev/shm")
REASON = replies.TEXT_LIMIT + 1_000  # characters
WORDS = {
    "PASSED",
    "RUNTIME_ERROR",
    "TIMEOUT",
    "INCORRECT",
    "COMPILE_ERROR",
    "CHEAT_SUSPECTED",
    "RULE_BROKEN",
    "INVALID_MEASUREMENT",
}

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-2, 300)
    | st.integers(-(10**30), 10**30)
    | st.floats()
    | st.sampled_from(["Tensor", "call", "\ud800", "\x1b[2J|<b>", "float16", "a\nb", "x" * 300])
    | st.sampled_from([2**63, 2**48, -0.0, 1e13])
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["us", "claims", "failed", "ready", "x", "replaced", "\x1b"]), inner, max_size=4
        )
    ),
    max_leaves=6,
)


@st.composite
def scripts(draw: st.DrawFn, at: tuple[str, ...]) -> Script:
    """What one submission's runner does. Those that cost their time limit are rare."""
    way = draw(st.sampled_from([*(way for way in BROKEN if way not in SILENT), *HARMLESS, *OTHERS * 3]))
    if draw(st.integers(0, 99)) == 99:
        way = draw(st.sampled_from(SILENT))
    return Script(
        draw(st.sampled_from(at)),
        draw(st.sampled_from((0, 0, 0, 1, 2, 4))),
        way,
        draw(VALUES) if way in OTHERS else None,
        tuple(draw(st.lists(st.integers(0, 40), min_size=1, max_size=2))),
        draw(st.binary(min_size=1, max_size=60)),
        draw(st.integers(0, 2**32)),
        draw(st.integers(0, 3)) > 0,
    )


def small(name: str) -> Problem:
    """The problem with small cases."""
    found = folders.find(str(FOLDERS[name]))
    cases = tuple(Case(params, 7 + i, bytes=1000) for i, params in enumerate(CASES[name]))
    return dataclasses.replace(found, tests=cases, benchmarks={"cpu": cases[1:], "cuda": cases[1:]})


class Fuzz:
    """Runs of the judge with hostile submissions, and what is known of them. folder: for submissions and records."""

    def __init__(self, device: str, name: str, folder: Path) -> None:
        self.device, self.problem, self.folder = device, small(name), folder
        self.kind = "gpu" if device == "cuda" else name
        self.runs, self.sent, self.read = 0, 0, 0
        self.verdicts: Counter[str] = Counter()
        self.submissions: dict[str, Submission] = {}
        self.results = folder / "results"
        for number in range(HOSTILE):
            self._file(f"hostile{number}", "compile_for" if number % 3 == 0 else "custom_kernel")
        self._file("honest", "custom_kernel")

    def _file(self, name: str, defines: str) -> None:
        file = self.folder / f"{name}.py"
        file.write_text(f"def {defines}(data):\n    pass\n")
        self.submissions[name] = folders.submission(self.problem, file)

    @property
    def machine(self) -> str:
        return f"box{self.runs // RENDERED}"

    def run(self, made: list[Script]) -> None:
        """One run with these scripts, and all that must be true of it."""
        fake_runner.BROKE.clear()
        fake_runner.SCRIPTS.clear()
        fake_runner.SCRIPTS.update({f"hostile{i}": script for i, script in enumerate(made)})
        judged = [self._judged(name) for name in (*fake_runner.SCRIPTS, "honest")]
        recorder = Recorder(self.problem, self.device)
        cases = [*self.problem.tests], [*self.problem.benchmarks[self.device]]
        held = RunFile.begin(recorder.run(self.machine, "cpu", {}, judged, *cases))
        with contextlib.redirect_stdout(io.StringIO()):
            self._judging(recorder, held).run(judged, list(self.problem.tests), self.problem.benchmarks[self.device])
            self._profile(made, judged)
        assert not fake_runner.BROKE
        *hostile, honest = judged
        assert honest.verdict == "PASSED" and honest.metric, reasons(honest)
        for script, one in zip(made, hostile, strict=True):
            self._check(script, one)
        self._record(recorder, judged, held)
        self.runs += 1
        self.sent += sum(script.did for script in made)
        self.read += sum(min(script.did, script.read) for script in made)

    def _judging(self, recorder: Recorder, held: RunFile) -> Judging:
        args = argparse.Namespace(
            mode="leaderboard",
            timeout=None,
            against=None,
            all=True,
            processes=None,
            same_within=1.5,
            seed=None,
            shard=None,
        )
        return Judging(self.problem, self.device, "cpu", args, recorder, held, lambda _: None, Events(None))

    def _judged(self, name: str) -> Result:
        return Result(self.submissions[name], "cpu", source_hash="abc")

    def _profile(self, made: list[Script], judged: list[Result]) -> None:
        for script, one in zip(made, judged, strict=False):
            if script.at == "profile":
                script.seen.clear()
                verdict = (
                    modes.profile(self.problem, self.device, "cpu", one.submission, list(self.problem.tests[:1]), None)
                    if self.device == "cpu"
                    else self._profiled(one)
                )
                assert verdict in WORDS and not (broken(script) and verdict == "PASSED"), script

    def _profiled(self, one: Result) -> str:
        """As modes.profile, less what needs a GPU's tools."""
        with Session(self.problem, "cuda") as running:
            running.weights(self.problem.tests[0])
            running.content(self.problem.tests[0])
            handle, message = RunnerHandle("p", one.submission, "cpu"), {"op": "profile", "baseline": False}
            found = running.ask_runner(handle, replies.Profiled, message, 5, buffers=1)
            return getattr(found, "status", "PASSED")

    def _check(self, script: Script, got: Result) -> None:
        """The verdict is one, and right as far as the script says; its reasons can be shown."""
        said = reasons(got)
        assert len(got.tests) == len(self.problem.tests), "every case gets its outcome"
        assert got.verdict in WORDS, (script, got.verdict)
        assert all(clean(reason) for reason in said), (script, said)
        assert got.verdict == "PASSED" or any(said), (script, "a verdict has a reason")
        if script.at != "profile":
            assert not (broken(script) and got.verdict == "PASSED"), (script, said)
        if self.device == "cpu" and not script.computes:
            assert got.verdict != "PASSED", (script, "outputs are wrong, whatever the runner says")
        if (not script.did or script.way in HARMLESS) and (script.computes or self.device == "cuda"):
            assert got.verdict == "PASSED" or (got.verdict == "TIMEOUT" and script.way not in HARMLESS), (script, said)
        self.verdicts[got.verdict] += 1

    def _record(self, recorder: Recorder, judged: list[Result], held: RunFile) -> None:
        """The records are written and read again, and so is the work."""
        records = [line for one in judged for line in recorder.lines(one)]
        known, path = repr(work.finished(held.contents.work)), held.contents.path
        held.close()
        again = RunFile.reopen(path, work.check)
        assert repr(work.finished(again.contents.work)) == known and not again.contents.complaints
        again.finish(records, 0)
        found = record.contents_of(path, self.results)
        assert not found.complaints and found.records == records

    def render(self) -> None:
        """The leaderboard shows every record, as text that moves no cursor."""
        machines = sorted(path.name for path in self.results.glob("box*"))
        foreign = [] if self.problem.own else [self.problem.name]  # on no board unless it is named
        shown = pages.read(self.results, machines, foreign)
        assert shown.boards and not shown.complaints
        screen = io.StringIO()
        pages.terminal(shown, Console(file=screen, width=200))
        for said in (pages.markdown(shown), screen.getvalue()):
            assert "honest" in said and clean(said, len(said))


def broken(script: Script) -> bool:
    return script.did > 0 and script.way in BROKEN


def reasons(judged: Result) -> list[str]:
    failures = [*(outcome for _, outcome in judged.tests), *filter(None, (time.failure for time in judged.times))]
    return [*filter(None, [judged.reason, *(failure.reason for failure in failures)])]


def clean(said: str, limit: int = REASON) -> bool:
    return len(said) <= limit and said.replace("\n", "").replace("\t", "").isprintable()


def descriptors() -> int:
    """How many are open here. A mapping holds one until it is collected."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def folder(tmp_path):
    """-> a folder in memory, where there is such: a run makes and removes many files."""
    with tempfile.TemporaryDirectory(dir=MEMORY if os.access(MEMORY, os.W_OK) else tmp_path) as made:
        yield Path(made)


@pytest.fixture
def fakes(monkeypatch, folder):
    """-> a maker of Fuzz(device, problem), all fakes in place."""
    monkeypatch.setattr(record, "RESULTS", folder / "results")
    monkeypatch.setattr(console, "console", Console(file=io.StringIO(), width=160))

    def make(device: str, name: str) -> Fuzz:
        fake_runner.install(monkeypatch, device)
        return Fuzz(device, name, folder)

    with fake_runner.idle_process() as pid:
        monkeypatch.setattr(fake_runner.FakeChild, "guard_pid", pid)
        yield make


def fuzz(made: Fuzz, wanted: int) -> None:
    """Runs until at least so many hostile replies were sent, and the judge had read what came of them."""
    before = descriptors()

    @settings(max_examples=wanted // 4 + 2, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(scripts(ASKED[made.kind]), min_size=HOSTILE, max_size=HOSTILE))
    def one_run(drawn: list[Script]) -> None:
        if made.read < wanted:
            made.run([dataclasses.replace(script, seen=Counter()) for script in drawn])

    one_run()
    made.render()
    print(f"{made.kind}: {made.runs} runs, {made.sent} replies sent, {made.read} read, {dict(made.verdicts)}")
    assert made.read >= wanted
    assert descriptors() <= before + 2, "descriptors that came with replies are closed"


KINDS = [("cpu", "vector_add"), ("cpu", "linear"), ("cpu", "vectoradd"), ("cuda", "linear")]


@pytest.mark.parametrize(("device", "name"), KINDS[2:])
def test_hostile_replies(fakes, device, name):
    fuzz(fakes(device, name), SHORT // len(KINDS))


@pytest.mark.slow
@pytest.mark.parametrize(("device", "name"), KINDS)
def test_ten_thousand_hostile_replies(fakes, device, name):
    fuzz(fakes(device, name), LONG // len(KINDS))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_one_that_is_lost_while_its_memory_is_first_measured_is_not_run_again(fakes, device):
    """What its next process keeps of the weights would not be counted."""
    made = fakes(device, "linear")
    made.run([Script("trim", 0, "closes")])
    assert made.verdicts == {"RUNTIME_ERROR": 1}


# With real processes.

HONEST = """
import torch


def custom_kernel(data):
    torch.add(data.x, data.y, out=data.z)
    return data.z
"""
LATER = f"import time\ntime.sleep(2)\n{HONEST}"
PATCHES_SEND = """
import sys
import torch
wire = sys.modules["harness.runner.wire"]
send = wire.send


def custom_kernel(data):
    torch.add(data.x, data.y, out=data.z)
    wire.send = lambda sock, message, fds=(): send(sock, {"claims": [{"type": 7, "shape": "\\x1b[2J" * 1000}] * 9})
    return data.z
"""
# Its process is gone when the judge turns to it: the submission before it is still being imported.
LEAVES = f"""
import os, sys
wire = sys.modules["harness.runner.wire"]
send = wire.send


def leave(*message):
    send(*message)
    os._exit(0)


wire.send = leave
{HONEST}
"""
DIES_OF_A_SIGNAL_WITHOUT_A_NAME = """
import os


def custom_kernel(data):
    os.kill(os.getpid(), 40)
"""
FALSE_SHAPE = """
import sys
import torch


def custom_kernel(data):
    a, b, scale = data
    form = {"type": "Tensor", "dtype": "float32", "shape": [2**48] * 4, "stride": [0] * 4, "device": "cpu"}
    sys.modules["harness.runner.claims"].form = lambda *_: form
    return scale * (torch.cat(a) + torch.cat(b))
"""
HONEST_LISTS = """
import torch


def custom_kernel(data):
    a, b, scale = data
    return scale * (torch.cat(a) + torch.cat(b))
"""


def on_tests(folder: Path, name: str, sources: dict[str, str]) -> dict[str, list[Outcome]]:
    """What real processes of these submissions get on two test cases, by name."""
    found = folders.find(str(FOLDERS[name]))
    handles = []
    for stem, source in sources.items():
        (folder / f"{stem}.py").write_text(source)
        handles.append(RunnerHandle(stem, folders.submission(found, folder / f"{stem}.py"), "cpu"))
    with Session(found, "cpu") as running:
        return phases.run_tests(running, handles, list(found.tests[:2]), lambda *_: None, lambda _: None)


def test_real_runners_that_break_their_word(tmp_path, monkeypatch):
    monkeypatch.setattr(flush, "nbytes", lambda: 2**20)
    sources = {
        "later": LATER,
        "leaves": LEAVES,
        "patches": PATCHES_SEND,
        "signal": DIES_OF_A_SIGNAL_WITHOUT_A_NAME,
    }
    got = on_tests(tmp_path, "vector_add", sources)
    assert {name: {o.status for o in outcomes} for name, outcomes in got.items()} == {
        "later": {"PASSED"},
        "leaves": {"RUNTIME_ERROR"},
        "patches": {"RUNTIME_ERROR"},
        "signal": {"RUNTIME_ERROR"},
    }
    assert "exited with status 0" in got["leaves"][0].reason
    assert "malformed reply" in got["patches"][0].reason and clean(got["patches"][0].reason, 2_500)
    assert "killed by signal 40" in got["signal"][0].reason


def test_a_false_shape_of_a_real_runner_is_incorrect(tmp_path, monkeypatch):
    monkeypatch.setattr(flush, "nbytes", lambda: 2**20)
    got = on_tests(tmp_path, "vectoradd", {"false_shape": FALSE_SHAPE, "honest": HONEST_LISTS})
    assert {o.status for o in got["false_shape"]} == {"INCORRECT"}
    assert "got float32 (281474976710656, " in got["false_shape"][0].reason
    assert {o.status for o in got["honest"]} == {"PASSED"}
