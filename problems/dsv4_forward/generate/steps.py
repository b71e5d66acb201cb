"""`Steps`: the next tokens of some sequences, step by step; on a GPU a step is recorded once and then replayed."""

from collections.abc import Sequence

import torch

from problems.dsv4_forward.cache.state import State
from problems.dsv4_forward.generate.sampler import Sampler
from problems.dsv4_forward.model import Model

PER_THREAD = 2  # cudaStreamPerThread: the default queue of our kernels; what is launched on another is not recorded
AHEAD = 4096  # tokens that a recording serves: what it reads grows with the longest sequence that it allows for


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
