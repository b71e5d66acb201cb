"""A small checkout: the judge, and one problem, "tiny", whose runs on a CPU take seconds."""

import subprocess
import sys
from pathlib import Path

from tests.support import ROOT

# A set-up that finds all packages: those of this interpreter. With "fail" in the checkout it fails; with "wait" it
# waits until somebody removes that file, and with "stray" it starts a process that leaves it.
SETUP = f"""import os, subprocess, sys, time
print("looking for packages", flush=True)
if os.path.exists("fail"):
    sys.exit("ERROR: no matching distribution for a package")
if os.path.exists("stray"):
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
if os.path.exists("wait"):
    while os.path.exists("wait"):
        time.sleep(0.1)
if not os.path.lexists(".venv"):
    os.symlink({sys.prefix!r}, ".venv")
"""
SMALL = """

for _counts in COUNTS.values():
    if not _counts.paired:
        vars(_counts).update(processes=1, samples=1)
"""  # at the end of harness/judge/phases.py


def make(folder: Path) -> Path:
    """Make a git checkout in `folder`. Return its root."""
    here = folder / "a checkout"
    parts = "harness leaderboard/*.py problems/__init__.py problems/wrong.py problems/common tools"
    parts += " pyproject.toml constraints.txt Makefile .gitignore"
    command = ["git", "ls-files", "-coz", "--exclude-standard", *parts.split()]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_bytes((ROOT / name).read_bytes())
        (here / name).chmod((ROOT / name).stat().st_mode)
    (here / ".venv").symlink_to(sys.prefix, target_is_directory=True)
    (here / "tools" / "setup.py").write_text(SETUP)
    phases = here / "harness" / "judge" / "phases.py"
    phases.write_text(phases.read_text() + SMALL)
    subprocess.run([here / ".venv/bin/python", "harness/__main__.py", "new", "tiny"], cwd=here, check=True)
    task = here / "problems" / "tiny" / "task.py"
    before, _, rest = task.read_text().partition("TESTS = [")
    after = rest.partition("BENCHMARKS_CPU = ")[2].partition("\n")[2]
    timed = "BENCHMARKS = BENCHMARKS_CPU = [Case(512, 512, seed=1), Case(640, 512, seed=1)]"
    task.write_text(f"{before}TESTS = [Case(16, 64, seed=100), Case(33, 7, seed=101)]\n{timed}\n{after}")
    git = ["git", "-c", "user.name=test", "-c", "user.email=test@example.com"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "tiny"]):
        subprocess.run([*git, *words], cwd=here, check=True)
    return here
