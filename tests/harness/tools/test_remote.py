"""The two ends of a remote run without a network: what is sent, and what a host does with it."""

import json
import os
import pathlib
import shutil
import stat
import sys
import time

import pytest

from harness import run
from harness.problem.folders import UsageError
from harness.tools import on_host, remote
from tests.support import ROOT, SUPPORT

DEFAULTS = run.parser().parse_args([])
# What takes the place of ssh: without options and host, the command runs here.
SSH = """#!/bin/sh
while [ "$1" = -o ] || [ "$1" = -T ]; do [ "$1" = -T ] || shift; shift; done
shift
exec sh -c "$1"
"""


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A host that is this machine; no sshd is needed."""
    for name, text in (("ssh", SSH), ("rsync", "#!/bin/sh\nexit 0\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / ".profile").write_text(f"PATH={tmp_path}:$PATH\n")  # a login shell makes PATH anew
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(remote.FOLDER_VARIABLE, str(tmp_path / "base"))
    return remote.Host("here")


def words(*argv):
    args, further = run.parser().parse_known_args(["--on", "x", *argv])
    return remote.words_of(args, further, DEFAULTS, set(remote.known_files()))


def test_arguments_get_there_as_they_were_given():
    asked = ["nvfp4_gemv", "--case", "m=16 k='$HOME' \"x\" *", "--same-within", "2.5", "--seed", "0", "--quiet"]
    sent, files = words(*asked, "--json", "x", "--events", "y", "--resume")
    args, further = run.parser().parse_known_args(sent)
    for name in ("problem", "case", "same_within", "seed", "quiet", "resume"):
        assert getattr(args, name) == getattr(run.parser().parse_args([*asked, "--resume"]), name)
    assert (args.on, args.json, args.events, further, files) == (None, None, None, [], [])


def test_the_arguments_of_a_problems_own_check_are_kept():
    sent, _ = words("dsv4_forward", "--check-only", "--config", "tiny", "--steps", "-1")
    assert run.parser().parse_known_args(sent)[1] == ["--config", "tiny", "--steps", "-1"]


def test_a_file_of_the_checkout_is_named_from_its_root_and_others_are_sent(tmp_path):
    inside = ROOT / "problems" / "nvfp4_gemv" / "variants" / "cpu_portable.py"
    sent, files = words("nvfp4_gemv", "--submission", str(inside))
    assert f"--submission={inside.relative_to(ROOT)}" in sent and not files
    odd = tmp_path / "it's here"
    odd.mkdir()
    for suffix in ("py", "cpp"):
        shutil.copy(inside.with_suffix(f".{suffix}"), odd / f"mine.{suffix}")
    (odd / "mine.cpp").write_text('#include "part.h"\n' + (odd / "mine.cpp").read_text())
    (odd / "part.h").write_text("\n")
    sent, files = words("nvfp4_gemv", "--against", str(odd / "mine.py"))
    assert f"--against=../sent{odd}/mine.py" in sent
    assert sorted(file.name for file in files) == ["mine.cpp", "mine.py", "part.h"]


def test_a_foreign_problem_is_sent_with_the_files_beside_it():
    folder = SUPPORT / "gpu_mode" / "vectoradd"
    (name, *_), files = words(str(folder), "--submission", str(folder / "submission.py"))
    assert name == str(folder.relative_to(ROOT)) and not files, "git knows it"


def test_a_foreign_problem_elsewhere(tmp_path):
    shutil.copytree(SUPPORT / "gpu_mode", tmp_path / "set")
    folder = tmp_path / "set" / "vectoradd"
    (name, *_), files = words(str(folder), "--submission", str(folder / "submission.py"))
    assert name == f"../sent{folder}"
    assert {folder / "task.yml", folder / "reference.py", tmp_path / "set" / "utils.py"} <= {*files}


@pytest.mark.parametrize("name", ["", "-oProxyCommand=x", "a:b", "a b", "a\nb"])
def test_what_is_no_host(name):
    with pytest.raises(UsageError, match="HOST must be a name"):
        remote.Host(name)


@pytest.mark.parametrize(
    ("program", "code", "complaint", "said"),
    [
        ("ssh", 255, "ssh: Could not resolve hostname x: unknown", "no such host: `ssh here` must work first"),
        ("ssh", 255, "ssh: connect to host x port 22: Connection refused", "no ssh server answers there"),
        ("ssh", 255, "x: Permission denied (publickey).", "does not accept your key"),
        ("ssh", 127, "sh: 1: exec: python3: not found", "has no python3"),
        ("rsync", 11, "rsync: write failed: No space left on device (28)", "the disk is full: free some space"),
    ],
)
def test_failures_are_named(host, tmp_path, program, code, complaint, said):
    (tmp_path / program).write_text(f"#!/bin/sh\ncat > {os.devnull}\necho '{complaint}' >&2\nexit {code}\n")
    with pytest.raises(UsageError, match=said.partition("(")[0]):
        if program == "ssh":
            host.ask("status")
        else:
            host.send(tmp_path, ["ssh"], "tree")


def test_a_host_without_a_program_is_refused(host, tmp_path, monkeypatch):
    few = tmp_path / "few"
    few.mkdir()
    (few / "python3").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(few))
    with pytest.raises(on_host.Refused, match="it has no rsync, make: install them there first"):
        on_host.prepare(str(tmp_path / "base"))


def test_a_full_disk_there_is_named(monkeypatch, capsys):
    def full(base):
        raise OSError(28, os.strerror(28))

    monkeypatch.setitem(on_host.COMMANDS, "status", full)
    on_host.main("status", "x")
    answer = json.loads(capsys.readouterr().out.partition(on_host.REPLY)[2])
    assert "the disk is full" in answer["error"]


def tree(base, makefile):
    """A tree whose set-up is `makefile`, and where no python is: a run that gets so far fails."""
    (base / "tree").mkdir(parents=True, exist_ok=True)
    (base / "tree" / "Makefile").write_text(f"setup:\n\t{makefile}\n")


def begin(host, job):
    return host.ask("start", job=job, words=["x"], env={}, files=["Makefile"])


def followed(host, job, offset=0):
    parts = []
    host.follow(job, offset, parts.append)
    return b"".join(parts)


def test_a_job_from_its_start_to_its_end(host, tmp_path):
    base = tmp_path / "base"
    assert host.ask("prepare")["base"] == str(base)
    assert stat.S_IMODE((base / "jobs").stat().st_mode) & 0o077 == 0
    tree(base, "@echo one; while [ ! -e ../go ]; do sleep 0.05; done; echo two; exit 3")
    (base / "tree" / "old.py").touch()
    (base / "tree" / ".build").mkdir()
    (base / "tree" / ".build" / "kept").touch()
    assert begin(host, "a") == begin(host, "a") == {"job": "a"}, "asked twice, begun once"
    with pytest.raises(UsageError, match="job a is running in this folder"):
        begin(host, "b")
    with pytest.raises(UsageError, match="job a is running in this folder"):
        host.ask("prepare")
    assert not (base / "tree" / "old.py").exists() and (base / "tree" / ".build" / "kept").exists()
    (base / "go").touch()
    whole = followed(host, "a")
    assert whole.startswith(b"one\ntwo\n") and followed(host, "a", 4) == whole[4:]
    (one,) = host.ask("status")
    assert (one["state"], one["code"], one["why"]) == ("set-up failed", 2, "make setup: exit code 2")
    assert "two" in one["tail"] and not one["alive"]
    with pytest.raises(UsageError, match="there is no job 'b'"):
        host.follow("b", 0, print)


@pytest.mark.parametrize("killed", [False, True], ids=["asked", "killed"])
def test_a_stopped_job_leaves_no_process(host, tmp_path, killed):
    """Also where the process that supervised it was killed before."""
    base = tmp_path / "base"
    host.ask("prepare")
    tree(base, "@setsid sh -c 'echo $$$$ > ../stray; sleep 1000' & sleep 1000")
    begin(host, "a")
    while not ((base / "stray").exists() and (base / "stray").read_text()):
        time.sleep(0.01)
    if killed:
        os.kill(json.loads((base / "jobs" / "a" / "state.json").read_text())["pid"], 9)
        followed(host, "a")
    assert host.ask("stop", job="a")["state"] == ("lost" if killed else "stopped")
    stray = int((base / "stray").read_text())
    while state_of(stray) not in "ZX":
        time.sleep(0.01)


def state_of(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def test_what_a_shell_prints_at_its_start_is_left_out(host, tmp_path):
    (tmp_path / "ssh").write_text(SSH.replace("exec sh", "echo welcome\nexec sh"))
    assert host.ask("status") == []
