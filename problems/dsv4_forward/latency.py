"""Decode steps whose latency `harness/run.py dsv4_forward --mode latency` measures: CASES, and a Decode for each.

A step can be recorded in a CUDA graph: it does not wait for the device, and it reads and writes the same memory each
time. harness/tools/latency.py records, replays and times it. Weights and caches are random and made at memory speed,
without a prefill; the experts that a step goes to are counted.
"""

import dataclasses
import functools
from collections.abc import Collection
from dataclasses import dataclass

import torch

from problems.common import load
from problems.dsv4_forward import ops, traffic
from problems.dsv4_forward.cache import random_state
from problems.dsv4_forward.cache.state import State
from problems.dsv4_forward.model import Model
from problems.dsv4_forward.ops import Chosen
from problems.dsv4_forward.weights import config, tree
from problems.dsv4_forward.weights.config import BLOCK_TOKENS
from problems.dsv4_forward.weights.tree import ModelWeights

CONTEXT = 512  # tokens of each sequence before the timed steps
CASES = [
    {"config": name, "format": fmt, "batch": batch, "context": CONTEXT}
    for name in ("tiny-k", "flash-4l32e") for fmt in ("bf16", "nvfp4") for batch in (1, 8)
]  # fmt: skip


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
        self.tokens.copy_(self.logits.argmax(-1))
        self.state.length.index_add_(0, batch.sequence_ids, batch.advance)


class Decode:
    """A model and its sequences before a decode step, with room for 4 times `steps` steps after each `reset`."""

    def __init__(self, case: dict, steps: int, device: str = "cuda") -> None:
        self.made = _weights(case["config"], case["format"], device)
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
        self.bytes = traffic.Step(self.made.config, self.made.format, (context,) * batch, 1, self.hits).bytes_moved()

    def _hits(self) -> tuple[int, ...]:
        """How many experts of each layer the first step goes to, by the reference."""
        found: list[int] = []

        def route(*args: object) -> None:
            ops.REFERENCE.route(*args)
            found.append(len(args[6].unique()))

        step = Step(
            Model(self.made, dataclasses.replace(ops.REFERENCE, route=route)), self.state, self.sequences, self.tokens,
            self.bound,
        )  # fmt: skip
        step()
        self.reset()
        return tuple(found)

    def choose(self) -> Chosen:
        """What fills each op: the winners of the problems, built as build.capturable() says now."""
        return ops.choose("winners", load.device_target(self.tokens.device), self.made)

    def step(self, chosen: Chosen, without: Collection[str] = ()) -> Step:
        """A step with what was chosen; the ops named in `without` hold the reference."""
        plain = {op: getattr(ops.REFERENCE, op) for op in without}
        model = Model(self.made, dataclasses.replace(chosen.ops, **plain))
        return Step(model, self.state, self.sequences, self.tokens, self.bound)

    def reset(self) -> None:
        """Put state and tokens back to what they were before the first step."""
        self.state.buffer.copy_(self._before[0])
        self.tokens.copy_(self._before[1])


@functools.lru_cache(maxsize=1)  # of one model at a time: they fill the GPU
def _weights(name: str, fmt: str, device: str) -> ModelWeights:
    return tree.quick(config.find(name), fmt, seed=1, device=device)
