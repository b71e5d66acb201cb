"""Commands, links and examples of the pages: every command is one that exists, and those that take seconds are run."""

import importlib
import importlib.util
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from harness import __main__ as harness_command
from harness import invocation, run
from harness.problem import scan, sources
from harness.tools import cluster, remote, scaffold
from problems.common import load
from tests.support import ROOT

PAGES = [
    *(ROOT / name for name in ("README.md", "AGENTS.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *(ROOT / name / "README.md" for name in ("leaderboard", "packaging", "ptx_model")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted(ROOT.glob("problems/*/README.md")),
]
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text() for page in PAGES}
PYTHON = ".venv/bin/python"
# A name that a page makes up -> what is there.
EXAMPLES = {
    "path/to/gpu_mode_problem": "tests/support/gpu_mode/vectoradd",
    "path/to/my.py": "problems/nvfp4_gemv/variants/torch_dequant.py",
    " my.py": " problems/nvfp4_gemv/variants/torch_dequant.py",
    "/tmp/cpu_draft.py": "problems/nvfp4_gemv/variants/torch_dequant.py",
    "--variant cpu_mine": "--variant cpu_portable",
    "--variant sm90_mine": "--variant sm90_plain",
    "sm90_naive": "sm90_plain",
}
CHEAP = re.compile(r"harness list|report\.py$|compare\.py |pack\.py |python -c ")


def commands() -> list[str]:
    """Return the commands in the indented blocks of all pages, without comments. Of Python a command has many lines."""
    found: dict[str, None] = {}
    for text in TEXTS.values():
        for several, line in re.findall(
            r'^    (?:(\.venv/bin/python -c "[^"]*")|((?:make|cp|\.venv/bin/\S+) .*))$', text, re.M
        ):
            command = re.split(r"\s{2,}|\s+# ", line)[0] if line else several.replace("\n    ", "\n")
            for name, there in EXAMPLES.items():
                command = command.replace(name, there)
            found.setdefault(command)
    return list(found)


COMMANDS = commands()


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Nothing is judged, sent or written: the arguments of what would be."""
    calls: list[object] = []

    monkeypatch.setattr(invocation.Run, "main", lambda run: calls.append(run) or 0)
    verbs = ((cluster, "run"), (remote, "run"), *((scaffold, name) for name in ("run", "listed", "wrong_kernels")))
    for module, name in verbs:
        monkeypatch.setattr(module, name, lambda *arguments: calls.append(arguments) or 0)
    return calls


@pytest.mark.parametrize("command", COMMANDS)
def test_command_of_a_page_is_valid(command, judged, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    program, *words = shlex.split(command)
    if program == "make":
        assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif program == "cp":
        assert Path(words[0]).is_file()
    elif words[0] == "-c":
        compile(words[1], command, "exec")
    elif words[0] == "-m":
        assert program == PYTHON and importlib.util.find_spec(words[1])
    else:
        assert program == PYTHON and Path(words[0]).is_file()
    if words[0] == run.NAME or words[:2] == ["-m", "harness"]:
        verb = ["run", *words[1:]] if words[0] == run.NAME else words[2:]
        assert harness_command.main(verb) == 0 and judged, capsys.readouterr().err


@pytest.mark.parametrize("command", [command for command in COMMANDS if CHEAP.search(command)])
@pytest.mark.parametrize("here", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_cheap_command_of_a_page_runs(command, here, tmp_path, capsys, monkeypatch):
    """In this process, where all of its packages are; at night as a program."""
    if " -c " in command and not shutil.which("nvcc"):
        pytest.skip("needs nvcc")
    command = command.replace("/tmp/", f"{tmp_path}/")
    if not here:
        done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0 and done.stdout, done.stdout + done.stderr
        return
    monkeypatch.chdir(ROOT)
    _, first, *words = shlex.split(command)
    if first == "-c":
        exec(words[0], {})
    elif first == "-m":
        assert harness_command.main(words[1:]) == 0
    else:
        assert importlib.import_module(first.removesuffix(".py").replace("/", ".")).main(words) == 0
    assert capsys.readouterr().out


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", TEXTS)
def test_links_of_a_page_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", TEXTS[page]):
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text()), link


@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
def test_worked_example_obeys_the_rules_and_compiles(tmp_path):
    file = tmp_path / "sm90_naive.py"
    for language, suffix in (("python", ".py"), ("cuda", ".cu")):
        (code,) = re.findall(rf"```{language}\n(.*?)```", TEXTS["docs/adding_a_kernel.md"], re.DOTALL)
        file.with_suffix(suffix).write_text(code)
    assert len(sources.closure(file)) == 2 and scan.findings(sources.closure(file)) == []
    example = load.from_file(load.PROBLEMS / "nvfp4_gemv", file)
    for target in example.TARGETS:
        assert not any(kernel.spill_bytes for kernel in example.compile_for(target)[0].kernels())
