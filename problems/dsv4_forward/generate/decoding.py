"""`decode`: tokens for several prompts, one of each in a pass; on a GPU a pass is recorded once, and then replayed.

Tokens stay on the device: a pass takes those that the pass before chose there. The host reads them while the next pass
is computed, so no pass waits for the host. It sees an end token one pass late; what that pass made of it is dropped.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from problems.dsv4_forward.cache.state import State
from problems.dsv4_forward.generate.sampler import Sampler
from problems.dsv4_forward.model import Model, feed

END, LENGTH, CONTEXT = "end token", "length", "context full"  # why a prompt gets no more tokens
NO_NUMBERS = -1  # in place of a token: its logits are no numbers
NOT_FINITE = "logits after {} must be finite, got NaN or infinities: weights and configuration overflow a pass"
PER_THREAD = 2  # cudaStreamPerThread: the default queue of our kernels; what is launched on another is not recorded
AHEAD = 4096  # tokens that a recording serves: what it reads grows with the longest sequence that it allows for


@dataclass(frozen=True)
class Limits:
    """most: tokens for a prompt; end: tokens after which there are no more, and which are not told."""

    most: int
    end: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Told:
    """A token for the prompt of this number, None for an end token; reason: why it is the last one, or "". at: when it
    was known, in seconds of time.perf_counter.
    """

    prompt: int
    token: int | None
    reason: str = ""
    at: float = field(default_factory=time.perf_counter, compare=False)


class Late:
    """Tokens, int64 (B,) of a device, on their way to the host; read() waits for them and for nothing after them.

    at: when they were known: on a CPU at once, on a GPU once they were read.
    """

    def __init__(self, tokens: torch.Tensor) -> None:
        self._tokens, self._event, self.at = tokens, None, time.perf_counter()
        if tokens.is_cuda:
            self._tokens = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            self._tokens.copy_(tokens, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> list[int]:
        if self._event:
            self._event.synchronize()
            self.at = time.perf_counter()
        return self._tokens.tolist()


class Steps:
    """Each call feeds the last tokens, one of each sequence, and draws the next ones.

    The tokens must be reserved. tokens: int64 (B,), the last ones, which on a GPU the next call overwrites. logits:
    fp32 (B, vocab) of the last call.
    """

    def __init__(
        self,
        model: Model,
        state: State,
        sequences: Sequence[int],
        tokens: torch.Tensor,
        who: torch.Tensor,
        sampler: Sampler,
        recorded: bool = True,
    ) -> None:
        """who: int64 (B,), the sequences' numbers for the sampler. recorded: if not, or on a CPU, each step is launched
        kernel by kernel.
        """
        self.model, self.state, self.sequences, self.sampler, self.who = model, state, sequences, sampler, who
        self.tokens, self.logits = tokens.clone(), torch.empty(0)
        self.recorded = recorded
        self._batch, self._graph = None, None

    def __call__(self) -> torch.Tensor:
        if not self.tokens.is_cuda:
            self._batch = self.state.step(self.sequences, self.tokens)
            self.tokens = self._launch()
        elif self._batch is None or self._longest() == self._batch.plan.bound:
            bound = min(self._longest() + AHEAD, self.state.capacity)
            self._batch = self.state.step(self.sequences, self.tokens, static=True, bound=bound)
            self._graph = None
            self.tokens.copy_(self._launch())  # what compiles or is loaded at a first call cannot be recorded
        elif self.recorded:
            self._graph = self._graph or self._record()
            self._graph.replay()
        else:
            self.tokens.copy_(self._launch())
        self.state.commit(self._batch)
        return self.tokens

    def _longest(self) -> int:
        return max(self.state.lengths[sequence] for sequence in self.sequences)

    def _launch(self) -> torch.Tensor:
        self.logits = self.model.forward(self._batch, self.state).logits
        return self.sampler.sample(self.logits, self.who, self._batch.lists.position + 1)

    def _record(self) -> torch.cuda.CUDAGraph:
        graph, queue = torch.cuda.CUDAGraph(), torch.cuda.ExternalStream(PER_THREAD)
        queue.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(queue):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self.tokens.copy_(self._launch())
            finally:
                graph.capture_end()
        return graph


def decode(
    model: Model, state: State, prompts: Sequence[Sequence[int]], limits: Limits, sampler: Sampler
) -> Iterator[Told]:
    """Yield the tokens of each prompt as they come, the first ones after all prompts were fed.

    A sequence of `state` is opened for each prompt, and closed in the end. A prompt's number is its identity for the
    sampler. ValueError: no prompts, or one that is empty, no token ids, or longer than the context; RuntimeError:
    sequences or blocks are too few. Nothing was computed then. ValueError too if a prompt's logits are not finite.
    """
    if limits.most < 1 or not prompts:
        raise ValueError(f"prompts and tokens must be one or more, got {len(prompts)} and {limits.most}")
    opened = []
    try:
        for _ in prompts:
            opened.append(state.open()[0])
        given = state.checked(dict(zip(opened, prompts, strict=True)))
        allowed = [min(limits.most, state.capacity + 1 - len(given[sequence])) for sequence in opened]
        # The last token of a prompt is returned and not fed.
        state.reserve({s: len(given[s]) + max(count - 1, 0) for s, count in zip(opened, allowed, strict=True)})
        yield from _passes(_Run(model, state, limits, sampler, opened, allowed), feed(model, state, given))
    finally:
        for sequence in opened:
            state.close(sequence)


@dataclass(frozen=True)
class _Run:
    """By prompt: sequences, and how many tokens it may get."""

    model: Model
    state: State
    limits: Limits
    sampler: Sampler
    sequences: list[int]
    allowed: list[int]

    def told(self, prompt: int, token: int, count: int, at: float) -> Told:
        """The count-th token of a prompt. ValueError: NO_NUMBERS."""
        if token == NO_NUMBERS:
            raise ValueError(NOT_FINITE.format(f"prompt {prompt + 1}"))
        if token in self.limits.end:
            return Told(prompt, None, END, at)
        full = LENGTH if count == self.limits.most else CONTEXT
        return Told(prompt, token, full if count == self.allowed[prompt] else "", at)


def _passes(run: _Run, logits: torch.Tensor) -> Iterator[Told]:
    """logits: fp32 (B, vocab) after each prompt."""
    put, live = run.state.planner.put, list(range(len(run.sequences)))
    numbers, lengths = put(live), put([run.state.lengths[sequence] for sequence in run.sequences])
    tokens = run.sampler.sample(logits, numbers, lengths)
    ended: set[int] = set()
    count = 1
    # The host sees by the first tokens whether the model computes numbers, so that nothing is read for it.
    sound = logits.isfinite().all(1)
    waiting: tuple[list[int], Late] | None = (live, Late(tokens.where(sound, NO_NUMBERS)))
    steps = None
    while waiting:
        before, late = waiting
        live = [prompt for prompt in before if prompt not in ended and count < run.allowed[prompt]]
        if live and (steps is None or live != before):
            kept = put([before.index(prompt) for prompt in live])
            tokens, numbers = tokens.index_select(0, kept), numbers.index_select(0, kept)
            steps = Steps(
                run.model, run.state, [run.sequences[prompt] for prompt in live], tokens, numbers, run.sampler
            )
        waiting = None
        if live:
            tokens = steps()
            waiting = live, Late(tokens)
        came = late.read()
        if run.model.exchange:
            run.model.exchange.see()
        for prompt, token in zip(before, came, strict=True):
            if prompt not in ended:
                told = run.told(prompt, token, count, late.at)
                ended |= {prompt} if told.reason else set()
                yield told
        count += 1
