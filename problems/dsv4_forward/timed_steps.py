"""Calls whose latency `harness/run.py dsv4_forward --mode latency` measures: CASES, and what `prepare` makes of each.

A decode step can be recorded in a CUDA graph: it does not wait for the device, and it reads and writes the same memory
each time. harness/tools/latency.py records, replays and times it. A case with `new` tokens is a prefill, timed without
a graph; with `early` 0 no kernel of another problem begins early; `kernels`, as the check's --kernels has it, goes over
the winners; `gpus` share the model, a process each. Weights and caches are random and made at memory speed; the experts
that a step goes to are counted.
"""

import dataclasses
import functools
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from problems.common import load
from problems.dsv4_forward import ops, traffic
from problems.dsv4_forward.cache import random_state
from problems.dsv4_forward.cache.state import State
from problems.dsv4_forward.kernels.argmax import Longer, argmax
from problems.dsv4_forward.model import Model
from problems.dsv4_forward.ops import Chosen, Op, Ops
from problems.dsv4_forward.parallel import launch
from problems.dsv4_forward.weights import config, partition, tree
from problems.dsv4_forward.weights.config import BLOCK_TOKENS
from problems.dsv4_forward.weights.tree import ModelWeights

CONTEXT, LONG, LONGER, LONGEST = 512, 4096, 65536, 262144  # tokens of each sequence before the timed steps
PREFILL = 2048  # tokens, in one chunk
PATIENT_S = 30.0  # that a GPU waits for another, whose process may be reading a profile
CASES = (
    [
        {"config": name, "format": fmt, "batch": batch, "context": CONTEXT}
        for name, formats in (("tiny-k", ("bf16", "nvfp4")), ("flash-4l32e", config.FORMATS[1:]))
        for fmt in formats
        for batch in (1, 8)
    ]
    + [  # of the time for 8 layers and for 4, the difference is that of four layers, without the head
        {"config": name, "format": "nvfp4", "batch": batch, "context": context}
        for name in ("flash-4l256e", "flash-8l256e")
        for batch, context in ((1, LONG), (8, LONG), (32, LONG), (8, LONGER))
    ]
    + [
        {"config": "flash-4l256e", "format": fmt, "batch": 1, "context": 0, "new": PREFILL}
        for fmt in ("nvfp4", "nvfp4_experts", "released")
    ]
    + [  # to be compared with the same case without `early`
        {"config": "flash-4l256e", "format": "nvfp4", "batch": batch, "context": LONG, "early": 0} for batch in (1, 8)
    ]
    + [
        {"config": "flash-4l256e", "format": "nvfp4", "batch": batch, "context": context}
        for batch, context in ((1, LONGER), (1, LONGEST), (8, LONGEST))
    ]
    + [  # the indexer in torch; to be compared with the same case without `kernels`
        {"config": "flash-4l256e", "format": "nvfp4", "batch": batch, "context": context, "kernels": "choose=reference"}
        for context in (LONG, LONGER, LONGEST)
        for batch in (1, 8)
    ]
    + [
        {"config": "flash-4l256e", "format": fmt, "batch": batch, "context": LONG}
        for fmt in ("nvfp4", "released")
        for batch in (64, 128)
    ]
    + [
        {"config": "flash-4l256e", "format": "nvfp4", "batch": 1, "context": 0, "new": count}
        for count in (512, 4 * PREFILL)
    ]
    + [  # the whole model, which no single GPU holds
        {"config": "flash", "format": "nvfp4", "batch": batch, "context": LONG, "gpus": gpus}
        for gpus, batches in ((2, (1, 8, 32)), (4, (1, 8, 32, 64)))
        for batch in batches
    ]
    + [
        {"config": "flash", "format": fmt, "batch": 1, "context": context, "gpus": 4} | new
        for fmt, context, new in (("released", LONG, {}), ("nvfp4", 0, {"new": 4 * PREFILL}))
    ]
)


@dataclass
class Step:
    """One decode step of B sequences: tokens in, the next tokens and logits out."""

    model: Model
    state: State
    sequences: tuple[int, ...]
    tokens: torch.Tensor  # int64 (B,)
    bound: int
    logits: torch.Tensor | None = None

    def __call__(self) -> None:
        batch = self.state.step(self.sequences, self.tokens, static=True, bound=self.bound)
        self.logits = self.model.forward(batch, self.state).logits
        argmax(self.logits, self.tokens, Longer(self.state.length, batch.plan.sequence_ids, batch.advance))


@dataclass
class Pass:
    """One pass over new tokens of a sequence, which do not become part of it."""

    model: Model
    state: State
    tokens: dict[int, list[int]]
    logits: torch.Tensor | None = None

    def __call__(self) -> None:
        self.logits = self.model.forward(self.state.plan(self.tokens), self.state).logits


def prepare(case: dict, steps: int, device: str = "cuda") -> "Prefill | Decode":
    """Return what a case measures, ready for `steps` timed steps."""
    return Prefill(case, device) if case.get("new") else Decode(case, steps, device)


class Prefill:
    """A model and an empty sequence before its first tokens."""

    graph = False

    def __init__(self, case: dict, device: str = "cuda") -> None:
        self.held = _held(case["config"], case["format"], device, case.get("gpus", 1))
        self.made = self.held.weights
        count, config = case["new"], self.made.config
        blocks = -(-count // BLOCK_TOKENS)
        self.state = State(config, self.made.format, sequences=1, blocks=blocks, chunk=count, device=device)
        sequence, _ = self.state.open()
        drawn = torch.randint(config.vocab_size, (count,), generator=torch.Generator().manual_seed(7))
        self.tokens = {sequence: drawn.tolist()}
        least = traffic.Step(config, self.made.format, (0,), count)
        self.bytes, self.flops = least.bytes_moved(), least.flops()

    def choose(self) -> Chosen:
        """Return what fills each op: the winners of the problems."""
        return self.held.choose("winners")

    def step(self, chosen: Chosen, without: Collection[str] = (), named: bool = False) -> Pass:
        """Return the pass with what was chosen; the ops named in `without` hold the reference."""
        model = Model(self.made, _table(chosen, without, named), exchange=self.held.mine.exchange)
        return Pass(model, self.state, self.tokens)

    def reset(self) -> None:
        """Put back nothing: a pass leaves the sequence as it was. PeerLostError."""
        self.held.meet()

    def gpus(self, median_us: float) -> dict | None:
        """What a record says of the GPUs that share the model."""
        return self.held.gpus(median_us)


class Decode:
    """A model and its sequences before a decode step, with room for 4 times `steps` steps after each `reset`."""

    graph = True

    def __init__(self, case: dict, steps: int, device: str = "cuda") -> None:
        self.held = _held(case["config"], case["format"], device, case.get("gpus", 1))
        self.made = self.held.weights
        self.early = bool(case.get("early", True))
        self.kernels = f"winners,{case['kernels']}" if "kernels" in case else "winners"
        batch, context = case["batch"], case["context"]
        room = -(-(context + 8 * steps) // BLOCK_TOKENS)
        self.state = State(self.made.config, self.made.format, sequences=batch, blocks=batch * room, device=device)
        self.sequences = random_state.fill(self.state, [context] * batch, seed=7)
        self.bound = context + 4 * steps
        self.state.reserve(dict.fromkeys(self.sequences, 6 * steps))
        self.tokens = torch.randint(
            self.made.config.vocab_size, (batch,), generator=torch.Generator().manual_seed(7)
        ).to(self.state.length.device)
        self._before = self.state.buffer.clone(), self.tokens.clone()
        # Distinct experts of each layer in the first step, and with them its least memory traffic, in bytes.
        self.hits = self._hits()
        least = traffic.Step(self.made.config, self.made.format, (context,) * batch, 1, self.hits)
        self.bytes, self.flops = least.bytes_moved(), least.flops()

    def _hits(self) -> tuple[int, ...]:
        """How many experts of each layer the first step goes to, by the reference; of a shared model by the winners."""
        found: list[int] = []

        def route(**named: Any) -> None:
            ops.REFERENCE.route(**named)
            found.append(len(named["out_ids"].unique()))

        table = self.choose().ops if self.made.disposable else ops.REFERENCE
        model = Model(self.made, dataclasses.replace(table, route=route), exchange=self.held.mine.exchange)
        Step(model, self.state, self.sequences, self.tokens, self.bound)()
        self.reset()
        return tuple(found)

    def choose(self) -> Chosen:
        """What fills each op."""
        return self.held.choose(self.kernels)

    def step(self, chosen: Chosen, without: Collection[str] = (), named: bool = False) -> Step:
        """Return a step with what was chosen; the ops named in `without` hold the reference. named: each call of an op
        is a range of the profiler, "op NAME".
        """
        model = Model(self.made, _table(chosen, without, named), early=self.early, exchange=self.held.mine.exchange)
        return Step(model, self.state, self.sequences, self.tokens, self.bound)

    def reset(self) -> None:
        """Put state and tokens back to what they were before the first step. PeerLostError."""
        self.held.meet()
        self.state.buffer.copy_(self._before[0])
        self.tokens.copy_(self._before[1])

    def gpus(self, median_us: float) -> dict | None:
        """What a record says of the GPUs that share the model."""
        return self.held.gpus(median_us)


def _table(chosen: Chosen, without: Collection[str], named: bool) -> Ops:
    table = dataclasses.replace(
        chosen.ops, **{op: ops.apart if op in ops.FUSED else getattr(ops.REFERENCE, op) for op in without}
    )
    if not named:
        return table
    return Ops(**{op.name: _named(op.name, getattr(table, op.name)) for op in dataclasses.fields(Ops)})


def _named(name: str, op: Op) -> Op:
    """Return the op, each call of which is a range of the profiler."""

    def call(**given: Any) -> object:
        with torch.profiler.record_function(f"op {name}"):
            return op(**given)

    return call


@dataclass
class _Held:
    """Weights, or this process's part of them, of which the experts can be laid out once only."""

    weights: ModelWeights
    mine: launch.Mine
    once: dict[str, Chosen] = field(default_factory=dict)

    def choose(self, kernels: str) -> Chosen:
        """What fills each op. ValueError: other kernels than before, where that is not possible."""
        if kernels in self.once:
            return self.once[kernels]
        if self.once:
            raise ValueError(f"a model that GPUs share is laid out once, for {next(iter(self.once))}, got {kernels}")
        chosen = ops.choose(kernels, load.device_target(self.weights.embed.device), self.weights)
        if self.weights.disposable:
            self.once[kernels] = chosen
        self.meet()
        return chosen

    def meet(self) -> None:
        """Raise PeerLostError if a GPU did not come; wait for all of them."""
        if self.mine.exchange and self.weights.embed.is_cuda:
            torch.cuda.synchronize()
        self.mine.meet()

    def gpus(self, median_us: float) -> dict | None:
        """None where there is one. median_us: this one's."""
        count = self.mine.gpus
        if count == 1:
            return None
        medians: list[float | None] = [None] * count
        dist.all_gather_object(medians, median_us)
        peers = self.weights.embed.is_cuda and all(
            torch.cuda.can_device_access_peer(0, other) for other in range(1, count)
        )
        topology = f"{count} of one host, {'with' if peers else 'without'} access to each other's memory"
        return {"partition": f"cut: {', '.join(partition.CUTS)}", "topology": topology, "median_us": medians}


@functools.lru_cache(maxsize=1)  # of one model at a time: they fill the GPU
def _held(name: str, fmt: str, device: str, gpus: int) -> _Held:
    """ValueError: this is not one of `gpus` processes."""
    mine = _joined(device)
    if mine.gpus != gpus:
        raise ValueError(f"a case of {gpus} GPUs must run in as many processes, got {mine.gpus}")
    made = tree.quick(config.find(name), fmt, seed=1, device=mine.device, gpus=gpus, rank=mine.rank)
    return _Held(dataclasses.replace(made, disposable=gpus > 1), mine)


_joined = functools.cache(functools.partial(launch.joined, limit_s=PATIENT_S))
