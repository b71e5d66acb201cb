"""Try problem folders of other repositories: does this judge say what the folder's own eval.py says?

python -m tests.support.public_sets [--out FILE] [--only TEXT]... [--device cpu] SET...
python -m tests.support.public_sets --render

SET: a checkout with folders in GPU MODE's format. Of each folder these are tried: its submissions and solutions, and
three that are derived from its reference: its text as a submission (right), and two that spoil its answer (wrong). Each
line of FILE, written when it is known, is one of them with both verdicts. The last one counts, and eval.py is not asked
again; docs/gpu_mode.md is rendered from docs/public_sets.jsonl.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import yaml

from harness import api
from harness.results import environment, output
from harness.results.text import first_line, line
from tests.support import ROOT

DOC = ROOT / "docs" / "gpu_mode.md"
OUT = ROOT / "docs" / "public_sets.jsonl"
MARKS = "<!-- sets:begin -->", "<!-- sets:end -->"
LIMIT_S = 170
SPOILED = {
    "scaled": "(value.float() * 1.5 + 1).to(value.dtype)",
    "half": "torch.where(torch.arange(value.numel(), device=value.device).view(value.shape) % 2 == 0, value, 0)",
}
DERIVED = """

import torch

def _spoiled(value):
    if isinstance(value, torch.Tensor):
        return SPOILED
    if isinstance(value, dict):
        return {key: _spoiled(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_spoiled(item) for item in value]
    return tuple(_spoiled(item) for item in value) if isinstance(value, tuple) else value

def custom_kernel(data):
    return _spoiled(ref_kernel(data))
"""


def sets(tops: list[Path]) -> list[Path]:
    """Return the folders with a task.yml, outside hidden ones."""
    found = [path.parent for top in tops for path in sorted(top.rglob("task.yml"))]
    return [folder for folder in found if not any(part.startswith(".") for part in folder.parts)]


def submissions(folder: Path, place: Path) -> dict[str, tuple[Path, bool]]:
    """Return (file, whether it claims to be right) by name: the folder's own, and derived ones, written to `place`."""
    patterns = {
        True: ("submission*.py", "submissions/*.py", "solutions/correct/*.py"),
        False: ("solutions/wrong/*.py", "wrong*.py"),
    }
    found = {}
    for right, globs in patterns.items():
        files = [file for pattern in globs for file in sorted(folder.glob(pattern))]
        found |= {str(file.relative_to(folder)): (file, right) for file in files}
    reference = folder / "reference.py"
    if not reference.is_file():
        return found
    for name, spoiled in {"same": "value", **SPOILED}.items():
        file = place / f"derived_{name}.py"
        file.write_text(reference.read_text() + DERIVED.replace("SPOILED", spoiled))
        found[f"(reference, {name})"] = file, name == "same"
    return found


def upstream(folder: Path, file: Path) -> str:
    """Return what the folder's own eval.py says of a submission in its test mode: pass, fail, or how it ended."""
    spec = yaml.safe_load((folder / "task.yml").read_text())
    with tempfile.TemporaryDirectory() as place:
        for item in spec["files"]:
            source = file if item["source"] == "@SUBMISSION@" else folder / item["source"]
            Path(place, item["name"]).write_bytes(source.read_bytes())
        cases = "".join("; ".join(f"{k}: {v}" for k, v in case.items()) + "\n" for case in spec["tests"])
        Path(place, "cases.txt").write_text(cases)
        read, write = os.pipe()
        command = [sys.executable, spec.get("config", {}).get("main", "eval.py"), "test", "cases.txt"]
        how = {"cwd": place, "env": os.environ | {"POPCORN_FD": str(write), "PYTHONPATH": place}, "pass_fds": (write,)}
        try:
            run = subprocess.run(command, **how, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            return "timeout"
        finally:
            os.close(write)
            with os.fdopen(read) as pipe:
                said = pipe.read()
        for one in reversed(said.splitlines()):
            if one.startswith("check: "):
                return one.removeprefix("check: ")
        return line(f"exit {run.returncode}: {(run.stderr.strip().splitlines() or [''])[-1]}", 200)


def ours(folder: Path, file: Path, device: str) -> tuple[str, str]:
    """Return this judge's verdict on a submission, and the reason."""
    try:
        outcomes = api.judge(folder, file, "test", device)
    except (api.ProblemError, api.UsageError) as error:
        return "REFUSED", str(error)
    return next(((one["status"], one["reason"]) for one in outcomes if one["status"] != "PASSED"), ("PASSED", ""))


def tried(folder: Path, name: str, device: str, known: dict[str, str]) -> Iterator[dict]:
    """Yield the lines of one folder. known: what its eval.py said before, by submission."""
    machine = environment.machine(device)
    with tempfile.TemporaryDirectory() as place:
        for submission, (file, right) in submissions(folder, Path(place)).items():
            verdict, reason = ours(folder, file, device)
            said = known.get(submission, "") or (upstream(folder, file) if device == "cuda" else "")
            judged = {"upstream": said, "verdict": verdict, "reason": _short(reason)}
            yield {"folder": name, "submission": submission, "right": right} | judged | {"machine": machine}


def _short(reason: str) -> str:
    """Return the first line of a reason, without the folders of this machine."""
    return re.sub(r"(?:/[\w.-]+)+/(?=[\w.-]+\.\w)", "", first_line(reason, 300))


def read(file: Path) -> list[dict]:
    """Return the lines of a file, of each submission the last; none if there is no such file."""
    found = [json.loads(text) for text in file.read_text().splitlines()] if file.exists() else []
    return list({(r["folder"], r["submission"]): r for r in found}.values())


def render(records: list[dict]) -> str:
    """Return the sums, and every difference, by what is said of it."""
    judged = [r for r in records if r["upstream"]]
    accepted = [r for r in judged if r["upstream"] == "pass"]
    refused = [r for r in judged if r["upstream"] == "fail"]
    right, broken = (sum(r["verdict"] == status for r in accepted) for status in ("PASSED", "RULE_BROKEN"))
    taken = sum(r["verdict"] == "PASSED" for r in refused)
    sums = (
        f"Of {len(accepted)} submissions that an eval.py accepts, {right} are accepted here, {broken} break a rule of "
        f"this judge. Of {len(refused)} that it finds wrong, {taken} are accepted here. What is judged otherwise:"
    )
    differ: dict[str, list[str]] = {}
    for r in judged:
        if (r["verdict"] == "PASSED") != (r["upstream"] == "pass"):
            said = re.sub(r"^\S+\.py:\d+: ", "", r["reason"]) if r["reason"] else f"its eval.py: {r['upstream']}"
            differ.setdefault(f"{r['verdict']}: {line(said, 170)}", []).append(f"{r['folder']} {r['submission']}")
    notes = [f"* {said}: {', '.join(names)}" for said, names in sorted(differ.items())]
    return "\n".join([sums, "", *notes]) + "\n"


def main() -> None:
    how = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=how, allow_abbrev=False)
    parser.add_argument("sets", nargs="*", type=Path)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", action="append")
    parser.add_argument("--render", action="store_true")
    args = parser.parse_args()
    if args.render:
        output.splice(DOC, MARKS, render(read(args.out)))
    known = {(r["folder"], r["submission"]): r["upstream"] for r in read(args.out)}
    for folder in sets([top.resolve() for top in args.sets]):
        top = next(top.resolve() for top in args.sets if folder.is_relative_to(top.resolve()))
        name = f"{top.name}/{folder.relative_to(top)}"
        mine = {submission: said for (place, submission), said in known.items() if place == name}
        for found in tried(folder, name, args.device, mine) if any(text in name for text in args.only or [""]) else ():
            with args.out.open("a") as out:
                out.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
