"""Measure the time per decode token on a GPU, eager and as one replayed graph a step, and print the speed of light.

    python problems/dsv4_forward/latency.py --config flash-4l32e --format bf16 nvfp4 --batch 1 8 --json FILE

Before it times, it checks: a decode step never waits for the GPU; the graph holds the kernels that an eager step
launches, the winners' too; a replay gives the logits of the eager step, bit for bit. Ops that cannot be captured are
named and hold the reference in the graph.
"""

import argparse
import collections
import contextlib
import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from problems.common import build, load
from problems.dsv4_forward import ops, traffic
from problems.dsv4_forward.cache.state import State
from problems.dsv4_forward.model import Model, feed
from problems.dsv4_forward.ops import Ops
from problems.dsv4_forward.weights import config, tree
from problems.dsv4_forward.weights.config import BLOCK_TOKENS
from problems.dsv4_forward.weights.tree import ModelWeights

BANDWIDTH = {"NVIDIA H200": 4.8e12}  # bytes/s, datasheet
WARMUPS, STEPS = 5, 50
PER_THREAD = 2  # cudaStreamPerThread: the default queue of code that build.capturable() made


@dataclass
class Step:
    """One decode step of B sequences that can be recorded and replayed: tokens in, the next tokens and logits out."""

    model: Model
    state: State
    sequences: tuple[int, ...]
    tokens: torch.Tensor  # int64 (B,)
    bound: int
    logits: torch.Tensor | None = None

    def __call__(self) -> None:
        batch = self.state.step(self.sequences, self.tokens, static=True, bound=self.bound)
        self.logits = self.model.forward(batch, self.state).logits
        self.tokens.copy_(self.logits.argmax(-1))
        self.state.length.index_add_(0, batch.sequence_ids, batch.advance)


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--config", nargs="+", default=["tiny-k", "flash-4l32e"])
    p.add_argument("--format", nargs="+", choices=config.FORMATS, default=["bf16", "nvfp4"])
    p.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    p.add_argument("--context", type=int, default=512, help="tokens of each sequence before the timed steps")
    p.add_argument("--kernels", default="winners")
    p.add_argument("--json", metavar="FILE", help="append a record for each line")
    args = p.parse_args(argv)
    if not torch.cuda.is_available():
        print("latency: needs a GPU", file=sys.stderr)
        return 2
    wrong = 0
    columns = ("eager ms", "graph ms", "SOL ms", "launches")
    print(f"{'config':<14}{'format':<10}{'B':>3}" + "".join(f"{column:>10}" for column in columns) + "  checks")
    for name in args.config:
        for fmt in args.format:
            made = tree.random(config.find(name), fmt, seed=1, device="cuda")
            for batch in args.batch:
                record = measure(made, batch, args.context, args.kernels)
                wrong += not record["ok"]
                print(
                    f"{name:<14}{fmt:<10}{batch:>3}{record['eager_ms']:>10.3f}{record['graph_ms']:>10.3f}"
                    f"{record['floor_ms']:>10.3f}{record['graph_launches']:>10}  {record['checks']}", flush=True
                )  # fmt: skip
                if args.json:
                    with open(args.json, "a") as file:
                        file.write(json.dumps(record) + "\n")
            del made
            torch.cuda.empty_cache()
    return 1 if wrong else 0


@torch.inference_mode()
def measure(made: ModelWeights, batch: int, context: int, text: str) -> dict:
    """The record of one configuration."""
    target = load.device_target("cuda")
    eager_table = ops.choose(text, target, made)
    with build.capturable():
        graph_table = ops.choose(text, target, made)
        state, sequences, tokens = _prefilled(made, batch, context)
        bound = context + 4 * (WARMUPS + STEPS)
        start, first = state.buffer.clone(), tokens.clone()
        side = torch.cuda.ExternalStream(PER_THREAD)
        with torch.cuda.stream(side):
            step, graph, left_out = _recorded(made, graph_table.ops, state, sequences, tokens, bound)
            state.buffer.copy_(start)
            tokens.copy_(first)
            graph.replay()
            side.synchronize()
            replayed = step.logits.clone()
            launched = _launches(graph.replay)
            graph_ms = _median_ms(graph.replay)
    eager = Step(Model(made, eager_table.ops), state, sequences, tokens, bound)
    state.buffer.copy_(start)
    tokens.copy_(first)
    torch.cuda.synchronize()
    wait = _waits(eager)
    same = torch.equal(eager.logits, replayed)
    launches = _launches(eager)
    eager_ms = _median_ms(eager)
    missing, further = (dict(c) for c in _apart(launches, launched))
    checks = {
        "host_synchronisations": wait, "replay_equals_eager": same,
        "missing_in_graph": missing, "only_in_graph": further, "not_captured": left_out,
    }  # fmt: skip
    nbytes = bytes_moved(made, batch, context)
    name = torch.cuda.get_device_name()
    return {
        "schema": 1, "kind": "latency", "problem": "dsv4_forward",
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "config": made.config.name, "format": made.format, "batch": batch, "context": context,
        "kernels": eager_table.names, "eager_ms": eager_ms, "graph_ms": graph_ms, "bytes": nbytes,
        "floor_ms": 1e3 * nbytes / BANDWIDTH.get(name, float("nan")), "eager_launches": len(launches),
        "graph_launches": len(launched), "checks": checks,
        "ok": wait == "" and same and not left_out and _holds(missing, launches, launched),
        "environment": {"gpu": name, "torch": torch.__version__, "cuda": torch.version.cuda},
        "commit": os.environ.get("GIT_COMMIT", ""),
    }  # fmt: skip


def bytes_moved(made: ModelWeights, batch: int, context: int) -> int:
    """Least memory traffic of one decode step, in bytes (traffic.py says what counts)."""
    return traffic.Step(made.config, made.format, (context,) * batch, 1).bytes_moved()


def _prefilled(made: ModelWeights, batch: int, context: int) -> tuple[State, tuple[int, ...], torch.Tensor]:
    """A state of `batch` sequences of `context` random tokens, by the reference kernels, with room for what follows."""
    room = -(-(context + 8 * (WARMUPS + STEPS)) // BLOCK_TOKENS)
    state = State(made.config, made.format, sequences=batch, blocks=batch * room, device="cuda")
    sequences = tuple(state.open()[0] for _ in range(batch))
    source = torch.Generator().manual_seed(7)
    prompts = torch.randint(made.config.vocab_size, (batch, context), generator=source)
    logits = feed(Model(made), state, dict(zip(sequences, prompts.tolist(), strict=True)))
    state.reserve(dict.fromkeys(sequences, 6 * (WARMUPS + STEPS)))
    return state, sequences, logits.argmax(-1)


def _recorded(
    made: ModelWeights, table: Ops, state: State, sequences: tuple[int, ...], tokens: torch.Tensor, bound: int
) -> tuple[Step, torch.cuda.CUDAGraph, list[str]]:
    """A graph of one step on the present queue, and the ops that had to hold the reference for it."""
    step = Step(Model(made, table), state, sequences, tokens, bound)
    try:
        return step, _capture(step), []
    except RuntimeError as whole:
        plain = vars(ops.REFERENCE)
        left_out = []
        for op, kernel in vars(table).items():
            if kernel is plain[op]:
                continue
            one = dataclasses.replace(ops.REFERENCE, **{op: kernel})
            try:
                _capture(Step(Model(made, one), state, sequences, tokens, bound))
            except RuntimeError as error:
                left_out.append(f"{op}: {error}".partition("\n")[0])
                table = dataclasses.replace(table, **{op: plain[op]})
        if not left_out:
            raise whole
        step = Step(Model(made, table), state, sequences, tokens, bound)
        return step, _capture(step), left_out


def _capture(step: Step) -> torch.cuda.CUDAGraph:
    for _ in range(3):  # compile, load, and let the allocator find its sizes
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        step()
    return graph


def _waits(step: Step) -> str:
    """What made a step wait for the GPU, "" if nothing did."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


def _launches(call: Callable[[], None]) -> list[str]:
    """Names of the kernels, copies and fills that one call runs on the GPU."""
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    for _ in range(2):  # the first profile of a process may miss records
        torch.cuda.synchronize()
        with contextlib.redirect_stdout(sys.stderr), torch.profiler.profile(activities=activities) as profile:
            call()
            torch.cuda.synchronize()
    device = torch.autograd.DeviceType.CUDA
    return [event.name for event in profile.events() if event.device_type == device]


def _apart(eager: list[str], graph: list[str]) -> tuple[collections.Counter, collections.Counter]:
    """How often each name is in the one alone, and in the other alone."""
    one, other = collections.Counter(eager), collections.Counter(graph)
    return one - other, other - one


def _holds(missing: dict[str, int], eager: list[str], graph: list[str]) -> bool:
    """Whether the graph does all that an eager step does: every kernel by name, and as many operations in all. Copies
    and fills are only counted: as nodes of a graph they may be done, and named, otherwise.
    """
    return len(eager) == len(graph) and all(name.startswith(("Memcpy", "Memset")) for name in missing)


def _median_ms(call: Callable[[], None]) -> float:
    """Median time of a call until the GPU has done it, on the host's clock, in ms."""
    taken = []
    for _ in range(WARMUPS + STEPS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        taken.append(1e3 * (time.perf_counter() - start))
    return statistics.median(taken[WARMUPS:])


if __name__ == "__main__":
    sys.exit(main())
