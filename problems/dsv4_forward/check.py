"""Check end to end that the model says the same with these kernels in it; if it does not, name where it begins.

    .venv/bin/python -m harness check dsv4_forward [--kernels winners]
    .venv/bin/python -m problems.dsv4_forward.check --config tiny --format nvfp4

Three passes over the same tokens, a ragged prefill and greedy decode steps, on the same weights: the oracle (reference
kernels, activations in fp32), the reference kernels in the model's dtype, and the composition. Then:

* each kernel call of the oracle's pass is repeated with the composed kernel and with the reference, on equal inputs:
  the first one past its budget (trace.CHECKS) is named with its layer. So are calls behind long random contexts of
  three sequences, where entries end that are not the first, index keys tie, and what no token wrote is NaN, and those
  of a token for each of 40 and of 65 sequences. There each op is also called with inputs in which its constants
  matter: eps, floors, clamps, sinks, ties (edges.py);
* what each layer by itself makes of the oracle's hc copies, the copies after each layer of a free pass, and the logits
  may be off the oracle's by 1.5 times what the reference kernels in the model's dtype are off (independent errors of
  one size add up to 1.4 of it), since quantised activations turn a rounding error into a step of the format, and later
  layers that into more: no tighter bound holds end to end;
* greedy tokens are equal, or the two logits are closer in the oracle than six times the size of the reference kernels'
  error: those tokens are listed, and no fault;
* decisions (experts of a token, entries of the indexer) follow the oracle's; each that would have been another is
  listed with the oracle's margin;
* on a GPU, decode steps wait for nothing, and a recorded step's replays have the same logits, bit for bit.

With --gpus the composition on so many GPUs is held against that on one, in the same way, and all GPUs' copies after
each layer must have equal bits. Each of them holds the whole model as well, so it must fit one.

Exit status: 0 if all of it holds, 1 if not, 2 for bad arguments and where memory does not suffice.
"""

import argparse
import contextlib
import dataclasses
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from problems.common import terminal, venv

if __name__ == "__main__":
    venv.enter("problems.dsv4_forward.check")

import torch
import torch.distributed as dist

from problems.common import load
from problems.dsv4_forward import ops
from problems.dsv4_forward.cache import random_state
from problems.dsv4_forward.cache.state import State
from problems.dsv4_forward.generate.decoding import Steps
from problems.dsv4_forward.generate.sampler import Sampler
from problems.dsv4_forward.layers import Exchange
from problems.dsv4_forward.model import Model, feed, no_memory
from problems.dsv4_forward.ops import Ops
from problems.dsv4_forward.parallel import launch
from problems.dsv4_forward.trace import CHECKS, BrokenKernelError, Follower, Recorder, blame
from problems.dsv4_forward.weights import config, partition, tree
from problems.dsv4_forward.weights.config import BLOCK_TOKENS, CSA, Config
from problems.dsv4_forward.weights.tree import ModelWeights

CASES = {  # what is checked where nothing is named
    "cpu": tuple(("tiny-512", fmt) for fmt in config.FORMATS),
    "cuda": (("tiny-k", "bf16"), ("tiny-k", "nvfp4"), ("flash-4l32e", "bf16"), ("flash-4l32e", "nvfp4")),
}
PROMPTS = (600, 37)  # tokens, each in one pass: past the window, blocks of 128, and what kernels for few tokens take
WIDE = (40, 65)  # sequences that get a token each: more than kernels for few tokens take
STEPS = 6  # greedy tokens of each sequence
LONG = 1024  # tokens that the longest random context is about to reach, or as many as an indexer chooses a half of
LATE = "late "  # ahead of a layer's name: behind random contexts
FACTOR = 1.5
CLOSE = 6.0  # a difference of two logits is off by sqrt(2) of one, and the worst of hundreds by four times that
FLOOR = 1e-5  # relative: fp32 sums in another order


@dataclass
class Pass:
    """logits fp32 (calls, B, V): after the prompt and each step; copies: (layer, fp32 (N, n, d)) in call order."""

    logits: torch.Tensor
    copies: list[tuple[str, torch.Tensor]]


@dataclass
class Case:
    """What one configuration is checked with."""

    cfg: Config
    fmt: str
    weights: ModelWeights
    prompts: list[list[int]]
    steps: int
    device: str
    exchange: Exchange | None = None

    def blocks(self) -> int:
        """Blocks for the prompts and the steps."""
        return sum(-(-(len(p) + self.steps) // config.BLOCK_TOKENS) for p in self.prompts)

    def run(self, table: Ops, dtype: torch.dtype | None, probe: object, forced: torch.Tensor | None) -> Pass:
        """Prefill, then steps. forced: int64 (steps, B), the tokens to feed; None: the greedy ones of this pass."""
        chunk = max(map(len, self.prompts))
        state = State(self.cfg, self.fmt, len(self.prompts), self.blocks(), chunk, self.device)
        model = Model(self.weights, table, dtype, probe, exchange=self.exchange)
        sequences = [state.open()[0] for _ in self.prompts]
        rows = [feed(model, state, dict(zip(sequences, self.prompts, strict=True)))]
        for step in range(self.steps):
            tokens = rows[-1].argmax(-1) if forced is None else forced[step]
            given = dict(zip(sequences, tokens.view(-1, 1).cpu(), strict=True))
            rows.append(feed(model, state, given))
        return Pass(torch.stack(rows), probe.copies if probe else [])

    def late(self, table: Ops, probe: object) -> None:
        """Passes behind random contexts, activations in fp32: single tokens with which entries of 128 tokens end that
        are not the first, in several sequences and in one alone, then several new tokens of each.
        """
        longest = max(LONG, 2 * CSA * self.cfg.index_topk)
        lengths = (longest - 3, longest * 3 // 4 - 2, 3 * BLOCK_TOKENS - 2)
        passes = ((1, 1, 1), (1, 1, 1), (1, 0, 0), (1, 37, 5), (0, 0, 1))
        ends = (length + sum(counts[i] for counts in passes) for i, length in enumerate(lengths))
        blocks = 1 + sum(-(-end // BLOCK_TOKENS) for end in ends)
        state = State(self.cfg, self.fmt, sequences=1 + len(lengths), blocks=blocks, device=self.device)
        first, _ = state.open()
        state.reserve({first: 1})  # no token of this sequence comes, so that the first page stays NaN
        sequences = random_state.fill_exactly(state, lengths, seed=1)
        model = Model(self.weights, table, torch.float32, probe)
        gen = torch.Generator().manual_seed(2)
        for counts in passes:
            drawn = [torch.randint(self.cfg.vocab_size, (count,), generator=gen).tolist() for count in counts]
            feed(model, state, {sequence: part for sequence, part in zip(sequences, drawn, strict=True) if part})

    def wide(self, table: Ops, probe: object) -> None:
        """A token each for WIDE sequences behind random contexts, activations in fp32."""
        model, gen = Model(self.weights, table, torch.float32, probe), torch.Generator().manual_seed(3)
        for count in WIDE:
            lengths = [1 + 5 * number % (BLOCK_TOKENS - 2) for number in range(count)]
            state = State(self.cfg, self.fmt, sequences=count, blocks=count, device=self.device)
            sequences = random_state.fill_exactly(state, lengths, seed=3)
            drawn = torch.randint(self.cfg.vocab_size, (count, 1), generator=gen).tolist()
            state.reserve(dict.fromkeys(sequences, 1))
            feed(model, state, dict(zip(sequences, drawn, strict=True)))


class Count:
    """Says which of `total` checks are done, since each takes seconds, or minutes for a wide model."""

    def __init__(self, total: int) -> None:
        self.total, self.number = total, 0

    def done(self, what: str) -> None:
        self.number += 1
        print(f"  {self.number} of {self.total} checks: {what}", flush=True)


def checks(device: str, gpus: int = 1) -> int:
    """How many checks there are of one configuration: six passes, or three pairs, and on a GPU recorded steps."""
    return (6 if gpus == 1 else 3) + (device != "cpu")


class Arguments(terminal.Parser):
    hint = "see .venv/bin/python -m problems.dsv4_forward.check --help"  # harness/run.py has another --help


class Refused(ValueError):
    """Arguments that name no configuration or no kernel, or too large a one. A ValueError of a kernel is none of these:
    it is a fault.
    """


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    try:
        target = _target(args.device)
        if args.gpus > 1 and not launch.started():
            _see_gpus(args)
            return launch.start(args.gpus, ["-m", __spec__.name, *(sys.argv[1:] if argv is None else argv)])
        mine = launch.joined(args.device)
        args.device = mine.device
        if mine.rank:  # the first process says it for all
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115  as long as the process lives
        # One configuration after the other: their weights need not fit the device together.
        cases = _cases(args)
        _see_kernels(args.kernels, target)
        count = Count(len(cases) * checks(torch.device(args.device).type, mine.gpus))
        right = [_checked(name, fmt, args, target, count, mine) for name, fmt in cases]
    except Refused as error:
        print(f"check: {error}", file=sys.stderr)
        return 2
    print(f"end-to-end check: {sum(right)} of {len(right)} configurations right")
    return 0 if all(right) else 1


def _checked(name: str, fmt: str, args: argparse.Namespace, target: str, count: Count, mine: launch.Mine) -> bool:
    """Make and check one configuration. Refused also where it is too large."""
    try:
        return check(make(name, fmt, args.device, args.steps), args.kernels, target, count, mine)
    except (RuntimeError, MemoryError) as error:  # in a kernel too
        if not no_memory(error):
            raise
        said = str(error).strip().partition("\n")[0]
        raise Refused(
            f"no memory for {name} in {fmt} on {args.device}: give a smaller --config, such as flash-4l32e, or a "
            f"larger device ({said})"
        ) from error


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    p = Arguments(prog="check", description=__doc__, formatter_class=form, allow_abbrev=False)
    p.add_argument("--kernels", default="winners", help="reference, winners, or NAME=VARIANT,... (op or problem)")
    p.add_argument("--config", help="one configuration instead of the device's list, such as tiny or flash-4l32e")
    p.add_argument("--format", choices=config.FORMATS, help="one number format")
    steps = terminal.Value(int, "1 or more")
    p.add_argument("--steps", type=steps, default=STEPS, help="greedy tokens of each sequence")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--gpus", type=steps, default=1, help="that share the model, a process each (with --device cpu too)")
    args = p.parse_args(argv)
    for name in ("steps", "gpus"):
        if vars(args)[name] < 1:
            p.error(f"--{name} must be 1 or more, got {vars(args)[name]}")
    return args


def _see_gpus(args: argparse.Namespace) -> None:
    """Refused: so many GPUs cannot share a configuration, or are not there."""
    try:
        launch.check(args.gpus, args.device)
        for name, fmt in _cases(args):
            partition.local(config.find(name), fmt, args.gpus)
    except ValueError as error:
        raise Refused(terminal.of_option(error, "--gpus")) from error


def _target(device: str) -> str:
    """The kernels' target. Refused: no such device."""
    try:
        return load.device_target(device)
    except ValueError as error:
        raise Refused(terminal.of_option(error, "--device")) from error


def _see_kernels(text: str, target: str) -> None:
    """Refused: a part of --kernels that names nothing."""
    try:
        ops.kernels(text, target)
    except ValueError as error:
        raise Refused(str(error)) from error


def _cases(args: argparse.Namespace) -> tuple[tuple[str, str], ...]:
    """(configuration, format) of each. Refused: no such configuration."""
    known = CASES[torch.device(args.device).type]
    if args.config is not None:
        try:
            config.find(args.config)
        except ValueError as error:
            raise Refused(terminal.of_option(error, "--config")) from error
        return tuple((args.config, fmt) for fmt in ([args.format] if args.format else ("bf16", "nvfp4")))
    found = tuple(case for case in known if args.format in (None, case[1]))
    if not found:
        listed = ", ".join(dict.fromkeys(fmt for _, fmt in known))
        raise Refused(f"--format must be one of {listed} without --config on this device, got {args.format}")
    return found


def make(name: str, fmt: str, device: str, steps: int = STEPS, seed: int = 1) -> Case:
    """A case with random weights and prompts."""
    cfg = config.find(name)
    if (most := cfg.max_position_embeddings - max(PROMPTS)) < steps:
        raise Refused(f"--steps must be at most {most} in {name}, whose context the prompts begin, got {steps}")
    gen = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(cfg.vocab_size, (length,), generator=gen).tolist() for length in PROMPTS]
    return Case(cfg, fmt, tree.random(cfg, fmt, seed=seed, device=device), prompts, steps, device)


@torch.inference_mode()
def check(case: Case, text: str, target: str, count: Count | None = None, mine: launch.Mine | None = None) -> bool:
    """Check one configuration with the kernels that `text` names, print the report. -> whether all of it holds.

    count: of the checks of all configurations. mine: this process's place, where several GPUs share the model. Refused:
    `text`. A kernel that cannot be loaded, or that raises, is a fault.
    """
    mine = mine or launch.Mine()
    count = count or Count(checks(torch.device(case.device).type, mine.gpus))
    print(f"\n{case.cfg.name} in {case.fmt}, prompts of {PROMPTS} tokens, {case.steps} steps")
    try:
        chosen = ops.choose(text, target, case.weights)
        if mine.exchange:
            part = tree.shard(case.weights, mine.gpus, mine.rank)
            table = ops.choose(text, target, part).ops
    except ValueError as error:
        raise Refused(str(error)) from error
    except (Exception, SystemExit) as error:
        if no_memory(error):
            raise
        return _wrong([f"--kernels {text}: {blame(error)}"])
    for line in chosen.report:
        print(f"  {line}")
    try:
        if mine.exchange:
            several = dataclasses.replace(case, cfg=part.config, weights=part, exchange=mine.exchange)
            return _checks_of_gpus(case, chosen.ops, several, table, count, mine)
        return _checks(case, chosen, count)
    except BrokenKernelError as error:
        return _wrong([str(error)])


def _wrong(faults: Sequence[str]) -> bool:
    """Print the faults and the verdict. -> whether there are none."""
    for fault in faults:
        print(f"  FAULT: {fault}")
    print(f"  {'right' if not faults else 'WRONG'}")
    return not faults


def _checks(case: Case, chosen: ops.Chosen, count: Count) -> bool:
    """All checks of one configuration with these kernels."""
    working = torch.float32 if case.fmt == "fp32" else torch.bfloat16
    recorder = Recorder(chosen.ops, working)
    oracle = case.run(recorder.ops(), torch.float32, recorder, None)
    count.done("each kernel on the oracle's inputs")
    late = Recorder(chosen.ops, working, edges=True)
    case.late(late.ops(), late)
    late.edges = False
    case.wide(late.ops(), late)
    for (layer, name), worst in late.worst.items():
        recorder.worst[LATE + layer, name] = dataclasses.replace(worst, layer=LATE + layer)
    count.done("each kernel behind long random contexts")
    forced = oracle.logits.argmax(-1)
    tables = {"the reference kernels": ops.REFERENCE, "the composition": chosen.ops}
    alone, free = [], []
    for name, table in tables.items():
        alone.append(_follow(case, Follower(table, recorder.decisions, recorder.residuals), forced))
        count.done(f"each layer on the oracle's copies, with {name}")
    composed = Follower(chosen.ops, recorder.decisions)
    for name, follower in zip(tables, (Follower(ops.REFERENCE, recorder.decisions), composed), strict=True):
        free.append(_follow(case, follower, forced))
        count.done(f"a whole pass with {name}")
    faults = _say_kernels(recorder)
    layers = _layers(oracle, alone, free)
    faults += _say_layers(layers)
    faults += _say_logits(oracle, *free)
    _say_decisions(composed)
    if case.device != "cpu":
        faults += _say_recorded(case, chosen.ops)
        count.done("recorded decode steps")
    return _wrong(faults)


def _checks_of_gpus(case: Case, ops_of_one: Ops, several: Case, table: Ops, count: Count, mine: launch.Mine) -> bool:
    """Hold a model that several GPUs share against the whole one on one of them."""
    recorder = Recorder(ops.REFERENCE, torch.float32)
    oracle = case.run(recorder.ops(), torch.float32, recorder, None)
    count.done("the oracle, on one GPU")
    forced = oracle.logits.argmax(-1)
    alone, free = [], []
    for name, one, kernels in (("one GPU", case, ops_of_one), (f"{mine.gpus} GPUs", several, table)):
        mine.meet()
        alone.append(_follow(one, Follower(kernels, recorder.decisions, recorder.residuals), forced))
        free.append(_follow(one, Follower(kernels, recorder.decisions), forced))
        count.done(f"each layer on the oracle's copies, and a whole pass, on {name}")
    faults = _say_layers(_layers(oracle, alone, free)) + _say_logits(oracle, *free) + _say_bits(free[1], mine)
    if case.device != "cpu":
        faults += _say_recorded(several, table)
        count.done("recorded decode steps")
    mine.meet()
    return _wrong(faults)


def _say_bits(one: Pass, mine: launch.Mine) -> list[str]:
    """Compare sums over the bits of all GPUs' copies and logits. -> the first that differ."""
    sums = torch.stack([_sum_of_bits(copies) for copies in (*(copies for _, copies in one.copies), one.logits)]).cpu()
    every = [torch.empty_like(sums) for _ in range(mine.gpus)]
    dist.all_gather(every, sums)
    places = [*(f"the copies before {layer}" for layer, _ in one.copies), "the logits"]
    for place, here in zip(places, torch.stack(every, 1).tolist(), strict=True):
        if others := [rank for rank, value in enumerate(here) if value != here[0]]:
            return [f"bits: {place} are others on rank {', '.join(map(str, others))} than on rank 0"]
    print(f"  bits: {len(places)} tensors are equal on {mine.gpus} GPUs")
    return []


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """int64 (), of an fp32 tensor: a sum of its words, each times another odd number."""
    words = tensor.contiguous().view(-1).view(torch.int32).long()
    return (words * (2 * torch.arange(len(words), device=words.device) + 1)).sum()


def _say_kernels(recorder: Recorder) -> list[str]:
    """Print a line for each op: its worst call. -> what is past its budget, in the order of the pass."""
    print(f"  {'kernel':<16}{'calls':>7}{'error':>11}{'budget':>11}{'cosine':>10}  worst in")
    names = {name for _, name in recorder.worst}
    for op in sorted(names, key=lambda name: (tuple(CHECKS).index(name.partition(",")[0]), name)):
        seen = [worst for (_, name), worst in recorder.worst.items() if name == op]
        worst = max(seen, key=lambda w: float("inf") if w.error != w.error else w.error)
        calls = sum(w.calls for w in seen)
        print(f"  {op:<16}{calls:>7}{worst.error:>11.2e}{worst.budget:>11.2e}{worst.cosine:>10.6f}  {worst.layer}")
    return [
        f"{w.layer} {w.op}: {w.output} is off by {w.error:.3g} of {w.of}, budget {w.budget:.3g} "
        f"(cosine {w.cosine:.4f}), on the oracle's inputs"
        for w in recorder.worst.values()
        if not w.ok
    ]


@dataclass(frozen=True)
class Layer:
    """Of the hc copies after a layer, in the oracle's pass: norm of a token's, growth. Relative errors: alone, of what
    the layer by itself does to the oracle's copies; drift, of a free pass; each with its budget. cosine: of that pass.
    """

    after: str
    norm: float
    growth: float
    alone: float
    alone_budget: float
    drift: float
    drift_budget: float
    cosine: float


def _layers(oracle: Pass, alone: Sequence[Pass], free: Sequence[Pass]) -> list[Layer]:
    """What each layer does; alone, free: passes of (reference ops, composition)."""
    found: list[Layer] = []
    names = list(dict.fromkeys(name for name, _ in oracle.copies))
    for layer, reached in zip(["embedding", *names], names, strict=False):
        want = _copies(oracle, reached)
        size = float(want.norm() / want.shape[0] ** 0.5)
        errors = []
        for base, got in (alone, free):
            error, honest = (_relative(_copies(one, reached), want) for one in (got, base))
            errors += [error, FACTOR * honest + FLOOR]
        drifted = _copies(free[1], reached).flatten()
        cosine = float(torch.nn.functional.cosine_similarity(drifted, want.flatten(), dim=0))
        found.append(Layer(layer, size, size / ((found[-1].norm if found else size) or size), *errors, cosine))
    return found


def _say_layers(layers: Sequence[Layer]) -> list[str]:
    """Print a line for each layer. -> the first layer past either budget."""
    columns = ("norm", "growth", "alone", "budget", "drift", "budget", "cosine")
    print(f"  {'after':<12}" + "".join(f"{name:>11}" for name in columns))
    found = []
    for one in layers:
        line = f"  {one.after:<12}{one.norm:>11.3g}{one.growth:>11.2f}"
        pairs = (("alone", one.alone, one.alone_budget), ("drift", one.drift, one.drift_budget))
        for kind, error, budget in pairs:
            line += f"{error:>11.2e}{budget:>11.2e}"
            if not error <= budget:
                found.append(f"{kind}: copies after {one.after} are off by {error:.3g}, budget {budget:.3g}")
        print(f"{line}{one.cosine:>11.6f}")
    return found[:1]


def _copies(one: Pass, layer: str) -> torch.Tensor:
    """All tokens' copies before `layer`, fp32 (N, n, d)."""
    return torch.cat([copies for name, copies in one.copies if name == layer])


def _say_logits(oracle: Pass, plain: Pass, composed: Pass) -> list[str]:
    scale = float(oracle.logits.std())
    error, honest = (_relative(p.logits, oracle.logits) for p in (composed, plain))
    budget = FACTOR * honest + FLOOR
    said = f"relative error {error:.2e} (reference kernels {honest:.2e}, budget {budget:.2e})"
    print(f"  logits: std {scale:.3g}, {said}")
    faults = [] if error <= budget else [f"logits are off by {error:.3g}, budget {budget:.3g}"]
    want, got = oracle.logits.argmax(-1), composed.logits.argmax(-1)
    near = CLOSE * scale * (honest + FLOOR)
    others = 0
    for step, row in (want != got).nonzero().tolist():
        line = oracle.logits[step, row]
        margin = float(line[want[step, row]] - line[got[step, row]])
        where = f"sequence {row}, token {step}: {int(got[step, row])} instead of {int(want[step, row])}"
        said = f"{where}, whose logit is {margin:.3g} higher in the oracle; up to {near:.3g} is within the error"
        if margin <= near:
            others += 1
            print(f"  greedy token differs within the error: {said}")
        else:
            faults.append(f"greedy token differs: {said}")
    equal = want.numel() - int((want != got).sum())
    print(f"  greedy tokens: {equal} of {want.numel()} equal, {others} differ within the error")
    return faults


def _say_decisions(composed: Follower) -> None:
    for op in ("route", "choose"):
        made = [d for d in composed.decisions if d.op == op]
        other = [margin for _, name, margin in composed.other if name == op]
        largest = f", margin up to {max(other):.2g} of the largest score" if other else ""
        print(f"  {op}: {len(other)} of {len(made)} calls would have decided otherwise{largest}")


def _say_recorded(case: Case, table: Ops) -> list[str]:
    """Decode steps during which torch refuses to wait for the GPU, and the same as a replayed graph. -> faults."""
    passes = []
    for recorded in (False, True):
        state = State(case.cfg, case.fmt, len(case.prompts), case.blocks(), max(PROMPTS), case.device)
        model = Model(case.weights, table, exchange=case.exchange)
        sequences = [state.open()[0] for _ in case.prompts]
        logits = feed(model, state, dict(zip(sequences, case.prompts, strict=True)))
        state.reserve(dict.fromkeys(sequences, case.steps))
        who = torch.tensor(sequences, device=case.device)
        step = Steps(model, state, sequences, logits.argmax(-1), who, Sampler(), recorded)
        rows = []
        for _ in range(case.steps):
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                step()
            except RuntimeError as error:
                return [f"a decode step{' cannot be recorded' * recorded}, or it waits for the GPU: {error}"]
            finally:
                torch.cuda.set_sync_debug_mode("default")
            rows.append(step.logits.clone())
        passes.append(torch.stack(rows))
    if not torch.equal(*passes):
        return [f"a decode step's replay differs from its kernels launched one by one: {_relative(*passes):.3g}"]
    print(f"  {case.steps} decode steps: no host synchronisation; replays of a recorded step are equal to them")
    return []


def _follow(case: Case, follower: Follower, forced: torch.Tensor) -> Pass:
    """Run a pass in the model's dtype that decides as the oracle did, over the oracle's tokens."""
    return case.run(follower.ops(), None, follower, forced)


def _relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm().clamp(min=1e-30))


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
