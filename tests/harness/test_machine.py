"""What the machine does to a run is one line and exit code 2; what a submission writes does nothing but show."""

import errno
import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from harness import __main__ as command
from harness import invocation, run
from harness.judge import machine
from harness.judge.handle import CheckerLost, DeviceError
from harness.problem import folders
from harness.results import output
from harness.results.record import StorageError
from harness.results.run_file import RunFile
from harness.sandbox.policy import SandboxError
from problems.common import build
from tests.support import ADDS, ROOT, VECTOR_ADD, copy_of, script
from tests.support.hostile import HOSTILE, UNPRINTABLE, brief
from tests.support.marks import first
from tests.support.records import run_line

VERBS = [sys.executable, str(ROOT / "harness" / "__main__.py")]
REPORT = [sys.executable, str(ROOT / "leaderboard" / "report.py")]


@pytest.fixture
def folder(tmp_path) -> Path:
    """A problem folder of the test's own."""
    return copy_of(VECTOR_ADD, tmp_path / "vector_add", {"variants/good.py": ADDS})


def one_line(said: str) -> str:
    """It, if it is one of a command's."""
    assert re.fullmatch(r"(harness/run\.py|python -m harness list): .*\n", said), said
    return said


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (StorageError("full"), "full"),
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
    monkeypatch.setattr(invocation.Run, "main", Mock(side_effect=error))
    assert run.main(["nvfp4_gemv"]) == output.USAGE_EXIT
    assert said in one_line(capsys.readouterr().err)


@pytest.mark.parametrize(
    "error", [KeyError("x"), AssertionError(), RecursionError(), FileNotFoundError(errno.ENOENT, "No such file", "/x")]
)
def test_a_bug_of_ours_keeps_its_traceback(monkeypatch, error):
    monkeypatch.setattr(invocation.Run, "main", Mock(side_effect=error))
    assert machine.said_of(error) is None
    with pytest.raises(type(error)):
        run.main(["nvfp4_gemv"])


@pytest.mark.parametrize(
    ("error", "code", "kept", "goes_on"),
    [
        (StorageError("full"), 2, True, True),
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


@pytest.mark.parametrize(
    ("lacks", "said"),
    first([("g++", "install g++"), ("a build folder", "set KERNEL_BUILD_DIR to a folder that can be written")]),
)
def test_what_the_judges_own_code_cannot_be_built_with(tmp_path, folder, lacks, said):
    """Everything that is on PATH but g++; a file in place of the build folder."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "runtime").mkdir(mode=0o700)
    (tmp_path / "file").touch()
    for place in reversed(os.environ["PATH"].split(os.pathsep)):
        for file in Path(place).glob("*"):
            if not file.name.startswith(("g++", "c++")) and not os.path.lexists(tmp_path / "bin" / file.name):
                (tmp_path / "bin" / file.name).symlink_to(file)
    env = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path / "runtime"), "KERNEL_BUILD_DIR": str(tmp_path / "file")}
    if lacks == "g++":
        env |= {"PATH": str(tmp_path / "bin"), "KERNEL_BUILD_DIR": str(tmp_path / "builds")}
    words = [str(tmp_path / "results"), "1", str(folder), "--variant", "good", "--device", "cpu"]
    command = [sys.executable, "tests/support/short_run.py", *words]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and said in one_line(done.stderr)


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
    assert run.main([str(folder), "--variant", "other", "--device", "cpu", "--json", str(tmp_path / "x.json")]) == 2
    said = capsys.readouterr()
    assert "No space left on device" in one_line(said.err) and "saved as run " in said.out
    assert len(list(results.rglob("*.jsonl"))) == 1


def test_a_file_is_replaced_whole_and_a_device_stays_one(tmp_path):
    file = tmp_path / "x"
    file.write_text("old")
    for place in (file, Path("/dev/null")):
        output.see_writable(place)
        output.write_whole(place, "new")
    with pytest.raises(UnicodeEncodeError):
        output.write_whole(file, "\ud800")
    assert file.read_text() == "new" and list(tmp_path.iterdir()) == [file]
    with pytest.raises(OSError, match="/dev/full"):
        output.write_whole(Path("/dev/full"), "x")
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("task.py", b"OUTPUTS = ("),
        ("task.py", b"\xff"),
        ("task.py", b"OUTPUTS = ()\nraise KeyError('x')"),
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


# --- the lock on a device, and who else is on a GPU


FORK = multiprocessing.get_context("fork")


@pytest.fixture
def device(tmp_path, monkeypatch):
    """A device of this test's own, its lock in a folder of its own."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return "GPU-0000"


class Holder:
    """Another process that holds a device, as soon as this is made. then: what it does while it holds it."""

    def __init__(self, device: str, then: Callable[[], object] = lambda: None) -> None:
        self.held, self.may_end = FORK.Event(), FORK.Event()
        self.process = FORK.Process(target=self._hold, args=(device, then))
        self.process.start()
        assert self.held.wait(60)

    def _hold(self, device: str, then: Callable[[], object]) -> None:
        with machine.hold(device):
            then()
            self.held.set()
            self.may_end.wait()

    def end(self) -> None:
        self.may_end.set()
        self.process.join(60)


def told(device: str) -> list[str]:
    """What is said to who holds it next."""
    said: list[str] = []
    with machine.hold(device, said.append):
        return said


def test_a_second_one_waits_and_is_told_once_for_whom(device):
    one = Holder(device)
    said = []

    def say(text: str) -> None:
        said.append(text)
        one.may_end.set()  # whoever waits goes on

    with machine.hold(device, say):
        one.end()
    assert said == [f"waiting for process {one.process.pid}, which is timing on {device}"]


def test_it_is_held_by_its_living_holder_alone(device):
    """Other devices are free; it goes with its holder however that ends; programs that it started do not inherit it."""
    one = Holder(device)
    assert told("cpu") == []
    one.process.kill()
    one.process.join(60)
    assert told(device) == []
    Holder(device, lambda: subprocess.Popen(["sleep", "5"], close_fds=False)).end()
    assert told(device) == []


def test_a_folder_of_somebody_elses_is_refused(device, tmp_path):
    """In a temporary folder that all may write, another user could have made it first."""
    folder = tmp_path / f"kernel-locks-{os.geteuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(RuntimeError, match="not this user's own"), machine.hold(device):
        pass


SMI = """\
GPU-aaaa, 4242, /usr/bin/python3, 512
GPU-aaaa, 4243, /opt/a, strange, name, [N/A]
GPU-bbbb, 4244, train, 1024
No running processes found
"""


def test_other_users_of_a_gpu_are_named(monkeypatch, tmp_path):
    smi = script(tmp_path / "nvidia-smi", f"cat <<'EOF'\n{SMI}EOF")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    named = ["process 4242 (/usr/bin/python3), 512 MiB", "process 4243 (/opt/a,strange,name)"]
    assert machine.users("GPU-aaaa") == named
    script(smi, "echo no driver; exit 9")
    with pytest.raises(RuntimeError, match="nvidia-smi failed with 9: no driver"):
        machine.users("GPU-aaaa")
