"""kill -9 of the judge at random moments: nothing written is lost, nothing is left behind, and the run goes on."""

import ctypes
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.problem import folders
from harness.results import record
from harness.sandbox import reaper
from tests.support import ADDS, ROOT, VECTOR_ADD, comes, copy_of

PR_SET_CHILD_SUBREAPER = 36
KILLS = 20
WHOLE_S = 20  # a guess at how long a run takes; one that is done before its kill says better
GONE_S = 20  # for everything that the killed judge had started to end, on a busy machine
FOUND = folders.find(str(VECTOR_ADD))
TESTS = len(FOUND.tests)
RECORDS = TESTS + len(FOUND.benchmarks["cpu"])  # of one run


@pytest.fixture(scope="module", autouse=True)
def subreaper():
    """What a killed judge leaves running becomes a child of this process, however it had detached itself."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    yield
    libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


class Place:
    """A problem, folders of our own for records, temporary files and locks, and how many processes time a case."""

    def __init__(self, folder: Path, processes: int) -> None:
        self.processes = processes
        self.folder = copy_of(VECTOR_ADD, folder / "vector_add", {"variants/good.py": ADDS})
        self.results, self.tmp, self.said = folder / "results", folder / "tmp", folder / "said"
        for part in (self.tmp, folder / "runtime"):
            part.mkdir()
        self.env = os.environ | {"TMPDIR": str(self.tmp), "XDG_RUNTIME_DIR": str(folder / "runtime")}

    def start(self, *more: str) -> subprocess.Popen:
        script = [sys.executable, "tests/support/short_run.py", str(self.results), str(self.processes)]
        options = ["--variant", "good"] if "--resume" not in more else []
        command = [*script, str(self.folder), "--device", "cpu", *options, *more]
        with open(self.said, "wb") as out:
            return subprocess.Popen(command, cwd=ROOT, env=self.env, stdout=out, stderr=subprocess.STDOUT)

    def finish(self, *more: str) -> str:
        """Run to the end. -> what it printed."""
        started = self.start(*more)
        started.wait(timeout=300)
        said = self.said.read_text()
        # What the kernel's verdict is on a busy machine is not the question here; that there is one is.
        assert started.returncode != 2 and started.returncode >= 0 and "Traceback" not in said, said
        return said

    def files(self) -> list[record.Contents]:
        """What the files of all runs hold."""
        names = [machine.name for machine in self.results.glob("*")]
        return [one for name in names for one in record.contents(name, "vector_add", self.results)]

    def bytes(self) -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in self.results.rglob("*.jsonl")}

    def unfinished(self) -> bool:
        return any(one.unfinished for one in self.files())

    def left_behind(self) -> list[str]:
        """Workdir folders."""
        return sorted(path.name for path in self.tmp.iterdir())


def children() -> set[int]:
    """What lives below this process."""
    return {*reaper.descendants(os.getpid())}


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return "(gone)"


def assert_nothing_left(place: Place, mine: set[int], when: str) -> None:
    """No process but `mine` and no private folder, within a moment."""
    comes(lambda: children() == mine and not place.left_behind(), GONE_S)
    assert [command(pid) for pid in children() - mine] == [], when
    assert place.left_behind() == [], when


@pytest.mark.slow
def test_kills_at_random_moments(tmp_path):
    """After each of many kills what was written is still there, and the next process resumes the run."""
    place = Place(tmp_path, 2)
    mine, whole_s, done = children(), WHOLE_S, 0
    while done < KILLS:
        anew, started = not place.unfinished(), time.monotonic()
        judge = place.start(*([] if anew else ["--resume"]))
        delay_s = random.uniform(0, whole_s)
        try:
            judge.wait(timeout=delay_s)
            assert judge.returncode != 2, place.said.read_text()
            # A resumed run has less to do, and the machine may be less busy than at first.
            whole_s = min(whole_s, time.monotonic() - started) if anew else whole_s
            continue
        except subprocess.TimeoutExpired:
            pass
        written = place.bytes()
        judge.send_signal(signal.SIGKILL)
        judge.wait()
        done += 1
        when = f"kill {done}, after {delay_s:.2f} of {whole_s:.1f} s"

        assert_nothing_left(place, mine, when)
        now = place.bytes()
        assert all(now[path].startswith(before[: before.rfind(b"\n") + 1]) for path, before in written.items()), when
    while place.unfinished():
        place.finish("--resume")
    said = place.finish()
    assert "waiting for" not in said
    assert_nothing_left(place, mine, "at the end")
    for run in place.files():
        assert run.complaints == [] and len(run.records) == RECORDS
        outcomes = [(line["submission"], line["case"]) for line in run.work if line["kind"] == "outcome"]
        groups = [(line["process"], line["case"]) for line in run.work if line["kind"] == "group"]
        assert len(set(outcomes)) == len(outcomes) and len(set(groups)) == len(groups), "done twice"
        timed = [one for one in run.records if one["kind"] == "benchmark"]
        assert all([len(group) for group in one["samples_us"]] == [2] * place.processes for one in timed)


def test_a_kill_during_the_calls_keeps_what_was_done(tmp_path):
    """The short form, not at random: as soon as a group of timed calls is on disk. It must not be timed again."""
    place, mine = Place(tmp_path, 2), children()
    judge = place.start()
    timed = comes(lambda: judge.poll() is not None or any(b'"group"' in text for text in place.bytes().values()), 120)
    assert timed and judge.poll() is None, place.said.read_text()
    judge.kill()
    judge.wait()
    assert_nothing_left(place, mine, "after the kill")
    (cut,) = place.files()
    groups = [line for line in cut.work if line["kind"] == "group"]
    said = place.finish("--resume")
    assert f"{TESTS} test outcomes and {len(groups)} groups of calls are known" in said
    (run,) = place.files()
    assert run.ended and run.work[: len(cut.work)] == cut.work and len(run.records) == RECORDS
    assert "waiting for" not in said and run.complaints == []
    assert_nothing_left(place, mine, "at the end")
    # A group has the clock's readings; the record has them less what the clock itself costs.
    timed = [one for one in run.records if one["kind"] == "benchmark"][groups[0]["case"]]
    known = [call["us"] - timed["empty_call_us"] for call in groups[0]["outcomes"]["good"]]
    assert any(group == pytest.approx(known, abs=1e-3) for group in timed["samples_us"])
