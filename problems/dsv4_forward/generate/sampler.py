"""`Sampler`: choose tokens from logits, greedily or by a draw at a temperature among the top k or top p.

A draw is an exponential race: the token with the largest probability / Exp(1) wins, which happens with its probability.
The noise of a token comes from a counter-based generator (Philox 4x32-10, Salmon et al., SC 2011) and depends on the
seed, the sequence, the position and the token only: a batch's other sequences, the device and the chunking of a
prompt do not change what is drawn. Source: section 14 of README.md's account of DeepSeek's generate.py, which has
neither top k nor top p.
"""

from dataclasses import dataclass

import torch

from problems.dsv4_forward.kernels.argmax import argmax

LEAST_TEMPERATURE = 1e-5  # of a draw, as in generate.py; exactly 0 is greedy
_WORD = 0xFFFFFFFF
_ROUNDS = 10
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85


@dataclass(frozen=True)
class Sampler:
    """temperature 0: the largest logit. top_k 0 and top_p 1: no such limit. top_k acts first, top_p on what is left."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        """ValueError, naming the field, where one is out of its range."""
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be 0 or a positive number, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (no limit) or more, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed must be in 0 .. 2^64 - 1, got {self.seed}")

    def sample(self, logits: torch.Tensor, sequence: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """-> tokens int64 (B,). logits: fp32 (B, V). sequence: int64 (B,), an identity of the request, equal between
        runs that should agree. position: int64 (B,), of the token that is drawn, below 2^32. ValueError: a shape is not
        that.
        """
        rows = logits.shape[:1]
        if logits.dim() != 2 or sequence.shape != rows or position.shape != rows:
            shapes = [tuple(x.shape) for x in (logits, sequence, position)]
            raise ValueError(f"logits, sequence, position must have shapes (B, V), (B,), (B,), got {shapes}")
        if self.temperature == 0:
            tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
            argmax(logits, tokens)
            return tokens
        scaled = self.limit(logits.double() / max(self.temperature, LEAST_TEMPERATURE))
        noise = uniforms(self.seed, sequence, position, logits.shape[1])
        # log(p / exponential) but for the same constant in a row; the uniform is below 1, so no logarithm is infinite.
        return (scaled - (-torch.log1p(-noise)).log()).argmax(1)

    def limit(self, scaled: torch.Tensor) -> torch.Tensor:
        """scaled: logits / temperature, float (B, V). -> the same, with -inf for what may not be drawn: all but the k
        largest, then all but the fewest whose probabilities reach top_p. Of equal logits the lower token comes first.
        """
        size = scaled.shape[1]
        if self.top_p == 1 and not 0 < self.top_k < size:
            return scaled
        ordered, tokens = scaled.sort(dim=1, descending=True, stable=True)
        if 0 < self.top_k < size:
            ordered[:, self.top_k :] = -torch.inf
        if self.top_p < 1:
            probability = ordered.softmax(1)
            before = probability.cumsum(1) - probability  # the token with which the sum reaches top_p stays
            ordered.masked_fill_(before >= self.top_p, -torch.inf)
        return torch.empty_like(scaled).scatter_(1, tokens, ordered)


def uniforms(seed: int, sequence: torch.Tensor, position: torch.Tensor, count: int) -> torch.Tensor:
    """fp64 (B, count), strictly between 0 and 1, 32 random bits each. sequence, position: int64 (B,)."""
    group = torch.arange(-(-count // 4), device=sequence.device).unsqueeze(0)
    low, high = (sequence & _WORD).unsqueeze(1), (sequence >> 32 & _WORD).unsqueeze(1)
    words = philox((group, (position & _WORD).unsqueeze(1), low, high), (seed & _WORD, seed >> 32))
    return (torch.stack(words, -1).flatten(1)[:, :count].double() + 0.5) * 2.0**-32


def philox(counter: tuple[torch.Tensor, ...], key: tuple[int, int]) -> tuple[torch.Tensor, ...]:
    """Philox 4x32-10: four int64 tensors that hold 32-bit words and broadcast together -> four of random words."""
    a, b, c, d = counter
    for _ in range(_ROUNDS):
        # 64-bit products wrap into the sign; shifting and masking takes the words out unharmed.
        first, second = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, b = (second >> 32 & _WORD) ^ b ^ key[0], second & _WORD
        c, d = (first >> 32 & _WORD) ^ d ^ key[1], first & _WORD
        key = (key[0] + _KEY_STEPS[0] & _WORD, key[1] + _KEY_STEPS[1] & _WORD)
    return torch.broadcast_tensors(a, b, c, d)
