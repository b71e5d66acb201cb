"""Count the least memory traffic and arithmetic of one call of the model, from its configuration.

Whatever a call needs is read once: every linear in its format, the experts that uniform routing hits in expectation,
the head, the tokens' rows of the tables, the caches that attention cannot do without. New entries are written once.
Activations, and what the call itself made, stay on the chip. Prediction layers take no part.
"""

import math
from dataclasses import dataclass

import torch

from problems.common import kv_pages
from problems.dsv4_forward.cache.batch import WINDOW
from problems.dsv4_forward.cache.pages import Pages
from problems.dsv4_forward.weights import layout
from problems.dsv4_forward.weights.config import CSA, HCA, PLAIN, SWA, Config
from problems.dsv4_forward.weights.layout import LinearSpec, Spec


@dataclass(frozen=True)
class Step:
    """lengths: tokens that each sequence has before the call; new: tokens that each gets in it. hits: the experts of
    each layer that some token goes to, where they were counted; None: as many as uniform routing is expected to hit.
    """

    config: Config
    format: str
    lengths: tuple[int, ...]
    new: int
    hits: tuple[int, ...] | None = None

    @property
    def tokens(self) -> int:
        """All new tokens."""
        return len(self.lengths) * self.new

    @property
    def hit_share(self) -> float:
        """Experts of a layer that some token goes to, as a share of all: expected where each token draws K of E."""
        return 1 - (1 - self.config.num_experts_per_tok / self.config.n_routed_experts) ** self.tokens

    def bytes_moved(self) -> int:
        """Least memory traffic, in bytes."""
        caches = sum(self._cache_bytes(ratio, length) for ratio in self.config.ratios for length in self.lengths)
        outputs = len(self.lengths) * (4 * self.config.vocab_size + 8)
        return math.ceil(self._weight_bytes() + caches + 8 * self.tokens + outputs)

    def flops(self) -> int:
        """Multiplications and additions of all products with weights and of attention's and the indexer's scores."""
        products = sum(
            2 * self._rows(name) * _matrix(name, unit)
            for name, unit in layout.units(self.config, self.format).items()
            if not name.startswith("mtp.")
        )
        scores = sum(
            _attention_flops(self.config, ratio, length + i)
            for ratio in self.config.ratios
            for length in self.lengths
            for i in range(1, self.new + 1)
        )
        return round(products + scores)

    def _weight_bytes(self) -> float:
        return sum(
            self._read_share(name, spec) * spec.nbytes
            for name, spec in layout.layout(self.config, self.format).items()
            if not name.startswith("mtp.")
        )

    def _read_share(self, name: str, spec: Spec) -> float:
        """How much of a tensor of the weights a call reads."""
        if name == "embed.weight" or name.endswith("tid2eid"):
            return min(self.tokens / spec.shape[0], 1.0)
        if ".ffn.experts." not in name:
            return 1.0
        if self.hits is None:
            return self.hit_share
        return self.hits[int(name.split(".")[1])] / self.config.n_routed_experts

    def _rows(self, name: str) -> float:
        """Vectors that the matrix `name` multiplies; each of a layer's experts gets its share."""
        if name in ("head.weight", "hc_head_fn"):
            return len(self.lengths)
        if ".ffn.experts." in name:
            return self.tokens * self.config.num_experts_per_tok / self.config.n_routed_experts
        return self.tokens

    def _cache_bytes(self, ratio: int, length: int) -> int:
        """Of one layer and sequence: entries of the window and compressed ones, indexer keys, rows that wait."""
        cfg, entry = self.config, _entry_bytes(self.config, self.format)
        window = (min(length, WINDOW - 1) + self.new) * entry
        if ratio == SWA:
            return window
        old, visible = length // ratio, (length + self.new) // ratio
        if ratio == HCA:
            return window + visible * entry + self._tail_bytes(ratio, cfg.head_dim, length)
        scored = old if visible > cfg.index_topk else 0  # with fewer every entry is selected
        keys = (scored + visible - old) * _key_bytes(cfg, self.format)
        entries = (min(old, cfg.index_topk) + visible - old) * entry  # queries may all select the same ones
        return window + keys + entries + self._tail_bytes(ratio, cfg.head_dim + cfg.index_head_dim, length)

    def _tail_bytes(self, ratio: int, width: int, length: int) -> int:
        """fp32 rows of content and gate: every new one is written, old ones are read by the entries that pool them."""
        halves = 2 if ratio == CSA else 1  # of a row; an entry pools one of each token of a window
        read = 0
        for entry in range(length // ratio, (length + self.new) // ratio):
            first = max(0, (entry + 1 - halves) * ratio)
            read += max(0, length - first)
        return (self.new * halves + read) * width * 2 * 4


def _matrix(name: str, unit: Spec | LinearSpec) -> int:
    """Values of a matrix that multiplies activations, all its groups or experts; 0 of another tensor."""
    if isinstance(unit, LinearSpec):
        return math.prod(unit.lead) * unit.n * unit.k
    multiplies = name.endswith(("head.weight", "project", "weights_proj.weight", "gate.weight", "_fn"))
    return math.prod(unit.shape) if multiplies else 0


def _attention_flops(cfg: Config, ratio: int, seen: int) -> int:
    """Count one query in one layer: scores, sums, and the indexer's scores. seen: tokens, the query's among them."""
    visible = seen // ratio if ratio else 0
    attended = min(seen, WINDOW) + (min(visible, cfg.index_topk) if ratio == CSA else visible)
    scored = visible if ratio == CSA and visible > cfg.index_topk else 0
    index = 2 * cfg.index_n_heads * cfg.index_head_dim * scored
    return 4 * cfg.num_attention_heads * cfg.head_dim * attended + index


def _entry_bytes(cfg: Config, fmt: str) -> int:
    """One entry of a window or cache, without padding."""
    if fmt in PLAIN:
        return cfg.head_dim * _plain(fmt)
    nope = cfg.head_dim - cfg.qk_rope_head_dim
    return kv_pages.payload_bytes(nope, cfg.qk_rope_head_dim) + kv_pages.SCALE_BYTES


def _key_bytes(cfg: Config, fmt: str) -> int:
    """One key of the indexer."""
    if fmt in PLAIN:
        return cfg.index_head_dim * _plain(fmt)
    return Pages.shape("index", 1, 1, cfg.index_head_dim)[0][1]


def _plain(fmt: str) -> int:
    return (torch.float32 if fmt == "fp32" else torch.bfloat16).itemsize
