"""The judge's times beside those of a plain loop without the judge's code: cold caches, events, fresh processes.

python -m tests.attacks.bare_loop [PROBLEM VARIANT CASE]
python -m tests.attacks.bare_loop --times PROBLEM VARIANT CASE

Needs a GPU. For each winner in WHAT, or for the given one, half of the loop's processes run before the judge's and
half after, and a line for each is appended to leaderboard/results/<machine>/judge/bare_loop.jsonl. CASE is words of
one benchmark case. The loop's data is made once in a process, and calls take it in turn.

With --times the loop alone runs, in this process, on each case that has the words: a few seconds for a problem, while
a kernel is being written. Nothing is checked or recorded.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType

import torch
from torch.utils._pytree import tree_leaves

from harness.checker import inputs
from harness.judge import machine
from harness.problem import folders
from harness.problem.folders import Case, has_words
from harness.results import environment, record
from problems.common import build, load
from tests.attacks.honest_pairs import judged
from tests.support import ROOT

WHAT = (
    ("nvfp4_gemv", "sm90_dp4a", "m=7168 k=16384"),
    ("nvfp4_gemv", "sm90_dp4a", "m=4096 k=7168"),
    ("fmha_decode", "sm90_wgmma", "batch=128 heads=128"),
)
PROCESSES = 6  # of each side, as in a run of the judge
CALLS, MOST_CALLS = 12, 40  # of a process: timed; made until there are so many
BUFFERS = 3
SLEEP = 4_000_000  # clocks, 2 ms: all of a call is enqueued when it ends
# A plain kernel in front of the call, as in the judge's reading: a programmatic launch reaches back to it. Torch's
# shortest, of _sleep, takes 1 us longer.
MARK = '__global__ void mark() {}\nextern "C" int launch() { mark<<<1, 32>>>(); return cudaGetLastError(); }\n'
PAGE = 65536  # bytes between the words that are read before a call, so that address translations are warm


def contents(problem: str, variant: ModuleType, case: Case, device: str) -> list:
    """Return the data of BUFFERS calls of a case. Weights that a problem has apart are shared, and prepared."""
    folder = folders.find(problem).folder
    reference, task = load.module(folder, "reference"), load.module(folder, "task")
    weights = None
    if hasattr(reference, "generate_weights"):
        weights = reference.generate_weights(**case.params, seed=BUFFERS, device=device)
    made = [
        inputs.make(reference, task, {**case.params, "seed": seed}, device, True, weights) for seed in range(BUFFERS)
    ]
    if hasattr(variant, "prepare"):
        weights = variant.prepare(weights)
    return [data._replace(weights=weights) for data in made] if weights is not None else made


def loop(problem: str, variant: str, case: Case) -> list[float]:
    """Return the times of CALLS calls in this process, in us."""
    variant_module = load.variant(problem, variant)
    called, data = variant_module.custom_kernel, contents(problem, variant_module, case, "cuda")
    # What a baseline's setup makes of each content, and its calls are given.
    states = [(variant_module.setup(one),) if hasattr(variant_module, "setup") else () for one in data]
    gpu = torch.cuda.get_device_properties(0)
    junk, readers = torch.zeros(gpu.L2_cache_size, dtype=torch.int32, device="cuda"), 4 * gpu.multi_processor_count
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    mark, found = _mark(), []
    for call in range(MOST_CALLS):
        one = data[call % BUFFERS]
        torch.cuda.synchronize()
        junk.max()  # reads it: four times the L2
        for tensor in tree_leaves(one):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().nbytes() >= 4:
                words = torch.tensor([], dtype=torch.int32, device="cuda").set_(tensor.untyped_storage())
                words[:: PAGE // 4].expand(readers, -1).amax(dim=1)  # a reader is a row, and has a block
        torch.cuda._sleep(SLEEP)
        start.record()
        build.check(mark(), "the mark's launch")
        called(one, *states[call % BUFFERS])
        late = start.query()  # a busy host enqueued for longer than SLEEP: the call was not ready when it began
        stop.record()
        torch.cuda.synchronize()
        if call >= BUFFERS and not late:
            found.append(start.elapsed_time(stop) * 1000)
        if len(found) == CALLS:
            return found
    raise SystemExit(f"{problem} {variant} {case}: {MOST_CALLS - len(found)} calls enqueued for over {SLEEP} clocks")


def _mark() -> Callable[[], int]:
    """Compile and return the launch of MARK."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "mark.cu")
        source.write_text(MARK)
        return build.cuda(source, "sm90").function("launch")


def times(problem: str, variant: str, cases: list[Case]) -> None:
    """Print the median of each case, with the GPU held for it alone."""
    if build := getattr(load.variant(problem, variant), "compile_for", None):
        build("sm90")
    for case in cases:
        with machine.hold(environment.gpu_uuid()):
            us = statistics.median(loop(problem, variant, case))
        print(f"{problem} {variant} {case}: {us:.2f} us", flush=True)


def processes(count: int, *what: str) -> list[list[float]]:
    """Return the times of so many fresh processes."""
    command = [sys.executable, "-m", "tests.attacks.bare_loop", *what, "--process"]
    said = [subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True) for _ in range(count)]
    return [json.loads(one.stdout.splitlines()[-1]) for one in said]


def of_processes(samples: list[list[float]]) -> tuple[float, float]:
    """Return (mean, standard error) of the processes' medians."""
    levels = [statistics.median(one) for one in samples]
    return statistics.mean(levels), statistics.stdev(levels) / len(levels) ** 0.5


def compare(problem: str, variant: str, words: str) -> None:
    """Record the line of one winner: the judge's time of a case beside the loop's."""
    first = processes(PROCESSES // 2, problem, variant, words)
    found = judged([problem, "--variant", variant, "--case", words])
    judge = next(line for line in found if line["variant"] == variant)
    if judge["status"] != "PASSED":
        raise SystemExit(f"{problem} {variant} {words}: {judge['status']}: {judge['reason']}")
    loops = first + processes(PROCESSES - PROCESSES // 2, problem, variant, words)
    (of_judge, judge_error), (of_loop, loop_error) = of_processes(judge["samples_us"]), of_processes(loops)
    ratio = of_judge / of_loop
    error = ratio * ((judge_error / of_judge) ** 2 + (loop_error / of_loop) ** 2) ** 0.5
    one = {"case": judge["case"], "judge_us": of_judge, "loop_us": of_loop, "ratio": ratio, "standard_error": error}
    one |= {"judge_samples_us": judge["samples_us"], "loop_samples_us": loops}
    line = {name: judge[name] for name in ("schema", "run_id", "commit", "harness_hash", "environment")}
    line |= {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "problem": problem}
    line |= {"kind": "bare_loop", "variant": variant, "cases": [one]}
    file = record.RESULTS / environment.machine("cuda") / "judge" / "bare_loop.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as out:
        out.write(json.dumps(line) + "\n")
    said = f"judge {of_judge:.2f} us, loop {of_loop:.2f} us"
    print(f"{problem} {words}: {said}, ratio {ratio:.4f} (standard error {error:.4f})")


def main() -> None:
    how = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=how, allow_abbrev=False)
    parser.add_argument("what", nargs="*", metavar="PROBLEM VARIANT CASE")
    parser.add_argument("--process", action="store_true", help="print the times of one process")
    parser.add_argument("--times", action="store_true", help="print the loop's medians by case, and record nothing")
    args = parser.parse_args()
    if len(args.what) not in (0, 3):
        parser.error(f"wanted PROBLEM VARIANT CASE or nothing, got {' '.join(args.what)}")
    if not torch.cuda.is_available():
        parser.error("needs a GPU, and torch sees none")
    for what in [tuple(args.what)] if args.what else WHAT:
        problem, variant, words = what
        cases = [case for case in folders.find(problem).timed("sm90") if has_words(str(case), words)]
        if not cases:
            parser.error(f"CASE: no benchmark case of {problem} has the words {words!r}")
        if args.process:
            print(json.dumps(loop(problem, variant, cases[0])))
        elif args.times:
            times(problem, variant, cases)
        else:
            compare(*what)


if __name__ == "__main__":
    main()
