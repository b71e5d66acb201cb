"""kill -9 of the judge at random moments: no record is lost, nothing is left behind, and the run goes on from there."""

import ctypes
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.problem import folders
from harness.results import record
from tests.support import ROOT

PR_SET_CHILD_SUBREAPER = 36
WHOLE_S = 20  # a guess at how long a run takes; one that is done before its kill says better
GONE_S = 20  # for everything that the killed judge had started to end, on a busy machine
VARIANT = '''"""good: one torch call."""
import torch

TARGETS = ("cpu",)


def custom_kernel(data):
    torch.add(data.x, data.y, out=data.z)
    return data.z
'''
PROBLEM = ROOT / "tests" / "support" / "problems" / "vector_add"
TESTS = len(folders.find(str(PROBLEM)).tests)
RECORDS = TESTS + len(folders.find(str(PROBLEM)).benchmarks["cpu"])  # of one run


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
        self.folder, self.results, self.tmp = folder / "vector_add", folder / "results", folder / "tmp"
        for part in (self.folder / "variants", self.tmp, folder / "runtime"):
            part.mkdir(parents=True)
        for name in ("task.py", "reference.py"):
            shutil.copy(PROBLEM / name, self.folder)
        (self.folder / "variants" / "good.py").write_text(VARIANT)
        self.said = folder / "said"
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

    def truth(self) -> bytes:
        return b"".join(path.read_bytes() for path in self.results.glob("*/vector_add.jsonl"))

    def journals(self) -> dict[Path, bytes]:
        found = {}
        for path in self.results.glob("*/*.partial.jsonl"):
            try:
                found[path] = path.read_bytes()
            except FileNotFoundError:
                continue  # it has just been finished
        return found

    def left_behind(self) -> list[str]:
        """Workdir folders."""
        return sorted(path.name for path in self.tmp.iterdir())


def children() -> set[int]:
    """Living children of this process."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        found |= {int(pid) for pid in (task / "children").read_text().split()}
    return {pid for pid in found if not _ended(pid)}


def _ended(pid: int) -> bool:
    """Whether the child is gone; one that has ended is reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z" and os.waitpid(pid, 0)[0] > 0
    except (FileNotFoundError, ProcessLookupError, ChildProcessError):
        return True


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return "(gone)"


def assert_nothing_left(place: Place, mine: set[int], when: str) -> None:
    """No process but `mine` and no private folder, within a moment."""
    deadline = time.monotonic() + GONE_S
    while (children() != mine or place.left_behind()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [command(pid) for pid in children() - mine] == [], when
    assert place.left_behind() == [], when


def kill_at_random(place: Place, kills: int) -> None:
    """As many kills; after each, everything is checked that can be, and the next process resumes the run."""
    mine, whole_s, done = children(), WHOLE_S, 0
    while done < kills:
        anew, started = not place.journals(), time.monotonic()
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
        truth, journals = place.truth(), place.journals()
        judge.send_signal(signal.SIGKILL)
        judge.wait()
        done += 1
        when = f"kill {done}, after {delay_s:.2f} of {whole_s:.1f} s"

        assert_nothing_left(place, mine, when)
        assert place.truth().startswith(truth), when
        records, _ = record.parse(place.truth(), "vector_add.jsonl")
        now = place.journals()
        for path, before in journals.items():
            run_id = path.name.split(".")[1]
            finished = sum(one["run_id"] == run_id for one in records) == RECORDS
            assert finished if path not in now else now[path].startswith(before), when
    while place.journals():
        place.finish("--resume")
    said = place.finish()
    assert "waiting for" not in said
    assert_nothing_left(place, mine, "at the end")
    records, complaints = record.parse(place.truth(), "vector_add.jsonl")
    by_run: dict[str, list[dict]] = {}
    for one in records:
        by_run.setdefault(one["run_id"], []).append(one)
    assert {len(run) for run in by_run.values()} == {RECORDS}
    assert len(complaints) <= kills  # lines that a kill tore; the whole ones follow them
    for run in by_run.values():
        timed = [one for one in run if one["kind"] == "benchmark"]
        assert all([len(group) for group in one["samples_us"]] == [2] * place.processes for one in timed)


@pytest.mark.slow
def test_fifty_kills(tmp_path):
    kill_at_random(Place(tmp_path, 2), 50)


def test_a_kill_during_the_calls_keeps_what_was_done(tmp_path):
    """The short form, not at random: as soon as a group of timed calls is on disk. It must not be timed again."""
    place = Place(tmp_path, 2)
    judge = place.start()
    deadline = time.monotonic() + 120
    while not any(b'"group"' in text for text in place.journals().values()):
        assert judge.poll() is None and time.monotonic() < deadline, place.said.read_text()
        time.sleep(0.02)
    judge.kill()
    judge.wait()
    ((path, text),) = place.journals().items()
    groups = [line for line in map(json.loads, text.splitlines()) if line["kind"] == "group"]
    said = place.finish("--resume")
    assert f"{TESTS} test outcomes and {len(groups)} groups of timed calls are known" in said and not path.exists()
    timed = [line for line in map(json.loads, place.truth().splitlines()) if line["kind"] == "benchmark"]
    # The journal has the clock's readings; the record has them less what the clock itself costs.
    record = timed[groups[0]["case"]]
    known = [call["us"] - record["empty_call_us"] for call in groups[0]["outcomes"]["good"]]
    assert any(group == pytest.approx(known, abs=1e-3) for group in record["samples_us"])
