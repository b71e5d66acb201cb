"""What the project promises, one JSON line each: verdicts of attacks, controls, wrong files and GPU MODE folders,
options, exit codes, committed records. `python -m tests.manifest` compares the tree with manifest.jsonl; --write
replaces that.

The lines are read from literals and records; that the judge gives these verdicts is what the tests check.
"""

import argparse
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from harness import run
from harness.judge import verdict
from harness.judge.options import Options
from harness.results import record
from leaderboard import pages
from problems import wrong
from problems.common import load
from tests.attacks import variants
from tests.support import foreign

ROOT = Path(__file__).resolve().parent.parent
FILE = Path(__file__).with_suffix(".jsonl")
RESULTS = "leaderboard/results"
# What makes a record this record and no other, and what it says.
IDENTITY = ("kind", "case", "variant", "target", "status", "median_us", "time")


def tracked(pattern: str) -> list[Path]:
    """Return the files that git tracks and that are there, by path from the root."""
    listed = subprocess.run(["git", "ls-files", "-z", pattern], cwd=ROOT, capture_output=True, check=True).stdout
    return sorted(Path(name) for name in listed.decode().split("\0") if name and (ROOT / name).is_file())


def attacks() -> Iterator[dict]:
    """Each attack and each honest control with its verdict by device."""
    for path in variants.files():
        said = {"REASON": ""} | load.constants(path, "PROBLEM", "TARGETS", "VERDICT", "REASON")
        targets = said.pop("TARGETS")
        said["DEVICES"] = [device for device, target in (("cpu", "cpu"), ("cuda", "sm90")) if target in targets]
        kind = "control" if variants.topic_of(path) == "honest" else "attack"
        yield {"what": kind, "name": path.stem, **{name.lower(): said[name] for name in sorted(said)}}


def wrong_files() -> Iterator[dict]:
    """Each wrong kernel of a problem: the judge must refuse it."""
    for path in tracked("problems/*/wrong.py"):
        for name in wrong.read(ROOT / path.parent):
            yield {"what": "wrong", "name": f"{path.parts[1]}/{name}", "verdict": "refused"}


def gpu_mode_folders() -> Iterator[dict]:
    """Each folder in GPU MODE's format: its right submission passes, its wrong one is refused."""
    stored = {path.parts[3] for path in tracked("tests/support/gpu_mode/*/reference.py")}
    for name in sorted(stored | set(foreign.FOLDERS)):
        yield {"what": "gpu_mode", "name": name, "verdict": "right PASSED, wrong refused"}


def options() -> Iterator[dict]:
    """Each option of harness/run.py, and each exit code with its verdicts."""
    for action in run.parser()._actions:
        name = " ".join(action.option_strings) or action.dest
        yield {
            "what": "option",
            "name": name,
            "choices": list(action.choices or ()),
            "default": getattr(Options, action.dest, None),
        }
    for word, code in sorted(verdict.EXIT_CODES.items()):
        yield {"what": "exit code", "name": word, "code": code}


def records() -> Iterator[dict]:
    """Each committed run on a machine: how many records it has, and a hash of what they say."""
    for machine in sorted({path.parts[2] for path in tracked(f"{RESULTS}/*.jsonl")}):
        folder = ROOT / RESULTS / machine
        for problem in sorted({pages.problem_of(path, folder) for path in record.files(folder)}):
            runs: dict[str, list[str]] = {}
            for one in record.read(machine, problem, ROOT / RESULTS):
                said = json.dumps([one.get(name) for name in IDENTITY], sort_keys=True)
                runs.setdefault(one["run_id"], []).append(said)
            for run_id, said in sorted(runs.items()):
                digest = hashlib.sha256("\n".join(sorted(said)).encode()).hexdigest()[:16]
                yield {"what": "run", "name": f"{machine}/{problem}/{run_id}", "records": len(said), "hash": digest}


def lines() -> list[str]:
    parts = (attacks(), wrong_files(), gpu_mode_folders(), options(), records())
    return [json.dumps(line, default=str) for part in parts for line in part]


def differences() -> list[str]:
    """Return the lines that the file has and the tree lacks, with "-", and the other way round, with "+"."""
    here, there = lines(), FILE.read_text().splitlines() if FILE.exists() else []
    return [f"- {line}" for line in there if line not in set(here)] + [
        f"+ {line}" for line in here if line not in set(there)
    ]


def main() -> int:
    """Return 0, or 1 if the tree differs from the file and that was not to be replaced."""
    parser = argparse.ArgumentParser("tests.manifest", description="Compare the tree with tests/manifest.jsonl.")
    parser.add_argument("--write", action="store_true", help="replace the file")
    write, found = parser.parse_args().write, differences()
    for line in found:
        print(line)
    if write:
        FILE.write_text("".join(f"{line}\n" for line in lines()))
    return int(bool(found) and not write)


if __name__ == "__main__":
    sys.exit(main())
