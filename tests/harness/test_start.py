"""What a command does before anything is judged: no traceback without packages, and no torch for what needs none."""

import ast
import importlib.util
import os
import shutil
import site
import subprocess
import sys
from pathlib import Path

import pytest

from problems.common import venv
from tests.support import ROOT

HEAVY = ("torch", "numpy", "pandas", "matplotlib", "cutlass")
RUN, REPORT = "harness/run.py", "leaderboard/report.py"
VERB = ["-m", "harness"]
SHORT = [
    ([RUN, "--help"], 0, "--events"),
    ([*VERB, "--help"], 0, "sanitize"),
    ([*VERB, "list"], 0, "nvfp4_gemv"),
    ([*VERB, "list", "dsv4_forward"], 0, "composed"),
    ([RUN, "nvfp4_gemb"], 2, "did you mean nvfp4_gemv?"),
    ([*VERB, "lint", "nvfp4_gemv", "--seed", "1"], 2, "unknown option --seed"),
    ([RUN, "nvfp4_gemv", "--device", "cuda:x"], 2, "--device must be cpu, cuda, cuda:N or model"),
    ([RUN, "nvfp4_gemv", "--json", "/dev/null", "--events", "/dev/null"], 2, "--json and --events must be two files"),
    ([REPORT, "--help"], 0, "--machine"),
    ([REPORT, "--format", "html"], 2, "--format"),
]
# Prints the packages that were imported, after all else on standard error.
WATCH = f"""import atexit, runpy, sys
atexit.register(lambda: print("heavy:", *sorted({HEAVY} & sys.modules.keys()), file=sys.stderr))
del sys.argv[0]
if sys.argv[0] == "-m":
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    runpy.run_path(sys.argv[0], run_name="__main__")
""".replace(f"{HEAVY}", f"{set(HEAVY)}")
COMMANDS = [
    [RUN, "nvfp4_gemv"],
    [*VERB, "list"],
    [REPORT],
    [REPORT, "--check"],
    ["-m", "harness.problem.task_yml", "--check"],
    ["problems/dsv4_forward/generate/generate.py"],
    ["-m", "problems.dsv4_forward.check"],
]


@pytest.mark.parametrize(
    ("arguments", "code", "said"), SHORT, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_what_judges_nothing_is_answered_at_once(arguments, code, said):
    done = subprocess.run([sys.executable, "-c", WATCH, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == code and said in done.stdout + done.stderr, done.stderr
    assert done.stderr.endswith("heavy:\n"), "imported without need"


@pytest.fixture
def checkout(tmp_path) -> Path:
    """The commands' files without .venv, and what they need on a bare python3."""
    place = tmp_path / "a checkout"
    for part in ("harness", "leaderboard", "problems"):
        leave_out = shutil.ignore_patterns("__pycache__", "*.jsonl", "*.cu")
        shutil.copytree(ROOT / part, place / part, ignore=leave_out)
    return place


def bare(place: Path, arguments: list[str], *flags: str) -> subprocess.CompletedProcess:
    """A command run by a python that sees no packages."""
    python = os.path.realpath(sys.executable)
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(place), "PYTHONNOUSERSITE": "1"}
    command = [python, "-S", *flags, *arguments]
    return subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_without_packages_one_line_names_make_setup(checkout, arguments):
    done = bare(checkout, arguments)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert "run `make setup` first: " in done.stderr and " has no torch, " in done.stderr
    assert done.stderr.count("\n") == 1


READ_FIRST = [RUN, "harness/__main__.py", "harness/judge/options.py", "harness/results/output.py", "tools/setup.py"]
READ_FIRST += [REPORT, "problems/common/venv.py", "problems/dsv4_forward/generate/streams.py"]


@pytest.mark.parametrize("file", READ_FIRST)
def test_what_a_command_reads_first_is_known_to_older_pythons(file):
    """As far as its syntax: what is too old is named by a line, not by a traceback."""
    ast.parse((ROOT / file).read_text(), feature_version=(3, 8))


def test_help_needs_no_package(checkout):
    for command in (RUN, REPORT):
        done = bare(checkout, [command, "--help"])
        assert done.returncode == 0 and done.stdout.startswith("usage: ") and done.stderr == ""
        assert done.stdout.count("\n") < 45, "a page of a terminal"


def test_with_venv_the_command_is_run_by_it(checkout):
    """With all its words and flags; a python in .venv that lacks the packages too is not called forever."""
    python = checkout / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$@"\nexit 7\n')
    python.chmod(0o755)
    done = bare(checkout, [RUN, "nvfp4_gemv", "--case", "a b"], "-u")
    assert (done.returncode, done.stdout, done.stderr) == (7, f"-S -u {RUN} nvfp4_gemv --case a b\n", "")
    done = bare(checkout, ["-m", "harness.problem.task_yml", "--check"])
    assert (done.returncode, done.stdout) == (7, "-S -m harness.problem.task_yml --check\n")
    python.write_text("no program")
    done = bare(checkout, [RUN, "nvfp4_gemv"])
    assert done.returncode == 2 and "cannot be started" in done.stderr and done.stderr.count("\n") == 1


def test_a_venv_without_the_packages_or_of_an_old_python_is_named(checkout, monkeypatch, capsys, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", checkout / ".venv"], check=True)
    done = bare(checkout, [RUN, "nvfp4_gemv"])
    assert done.returncode == 2 and "run `make setup` first" in done.stderr and done.stderr.count("\n") == 1
    monkeypatch.setattr(venv, "PYTHON", str(tmp_path / "python"))
    monkeypatch.setattr(venv, "OLDEST", (99, 0))
    with pytest.raises(SystemExit) as stop:
        venv.enter("x")
    assert stop.value.code == 2 and "is older than Python 99.0" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("setuptools"), reason="needs setuptools")
def test_an_editable_install_gives_a_command_in_any_folder(checkout, tmp_path):
    """Where its interpreter lacks the packages .venv's runs. Another installation than an editable one is refused."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "an env"], check=True)
    python = tmp_path / "an env" / "bin" / "python"
    (checkout / ".venv").symlink_to(sys.prefix)
    packages = next((tmp_path / "an env").glob("lib/*/site-packages")) / "setup.pth"
    packages.write_text("\n".join(site.getsitepackages()))
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-build-isolation"]
    refused = subprocess.run([*pip, checkout], capture_output=True, text=True)
    assert refused.returncode and "pip install -e ." in refused.stdout + refused.stderr
    subprocess.run([*pip, "-e", checkout], check=True, capture_output=True)
    packages.unlink()
    done = subprocess.run([python.with_name("dsv4-judge"), "list"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "nvfp4_gemv" in done.stdout, done.stderr


def completions(shell: str) -> str:
    return subprocess.check_output([sys.executable, *VERB, "completion", shell], cwd=ROOT, text=True)


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_gets_options_modes_and_problems(shell):
    script = completions(shell)
    for word in ("--against", "leaderboard", "nvfp4_gemv", "dsv4_forward", "run.py", "dsv4-judge", "sanitize"):
        assert word in script


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
def test_bash_completes(tmp_path):
    said = completions("bash")

    def completed(*words: str) -> list[str]:
        quoted, name = " ".join(f"'{word}'" for word in words), Path(words[0]).name
        function = f"$(complete -p {name} | sed 's/.*-F \\([^ ]*\\).*/\\1/')"
        script = f"{said}\nCOMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; {function}\n"
        script += 'printf "%s\\n" "${COMPREPLY[@]}"\n'
        done = subprocess.run(["bash", "--norc"], input=script, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    assert completed("harness/run.py", "nvf") == ["nvfp4_gemv"]
    assert completed("harness/run.py", "nvfp4_gemv", "--mode", "la") == ["latency"]
    assert set(completed("harness/run.py", "nvfp4_gemv", "--s")) == {"--submission", "--seed", "--shard"}
    assert completed("dsv4-judge", "sani") == ["sanitize"]
    assert completed("dsv4-judge", "lint", "nvf") == ["nvfp4_gemv"]
