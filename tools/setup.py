#!/usr/bin/env python3
"""Make .venv with the pinned packages, once. Runs on a bare python3: the standard library only.

`decide` is pure: what was found -> what to do. The rest finds out and does it. A second call with the same pins,
python3 and driver only prints what this machine lacks. Exit status: 0 ready, 1 not (one line says why and what to do).
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036  this file is what meets an older python3
    sys.exit(f"setup: Python 3.11 or later is needed, this is {sys.version.split()[0]}; name another: make PYTHON=...")

import hashlib
import importlib.metadata
import importlib.util
import json
import re
import shutil
import site
import subprocess
import tempfile
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "setup.json"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"  # the public home of torch's CPU builds
LOG = VENV / "pip.log"
LARGE_MB = 10  # of a download that is worth a line
TAIL = 12  # lines of pip's that are shown if it fails
ESSENTIAL = ("torch", "pytest", "pandas", "matplotlib", "rich", "pyyaml", "pydantic")  # nothing works without them
WITHOUT = {  # what is lost without the others
    "nvidia-cutlass-dsl": "CuTe DSL variants neither compile nor run",
    "jinja2": "leaderboard/report.py --html does not run",
    "pygments": "leaderboard/report.py --html does not run",
    "pytest-xdist": "make test runs in one process and takes longer",
    "hypothesis": "the tests that draw their own cases do not run",
    "ruff": "make lint does not run",
    "ty": "make lint does not check types",
    "shtab": "harness/run.py --print-completion does not run",
    "safetensors": "checkpoints of the DSV4 model are neither read nor written",
    "tokenizers": "generate.py of the DSV4 model takes and prints token ids, no text",
    "transformers": "the tests that compare the DSV4 model with it do not run",
    "humming-kernels": "peer_humming is UNSUPPORTED",
    "tokenspeed-flashmla": "peer_flashmla is UNSUPPORTED",
    "sgl-deep-gemm": "peer_deepgemm is UNSUPPORTED",
    "cuda-bindings": "variants and baselines that call the driver through it are UNSUPPORTED",
}


@dataclass(frozen=True)
class Facts:
    """What was found on the machine."""

    installed: Mapping[str, str]  # python3's own packages: normalised name -> version
    torch_cuda: str  # CUDA version of python3's torch if that torch sees a GPU, else ""
    gpu: bool  # an NVIDIA driver answers
    ensurepip: bool  # python3 can put pip into a venv
    pip: tuple[int, int]  # version of python3's own pip, (0, 0) if it has none


@dataclass(frozen=True)
class Plan:
    """What to do. `stop` says in one line why nothing can be done; the other fields then mean nothing."""

    stop: str = ""
    torch: str = ""  # "python3": the one that is there; "cpu", "cuda": install that build
    with_pip: bool = True  # the venv gets a pip of its own; else python3's pip installs into it
    requirements: tuple[str, ...] = ()  # for pip, pinned, torch (if any) first
    pins: Mapping[str, str] = field(default_factory=dict)  # what may be installed, and at which version


def normal(name: str) -> str:
    """The name that package indexes compare: "PyYAML" -> "pyyaml", "typing_extensions" -> "typing-extensions"."""
    return re.sub(r"[-_.]+", "-", name).lower()


def split(requirement: str) -> tuple[str, str, str]:
    """As "Name[extra]>=1.2" -> (normalised name, "[extra]", ">=1.2"). ValueError: another bound than ==, >= or none."""
    found = re.fullmatch(r"\s*([\w.-]+?)\s*(\[[\w, -]+\])?\s*((?:==|>=)\s*[\w.+!]+)?\s*", requirement)
    if not found:
        raise ValueError(f"requirement must be NAME[EXTRA] with == or >= and a version, got {requirement!r}")
    return normal(found[1]), found[2] or "", (found[3] or "").replace(" ", "")


def release(version: str) -> tuple[int, ...]:
    """As "2.13.0+cpu" -> (2, 13): the leading numbers, without trailing zeros."""
    numbers = [int(n) for n in re.match(r"\d+(\.\d+)*", version)[0].split(".")] if version[:1].isdigit() else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def order(version: str) -> tuple[tuple[int, ...], int]:
    """As "1.0.0.post2" -> ((1,), 2): release and post-release, -1 for none, for comparing."""
    post = re.match(r"[\d.]+\.post(\d+)", version)
    return release(version), int(post[1]) if post else -1


def satisfied(requirement: str, installed: Mapping[str, str]) -> bool:
    """Whether `installed` (normalised name -> version) holds the package, within its bound."""
    name, _, bound = split(requirement)
    if name not in installed:
        return False
    have, want = order(installed[name]), order(bound[2:])
    return have == want if bound.startswith("==") else have >= want


def read_pins(text: str) -> dict[str, str]:
    """constraints.txt -> {normalised name: version}."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return {normal(name): version for name, _, version in (line.partition("==") for line in lines if line)}


def wanted(project: Mapping, gpu: bool) -> list[str]:
    """pyproject's [project] table -> requirements: the dependencies, [test], and [baselines] where there is a GPU."""
    extras = project["optional-dependencies"]
    return [*project["dependencies"], *extras["test"], *(extras["baselines"] if gpu else ())]


def decide(facts: Facts, requirements: Sequence[str], pins: Mapping[str, str]) -> Plan:
    """The plan for a machine like `facts`. Every requirement has its pin; torch is among them."""
    need_torch = next(r for r in requirements if split(r)[0] == "torch")
    rest = [r for r in requirements if r is not need_torch]
    if facts.torch_cuda and satisfied(need_torch, facts.installed):
        rest = [r for r in rest if not satisfied(r, facts.installed)]
        # python3's packages are kept as they are, and what is added must fit them; but one that is too old for us
        # gets a newer one in .venv, which goes before it.
        renewed = {split(r)[0] for r in rest}
        kept = {n: v for n, v in facts.installed.items() if n not in renewed and re.fullmatch(r"\d[\w.+!]*", v)}
        torch, first, pins = "python3", [], {**pins, **kept}
    else:
        torch, first = "cuda" if facts.gpu else "cpu", [f"torch=={pins['torch']}"]
    if not facts.ensurepip and facts.pip < (22, 3):  # pip --python came with 22.3
        if first or any(split(r)[0] in ESSENTIAL for r in rest):
            return Plan(
                stop="python3 has neither ensurepip nor a pip of 22.3 or later, so nothing can be installed: "
                "get one (Debian: apt install python3-venv) and make again"
            )
        rest = []
    named = [f"{name}{extra}=={pins[name]}" for name, extra, _ in map(split, rest)]
    return Plan("", torch, facts.ensurepip, (*first, *named), pins)


def lacks(which: Mapping[str, bool]) -> list[str]:
    """One clear line for each tool that is missing. which: "g++", "nvcc", "driver", "card" -> found."""
    lines = []
    if not which["g++"]:
        lines.append("no g++: cpu variants cannot be compiled (Debian: apt install g++)")
    if not which["nvcc"]:
        lines.append("no nvcc on PATH: CUDA variants are not compiled, not even checked (install the CUDA toolkit)")
    if not which["driver"]:
        why = "an NVIDIA GPU without a driver that answers" if which["card"] else "no NVIDIA GPU"
        lines.append(f"{why}: CPU torch; sm90 and sm100 variants are at most compiled, not run")
    return lines


def without(missing: Sequence[str]) -> str:
    """One line: the packages that could not be installed, and what does not run for it."""
    lost = "; ".join(WITHOUT.get(name, f"what needs {name} does not run") for name in missing)
    return f"not installed: {', '.join(missing)}: {lost}"


def say(line: str) -> None:
    print(f"setup: {line}", flush=True)


def tools() -> dict[str, bool]:
    """What `lacks` asks about."""
    vendors = Path("/sys/bus/pci/devices").glob("*/vendor")
    return {
        "g++": bool(shutil.which("g++")),
        "nvcc": bool(shutil.which("nvcc")),
        "driver": Path("/dev/nvidiactl").exists() or answers(["nvidia-smi", "-L"]),
        "card": any(v.read_text().strip() == "0x10de" for v in vendors),
    }


def answers(command: Sequence[str]) -> bool:
    """Whether `command` exists, ends with status 0 within 30 s and prints something."""
    if not shutil.which(command[0]):
        return False
    try:
        done = subprocess.run(command, capture_output=True, timeout=30)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0 and bool(done.stdout.strip())


def installed(python: str | Path) -> dict[str, str]:
    """The packages that `python` can import: normalised name -> version."""
    code = (
        "import importlib.metadata as m, json, sys; seen = {}\n"
        "for d in m.distributions(): seen.setdefault(d.metadata['Name'] or '', d.version)\n"
        "json.dump(seen, sys.stdout)"
    )
    done = subprocess.run([str(python), "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    return {normal(name): version for name, version in json.loads(done.stdout).items() if name and version}


def find(driver: bool) -> Facts:
    """Look at python3 (the interpreter that runs this) and the driver."""
    have = installed(sys.executable)
    cuda = ""
    if "torch" in have:
        code = "import torch; print(torch.version.cuda or '') if torch.cuda.is_available() else None"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        cuda = done.stdout.strip()
    pip = release(have.get("pip", ""))
    return Facts(have, cuda, driver or bool(cuda), bool(importlib.util.find_spec("ensurepip")), (*pip, 0, 0)[:2])


def usable(plan: Plan) -> bool:
    """Whether the .venv that is there suits the plan, so that pip can bring it up to date in place."""
    config = VENV / "pyvenv.cfg"
    if not (PYTHON.exists() and config.is_file()):
        return False
    said = dict(re.findall(r"^(\S+) *= *(.*?) *$", config.read_text(), re.MULTILINE))
    version = ".".join(map(str, sys.version_info[:3]))
    shared = "true" if plan.torch == "python3" else "false"
    same = said.get("version") == version and said.get("include-system-site-packages") == shared
    return same and (not plan.with_pip or "pip" in installed(PYTHON))


def up_to_date(requirements: Sequence[str], pins: Mapping[str, str], have: Mapping[str, str]) -> bool:
    """Whether every requirement is there, and everything that has a pin is at it."""
    there = all(satisfied(r, have) for r in requirements)
    return there and all(order(have[name]) == order(version) for name, version in pins.items() if name in have)


def make_venv(plan: Plan) -> None:
    """A fresh .venv. With python3's torch it sees python3's packages, also where python3 is itself in a venv."""
    say(f"making .venv with {sys.executable} ({sys.version.split()[0]})")
    shutil.rmtree(VENV, ignore_errors=True)
    flags = ["--system-site-packages"] if plan.torch == "python3" else []
    flags += [] if plan.with_pip else ["--without-pip"]
    subprocess.run([sys.executable, "-m", "venv", *flags, str(VENV)], check=True)
    if plan.torch == "python3" and sys.prefix != sys.base_prefix:
        # A venv made from a venv looks past it, at the interpreter below; this names the one that was meant.
        paths = [p for p in site.getsitepackages() if Path(p).is_dir()]
        own = next(VENV.glob("lib/python*/site-packages"))
        lines = (f"import site; site.addsitedir({p!r})\n" for p in paths)
        (own / "python3_packages.pth").write_text("".join(lines))


def pip_command(plan: Plan, *arguments: str) -> list[str]:
    pip = [str(PYTHON), "-m", "pip"] if plan.with_pip else [sys.executable, "-m", "pip", "--python", str(PYTHON)]
    return [*pip, "--disable-pip-version-check", *arguments]


def torch_choice(plan: Plan) -> tuple[str, list[str]]:
    """The CPU build of the pinned torch: (requirement, further pip arguments), the first that an index offers.

    The indexes that pip is set up with come first, then the public CPU index; the plain version is the last resort,
    since on a public index it means the CUDA build.
    """
    plain = plan.requirements[0]
    for where, extra in (("pip's own indexes", []), (CPU_INDEX, ["--extra-index-url", CPU_INDEX])):
        probe = pip_command(
            plan,
            "install",
            "--dry-run",
            "--no-deps",
            "--only-binary=:all:",
            "--retries",
            "1",
            "--timeout",
            "20",
            *extra,
            f"{plain}+cpu",
        )
        if subprocess.run(probe, capture_output=True).returncode == 0:
            say(f"{plain}+cpu from {where}")
            return f"{plain}+cpu", extra
    say(f"no CPU build of {plain} found: taking the plain one, on a public index that is the CUDA build (gigabytes)")
    return plain, []


def install(plan: Plan) -> bool:
    """Run pip for the plan. -> whether it succeeded."""
    requirements, extra = list(plan.requirements), []
    if plan.torch == "cpu":
        requirements[0], extra = torch_choice(plan)
    elif plan.torch == "python3":
        extra = ["--retries", "1", "--timeout", "20"]  # often a machine without a network: find out soon
    say(f"installing {len(requirements)} packages and what they need; what pip says is in {LOG.relative_to(ROOT)}")
    done = run_pip(plan, extra, requirements)
    if not done and plan.torch == "python3" and len(requirements) > 1:
        say("one by one, since some may be within reach")
        tried = [run_pip(plan, extra, [r]) for r in requirements]
        done = all(tried)
    return done


def run_pip(plan: Plan, extra: Sequence[str], requirements: Sequence[str]) -> bool:
    named = {split(r.partition("+")[0])[0] for r in requirements}  # pip mixes up a pin that it gets twice
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.writelines(f"{n}=={v}\n" for n, v in plan.pins.items() if n not in named)
        constraints.flush()
        # Modules are compiled when first imported, not all 20,000 now.
        command = pip_command(
            plan,
            "install",
            "--no-compile",
            "--only-binary=:all:",
            "--progress-bar",
            "off",
            *extra,
            "-c",
            constraints.name,
            *requirements,
        )
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
            lines = show(pip.stdout)
    LOG.write_text("".join(lines))
    if pip.returncode:
        print("".join(lines[-TAIL:]), end="", flush=True)
    return not pip.returncode


def show(said: Iterable[str]) -> list[str]:
    """Turn pip's lines into progress as they come: every download of LARGE_MB or more, a count of the packages that
    were found, and the installation. -> the lines.
    """
    lines, found = [], 0
    for line in said:
        lines.append(line)
        found += line.startswith(("Collecting ", "Processing "))
        size = re.match(r"\s+Downloading (\S+?)-\d\S* \(([\d.]+) (MB|GB)\)", line)
        if size and (size[3] == "GB" or float(size[2]) >= LARGE_MB):
            say(f"package {found}: downloading {size[1]}, {size[2]} {size[3]}")
        elif line.startswith("Installing collected packages:"):
            say(f"unpacking {line.count(',') + 1} packages into .venv")
    return lines


def key(sources: Sequence[str], gpu: bool) -> str:
    """Changes when the pins, the requirements, this file, python3, the place of .venv or the presence of a GPU do."""
    return hashlib.sha256(repr((sources, sys.executable, sys.version, str(VENV), gpu)).encode()).hexdigest()


def main() -> int:
    sources = [(ROOT / name).read_text() for name in ("pyproject.toml", "constraints.txt", "tools/setup.py")]
    found = tools()
    for line in lacks(found):
        say(line)
    fingerprint = key(sources, found["driver"])
    if PYTHON.exists() and STAMP.is_file():
        stamp = json.loads(STAMP.read_text())
        if stamp["key"] == fingerprint:
            if stamp["missing"]:
                say(without(stamp["missing"]) + " (make clean setup tries again)")
            return 0
    begin = time.monotonic()
    facts = find(found["driver"])
    requirements = wanted(tomllib.loads(sources[0])["project"], facts.gpu)
    plan = decide(facts, requirements, read_pins(sources[1]))
    if plan.stop:
        say(plan.stop)
        return 1
    if plan.torch == "python3":
        say(f"python3's torch {facts.installed['torch']} (CUDA {facts.torch_cuda}) is used, not another one")
    if not usable(plan):
        make_venv(plan)
    ready = up_to_date(requirements, plan.pins, installed(PYTHON))
    if plan.requirements and not ready and not install(plan):
        say("pip did not finish; its last lines, above, say why")
    have = installed(PYTHON)
    missing = [split(r)[0] for r in requirements if not satisfied(r, have)]
    if lost := [name for name in ESSENTIAL if name in missing]:
        say(f"cannot go on without {', '.join(lost)}: reach a package index, or install them for python3 by hand")
        return 1
    if missing:
        say(without(missing))
    STAMP.write_text(json.dumps({"key": fingerprint, "missing": missing}) + "\n")
    say(f"ready after {time.monotonic() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.CalledProcessError as failed:
        say(f"{' '.join(map(str, failed.cmd[:4]))} failed with status {failed.returncode}")
        sys.exit(1)
