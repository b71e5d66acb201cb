"""Bring a B200 up in stages, from words through tensor memory to judgements of our variants, and write one JSON file.

    make b200                               # this file; it writes leaderboard/out/bringup_sm100.json

Each stage is a kernel with one piece of the hardware more than the one before (bringup_sm100.cu). It runs in the model
of ptx_model, then on the GPU, each time in a separate process, and both outputs are compared with
numpy's bit by bit. A wait that lasts too long writes role, barrier, phase and tile, and traps; these are in the file
too. Behind the stages each variant for sm100 is compiled and runs its smallest test case, each in processes with a time
limit; those that are right are judged by harness/run.py, which on a GPU times them by players, and records them.

Without a GPU of compute capability 10.x the stages run in the model only, the variants are only compiled, and the exit
code is 7. It is 0 if all is right, else 1. --out FILE: where the JSON goes; --stage NAME: that stage only, and no
variants; --no-variants: stages only; --no-judge: no judgements, which take up to half an hour a variant.
"""

from __future__ import annotations  # until `venv.enter`, Python 3.8 must do

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # run as a script, from anywhere

from problems.common import terminal, venv  # noqa: E402

NAME = "ptx_model/tools/bringup_sm100.py"
SOURCE = Path(__file__).with_suffix(".cu")
OUT = ROOT / "leaderboard" / "out" / "bringup_sm100.json"
MODEL_S, GPU_S = 120, 30  # limits of all stages in the model, and of a stage on the GPU


def main(arguments: list[str] | None = None) -> int:
    """See the top of this file. Return the exit code."""
    parser = terminal.Parser(prog=NAME, description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=OUT, metavar="FILE", help=f"default: {OUT.relative_to(ROOT)}")
    parser.add_argument("--stage", metavar="NAME", help="only this stage")
    parser.add_argument("--no-variants", action="store_true", help="only the stages")
    parser.add_argument("--no-judge", action="store_true", help="compile and test the variants only")
    parser.add_argument("--run", nargs=2, metavar=("WHERE", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    venv.enter(NAME)
    from ptx_model.tools import bringup_stages

    if options.stage and options.stage not in bringup_stages.STAGES:
        parser.error(f"--stage must be one of {', '.join(bringup_stages.STAGES)}, got {options.stage!r}")
    stages = [options.stage] if options.stage else list(bringup_stages.STAGES)
    if options.run:
        return bringup_stages.run(stages, *options.run)
    if not shutil.which("nvcc"):
        print(f"{NAME}: nvcc must be on PATH: install the CUDA toolkit, 12.8 or newer", file=sys.stderr)
        return 2
    return _bring_up(stages, options)


def _bring_up(stages: list[str], options: argparse.Namespace) -> int:
    from harness.results import environment, output
    from ptx_model.tools import bringup_variants

    gpu = _gpu()
    commit, dirty = environment.commit()
    found: dict = {
        "gpu": gpu,
        "environment": environment.describe(),
        "nvcc": _nvcc(),
        "commit": commit,
        "dirty": dirty,
        "stages": [],
        "variants": [],
    }

    def keep() -> None:  # after each step: a machine may hang
        options.out.parent.mkdir(parents=True, exist_ok=True)
        output.write_whole(options.out, json.dumps(found, indent=1) + "\n")

    if gpu is None:
        print("no GPU of compute capability 10.x: the stages run in the model only")
    models = _process(options.stage, "model", MODEL_S)
    for name in stages:
        one = {"name": name, "model": models.get(name, models), "gpu": {"status": "not run"}}
        if gpu is not None:
            said = _process(name, "gpu", GPU_S)
            one["gpu"] = said.get(name, said)
        found["stages"].append(one)
        print(f"{name:12} model: {one['model']['status']:10} gpu: {one['gpu']['status']}", flush=True)
        for line in one["gpu"].get("report", []):
            print(f"    waited in vain: {line}")
        keep()
    if not options.no_variants and not options.stage:
        found["variants"] = bringup_variants.variants()
        bringup_variants.take(found["variants"], gpu and "cuda", not options.no_judge, keep)
        print(bringup_variants.table(found["variants"]))
    ending = ": send this file back" if gpu else "; nothing ran on a GPU, so there is nothing to send back"
    print(f"wrote {options.out}{ending}")
    right = all(one["model"]["status"] == "equal" for one in found["stages"])
    steps = [one.get(step) for one in found["variants"] for step in ("compiled", "test", "judged")]
    right &= not any(map(bringup_variants.is_fault, filter(None, steps)))
    if gpu is None:
        return 7 if right else 1
    right &= all(one["gpu"]["status"] == "equal" for one in found["stages"])
    return 0 if right else 1


def _gpu() -> str | None:
    """The name of a GPU with compute capability 10.x, or None."""
    from harness.results import gpu

    found = gpu.current()
    return found.name if found and found.capability.startswith("10.") else None


def _nvcc() -> str:
    said = subprocess.run(["nvcc", "--version"], capture_output=True, text=True).stdout
    return next((line.strip() for line in said.splitlines() if "release" in line), "")


def _process(name: str | None, where: str, limit_s: int) -> dict:
    """Run a stage, or all of them, in one process. Return {stage: what it found}, or how the process ended."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch, "result.json")
        command = [sys.executable, str(Path(__file__)), *(["--stage", name] if name else [])]
        begin = time.monotonic()
        try:
            ran = subprocess.run(
                [*command, "--run", where, str(file)], cwd=ROOT, capture_output=True, text=True, timeout=limit_s
            )
            ended = {"status": "failed", "said": (ran.stdout + ran.stderr)[-2000:]}
        except subprocess.TimeoutExpired:
            ended = {"status": "timeout", "said": f"killed after {limit_s} s"}
        found = json.loads(file.read_text()) if file.is_file() else ended
        return found | {"seconds": round(time.monotonic() - begin, 1)}


if __name__ == "__main__":
    sys.exit(main())
