"""Try problem folders of other repositories: does this judge say what the folder's own eval.py says?

python -m tests.support.public_sets [--out FILE] [--only TEXT ...] [--time] [--jobs N] [--device cpu] SET...
python -m tests.support.public_sets --render

SET: a checkout with folders in GPU MODE's format. Of each folder these are tried: its submissions and solutions, and
three that are derived from its reference: its text as a submission (right), and two that spoil its answer (wrong). Each
line of FILE, written when it is known, is one of them with both verdicts. The last one counts, and eval.py is not asked
again; docs/gpu_mode.md is rendered from docs/public_sets.jsonl. --time: time one right submission of each folder
instead, shortly.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml

from harness.judge import phases, selection
from harness.judge.handle import ProblemError, RunnerHandle
from harness.judge.session import Session
from harness.judge.verdict import Result, aggregate
from harness.problem import folders
from harness.problem.folders import UsageError
from harness.results import environment, output
from harness.results.text import first_line, line
from tests.support import ROOT

DOC = ROOT / "docs" / "gpu_mode.md"
OUT = ROOT / "docs" / "public_sets.jsonl"
MARKS = "<!-- sets:begin -->", "<!-- sets:end -->"
LIMIT_S = 170
SHORT = phases.Plan(processes=1, samples=3, warmups=2, buffers=3, audits=1, extra=12)
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
    found = {
        str(file.relative_to(folder)): (file, right)
        for right, globs in patterns.items()
        for pattern in globs
        for file in sorted(folder.glob(pattern))
    }
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
        try:
            run = subprocess.run(
                [sys.executable, spec.get("config", {}).get("main", "eval.py"), "test", "cases.txt"],
                cwd=place,
                env={**os.environ, "POPCORN_FD": str(write), "PYTHONPATH": place},
                pass_fds=(write,),
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                check=False,
            )
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


def ours(folder: Path, files: dict[str, Path], device: str, timed: bool) -> Iterator[tuple[str, str, str]]:
    """Yield (name, verdict, reason) of each submission, one after the other as a user's: their data may be large."""
    target = {"cpu": "cpu", "cuda": "sm90"}[device]
    try:
        problem = folders.find(str(folder))
    except UsageError as error:
        yield from ((name, "REFUSED", str(error)) for name in files)
        return
    for name, file in files.items():
        submission = folders.submission(problem, file)
        if refused := selection.refusal(submission, device, target):
            yield name, refused.status, refused.reason
            continue
        handle = RunnerHandle(name, submission, target)
        result = Result(submission, target)
        try:
            with Session(problem, device) as session:
                if timed:
                    cases = list(problem.benchmarks[device])
                    times, readings = phases.run_benchmarks(session, [handle], cases, lambda _: None, how=SHORT)
                    result.times = [aggregate(*pair) for pair in zip(times[name], readings, strict=True)]
                else:
                    cases = list(problem.tests)
                    tests = phases.run_tests(session, [handle], cases, lambda *_: None, lambda _: None)
                    result.tests = list(zip(cases, tests[name], strict=True))
        except (ProblemError, UsageError) as error:
            yield name, "REFUSED", str(error)
            continue
        failed: list[str] = [outcome.reason for _, outcome in result.tests if outcome.status != "PASSED"]
        failed += [f"{time.case}: {time.failure.reason}" for time in result.times if time.failure]
        yield name, result.verdict, failed[0] if failed else ""


def tried(folder: Path, top: str, device: str, timed: bool, known: dict[str, str]) -> Iterator[dict]:
    """Yield the lines of one folder. known: what its eval.py said before, by submission."""
    with tempfile.TemporaryDirectory() as place:
        found = submissions(folder, Path(place))
        files = {name: file for name, (file, _) in found.items()}
        if timed:
            right = [name for name, (_, right) in found.items() if right]
            files = {name: files[name] for name in right[:1]}
        began = time.monotonic()
        for name, verdict, reason in ours(folder, files, device, timed):
            middle = time.monotonic()
            theirs = known.get(name, "")
            if not theirs and not timed and device == "cuda":
                theirs = upstream(folder, files[name])
            after = time.monotonic()
            print(f"{top}, {name}: ours {middle - began:.0f} s, theirs {after - middle:.0f} s", file=sys.stderr)
            began = after
            yield {
                "folder": top,
                "submission": name,
                "right": found[name][1],
                "upstream": theirs,
                "verdict": verdict,
                "reason": _short(reason),
                "timed": timed,
                "machine": environment.machine(device),
            }


def _short(reason: str) -> str:
    """Return the first line of a reason, without the folders of this machine."""
    return re.sub(r"(?:/[\w.-]+)+/(?=[\w.-]+\.\w)", "", first_line(reason, 300))


def run(args: argparse.Namespace) -> None:
    """Try every folder in a separate process, and append what is found as it comes."""
    tops = {folder: f"{top.name}/{folder.relative_to(top)}" for top in args.sets for folder in sets([top.resolve()])}
    tops = {folder: name for folder, name in tops.items() if any(text in name for text in args.only)}
    began = time.monotonic()
    known = {(r["folder"], r["submission"]): r["upstream"] for r in read(args.out) if r["upstream"]}

    def one(folder: Path) -> None:
        options = ["--device", args.device, *(["--time"] if args.time else [])]
        command = [sys.executable, "-m", "tests.support.public_sets", "--one", str(folder), "--name", tops[folder]]
        mine = {name: said for (place, name), said in known.items() if place == tops[folder]}
        if time.monotonic() - began > args.limit:
            print(f"{tops[folder]}: no time left", file=sys.stderr)
            return
        with args.out.open("a") as out:
            subprocess.run([*command, *options, "--known", json.dumps(mine)], cwd=ROOT, stdout=out, check=False)

    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(one, tops))


def read(file: Path) -> list[dict]:
    """Return the lines of a file, of each submission the last of its kind; none if there is no such file."""
    found = [json.loads(text) for text in file.read_text().splitlines()] if file.exists() else []
    return list({(r["folder"], r["submission"], r["timed"]): r for r in found}.values())


def render(records: list[dict]) -> str:
    """Return the sums, the table by folder, and every difference."""
    rows, notes = [], []
    judged = [r for r in records if not r["timed"] and r["upstream"]]
    accepted = [r for r in judged if r["upstream"] == "pass"]
    ours = [r for r in accepted if r["verdict"] == "PASSED"]
    meant = [r for r in accepted if r["verdict"] == "RULE_BROKEN"]
    refused = [r for r in judged if r["upstream"] == "fail"]
    taken = [r for r in refused if r["verdict"] == "PASSED"]
    sums = (
        f"Of {len(accepted)} submissions that an eval.py accepts, {len(ours)} are accepted here and {len(meant)} break "
        f"a rule of this judge. Of {len(refused)} that it finds wrong, {len(taken)} are accepted here."
    )
    for name in sorted({r["folder"] for r in judged}):
        mine = [r for r in judged if r["folder"] == name]
        right = [r for r in mine if r["upstream"] == "pass"]
        wrong = [r for r in mine if r["upstream"] == "fail"]
        times = [r for r in records if r["timed"] and r["folder"] == name]
        rows.append(
            {
                "folder": name,
                "accepted by its eval.py": len(right),
                "accepted here": sum(r["verdict"] == "PASSED" for r in right),
                "wrong by its eval.py": len(wrong),
                "accepted here of these": sum(r["verdict"] == "PASSED" for r in wrong),
                "timed": ", ".join(sorted({r["verdict"] for r in times})),
            }
        )
        notes += [
            f"* {name}, {r['submission']}: {r['verdict']} ({line(r['reason'], 200)}); its eval.py: {r['upstream']}"
            for r in mine
            if (r["verdict"] == "PASSED") != (r["upstream"] == "pass")
        ]
    heads = list(rows[0])
    table = [heads, ["---", *["---:"] * (len(heads) - 2), "---"], *(list(row.values()) for row in rows)]
    return "\n".join([sums, "", *(f"| {' | '.join(map(str, cells))} |" for cells in table), "", *notes]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("sets", nargs="*", type=Path)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which no folder is begun")
    parser.add_argument("--one", type=Path)
    parser.add_argument("--name")
    parser.add_argument("--known", type=json.loads, default={})
    parser.add_argument("--only", nargs="*", default=[""])
    parser.add_argument("--render", action="store_true")
    args = parser.parse_args()
    if args.one:
        for found in tried(args.one, args.name, args.device, args.time, args.known):
            print(json.dumps(found), flush=True)
    elif args.render:
        output.splice(DOC, MARKS, render(read(args.out)))
    else:
        run(args)


if __name__ == "__main__":
    main()
