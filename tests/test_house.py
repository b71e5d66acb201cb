"""The house around the code: setting up, the README's promises, pins, ignored files."""

import ast
import importlib.metadata
import itertools
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from harness import run
from harness.judge import verdict
from harness.problem import folders, scan
from problems.common import build, load
from tests.support import ROOT
from tools import setup, setup_system

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = setup.read_pins((ROOT / "constraints.txt").read_text())
PAGES = [ROOT / "README.md", ROOT / "AGENTS.md", *sorted((ROOT / "docs").glob("*.md"))]
CPU_NEEDS, GPU_NEEDS = (setup.wanted(PROJECT, gpu) for gpu in (False, True))
# A python3 with torch for CUDA and everything that nothing works without.
GPU_PACKAGES = {
    "torch": "2.11.0+cu130",
    "numpy": "2.5.2",
    "pytest": "8.4.0",
    "pandas": "2.3.1",
    "matplotlib": "3.10.0",
    "rich": "14.0.0",
    "pyyaml": "6.0.2",
    "pydantic": "2.11.0",
    "hypothesis": "6.140.0",
    "cuda-bindings": "13.0.1",
    "pip": "25.0",
}


def facts(**changes: object) -> setup.Facts:
    """A bare Debian with python3, pip and no GPU, but for `changes`."""
    plain = {"installed": {"pip": "23.0.1"}, "torch_cuda": "", "gpu": False, "ensurepip": True, "pip": (23, 0)}
    return setup.Facts(**{**plain, **changes})


def gpu_facts(**changes: object) -> setup.Facts:
    return facts(**{"installed": GPU_PACKAGES, "torch_cuda": "13.0", "gpu": True, "pip": (25, 0), **changes})


def names(requirements: tuple[str, ...]) -> list[str]:
    return [setup.split(r)[0] for r in requirements]


# The decision: what is found -> what is done.


def test_without_a_gpu_cpu_torch_is_installed_at_its_exact_pin():
    plan = setup.decide(facts(), CPU_NEEDS, PINS)
    assert (plan.stop, plan.torch, plan.with_pip) == ("", "cpu", True)
    assert plan.requirements[0] == f"torch=={PINS['torch']}"
    assert sorted(names(plan.requirements)) == sorted(names(CPU_NEEDS))
    assert all("==" in r for r in plan.requirements)
    assert plan.pins == PINS


def test_baselines_are_for_machines_with_a_gpu():
    baselines = {"humming-kernels", "tokenspeed-flashmla", "sgl-deep-gemm"}
    assert baselines <= set(names(GPU_NEEDS)) and not baselines & set(names(CPU_NEEDS))


def test_torch_with_cuda_is_used_and_what_is_there_is_kept():
    plan = setup.decide(gpu_facts(), GPU_NEEDS, PINS)
    assert (plan.stop, plan.torch) == ("", "python3")
    assert sorted(names(plan.requirements)) == [
        "humming-kernels",
        "jinja2",
        "nvidia-cutlass-dsl",
        "pygments",
        "pytest-xdist",
        "ruff",
        "safetensors",
        "sgl-deep-gemm",
        "shtab",
        "tokenizers",
        "tokenspeed-flashmla",
        "transformers",
        "ty",
    ]
    assert plan.pins["torch"] == "2.11.0+cu130" and plan.pins["numpy"] == "2.5.2"
    assert plan.pins["nvidia-cutlass-dsl"] == PINS["nvidia-cutlass-dsl"]
    assert any(r.startswith("nvidia-cutlass-dsl[cu13]==") for r in plan.requirements)


def test_a_package_of_python3_that_is_too_old_gets_a_newer_one():
    plan = setup.decide(gpu_facts(installed={**GPU_PACKAGES, "pytest": "7.4.4"}), GPU_NEEDS, PINS)
    assert f"pytest=={PINS['pytest']}" in plan.requirements
    assert plan.pins["pytest"] == PINS["pytest"]


@pytest.mark.parametrize(
    ("changes", "torch"),
    [
        ({"torch_cuda": "", "gpu": False}, "cpu"),  # torch for CUDA, and no GPU that it sees
        ({"torch_cuda": "", "gpu": True}, "cuda"),  # a GPU, and a torch that cannot use it
        ({"installed": {**GPU_PACKAGES, "torch": "2.4.1+cu121"}}, "cuda"),  # too old for us
    ],
)
def test_another_torch_of_python3_is_not_used(changes, torch):
    plan = setup.decide(gpu_facts(**changes), GPU_NEEDS, PINS)
    assert plan.torch == torch
    assert plan.requirements[0] == f"torch=={PINS['torch']}"
    assert plan.pins == PINS, "python3's packages are out of sight, so they constrain nothing"


def test_without_ensurepip_the_pip_of_python3_installs():
    plan = setup.decide(facts(ensurepip=False), CPU_NEEDS, PINS)
    assert not plan.stop and not plan.with_pip
    assert setup.pip_command(plan, "install")[:4] == [sys.executable, "-m", "pip", "--python"]
    assert setup.pip_command(setup.decide(facts(), CPU_NEEDS, PINS))[0] == str(setup.PYTHON)


@pytest.mark.parametrize("pip", [(0, 0), (20, 3), (22, 2)])
def test_without_any_pip_that_will_do_one_line_names_the_package(pip):
    plan = setup.decide(facts(ensurepip=False, pip=pip), CPU_NEEDS, PINS)
    assert "python3-venv" in plan.stop and "\n" not in plan.stop


def test_without_any_pip_a_python3_that_has_the_essentials_will_do():
    plan = setup.decide(gpu_facts(ensurepip=False, pip=(0, 0)), GPU_NEEDS, PINS)
    assert (plan.stop, plan.requirements, plan.torch) == ("", (), "python3")
    lacking = {name: version for name, version in GPU_PACKAGES.items() if name != "rich"}
    assert setup.decide(gpu_facts(installed=lacking, ensurepip=False, pip=(0, 0)), GPU_NEEDS, PINS).stop


def test_every_missing_tool_gets_one_clear_line():
    whole = {"g++": True, "nvcc": True, "driver": True, "card": True}
    assert setup.lacks(whole) == []
    said = {"g++": "apt install g++", "nvcc": "CUDA variants are not compiled", "driver": "without a driver"}
    for tool, word in said.items():
        lines = setup.lacks({**whole, tool: False})
        assert len(lines) == 1 and word in lines[0] and "\n" not in lines[0]
    assert "no NVIDIA GPU" in setup.lacks({**whole, "driver": False, "card": False})[0]


def test_what_is_lost_without_a_package_is_said():
    line = setup.without(["nvidia-cutlass-dsl", "ruff"])
    assert "CuTe DSL variants" in line and "make lint" in line and "\n" not in line
    optional = set(names(GPU_NEEDS)) - set(setup.ESSENTIAL)
    assert optional == set(setup.WITHOUT)


@pytest.mark.parametrize(
    ("requirement", "version", "expected"),
    [
        ("pkg>=1.10", "1.9", False),
        ("pkg>=1.10", "1.10.0", True),
        ("pkg>=2.10", "2.13.0+cpu", True),
        ("pkg==1.2", "1.2.0", True),
        ("pkg==1.2", "1.2.1", False),
        ("pkg[extra]>=1", "0.9", False),
        ("pkg", "1", True),
        ("pkg==1.0.post2", "1.0.0.post2", True),
        ("pkg==1.0.post2", "1.0.post3", False),
        ("pkg==1.0", "1.0.post2", False),
        ("pkg>=1.0.1", "1.0.post2", False),
        ("pkg>=1.0.post2", "1.1", True),
    ],
)
def test_bounds(requirement, version, expected):
    assert setup.satisfied(requirement, {"pkg": version}) is expected
    assert not setup.satisfied(requirement, {"other": version})


@pytest.mark.parametrize("requirement", ["pkg<2", "pkg>=1,<2", "pkg~=1.0", "pkg @ file:///x", ""])
def test_other_bounds_are_refused(requirement):
    with pytest.raises(ValueError, match="requirement must be"):
        setup.split(requirement)


def test_up_to_date_means_there_and_at_the_pin():
    at_pins = dict(PINS, torch=PINS["torch"] + "+cpu")
    assert setup.up_to_date(CPU_NEEDS, PINS, at_pins)
    assert not setup.up_to_date(CPU_NEEDS, PINS, {n: v for n, v in at_pins.items() if n != "rich"})
    assert not setup.up_to_date(CPU_NEEDS, PINS, dict(at_pins, numpy="1.26.4"))


def test_a_second_call_does_nothing_and_a_changed_pin_does_not_go_unseen(monkeypatch, tmp_path, capsys):
    """main with an environment that is as its stamp says ends before it looks for packages."""
    for name in ("pyproject.toml", "constraints.txt", "tools/setup.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    python = tmp_path / "python"
    python.touch()
    found = {"g++": True, "nvcc": True, "driver": False, "card": False}
    replaced = {"ROOT": tmp_path, "PYTHON": python, "STAMP": tmp_path / "stamp", "tools": lambda: found}
    for name, value in replaced.items():
        monkeypatch.setattr(setup, name, value)

    class Looked(Exception):
        pass

    def find(driver: bool) -> setup.Facts:
        raise Looked

    monkeypatch.setattr(setup, "find", find)
    sources = [(tmp_path / name).read_text() for name in ("pyproject.toml", "constraints.txt", "tools/setup.py")]
    stamp = {"key": setup.key(sources, False), "missing": ["ruff"]}
    (tmp_path / "stamp").write_text(json.dumps(stamp))
    assert setup.main() == 0
    assert "not installed: ruff: make lint does not run" in capsys.readouterr().out
    (tmp_path / "constraints.txt").write_text(sources[1] + "another==1.0\n")
    with pytest.raises(Looked):
        setup.main()
    (tmp_path / "constraints.txt").write_text(sources[1])
    found["driver"] = True  # a driver came: another torch is due
    with pytest.raises(Looked):
        setup.main()


PIP = """Collecting torch==2.13.0+cpu
  Downloading torch-2.13.0%2Bcpu-cp311-cp311-linux_x86_64.whl (190.4 MB)
     ---------- 190.4/190.4 MB 200.0 MB/s eta 0:00:00
Processing /opt/rich-15.0.0-py3-none-any.whl (from rich)
Collecting idna
  Downloading idna-3.10-py3-none-any.whl (70 kB)
  Downloading nvidia_big-1.0-py3-none-any.whl (1.2 GB)
Installing collected packages: torch, rich, idna
Successfully installed idna-3.10 rich-15.0.0 torch-2.13.0+cpu
"""


def test_setup_says_what_takes_long_and_not_every_package(capsys):
    assert "".join(setup.show(PIP.splitlines(keepends=True))) == PIP
    assert capsys.readouterr().out.splitlines() == [
        "setup: package 1: downloading torch, 190.4 MB",
        "setup: package 3: downloading nvidia_big, 1.2 GB",
        "setup: unpacking 3 packages into .venv",
    ]


@pytest.mark.parametrize("status", [0, 1])
def test_pips_last_lines_are_shown_where_it_fails(monkeypatch, tmp_path, capsys, status):
    monkeypatch.setattr(setup, "LOG", tmp_path / "pip.log")
    script = f"print('Collecting a\\n' * 99 + 'ERROR: no such version'); exit({status})"
    monkeypatch.setattr(setup, "pip_command", lambda *_: [sys.executable, "-c", script])
    assert setup.run_pip(setup.decide(facts(), CPU_NEEDS, PINS), [], ["rich==15.0.0"]) == (not status)
    said = capsys.readouterr().out
    assert said.count("\n") == (setup.TAIL if status else 0) and ("ERROR: no such version" in said) == bool(status)
    assert (tmp_path / "pip.log").read_text().count("\n") == 100


@pytest.mark.parametrize("name", ["nvfp4_gemv", "fmha_decode", "indexer"])
def test_make_run_begins_with_one_case(name):
    done = subprocess.run(
        ["make", "--no-print-directory", "-n", "run", f"PROBLEM={name}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    _, first, whole, board = done.stdout.splitlines()
    assert "harness/run.py" in first and whole.endswith(f"{name} --all") and "report.py" in board
    (case,) = re.findall(r'--case "(.*)"$', first)
    problem = folders.find(name)
    for cases in (*problem.benchmarks.values(), problem.tests):
        assert len([one for one in cases if case in str(one)]) == 1


def test_an_old_python_gets_one_line():
    """setup.py is what meets it: it must parse there, and speak before it imports what is missing there."""
    source = (ROOT / "tools" / "setup.py").read_text()
    tree = ast.parse(source, feature_version=(3, 8))
    ours = [type(node).__name__ for node in tree.body[:3]]
    assert ours == ["Expr", "Import", "If"] and "version_info < (3, 11)" in ast.unparse(tree.body[2].test)


# Pins.


def test_every_pin_is_exact_and_every_requirement_has_one():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.!]+", line) for line in lines), "NAME==VERSION, no local version"
    assert len(lines) == len(PINS), "a package is pinned twice"
    for requirement in itertools.chain(PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()):
        assert setup.satisfied(requirement, PINS), f"{requirement} has no pin that meets it"


def test_the_pins_fit_together():
    """What the installed packages require of one another is met by the pins, for each that is pinned."""
    config = Path(sys.prefix, "pyvenv.cfg")
    if not config.is_file() or "include-system-site-packages = true" in config.read_text():
        pytest.skip("python3's own packages are in use, not the pinned ones")
    unmet, checked = [], 0
    for name in PINS:
        try:
            wanted = [Requirement(text) for text in importlib.metadata.requires(name) or []]
        except importlib.metadata.PackageNotFoundError:
            continue  # [baselines], on a machine without a GPU
        checked += 1
        for need in wanted:
            pin = PINS.get(setup.normal(need.name))
            own = name == "torch" and str(need.specifier).startswith("==")  # its CUDA packages, pinned by itself
            if own or (need.marker and not need.marker.evaluate({"extra": ""})):
                continue
            if pin is None or not need.specifier.contains(pin, prereleases=True):
                unmet.append(f"{name} needs {need}, pinned: {pin}")
    assert checked >= len(names(CPU_NEEDS))
    assert not unmet, "\n".join(unmet)


# Makefile, CI and what the pages promise.


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
@pytest.mark.parametrize("there", [True, False])
def test_the_tests_run_also_without_the_package_that_spreads_them(tmp_path, there):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$1" != -c ] || exit {0 if there else 1}\necho "called $*"\n')
    python.chmod(0o755)
    command = ["make", "-C", str(ROOT), "test", "PYTHON=true", f"VENV_PYTHON={python}"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    options = " -n 2 --dist loadfile --no-loadscope-reorder"
    assert re.search("^called (.*)", said, re.MULTILINE)[1] == "-m pytest -q" + options * there


def test_ci_runs_the_tests_and_lint_and_fails_with_either(tmp_path):
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111, "not executable"
    (tmp_path / ".ci").mkdir()
    shutil.copy(script, tmp_path / ".ci" / "run")
    make = tmp_path / "bin" / "make"
    make.parent.mkdir()
    for failing, status in (("none", 0), ("test", 1), ("test-system", 1), ("lint", 1)):
        make.write_text(f'#!/bin/sh\necho "$1" >> {tmp_path}/called\n[ "$1" != {failing} ]\n')
        make.chmod(0o755)
        (tmp_path / "called").write_text("")
        done = subprocess.run(["sh", str(tmp_path / ".ci" / "run")], env={"PATH": f"{make.parent}:/usr/bin:/bin"})
        assert done.returncode == status, failing
        assert (tmp_path / "called").read_text().split() == ["test", "setup-system", "test-system", "lint"]


@pytest.mark.parametrize(
    ("root", "apt", "said"),
    [(True, True, ""), (False, True, "sudo apt-get install rsync"), (True, False, "install rsync with")],
)
def test_what_apt_cannot_install_is_said(root, apt, said):
    found = setup_system.why_not(["rsync"], root, apt)
    assert said in found and bool(found) == bool(said)
    assert setup_system.missing(lambda name: name != "sshd") == ["openssh-server"]


def test_every_file_named_on_the_pages_exists():
    """Links, and paths in backquotes, but for what only an example or a run makes."""
    examples = {
        "variants/",
        "wrong/",
        "solutions/correct/",
        "solutions/wrong/",
        "problems/NAME/",
        "problems/my_op/",
        "leaderboard/out/profile/",
        "leaderboard/out/ray/",
        "leaderboard/out/remote/",
        "leaderboard/results/<machine>/",
    }
    missing, seen = [], 0
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        named = {name for link in re.findall(r"\[([\w./]+\.md)\]\(([^)#]+)\)", text) for name in link}
        named |= set(re.findall(r"`([\w./<>-]+/[\w./<>-]*)`", text))
        for name in named - examples:
            if "<" in name or "_naive" in name or "_mine" in name or name.startswith("path/"):
                continue
            seen += 1
            if not (page.parent / name).exists() and not (ROOT / name).exists():
                missing.append(f"{page.name}: {name}")
    assert seen >= 10
    assert not missing, "\n".join(missing)


def test_the_pages_and_messages_call_the_python_that_make_sets_up():
    """A bare `python` may be missing, or lack what is needed."""
    pages = [*PAGES, *ROOT.glob("problems/*/README.md"), ROOT / "leaderboard" / "README.md"]
    sources = [ROOT / "leaderboard" / "report.py", ROOT / "harness" / "run.py"]
    bare = re.compile(r"(?<![\w/.-])python3? (?:-m|harness/|leaderboard/|problems/|tests/|tools/)")
    found = [f"{file}: {hit}" for file in [*pages, *sources] for hit in bare.findall(file.read_text(encoding="utf-8"))]
    assert not found, "write .venv/bin/python"


def flags(source: str) -> set[str]:
    """The options that a command's source defines with add_argument."""
    return {
        node.args[0].value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".add_argument")
    }


def test_the_readme_names_every_option_of_the_command_line():
    rows = re.findall(r"^\| `(--[a-z-]+|PROBLEM)", (ROOT / "README.md").read_text(), re.MULTILINE)
    defined = flags((ROOT / "harness/run.py").read_text())
    assert sorted(rows) == sorted({"PROBLEM" if name == "problem" else name for name in defined})


def test_the_options_in_the_page_for_agents_are_those_of_the_commands():
    commands = re.findall(r"^    (\.venv/bin/python .*?)(?:  +#.*)?$", (ROOT / "AGENTS.md").read_text(), re.MULTILINE)
    runs = [shlex.split(command)[2:] for command in commands if " harness/run.py " in command]
    assert len(runs) >= 6
    for words in runs:
        args, further = run.parser().parse_known_args(words)
        assert further == [] and (args.device == "cpu" or args.list), words


def test_the_readme_has_the_exit_codes_of_the_judge():
    other = {2: "bad", verdict.REGRESSION_EXIT: "regression"}  # of no verdict
    codes = {code: {word} for code, word in other.items()}
    for status, code in load.constants(ROOT / "harness/judge/verdict.py", "EXIT_CODES")["EXIT_CODES"].items():
        codes.setdefault(code, set()).add(status)
    for page, head in (("README.md", "| exit code | verdict |"), ("AGENTS.md", "| code | meaning |")):
        table = (ROOT / page).read_text().partition(head)[2].partition("\n\n")[0]
        rows = re.findall(r"^\| (\d) \| (.*?) \|", table, re.MULTILINE)
        assert len(rows) == len(codes)
        said = {int(n): set(text.replace(",", "").split()) for n, text in rows}
        assert all(word in said[code] for code, word in other.items())
        assert said | {code: codes[code] for code in other} == codes


def test_no_command_takes_shortened_options():
    """terminal.Parser sees to it, for its subcommands too; another parser says so where it is made."""
    areas = ("problems", "harness", "leaderboard", "tools", "tests")
    found, wrong = 0, []
    for file in (file for area in areas for file in (ROOT / area).rglob("*.py")):
        if "ArgumentParser" not in (text := file.read_text()):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("ArgumentParser", ".add_parser")):
                found += 1
                if not any(word.arg == "allow_abbrev" and ast.unparse(word.value) == "False" for word in node.keywords):
                    wrong.append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert found > 5 and not wrong, wrong
    assert not run.parser().allow_abbrev


def test_the_constants_in_measuring_are_those_of_the_code():
    rows = re.findall(r"^\| `(\w+)` \| `(.+?)` \| `(.+?)` \|$", (ROOT / "docs/measuring.md").read_text(), re.MULTILINE)
    assert len(rows) >= 5
    for name, value, file in rows:
        assert load.constants(ROOT / file, name).get(name) == ast.literal_eval(value), f"{name} in {file}"


@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
def test_the_worked_example_obeys_the_rules_and_compiles(tmp_path):
    text = (ROOT / "docs/adding_a_kernel.md").read_text()
    for language, suffix in (("python", "py"), ("cuda", "cu")):
        (code,) = re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
        (tmp_path / f"sm90_naive.{suffix}").write_text(code)
    file = tmp_path / "sm90_naive.py"
    assert len(scan.closure(file)) == 2 and scan.findings(scan.closure(file)) == []
    example = load.from_file(load.PROBLEMS / "nvfp4_gemv", file)
    for target in example.TARGETS:
        (artefact,) = example.compile_for(target)
        assert [kernel.spill_bytes for kernel in artefact.kernels()] == [0], build.ARCH[target]


# What git keeps.


def machines() -> list[str]:
    lines = (line.partition("#")[0].strip() for line in (ROOT / "leaderboard/machines.txt").read_text().splitlines())
    return [line for line in lines if line]


def test_gitignore_lists_the_machines_whose_records_are_committed():
    lines = (ROOT / ".gitignore").read_text().splitlines()
    kept = [line for line in lines if line.startswith("!leaderboard/results/")]
    wanted = [f"!leaderboard/results/{slug}/" for slug in machines()]
    assert sorted(kept) == sorted(wanted)
    assert "leaderboard/results/*" in lines
    assert all(lines.index(line) > lines.index("leaderboard/results/*") for line in kept), "a later line wins"


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_git_ignores_the_records_of_other_machines_alone(tmp_path):
    """In a repository of its own with our .gitignore and one machine more, in the same form."""
    text = (ROOT / ".gitignore").read_text() + "!leaderboard/results/listed-one/\n"
    (tmp_path / ".gitignore").write_text(text)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    for slug in (*machines(), "listed-one", "some-laptop-8c"):
        record = tmp_path / "leaderboard" / "results" / slug / "nvfp4_gemv.jsonl"
        record.parent.mkdir(parents=True)
        record.touch()
    for made in (".venv/setup.json", ".build/x.so", "leaderboard/out/board.md", "harness/__pycache__/a.pyc"):
        (tmp_path / made).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / made).touch()
    seen = subprocess.run(
        ["git", "ls-files", "--others", "--exclude-standard"], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout.split()
    assert sorted(seen) == sorted(
        [".gitignore", *(f"leaderboard/results/{slug}/nvfp4_gemv.jsonl" for slug in (*machines(), "listed-one"))]
    )
