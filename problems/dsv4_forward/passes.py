"""What the end-to-end check runs, and what it prints of it: passes over a configuration, and how far apart they are."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from problems.dsv4_forward.cache import random_state
from problems.dsv4_forward.cache.state import State
from problems.dsv4_forward.generate.decoding import Steps
from problems.dsv4_forward.generate.sampler import Sampler
from problems.dsv4_forward.layers import Exchange
from problems.dsv4_forward.model import Model, feed
from problems.dsv4_forward.ops import Ops
from problems.dsv4_forward.trace import CHECKS, Follower, Recorder
from problems.dsv4_forward.weights import config
from problems.dsv4_forward.weights.config import BLOCK_TOKENS, CSA, Config
from problems.dsv4_forward.weights.tree import ModelWeights

WIDE = (40, 65)  # sequences that get a token each: more than kernels for few tokens take
LONG = 1024  # tokens that the longest random context is about to reach, or as many as an indexer chooses a half of
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


def verdict(faults: Sequence[str]) -> bool:
    """Print the faults and the verdict. -> whether there are none."""
    for fault in faults:
        print(f"  FAULT: {fault}")
    print(f"  {'right' if not faults else 'WRONG'}")
    return not faults


def say_kernels(recorder: Recorder) -> list[str]:
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


def layers(oracle: Pass, alone: Sequence[Pass], free: Sequence[Pass]) -> list[Layer]:
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


def say_layers(layers: Sequence[Layer]) -> list[str]:
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


def say_logits(oracle: Pass, plain: Pass, composed: Pass) -> list[str]:
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


def say_decisions(composed: Follower) -> None:
    for op in ("route", "choose"):
        made = [d for d in composed.decisions if d.op == op]
        other = [margin for _, name, margin in composed.other if name == op]
        largest = f", margin up to {max(other):.2g} of the largest score" if other else ""
        print(f"  {op}: {len(other)} of {len(made)} calls would have decided otherwise{largest}")


def say_recorded(case: Case, table: Ops) -> list[str]:
    """Decode steps during which torch refuses to wait for the GPU, and the same as a replayed graph. -> faults."""
    passes = []
    for recorded in (False, True):
        state = State(case.cfg, case.fmt, len(case.prompts), case.blocks(), max(map(len, case.prompts)), case.device)
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


def follow(case: Case, follower: Follower, forced: torch.Tensor) -> Pass:
    """Run a pass in the model's dtype that decides as the oracle did, over the oracle's tokens."""
    return case.run(follower.ops(), None, follower, forced)


def _relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm().clamp(min=1e-30))
