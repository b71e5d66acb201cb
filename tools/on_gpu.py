#!/usr/bin/env python3
"""What has to run on a GPU before a commit is trusted, in parts that fit into a short loan of a machine.

.venv/bin/python tools/on_gpu.py --out FOLDER PART[=SECONDS] ...     in this order; --list prints the parts

The commands of a part run at the same time. What takes longer than the part's seconds is interrupted, as Ctrl-C would,
so that pytest says what failed, and a judge's run can be taken up with --resume. A command's output goes to
FOLDER/<part>.<number>.log, its last lines to the screen. Exit status: 0 if every command ended with 0.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON = sys.executable
GRACE_S = 20  # to end in after an interrupt
SHOWN = 6  # last lines of a command's output
TEST = "-m pytest -q -m gpu -p no:cacheprovider"
RUN, LOOP = "harness/run.py", "-m tests.attacks.bare_loop --times"
SANITIZED = "linear_decode mhc_site indexer fmha_decode fmha_prefill moe_gemm nvfp4_gemv"


@dataclass(frozen=True)
class Part:
    """commands: of Python, run at the same time. limit_s: about twice what they took on an H200 or H100."""

    commands: tuple[str, ...]
    limit_s: int
    what: str


def _records(problem: str, limit_s: int) -> Part:
    return Part((f"{RUN} {problem} --all --quiet",), limit_s, f"a recorded run of all variants of {problem}")


PARTS = {
    "times": Part(
        (
            f"{LOOP} linear_decode sm90_mma plain",
            f"{LOOP} mhc_site sm90_columns alike",
            f"{LOOP} indexer sm90_join plain",
            f"{LOOP} fmha_decode sm90_wgmma plain",
        ),
        120,
        "times by a plain loop, a case at a time: no records",
    ),
    "kernels": Part(
        (
            f"{TEST} tests/problems/test_gpu.py tests/problems/test_wrong.py",
            f"{TEST} tests/problems/test_variants.py tests/common tests/packaging",
            f"{TEST} tests/problems/test_indexer.py tests/problems/test_every_problem.py",
            f"{TEST} tests/problems/test_fmha_decode_variants.py tests/problems/test_moe_prefill.py",
        ),
        200,
        "tests of the problems' kernels",
    ),
    "model": Part(
        (f"{TEST} tests/dsv4 --ignore tests/dsv4/test_steps.py",),
        200,
        "tests of the model's kernels and passes",
    ),
    "steps": Part((f"{TEST} tests/dsv4/test_steps.py",), 500, "steps of the model: 2,000 in a row, replays, drafting"),
    "check": Part(("-m harness check dsv4_forward --quiet",), 200, "the end-to-end check in all formats"),
    "judge": Part((f"{TEST} tests/harness",), 200, "tests of the judge"),
    "attacks": Part((f"{TEST} tests/attacks",), 560, "the table of attacks"),
    "sanitize": Part(
        tuple(f"-m harness sanitize {problem} --quiet" for problem in SANITIZED.split()),
        560,
        "small cases of the winners under compute-sanitizer",
    ),
    "latency": Part((f"{RUN} dsv4_forward --mode latency --quiet",), 400, "recorded latency of the composed model"),
    "pairs": Part(("-m tests.attacks.honest_pairs run --same 3 --slowed 3",), 400, "pairs whose ratio is known"),
    "loop": Part(("-m tests.attacks.bare_loop",), 150, "the judge's times beside a plain loop's, recorded"),
    "nvfp4_gemv": _records("nvfp4_gemv", 400),
    "fmha_decode": _records("fmha_decode", 700),
    "fmha_prefill": _records("fmha_prefill", 250),
    "mhc_site": _records("mhc_site", 1400),
    "indexer": _records("indexer", 1700),
    "linear_decode": _records("linear_decode", 1100),
    "moe_gemm": _records("moe_gemm", 1500),
}


def _heed() -> None:
    """In a command: what a shell has put into the background ignores interrupts, and its children do."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def run(name: str, part: Part, limit_s: int, out: Path) -> list[int]:
    """Run the commands of a part. Return their exit codes, 124 for one that was interrupted."""
    begun, running = time.monotonic(), []
    for number, command in enumerate(part.commands):
        with (out / f"{name}.{number}.log").open("w") as log:
            arguments = [PYTHON, *command.split()]
            environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
            streams = {"stdout": log, "stderr": log}
            running.append(subprocess.Popen(arguments, cwd=ROOT, env=environment, preexec_fn=_heed, **streams))
    late = set()
    for number, process in enumerate(running):
        try:
            process.wait(max(0.1, begun + limit_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            late.add(number)
            process.send_signal(signal.SIGINT)
    for process in running:
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    codes = [124 if number in late else process.returncode for number, process in enumerate(running)]
    for number, code in enumerate(codes):
        lines = (out / f"{name}.{number}.log").read_text(errors="replace").splitlines()
        print(f"== {name}.{number}: exit {code}, {time.monotonic() - begun:.0f} s: {part.commands[number]}")
        print("\n".join(lines[-SHOWN if code == 0 else -4 * SHOWN :]), flush=True)
    return codes


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("parts", nargs="*", metavar="PART[=SECONDS]")
    parser.add_argument("--out", type=Path, default=ROOT / ".build" / "on_gpu", help="folder of the logs")
    parser.add_argument("--list", action="store_true", help="print the parts")
    args = parser.parse_args()
    if args.list or not args.parts:
        for name, part in PARTS.items():
            print(f"{name:14} {part.limit_s:4} s  {part.what}")
        return 0
    asked = []
    for word in args.parts:
        name, _, seconds = word.partition("=")
        if name not in PARTS:
            parser.error(f"PART: wanted one of {', '.join(PARTS)}, got {name!r}")
        if seconds and not (seconds.isdecimal() and int(seconds)):
            parser.error(f"PART=SECONDS: wanted whole seconds, got {word!r}")
        asked.append((name, int(seconds or PARTS[name].limit_s)))
    args.out.mkdir(parents=True, exist_ok=True)
    codes = [code for name, limit_s in asked for code in run(name, PARTS[name], limit_s, args.out)]
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
