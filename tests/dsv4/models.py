"""A small model for tests of weights, and what any model makes of one sequence by itself."""

import dataclasses

import torch

from problems.dsv4_forward import trace
from problems.dsv4_forward.cache.state import State
from problems.dsv4_forward.model import Model, feed
from problems.dsv4_forward.weights.config import CSA, HCA, SWA, TINY

# No two sizes alike, k not in whole FP8 blocks, with a prediction layer.
_SIZES = {"hidden_size": 320, "num_attention_heads": 6, "q_lora_rank": 160, "o_groups": 3, "n_routed_experts": 3}
_SIZES |= {"num_hash_layers": 1, "num_nextn_predict_layers": 1, "vocab_size": 66, "index_n_heads": 8}
SMALL = dataclasses.replace(TINY, name="small", compress_ratios=(SWA, HCA, CSA, SWA), **_SIZES)


def opened(model: Model, blocks: int = 8) -> tuple[State, int]:
    state = State(model.config, model.weights.format, 1, blocks, device=str(model.weights.embed.device))
    return state, state.open()[0]


def decoded(model: Model, tokens: list[int], count: int) -> list[torch.Tensor]:
    """Logits (V,) of greedy decoding, a token in a call: so many, or as many as the context has room for."""
    (state, sequence), found = opened(model), []
    while len(found) < count and state.lengths[sequence] < state.capacity:
        found.append(feed(model, state, {sequence: [int(found[-1].argmax())] if found else tokens})[0])
    return found


def greedy(model: Model, tokens: list[int], count: int) -> list[int]:
    return [int(row.argmax()) for row in decoded(model, tokens, count)]


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the bits are equal: FP8 has no comparisons of its own."""
    return torch.equal(*(tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other)))


class Seen:
    """A probe that keeps the copies of the residual that it sees."""

    def __init__(self) -> None:
        self.copies: list[torch.Tensor] = []

    def enter(self, layer: str, residual: object) -> None:
        self.copies.append(trace.written(residual))
