"""The judge against the submissions of the topics' folders, each of which must get its verdict. See README.md."""

import contextlib
import functools
import os
import shutil
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from harness.judge import judging, phases, replies
from harness.judge.handle import RunnerHandle
from harness.judge.outcome import Outcome
from harness.judge.session import Session
from harness.judge.verdict import CaseTime, Result, aggregate
from harness.problem import folders, scan, sources
from harness.runner import gate
from harness.sandbox import process, reaper
from problems.common import build, load
from tests.attacks import variants
from tests.support import SUPPORT, forked, warm

PROBLEMS, GPU_MODE = SUPPORT / "problems", SUPPORT / "gpu_mode"
FILES = variants.files()
BY_NAME = {file.stem: file for file in FILES}
CONTROLS = [file for file in FILES if variants.topic_of(file) == "honest"]
each = functools.partial(pytest.mark.parametrize, "file", ids=lambda file: file.stem)


class Field(NamedTuple):
    """A problem. at_once: hostile processes in a session, each with torch in it, beside one honest neighbour."""

    folder: Path
    neighbour: str
    at_once: int


FIELDS = {
    "vector_add": Field(PROBLEMS / "vector_add", "honest_answer_vector_add", 12),
    "linear": Field(PROBLEMS / "linear", "honest_answer_linear", 4),  # weights take 64 MiB, on a GPU 1 GiB
    "rounds": Field(PROBLEMS / "rounds", "honest_rounds", 8),
    "gpu_rounds": Field(GPU_MODE / "rounds", "honest_answer_gpu_rounds", 8),
    "gpu_numbers": Field(GPU_MODE / "numbers", "honest_answer_gpu_numbers", 8),
}
# What `make test` runs: a file for each way of catching one, in processes that are forked from one with torch in it.
# Slow are the others, and all in processes that start as the judge's do: each costs 3 s of a processor, and several
# burn one until they are stopped.
QUICK = {
    *("honest_answer_vector_add", "honest_answer_prepared", "honest_mistake_wrong", "answers_wrong_nan"),
    *("caching_answers_by_fingerprint", "caching_prepare_hides_copies", "clock_patched", "early_ahead_thread"),
    *("host_crashes_segfault", "host_daemons_holds_the_answer", "late_helper_child_continues", "late_thread_sleeps"),
    *("memory_pages_maps_over", "memory_scan_canary", "replies_forged_reply", "replies_lazy_subclass"),
    *("replies_other_tensor_copy_when_timed", "sandbox_files_edits_the_judge"),
}
CASES = 3  # test cases: a block, the smallest, one past a block
GIVE_UP_AFTER = 2  # lost processes: one loss shows that the run goes on, and each further one costs seconds
LIMIT_S = 20  # for a call
PREPARE_LIMIT_S = 8
MEMORY = 1.5 * 2**30  # bytes: a hoarder is stopped soon and harms no neighbour
FLUSH_BYTES = 2**26  # that make caches cold: the judge's own, of a large cache, take a second before each call
# A short plan: what an attack gets away with in three calls it would get away with in thirty.
PLAN = {
    "cpu": phases.Counts(processes=1, samples=3, warmups=1, buffers=2, extra=12),
    "cuda": phases.Counts(processes=2, samples=5, warmups=1, buffers=2),  # one group that is off accuses nobody
}
TARGET = {"cpu": "cpu", "cuda": "sm90"}
NOT_FASTER = 0.97  # times its control's median
OVERLAP_US = {"early_launch": 2.0}  # what its launch gains beside the judge's own kernel (docs/rules.md)


class Expected(NamedTuple):
    """What a file says that it must get."""

    problem: str
    devices: tuple[str, ...]
    verdicts: dict[str, tuple[str, ...]]  # by device
    reason: dict[str, str]
    forms: bool  # it has HONEST_OF_FOUR
    markers: tuple[str, ...] = ()
    honest: str = ""
    limit_s: float = LIMIT_S
    import_limit_s: float = replies.IMPORT_LIMIT_S
    takes_us: float = 0.0


@functools.cache
def read(file: Path) -> Expected:
    """KeyError where a literal is missing."""
    said = load.constants(file, "HONEST_OF_FOUR", *variants.JUDGED)
    devices = tuple(device for device, target in TARGET.items() if target in said["TARGETS"])
    verdicts, reasons = (
        value if isinstance(value, dict) else dict.fromkeys(devices, value)
        for value in (said["VERDICT"], said.get("REASON", ""))
    )
    verdicts = {device: (word,) if isinstance(word, str) else word for device, word in verdicts.items()}
    more = {name.lower(): said[name] for name in ("MARKERS", "HONEST", *variants.LIMITS) if name in said}
    return Expected(said["PROBLEM"], devices, verdicts, reasons, "HONEST_OF_FOUR" in said, **more)


def handle(problem: folders.Problem, file: Path, name: str = "", device: str = "cpu") -> RunnerHandle:
    return RunnerHandle(name or file.stem, folders.submission(problem, file), TARGET[device])


def not_passed(running: Session, handles: list[RunnerHandle]) -> dict[str, list[Outcome]]:
    """What did not pass of the test cases, by name."""
    said = phases.run_tests(running, handles, list(running.problem.tests[:CASES]), lambda *_: None)
    return {name: [outcome for outcome in of if outcome.status != "PASSED"] for name, of in said.items()}


def aggregated(timings: dict[str, list], all_readings: list) -> dict[str, list[CaseTime]]:
    return {name: [aggregate(t, g) for t, g in zip(of, all_readings, strict=True)] for name, of in timings.items()}


def judge(files: list[Path], device: str) -> dict[str, Result]:
    """What each file gets, and "neighbour": an honest one beside them. All of one problem and limit."""
    field, limit_s = FIELDS[read(files[0]).problem], max(read(file).limit_s for file in files)
    folder = folders.find(str(field.folder))
    handles = {file.stem: handle(folder, file, device=device) for file in files}
    handles["neighbour"] = handle(folder, BY_NAME[field.neighbour], "neighbour", device)
    judged = {name: Result(handle.submission, TARGET[device]) for name, handle in handles.items()}

    def done(handle: RunnerHandle, case: folders.Case, outcome: object) -> None:
        judged[handle.name].tests.append((case, outcome))

    way = judging.phases_of(device)
    with Session(folder, device, limit_s) as running:
        way.run_tests(running, list(handles.values()), list(folder.tests[:CASES]), done)
        right = [e for name, e in handles.items() if {o.status for _, o in judged[name].tests} == {"PASSED"}]
        if right:
            cases = list(folder.benchmarks[device])
            for name, times in aggregated(*way.run_benchmarks(running, right, cases, PLAN[device])).items():
                judged[name].times = times
    return judged


@functools.cache
def groups(device: str) -> tuple[tuple[Path, ...], ...]:
    """The files for a device in groups that are judged together: of one problem, few at a time. The quick ones get the
    largest of their limits, of the others each group has one limit.
    """
    kinds: dict[tuple, list[Path]] = {}
    for file in filter(lambda file: device in read(file).devices, FILES):
        said, quick = read(file), file.stem in QUICK and device == "cpu"
        limits_s = () if quick else (said.limit_s, said.import_limit_s)
        kinds.setdefault((said.problem, quick, *limits_s), []).append(file)
    return tuple(
        tuple(kind[i : i + FIELDS[name].at_once])
        for (name, *_), kind in kinds.items()
        for i in range(0, len(kind), FIELDS[name].at_once)
    )


@functools.cache
def results(group: tuple[Path, ...], device: str, forked: bool = False) -> dict[str, Result]:
    """Each group is judged once, when the first of its tests is. forked: see QUICK."""
    with pytest.MonkeyPatch.context() as patch, warm.installed() if forked else contextlib.nullcontext():
        patch.setattr(replies, "GIVE_UP_AFTER", GIVE_UP_AFTER)
        patch.setattr(replies, "IMPORT_LIMIT_S", max(read(file).import_limit_s for file in group))
        patch.setattr(replies, "PREPARE_LIMIT_S", PREPARE_LIMIT_S)
        if device == "cpu":
            patch.setattr(process, "MEMORY_SHARE", MEMORY / process.available_memory())
            patch.setattr(gate, "flush_bytes", lambda: FLUSH_BYTES)
        return judge(list(group), device)


def said_by(judged: Result) -> str:
    """Everything that the judge gave as a reason."""
    reasons = [judged.reason, *(outcome.reason for _, outcome in judged.tests)]
    return "\n".join(filter(None, [*reasons, *(t.failure.reason for t in judged.times if t.failure)]))


def check(file: Path, device: str, judged: dict[str, Result]) -> None:
    """Asserts that a file got what it must get, and that it did no harm."""
    expected, got = read(file), judged[file.stem]
    ended = got.tests and got.tests[-1][1].status != "PASSED"  # a first call that kills its process is not tried again
    assert got.status or ended or len(got.tests) == CASES, "every case gets a verdict, up to a failure that ends it"
    wanted = expected.verdicts[device]
    assert got.verdict in wanted, f"{got.verdict}, not {wanted}: {said_by(got)}"
    assert expected.reason[device] in said_by(got), said_by(got)
    if got.verdict == "PASSED":
        samples = PLAN[device].processes * PLAN[device].samples
        assert [len(t.timing.flat("us")) for t in got.times] == [samples] * len(got.times) != []
        assert min(t.median for t in got.times) >= expected.takes_us, "a false time"
    left = [path for path in map(Path, expected.markers) if path.exists()]
    for path in left:
        path.unlink()
    assert not left, "left behind outside its own folders"
    neighbour = judged["neighbour"]
    assert neighbour.verdict == "PASSED" and neighbour.times, f"the neighbour suffered: {said_by(neighbour)}"


def of(device: str, *kinds: bool) -> list[Path]:
    """Files for a device that are in QUICK (True) or are not (False)."""
    return [file for file in FILES if device in read(file).devices and (file.stem in QUICK) in kinds]


def group_of(file: Path, device: str) -> tuple[Path, ...]:
    return next(group for group in groups(device) if file in group)


def quickly(name: str) -> dict[str, Result]:
    """What the group of a file of QUICK gets."""
    return results(group_of(BY_NAME[name], "cpu"), "cpu", forked=True)


@each(of("cpu", True))
def test_on_cpu(file):
    check(file, "cpu", quickly(file.stem))


@pytest.mark.slow
@each(of("cpu", True, False))
def test_on_cpu_in_processes_that_start_as_the_judges_do(file):
    check(file, "cpu", results(group_of(file, "cpu"), "cpu"))


# pytest -n with --dist loadgroup gives a worker all files of a group.
IN_GROUPS = [
    pytest.param(file, marks=pytest.mark.xdist_group(f"{number}"))
    for number, group in enumerate(groups("cuda"))
    for file in group
]


@pytest.mark.gpu
@each(IN_GROUPS)
def test_on_gpu(file):
    check(file, "cuda", results(group_of(file, "cuda"), "cuda"))


@functools.cache
def beside_controls(problem: str) -> dict[str, Result]:
    """What the files that must not beat a control get beside their controls."""
    files = {file for file in FILES if read(file).honest and read(file).problem == problem}
    return judge(sorted({*files, *(BY_NAME[read(file).honest] for file in files)}), "cuda")


@pytest.mark.gpu
@each([param for param in IN_GROUPS if read(param.values[0]).honest])
def test_it_does_not_beat_its_control(file):
    judged = beside_controls(read(file).problem)
    mine, control = judged[file.stem], judged[read(file).honest]
    assert control.verdict == "PASSED", said_by(control)
    assert mine.verdict in read(file).verdicts["cuda"], said_by(mine)
    if mine.verdict == "PASSED":
        for a, b in zip(mine.times, control.times, strict=True):
            least = NOT_FASTER * b.median - OVERLAP_US.get(file.stem, 0)
            assert a.median >= least, (str(a.timing.case), a.median, b.median)


def test_the_roof_of_a_problem_with_weights_counts_them():
    """The plain readers read as much as a call moves, though the weights are not in the buffer."""
    found = quickly("honest_answer_prepared")["neighbour"].times[0].readings
    assert found.bytes > 2**26 and found.bytes / found.roofline_us < 500_000, "500 GB/s: no CPU of ours reads so fast"


def test_nothing_is_left_running():
    """After the suite no process of a runner is there, however it hid: each had its guard."""
    quickly("honest_answer_vector_add")
    deadline = time.monotonic() + 60
    while left := runners():
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def runners() -> list[str]:
    """Command lines of runners that descend from this process, and of those whose guard has ended. One that was
    forked has that of the process with torch in it.
    """
    found, ours = [], {*reaper.descendants(os.getpid())} - {warm.pid()}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            names = ("harness.runner.runner", "tests.support.warm") if int(folder.name) in ours else ()
            if any(name in command for name in names) or ("harness.runner.runner" in command and parent == "1"):
                found.append(command)
    return found


@each(FILES)
def test_a_file_says_what_it_needs(file):
    expected = read(file)
    assert load.summary(file) and (file in CONTROLS or "Stopped by: " in file.read_text())
    assert expected.problem in FIELDS and expected.devices
    assert not expected.honest or BY_NAME[expected.honest] in CONTROLS
    assert not scan.findings(sources.closure(file)), "what is caught at run time must not be caught by its text"
    assert set(expected.verdicts) == set(expected.reason) == set(expected.devices)


def test_the_control_that_is_wrong_would_be_seen_to_pass():
    """The suite can fail: an honest file does not get what an attack must get."""
    judged = quickly("honest_answer_vector_add")
    honest = {**judged, "answers_wrong_nan": judged["honest_answer_vector_add"]}
    with pytest.raises(AssertionError, match="PASSED, not"):
        check(BY_NAME["answers_wrong_nan"], "cpu", honest)


@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
@pytest.mark.slow
@each([file for file in FILES if file.with_suffix(".cu").exists()])
def test_cuda_sources_compile(file):
    flags = load.constants(file, "FLAGS").get("FLAGS", ())
    assert build.cuda(file.with_suffix(".cu"), "sm90", flags).kernels()


# Each answers right where its attack works: in a process that nothing confines, it must.
BITES = {f"sandbox_files_{name}": "right" for name in ("edits_the_judge", "poisons_builds", "reference", "repository")}
BITES |= {"sandbox_network": "right", "memory_scan_canary": "the canary can be read"}
ALONE = """
import os, sys, torch, traceback
from pathlib import Path
from problems.common import load
folder, device = Path(sys.argv[1]), sys.argv[2]

def call(file):
    data = load.module(folder, "reference").generate_input(n=1024, seed=1, device=device)
    parts = b"DSV4", b"EXPECTED", b"VALUES", b"CANARY."
    canary = torch.frombuffer(bytearray(b"-".join(parts) * 147), dtype=torch.uint8).to(device)
    load.from_file(folder, file).custom_kernel(data)
    return "right" if torch.equal(data.z, data.x + data.y) else "wrong"

for file in map(Path, sys.argv[3:]):
    if pid := os.fork():
        os.waitpid(pid, 0)
        continue
    try:
        said = call(file)
    except BaseException:
        said = traceback.format_exc()
    os.write(1, f"{file.stem}: {said}\\0".encode())
    os._exit(0)
"""


@functools.cache
def unconfined(names: tuple[str, ...], device: str = "cpu") -> dict[str, str]:
    """What one call of each file says in a separate plain process, beside a canary: right, wrong or an exception."""
    files = [str(BY_NAME[name]) for name in names]
    command = ["-c", ALONE, PROBLEMS / "vector_add", device, *files]
    done = forked.run(command, env={**os.environ, "PYTHONPATH": str(process.ROOT)}, timeout=120)
    assert done.returncode == 0, done.stderr
    return dict(part.strip().split(": ", 1) for part in done.stdout.split("\0") if ": " in part)


@pytest.mark.parametrize("name", BITES)
def test_it_would_work_where_nothing_stops_it(name):
    assert BITES[name] in unconfined(tuple(BITES))[name]


@pytest.mark.gpu
def test_the_canary_would_be_found_on_a_gpu():
    assert "the canary can be read" in unconfined(("memory_gpu_scan",), "cuda")["memory_gpu_scan"]
