"""What is sent to another machine: the arguments as they mean the same there, and the files."""

import shutil
from pathlib import Path

import pytest

from harness import run
from harness.judge import options
from harness.judge.options import Options
from harness.problem.folders import UsageError
from harness.tools import remote
from tests.support import ROOT, SUPPORT, write_files


def parsed(argv) -> Options:
    return options.of(run.parser().parse_args(argv))


def request(*argv):
    return remote.request(parsed(argv))


def test_arguments_are_sent_as_they_were_given():
    """Those of a problem's own check too; a submission that is not there is refused."""
    argv = ["nvfp4_gemv", "--case", "m=16 k='$HOME' \"x\" *", "--timeout", "2.5", "--seed", "0", "--quiet", "--resume"]
    sent = request(*argv, "--json", "x", "--events", "y")
    outputs = {name: str(Path("..", *[".."] * len(ROOT.parts[1:]), "job", name)) for name in ("json", "events")}
    assert vars(parsed(sent.arguments)) == vars(parsed(argv)) | outputs and not sent.files
    argv = ["--config", "tiny", "--steps", "-1"]
    assert remote.request(parsed(["dsv4_forward"]), argv).arguments == ["dsv4_forward", *argv]
    with pytest.raises(UsageError, match=r"--submission must be a Python file, found none at nothing\.py"):
        request("nvfp4_gemv", "--submission", "nothing.py")


def test_copy_has_a_submission_with_its_sources_where_its_path_leads(tmp_path):
    inside = ROOT / "problems" / "nvfp4_gemv" / "variants" / "cpu_portable.py"
    assert f"--submission={inside.relative_to(ROOT)}" in request("nvfp4_gemv", "--submission", str(inside)).arguments
    source = '#include "part.h"\n' + inside.with_suffix(".cpp").read_text()
    files = {"mine.py": inside.read_text(), "mine.cpp": source, "part.h": "\n"}
    awkward = write_files(tmp_path / "it's here", files)
    sent = request("nvfp4_gemv", "--submission", str(inside), "--submission", str(awkward / "mine.py"))
    _, path = (word.partition("=")[2] for word in sent.arguments if word.startswith("--submission="))
    with remote.copied(sent.files) as copy:
        tree = copy / remote.TREE
        assert {file.name for file in (tree / path).resolve().parent.iterdir()} == set(files)
        assert (tree / "harness" / "run.py").stat().st_mode & 0o100 and (tree / inside.relative_to(ROOT)).is_file()
        assert not (tree / ".venv").exists() and not (tree / ".git").exists()


def test_foreign_problem_is_sent_with_the_files_beside_it(tmp_path):
    shutil.copytree(SUPPORT / "gpu_mode", tmp_path / "set")
    folder = tmp_path / "set" / "vectoradd"
    sent = request(str(folder), "--submission", str(folder / "submission.py"))
    assert (ROOT / sent.arguments[0]).resolve() == folder
    assert {folder / "task.yml", folder / "reference.py", tmp_path / "set" / "utils.py"} <= {*sent.files}


@pytest.mark.parametrize("name", ["", "-oProxyCommand=x", "a:b", "a b", "a\nb"])
def test_host_must_be_a_name(name):
    with pytest.raises(UsageError, match="HOST must be a name that ssh knows"):
        remote.Host(name)
