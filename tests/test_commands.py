"""Every command in the code blocks of the pages runs: a short form of each here, as it is written in the slow tests.

What needs a GPU is refused on a CPU, with exit code 7 or 2 and a line that says so.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import run
from harness.judge import phases
from harness.results import environment, gpu, record
from harness.tools import model_outputs
from leaderboard import compare, pack, report
from problems.common import load
from problems.dsv4_forward.generate import generate
from tests.exploits import exploit_table
from tests.support import ROOT, pages

COMMANDS = pages.commands()
PYTHON = ".venv/bin/python "
SMALL = {  # a problem's small case, and for the whole model a short end-to-end check
    "nvfp4_gemv": ["--case", "m=16 k=64"],
    "fmha_decode": ["--case", "batch=1 queries=1 heads=8"],
    "indexer": ["--case", "entries=129"],
    "moe_gemm": ["--case", "tokens=1 experts=1"],
    "mhc_site": ["--case", "tokens=1 hidden=64"],
    "linear_decode": ["--case", "format=fp8 tokens=2 shape=192x320"],
    "dsv4_forward": ["--case", "config=tiny format=fp32 batch=1 phase=decode"],
}
# Of nvfp4_gemv, what is timed: m, k, l.
TIMED = ((64, 16384, 1), (64, 7168, 2), (64, 2048, 4))
CHECK = ["--config", "tiny", "--format", "fp32", "--steps", "1"]
STOPS = {"--check-only", "--lint", "--sanitize"}
# What this suite is part of, or takes hours.
NOT_WITHIN = (
    "make test",
    "make test-slow",
    "make test-system",
    "make lint",
    "make clean",
    "make setup",
    "make setup-system",
    ".ci/run",
)
ELSEWHERE = re.compile(r"tools/remote\.py|--on |--ray ")  # tests/system runs these, with a host and a cluster
# Slow: the same command for another problem, and options of the model's check and the page, which have other tests.
REPEATS = re.compile(
    r"run\.py (?!nvfp4_gemv)\w+ --all|run\.py (moe_gemm|fmha_decode|mhc_site|dsv4_forward)$|--check-only --attribute"
    r"|--kernels linear|--html|report\.py --out"
)
HOURS = (f"{PYTHON}-m tests.exploits.exploit_table",)
NEED_GPU = {"harness/tools/bringup_sm100.py": 7, "harness.tools.model_outputs compare": 1}  # else they return this

pytestmark = pytest.mark.skipif(gpu.visible(), reason="says what happens without a GPU")


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    return pages.checkout(tmp_path_factory.mktemp("checkout"))


@pytest.fixture
def there(copy, monkeypatch) -> Path:
    """This process is in the copy, and reads and writes problems and records there; nvfp4_gemv has few small cases."""
    monkeypatch.chdir(copy)
    monkeypatch.setattr(record, "RESULTS", copy / "leaderboard" / "results")
    monkeypatch.setattr(load, "PROBLEMS", copy / "problems")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # of children: tensors are small
    for counts in ("PROCESSES", "SAMPLES", "PAIRED_PROCESSES", "PAIRS"):
        monkeypatch.setattr(phases, counts, {"cpu": 1})
    task = load.module(copy / "problems" / "nvfp4_gemv", "task")
    timed = [task.Case(*sizes, seed=1111) for sizes in TIMED]
    for name in ("BENCHMARKS", "BENCHMARKS_CPU"):
        monkeypatch.setattr(task, name, timed)
    monkeypatch.setattr(task, "TESTS", [*task.TESTS[:6], timed[-1]])
    return copy


def needs_gpu(words: list[str]) -> bool:
    """Whether a call of harness/run.py is about a GPU, so that a CPU can only refuse it."""
    return any(word.startswith(("sm90_", "sm100_")) for word in words) or {"--sanitize", "latency"} & {*words} != set()


def exit_codes(words: list[str]) -> tuple[int, ...]:
    """What a call of harness/run.py may return on a CPU."""
    if needs_gpu(words) and "--new-variant" not in words:
        # Without --mode a kernel for another machine is compiled, and that is all that was asked for.
        return (7, 2) if {"--mode", "--against", "--sanitize"} & {*words} else (0, 7)
    if any("/wrong/" in word for word in words):
        return (1,)
    if "--fail-on-regression" in words:
        return (0, 6, 8)
    return (0, 6) if "benchmark" in words else (0,)  # 6: the machine was too busy to time it


def make_way(there: Path, words: list[str]) -> None:
    """Leave of cpu_mine and my_op, which the pages make, what a command needs: it may come before or after others. For
    a variant of another commit the copy gets two commits.
    """
    if any(word.startswith("HEAD~1:") for word in words) and not (there / ".git").is_dir():
        git = ["git", "-c", "user.name=t", "-c", "user.email=t@t"]
        for command in (["init", "-q"], ["add", "problems"], *[["commit", "-q", "--allow-empty", "-mx"]] * 2):
            assert subprocess.run([*git, *command], cwd=there).returncode == 0
    shutil.rmtree(there / "problems" / "my_op", ignore_errors=True)
    for file in there.glob("problems/*/variants/cpu_mine.*"):
        file.unlink()
    if "--variant" in words and "cpu_mine" in words:
        variants = there / "problems" / "nvfp4_gemv" / "variants"
        for suffix in ("py", "cpp"):
            shutil.copy2(variants / f"cpu_portable.{suffix}", variants / f"cpu_mine.{suffix}")


def shortened(words: list[str]) -> list[str]:
    """The arguments of harness/run.py with more of them, so that it is done in seconds."""
    if {"--new", "--new-variant", "--list", "--help"} & {*words}:
        return words
    words = [*(word.replace("m=7168", "m=64") for word in words), "--device", "cpu"]  # see TIMED
    if words[0] == "path/to/gpu_mode_problem":
        words = [word.replace("my.py", "path/to/gpu_mode_problem/submission.py") for word in words]
    if words[0] == "dsv4_forward" and "latency" not in words:
        words += [*CHECK, *(["--check-only"] if "--kernels" in words else [])]  # which only the check knows
    if STOPS & {*words}:
        return words
    if "--against" in words:  # pairs are timed, by at least two processes of each side
        return [*words, "--mode", "benchmark", "--processes", "2", "--case", "k=2048 l=4"]
    words += [] if "--mode" in words else ["--mode", "test"]
    return words if "--case" in words or "latency" in words else [*words, *SMALL.get(words[0], [])]


def shows_help(main: Callable[[list[str]], int], words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0


def run_short(command: str, there: Path, monkeypatch, capsys) -> None:
    if command.startswith("make "):
        listed = subprocess.run(["make", "-n", *command.split()[1:]], cwd=ROOT, capture_output=True, text=True)
        assert listed.returncode == 0, listed.stderr
        if command not in NOT_WITHIN:
            for line in listed.stdout.splitlines():
                if line.startswith((f"{PYTHON}harness/", f"{PYTHON}leaderboard/")):
                    run_short(line, there, monkeypatch, capsys)
        return
    if command.startswith(f"{PYTHON}-c"):
        if shutil.which("nvcc"):
            assert subprocess.run(["sh", "-c", command], cwd=there).returncode == 0
        return
    if command.startswith("cp "):
        assert subprocess.run(shlex.split(command), cwd=there).returncode == 0
        return
    if command in NOT_WITHIN:
        assert os.access(ROOT / command, os.X_OK)
        return
    assert command.startswith(PYTHON), f"tests/test_commands.py has no short form of {command!r}: add one"
    program, *words = shlex.split(command.removeprefix(PYTHON))
    if ELSEWHERE.search(command):
        return
    if program == "harness/run.py":
        if words[0] == "dsv4_forward":  # its modules import each other by name, so it is that of this checkout
            monkeypatch.setattr(load, "PROBLEMS", ROOT / "problems")
        make_way(there, words)
        code, wanted = run.main(shortened(words)), exit_codes(words)
        out, err = capsys.readouterr()
        assert code in wanted, f"{out}\n{err}"
        if code in (2, 7):
            assert "this run is on cpu" in out + err or "needs a GPU" in err
    elif program == "leaderboard/report.py":
        assert report.main(words) == 0
    elif program == "leaderboard/compare.py":
        assert compare.main(words) == 0
    elif program == "leaderboard/pack.py":
        assert pack.main(words) == 0
    elif program == "problems/dsv4_forward/generate/generate.py":
        assert generate.main([*words, "--tokens", "3"]) in (0, None)
    elif program == "-m" and words[0] == "tests.support.code_sections":
        assert subprocess.run([sys.executable, "-m", words[0], "--help"], cwd=ROOT, capture_output=True).returncode == 0
    elif program == "-m" and words[0] == "tests.exploits.exploit_table":
        shows_help(exploit_table.main, ["--help"])
    elif program == "-m" and words[0] == "harness.tools.model_outputs":
        if words[1] == "table":
            for name in ("PAGE", "RESULTS"):
                monkeypatch.setattr(model_outputs, name, there / getattr(model_outputs, name).relative_to(ROOT))
            assert model_outputs.main(words[1:]) == 0
        else:
            shows_help(model_outputs.main, [words[1], "--help"])
    elif program == "harness/tools/bringup_sm100.py":
        assert subprocess.run([sys.executable, program, "--help"], cwd=ROOT, capture_output=True).returncode == 0
    elif program == "-m" and words[0] == "harness.problem.task_yml":
        assert subprocess.run([sys.executable, "-m", *words, "--check"], cwd=ROOT).returncode == 0
    elif program != "-m" or words[0] not in ("pytest", "ruff", "ty"):
        pytest.fail(f"tests/test_commands.py has no short form of {command!r}: add one")


@pytest.mark.parametrize(
    "command", [pytest.param(one, marks=pytest.mark.slow if REPEATS.search(one) else ()) for one in COMMANDS]
)
def test_a_short_form_of_every_command_runs(command, there, monkeypatch, capsys):
    run_short(command, there, monkeypatch, capsys)


def test_the_commands_are_found():
    assert len(COMMANDS) > 25 and {"make run", "make test"} <= {*COMMANDS}
    page = "```python\nmake x\n```\n```sh\n$ make y  # z\n```\n    make a  b\ntext\n    it is no make\n"
    assert pages.of_text(page) == ["make y", "make a"]
    assert any(command.startswith(f'{PYTHON}-c "\n') and command.endswith('"') for command in COMMANDS)


def test_four_commands_lead_from_a_clone_to_a_row_on_the_board(there, monkeypatch, capsys):
    """The judge's counts are small here; all else is as it is written."""
    four = pages.of_text((ROOT / "README.md").read_text().partition("## Judge your own kernel")[2])[:4]
    assert four == pages.of_text((ROOT / "docs/adding_a_kernel.md").read_text().partition("## Four commands")[2])[:4]
    assert four[0] == "make setup"
    create, judge, show = (shlex.split(command.removeprefix(PYTHON))[1:] for command in four[1:])
    make_way(there, create)
    assert run.main(create) == 0
    code = run.main([*judge, "--device", "cpu"])
    assert code in (0, 6), capsys.readouterr()  # 6: the machine was too busy to time it
    assert report.main([*show, "--results", str(record.RESULTS), "--machine", environment.machine("cpu")]) == 0
    assert "cpu_mine" in capsys.readouterr().out.partition("nvfp4_gemv, cpu, on ")[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [command for command in COMMANDS if command not in (*NOT_WITHIN, *HOURS) and not ELSEWHERE.search(command)],
)
def test_every_command_runs_as_it_is_written(command, copy):
    words = shlex.split(command)
    make_way(copy, words)
    if words[0] == "make":
        command = command.replace("make", "make -o setup", 1)
    if "gpu_mode_problem" in command:
        command = command.replace("my.py", "path/to/gpu_mode_problem/submission.py")
    if "code_sections" in command:
        command = f"cd {ROOT} && {command}".replace(" main ", " HEAD ")
    done = subprocess.run(["sh", "-c", command], cwd=copy, capture_output=True, text=True)
    without = next((code for words_of, code in NEED_GPU.items() if words_of in command), 0)
    wanted = exit_codes(words[2:]) if "harness/run.py" in words and "model" not in words else (without,)
    # 6: the machine was too busy to time it.
    assert done.returncode in (*wanted, 6), f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert "Traceback" not in done.stderr
