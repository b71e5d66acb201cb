"""What the machine does to a run is one line and exit code 2; what a submission writes does nothing but show."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from harness import __main__ as command
from harness import invocation, run
from harness.judge import machine
from harness.judge.handle import CheckerLost, DeviceError
from harness.problem import folders
from harness.results import output, record
from harness.results.run_file import RunFile
from harness.sandbox.policy import SandboxError
from problems.common import build
from tests.support import ADDS, ROOT
from tests.support.hostile import HOSTILE, UNPRINTABLE, brief
from tests.support.records import run_line

PROBLEM = ROOT / "tests" / "support" / "problems" / "vector_add"
RUN = [sys.executable, str(ROOT / "harness" / "run.py")]
VERBS = [sys.executable, str(ROOT / "harness" / "__main__.py")]
REPORT = [sys.executable, str(ROOT / "leaderboard" / "report.py")]


@pytest.fixture
def folder(tmp_path) -> Path:
    """A problem folder of the test's own."""
    place = tmp_path / "vector_add"
    (place / "variants").mkdir(parents=True)
    for name in ("task.py", "reference.py"):
        shutil.copy(PROBLEM / name, place)
    (place / "variants" / "good.py").write_text(ADDS)
    return place


@pytest.fixture
def results(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results")
    return tmp_path / "results"


def short(tmp_path: Path, *arguments: object, **environment: str) -> subprocess.Popen:
    """A run of its own process with one process of a submission, records in tmp_path / "results"."""
    command = [sys.executable, "tests/support/short_run.py", tmp_path / "results", 1, *arguments]
    command += ["--device", "cpu"]
    (tmp_path / "runtime").mkdir(exist_ok=True, mode=0o700)
    env = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path / "runtime")} | environment
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(list(map(str, command)), cwd=ROOT, env=env, text=True, errors="replace", **pipes)


def one_line(said: str) -> str:
    """It, if it is one of a command's."""
    assert (
        said.startswith(("harness/run.py: ", "python -m harness list: "))
        and said.count("\n") == 1
        and said.endswith("\n")
    ), said
    return said


# --- what the machine does


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (record.StorageError("full"), "full"),
        (DeviceError("gone"), "gone"),
        (SandboxError("no uid"), "no uid"),
        (build.BuildError("g++ is not on PATH: install g++"), "g++ is not on PATH: install g++"),
        (MemoryError(), "out of memory in the judge"),
        (torch.OutOfMemoryError("CUDA\nmore"), "out of memory"),
        (OSError(errno.ENOSPC, "No space left on device", "/x"), "No space left on device: /x (free some space)"),
        (OSError(errno.EMFILE, "Too many open files"), "Too many open files"),
        (OSError("no folder"), "no folder"),
        (FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/x']"), "No usable temporary"),
        (FileExistsError(errno.EEXIST, "File exists", str(build.directory())), "set KERNEL_BUILD_DIR to a folder"),
        (subprocess.CalledProcessError(1, ["g++", "--version"]), "g++"),
    ],
    ids=brief,
)
def test_a_machine_error_is_one_line_and_status_2(monkeypatch, capsys, error, said):
    def fail(_):
        raise error

    monkeypatch.setattr(invocation.Run, "main", fail)
    assert run.main(["nvfp4_gemv"]) == output.USAGE_EXIT
    assert said in one_line(capsys.readouterr().err)


@pytest.mark.parametrize(
    "error", [KeyError("x"), AssertionError(), RecursionError(), FileNotFoundError(errno.ENOENT, "No such file", "/x")]
)
def test_a_bug_of_ours_keeps_its_traceback(monkeypatch, error):
    def fail(_):
        raise error

    monkeypatch.setattr(invocation.Run, "main", fail)
    assert machine.said_of(error) is None
    with pytest.raises(type(error)):
        run.main(["nvfp4_gemv"])


@pytest.mark.parametrize(
    ("error", "code", "kept", "goes_on"),
    [
        (record.StorageError("full"), 2, True, True),
        (CheckerLost("x"), 2, True, True),
        (KeyboardInterrupt(), 130, True, True),
        (KeyboardInterrupt(), 130, False, False),
        (output.ClosedError("gone"), 141, True, True),
        (folders.ProblemError("p's own code failed"), 2, True, False),  # it would raise again
    ],
    ids=brief,
)
def test_the_line_says_how_to_go_on(monkeypatch, capsys, results, error, code, kept, goes_on):
    held = RunFile.begin(run_line("20260101T000000-00000001"))
    held.write("outcome")

    def fail(self):
        self.file = held if kept else None
        raise error

    monkeypatch.setattr(invocation.Run, "main", fail)
    assert run.main(["nvfp4_gemv"]) == code
    said = one_line(capsys.readouterr().err)
    assert said.endswith("; go on with --resume 20260101T000000-00000001\n") == ("--resume" in said) == goes_on


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/nothing"])
def test_a_folder_of_results_that_cannot_be(monkeypatch, tmp_path, folder, capsys, place):
    (tmp_path / "file").touch()
    monkeypatch.setattr(record, "RESULTS", tmp_path / place)
    assert run.main([str(folder), "--variant", "good", "--device", "cpu"]) == 2
    assert "file" in (said := one_line(capsys.readouterr().err)) or "/proc/nothing" in said


def test_without_a_compiler_for_the_judges_own_code(tmp_path, folder):
    """Everything that is on PATH but g++."""
    (tmp_path / "bin").mkdir()
    for place in reversed(os.environ["PATH"].split(os.pathsep)):
        for file in Path(place).glob("*"):
            if not file.name.startswith(("g++", "c++")) and not os.path.lexists(tmp_path / "bin" / file.name):
                (tmp_path / "bin" / file.name).symlink_to(file)
    where = {"PATH": str(tmp_path / "bin"), "KERNEL_BUILD_DIR": str(tmp_path / "builds")}
    started = short(tmp_path, folder, "--variant", "good", **where)
    _, said = started.communicate(timeout=120)
    assert started.returncode == 2 and "g++ is not on PATH: install g++" in one_line(said)


def test_a_build_folder_that_cannot_be_written(tmp_path, folder):
    (tmp_path / "file").touch()
    where = {"KERNEL_BUILD_DIR": str(tmp_path / "file")}
    started = short(tmp_path, folder, "--variant", "good", "--mode", "test", **where)
    _, said = started.communicate(timeout=120)
    assert started.returncode == 2 and "set KERNEL_BUILD_DIR to a folder that can be written" in one_line(said)


@pytest.mark.slow
def test_a_full_disk_in_the_middle_keeps_what_was_done(tmp_path, folder):
    started = short(tmp_path, folder, "--variant", "good", FULL_AFTER="3")
    _, said = started.communicate(timeout=120)
    assert started.returncode == 2 and "No space left on device" in one_line(said) and "; go on with --resume " in said
    (path,) = (tmp_path / "results").rglob("*.jsonl")
    kept = path.read_bytes()
    again = short(tmp_path, folder, "--resume")
    out, said = again.communicate(timeout=120)
    assert again.returncode in (0, 6) and said == "" and "goes on: 3 test outcomes" in out, out + said
    assert path.read_bytes().startswith(kept)


# --- whoever reads the output goes away


@pytest.mark.parametrize(
    "command",
    [[*VERBS, "list", "nvfp4_gemv"], pytest.param(REPORT, marks=pytest.mark.slow)],
    ids=lambda command: " ".join(command[1:]).rpartition("/")[2],
)
def test_a_closed_pipe_is_no_traceback(command):
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(writer)
    assert (done.stderr, done.returncode) == ("", output.CLOSED_EXIT)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_under_the_output_is_one_line():
    with open("/dev/full", "w") as full:
        done = subprocess.run([*VERBS, "list"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "No space left on device" in done.stderr


@pytest.mark.slow
def test_a_closed_pipe_in_the_middle_of_a_run_keeps_what_was_done(tmp_path, folder):
    started = short(tmp_path, folder, "--variant", "good")
    assert started.stdout.readline(), started.stderr.read()  # the machine's; the next one says how many tests are right
    started.stdout.close()
    said = started.stderr.read()
    assert started.wait(timeout=120) == output.CLOSED_EXIT and "closed; go on with --resume " in one_line(said)
    assert len(list((tmp_path / "results").rglob("*.jsonl"))) == 1


# --- --json


def test_json_that_cannot_be_written_is_known_before_anything_is_judged(tmp_path, folder, results, capsys):
    (tmp_path / "file").touch()
    for place in (tmp_path / "file" / "x.json", tmp_path, tmp_path / "none" / "x.json", Path("/proc/x.json")):
        assert run.main([str(folder), "--variant", "good", "--device", "cpu", "--json", str(place)]) == 2
        said = capsys.readouterr()
        assert f"--json: cannot write {place}: " in one_line(said.err) and "test" not in said.out
    assert not results.exists()


def test_json_that_fails_at_the_end_loses_no_record(tmp_path, folder, results, capsys, monkeypatch):
    def fail(path, text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(output, "write_whole", fail)
    (folder / "variants" / "other.py").write_text('TARGETS = ("sm90",)\nREQUIRES = ("no_such_package",)\n')
    arguments = [str(folder), "--variant", "other", "--device", "cpu", "--json", str(tmp_path / "x.json")]
    assert run.main(arguments) == 2
    said = capsys.readouterr()
    assert "No space left on device" in one_line(said.err) and "saved as run " in said.out
    assert len(list(results.rglob("*.jsonl"))) == 1


def test_a_file_is_replaced_whole_and_a_device_stays_one(tmp_path):
    file = tmp_path / "x"
    file.write_text("old")
    output.see_writable(file)
    output.write_whole(file, "new")
    assert file.read_text() == "new" and list(tmp_path.iterdir()) == [file]
    with pytest.raises(UnicodeEncodeError):
        output.write_whole(file, "\ud800")
    assert file.read_text() == "new" and list(tmp_path.iterdir()) == [file]
    output.see_writable(Path("/dev/null"))
    output.write_whole(Path("/dev/null"), "x")
    with pytest.raises(OSError, match="/dev/full"):
        output.write_whole(Path("/dev/full"), "x")
    assert Path("/dev/null").is_char_device()


# --- odd files of a problem or a submission


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("task.py", b"OUTPUTS = ("),
        ("task.py", b"\xff"),
        ("task.py", b"OUTPUTS = ()\nraise KeyError('x')"),
        ("task.yml", b"tests: [5]"),
        ("task.yml", b"tests: &a [*a]"),
        ("task.yml", b"a: " + b"[" * 5000),
    ],
    ids=brief,
)
def test_odd_file_of_a_problem_is_one_line(tmp_path, capsys, name, content):
    for other in ("reference.py", "submission.py"):
        (tmp_path / other).write_text("")
    (tmp_path / name).write_bytes(content)
    assert run.main([str(tmp_path), "--device", "cpu"]) == 2
    assert str(tmp_path) in one_line(capsys.readouterr().err)


@pytest.mark.parametrize("text", [b"(", b"CPU_FLAGS = f()"], ids=brief)
def test_odd_submission_is_one_line(folder, results, capsys, text):
    (folder / "variants" / "odd.py").write_bytes(text)
    assert run.main([str(folder), "--variant", "odd", "--device", "cpu", "--mode", "test"]) == 2
    assert "odd.py" in one_line(capsys.readouterr().err)


# --- text of a submission is data


@pytest.mark.parametrize("name", UNPRINTABLE[:2], ids=brief)
def test_a_name_that_cannot_be_shown_is_refused(folder, results, capsys, name):
    (folder / "variants" / f"{name}.py").write_text(ADDS)
    for which in (["--variant", name], ["--submission", str(folder / "variants" / f"{name}.py")], ["--all"]):
        assert run.main([str(folder), *which, "--device", "cpu"]) == 2
        said = one_line(capsys.readouterr().err)
        assert "plain" in said and said.rstrip("\n").isprintable()
    assert command.main(["list", str(folder)]) == 2
    assert "plain" in one_line(capsys.readouterr().err)


def test_docstrings_are_listed_as_text(folder, capsys):
    for number, said in enumerate(HOSTILE):
        source = ADDS.replace('"""adds."""', repr(said.replace("\ud800", "")))
        (folder / "variants" / f"v{number}.py").write_text(source)
    assert command.main(["list", str(folder)]) == 0
    lines = capsys.readouterr().out.split("\n")[:-1]
    assert len(lines) == len(HOSTILE) + 1 and all(line.isprintable() and len(line) < 2200 for line in lines)
    assert any("[bold]" in line for line in lines) and any(":smile:" in line for line in lines)
