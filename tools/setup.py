#!/usr/bin/env python3
"""Make .venv with the packages of pyproject.toml at the versions of constraints.txt: `make setup`.

Needs only Python 3.11 with its venv module. Run again, it only says what this machine lacks. If python3's torch sees a
GPU, .venv uses it, and python3's other packages where they are recent enough; the rest is installed. pip's settings say
where packages come from: without a network, PIP_NO_INDEX=1 and PIP_FIND_LINKS=FOLDER name a folder of wheels.
Arguments are further extras of pyproject.toml.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036  Python 3.8 must be able to parse this file
    sys.exit(f"setup: {sys.executable} is older than Python 3.11: name another, make PYTHON=/path/to/python3")

import importlib.metadata
import importlib.util
import json
import re
import shutil
import site
import subprocess
import tomllib
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from problems.common import venv  # noqa: E402

ROOT, VENV, PYTHON = Path(venv.ROOT), Path(venv.VENV), venv.PYTHON
STAMP, PINS, LOG = VENV / "setup.json", VENV / "constraints.txt", VENV / "pip.log"
PUBLIC = ("--extra-index-url", "https://download.pytorch.org/whl/cpu")  # the home of torch's CPU builds
QUICK = ("--retries=1", "--timeout=20")  # for what may be out of reach


def say(line: str) -> None:
    print(f"setup: {line}", flush=True)


def succeeds(*command: str) -> bool:
    return subprocess.run(command, capture_output=True).returncode == 0


def say_lacks(driver: bool) -> None:
    """Print a line for each tool that this machine lacks."""
    if not shutil.which("g++"):
        say("no g++: cpu variants cannot be compiled (Debian: apt install g++)")
    if not shutil.which("nvcc"):
        say("no nvcc on PATH: CUDA variants are not compiled, not even checked (install the CUDA toolkit)")
    if not driver:
        say("no NVIDIA driver that answers: CPU torch; sm90 and sm100 variants are at most compiled, not run")


def torch_to_share(oldest: str) -> str:
    """Return the version of python3's torch if it is `oldest` or later and sees a GPU, else ""."""
    good = "torch.__version__ >= sys.argv[1] and torch.cuda.is_available()"  # torch compares as versions, not as text
    code = f"import sys, torch; sys.exit(not ({good}))"
    there = importlib.util.find_spec("torch") and succeeds(sys.executable, "-c", code, oldest)
    return importlib.metadata.version("torch") if there else ""


def pip_of_venv() -> list[str]:
    """Return the command of the pip that installs into .venv: its own, or python3's where there is no ensurepip."""
    if importlib.util.find_spec("ensurepip"):
        return [PYTHON, "-m", "pip"]
    if not succeeds(sys.executable, "-m", "pip", "--python", sys.executable, "--version"):
        sys.exit(
            f"setup: {sys.executable} has neither ensurepip nor pip 22.3 or later, so nothing can be installed: "
            "apt install python3-venv (Debian), or name another python3: make PYTHON=/path/to/python3"
        )
    return [sys.executable, "-m", "pip", "--python", PYTHON]


def make_venv(shared: bool, own_pip: bool) -> None:
    """Make .venv anew. shared: it sees python3's packages."""
    say(f"making .venv with {sys.executable} ({sys.version.split()[0]})")
    shutil.rmtree(VENV, ignore_errors=True)
    flags = ["--system-site-packages"] * shared + ["--without-pip"] * (not own_pip)
    if subprocess.run([sys.executable, "-m", "venv", *flags, VENV]).returncode:
        sys.exit("setup: python3 -m venv failed; its last lines, above, say why (Debian: apt install python3-venv)")
    if shared and sys.prefix != sys.base_prefix:
        # A venv made from a venv looks past it, at the interpreter below; this names the one that was meant.
        lines = [f"import site; site.addsitedir({folder!r})\n" for folder in site.getsitepackages()]
        next(VENV.glob("lib/python*/site-packages")).joinpath("python3_packages.pth").write_text("".join(lines))


def run_pip(pip: list[str], *arguments: str) -> bool:
    """Run `pip install` within PINS. Large downloads are shown as they begin; LOG gets all that pip prints."""
    # Modules are compiled when first imported, not all 20,000 now.
    options = ("--disable-pip-version-check", "--no-compile", "--only-binary=:all:", "--progress-bar=off")
    command = [*pip, "install", *options, "-c", str(PINS), *arguments]
    with LOG.open("a") as log, subprocess.Popen(command, stdout=-1, stderr=-2, text=True) as process:
        for line in process.stdout:
            log.write(line)
            if re.search(r"Downloading .*(\d\d\.\d MB|GB)\)", line):
                say(line.strip())
    return process.returncode == 0


def install(pip: list[str], requirements: list[str], pins: dict[str, str], driver: bool, torch: str) -> list[str]:
    """Install the requirements, beside python3's `torch` if it names a version. Return those that pip cannot get.

    pins: lower-case name -> version. What python3 has is not pinned: pip keeps it if it will do.
    """
    if torch:
        say(f"python3's torch {torch} is used, not another one")
        theirs = {name for name in pins if any(importlib.metadata.distributions(name=name))}
        pins = {name: version for name, version in pins.items() if name not in theirs}
    exact = {}  # pip's message for a package that it does not find is clear only if a constraint does not name it too
    for requirement in requirements:
        name, extra = re.match(r"([\w.-]+)(\[.+\])?", requirement).groups("")
        exact[name] = f"{name}{extra}=={pins[name]}" if name in pins else requirement
    rest = [f"{name}=={version}\n" for name, version in pins.items() if name not in exact]
    PINS.write_text("".join([f"torch=={torch}\n"] * bool(torch) + rest))
    LOG.unlink(missing_ok=True)
    say(f"installing {len(exact)} packages and what they need; what pip says is in {LOG}")
    if torch:  # often without a network: some may be there, or in a folder of wheels
        everything = run_pip(pip, *QUICK, *exact.values())
        return [] if everything else [r for r in exact.values() if not run_pip(pip, *QUICK, r)]
    cpu_torch = exact["torch"] + "+cpu"
    if not (driver or run_pip(pip, *QUICK, cpu_torch) or run_pip(pip, *QUICK, *PUBLIC, cpu_torch)):
        say(f"no {cpu_torch} found: taking the plain one, on a public index that is the CUDA build (gigabytes)")
    return [] if run_pip(pip, *exact.values()) else requirements


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras, constraints = project["optional-dependencies"], (ROOT / "constraints.txt").read_text().lower()
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", constraints, re.MULTILINE))
    driver = Path("/dev/nvidiactl").exists() or (bool(shutil.which("nvidia-smi")) and succeeds("nvidia-smi", "-L"))
    say_lacks(driver)
    requirements = [*project["dependencies"], *extras["test"], *(extras["baselines"] if driver else ())]
    pip = pip_of_venv()
    stamp = json.loads(STAMP.read_text()) if STAMP.is_file() and Path(PYTHON).exists() else {}
    state = [sys.executable, sys.version, str(VENV), driver, requirements, pins]
    if stamp.get("state") != state:
        torch = torch_to_share(next(r for r in requirements if r.startswith("torch>="))[len("torch>=") :])
        if stamp.get("state", [])[:4] != state[:4] or stamp["shared"] != bool(torch):
            make_venv(bool(torch), own_pip=pip[0] == PYTHON)
        stamp = {"state": state, "shared": bool(torch)}
        stamp["missing"] = install(pip, requirements, pins, driver, torch)
        if stamp["missing"] and (not torch or not succeeds(PYTHON, "-c", f"import {', '.join(venv.NEEDED)}")):
            print(*LOG.read_text().splitlines()[-12:], sep="\n")
            sys.exit(
                f"setup: pip failed; its last lines are above, all are in {LOG}: reach a package index, or name a "
                "folder of wheels (PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER), and make again"
            )
        STAMP.write_text(json.dumps(stamp))
    if stamp["missing"]:
        say(f"not installed: {', '.join(stamp['missing'])}; what needs them fails (`make clean setup` tries again)")
    for requirement in (requirement for extra in sys.argv[1:] for requirement in extras[extra]):
        if not run_pip(pip, requirement):
            sys.exit(f"setup: pip cannot get {requirement}: {LOG} says why")


if __name__ == "__main__":
    main()
