"""`StateLayout`: which tensors a state is made of, their shapes, and where each lies in one buffer of bytes.

Everything of one kind is one tensor with an axis for the layers, so that a block or a window of all layers is copied
by one operation; a layer's part is contiguous. S sequences, L layers (a prediction layer last), of these C with ratio 4
and H with ratio 128:

    length, active  int64 (S,)               tokens so far; 1 if the sequence is open
    table           int32 (S, blocks a sequence)
    window          (L, pages)               pages of 64 tokens, ring / 64 of them a sequence
    csa_tail        fp32 (C, S, T, 2, 2 D)   T = chunk + 8; row t % T of a sequence: kv and gate + ape of token t
    index_tail      fp32 (C, S, T, 2, 2 * 128)
    hca_tail        fp32 (H, S, chunk + 128, 2, D)
    csa_cache, index_keys, hca_cache         (C or H, blocks + 1 pages) of 32, 32, 1 entries; the last is never read
    saved_*         two pages of window and 4 rows of tails in each snapshot
"""

from dataclasses import dataclass
from math import prod

import torch

from problems.dsv4_forward.cache.batch import WINDOW
from problems.dsv4_forward.cache.pages import Pages
from problems.dsv4_forward.weights.config import BLOCK_TOKENS, CSA, HCA, Config, check_format

ALIGN = 256  # bytes; each tensor begins at a multiple
PAGE_TOKENS = 64  # tokens in a page of a window
WINDOW_PAGES = WINDOW // PAGE_TOKENS
CSA_ROWS, HCA_ROWS = 2 * CSA, HCA  # tokens that an entry pools
SAVED_ROWS = CSA  # of these, that a snapshot at the end of a block must hold
CACHES = {"csa_cache": CSA, "index_keys": CSA, "hca_cache": HCA}
Region = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class LayerState:
    """One layer's views. ratio: of its compressed entries, 0 for none; what such a layer lacks is None.

    window: pages of 64 tokens, token p of sequence s at s * ring + p % ring; tail, index_tail: fp32 (S, T, 2, width);
    cache: pages of one block's entries; index_keys: of as many indexer keys.
    """

    ratio: int
    window: Pages
    tail: torch.Tensor | None
    cache: Pages | None
    index_tail: torch.Tensor | None
    index_keys: Pages | None


@dataclass(frozen=True)
class StateLayout:
    """The sizes that everything follows from. chunk is in tokens; sequences, blocks and snapshots are counts."""

    config: Config
    format: str
    sequences: int
    blocks: int
    chunk: int
    snapshots: int

    def __post_init__(self) -> None:
        """ValueError, naming the argument."""
        check_format(self.format)
        if self.config.sliding_window != WINDOW:
            raise ValueError(f"sliding_window must be {WINDOW} tokens, got {self.config.sliding_window}")
        least = {"sequences": 1, "blocks": 1, "chunk": 1, "snapshots": 0}
        for name, value in zip(least, (self.sequences, self.blocks, self.chunk, self.snapshots), strict=True):
            if not isinstance(value, int) or value < least[name]:
                raise ValueError(f"{name} must be {least[name]} or more, got {value!r}")

    @property
    def ring(self) -> int:
        """Tokens in a window: the query's window, and the chunk that is written before its first token attends."""
        return -(-(WINDOW + self.chunk) // PAGE_TOKENS) * PAGE_TOKENS

    @property
    def width(self) -> int:
        """Blocks that one sequence may have."""
        return min(-(-self.config.max_position_embeddings // BLOCK_TOKENS), self.blocks)

    @property
    def capacity(self) -> int:
        """Tokens that one sequence may have."""
        return min(self.config.max_position_embeddings, self.width * BLOCK_TOKENS)

    @property
    def tail_rows(self) -> dict[int, int]:
        """Tokens in a tail, by ratio: what an entry pools, and a chunk."""
        return {CSA: self.chunk + CSA_ROWS, HCA: self.chunk + HCA_ROWS}

    @property
    def kind(self) -> str:
        """Kind of the pages of windows and caches."""
        return "plain" if self.format in ("fp32", "bf16") else "entry"

    @property
    def key_kind(self) -> str:
        return "plain" if self.format in ("fp32", "bf16") else "index"

    def regions(self) -> dict[str, Region]:
        """Shape and dtype by name, in the order in which they lie."""
        cfg, sequences, rows = self.config, self.sequences, self.tail_rows
        ratios = cfg.compress_ratios
        layers, csa, hca = len(ratios), ratios.count(CSA), ratios.count(HCA)
        found: dict[str, Region] = {
            "length": ((sequences,), torch.int64),
            "active": ((sequences,), torch.int64),
            "table": ((sequences, self.width), torch.int32),
            "window": self._pages(layers, sequences * self.ring // PAGE_TOKENS, PAGE_TOKENS),
        }
        if csa:
            wide, narrow, per_page = 2 * cfg.head_dim, 2 * cfg.index_head_dim, BLOCK_TOKENS // CSA
            found["csa_tail"] = (csa, sequences, rows[CSA], 2, wide), torch.float32
            found["index_tail"] = (csa, sequences, rows[CSA], 2, narrow), torch.float32
            found["csa_cache"] = self._pages(csa, self.blocks + 1, per_page)
            found["index_keys"] = self._pages(csa, self.blocks + 1, per_page, keys=True)
        if hca:
            found["hca_tail"] = (hca, sequences, rows[HCA], 2, cfg.head_dim), torch.float32
            found["hca_cache"] = self._pages(hca, self.blocks + 1, BLOCK_TOKENS // HCA)
        if self.snapshots:
            found["saved_window"] = self._pages(layers, self.snapshots * WINDOW_PAGES, PAGE_TOKENS)
            for name in ("csa_tail", "index_tail") if csa else ():
                found[f"saved_{name}"] = (csa, self.snapshots, SAVED_ROWS, *found[name][0][3:]), torch.float32
        return found

    def nbytes(self) -> int:
        """Bytes of all regions, each aligned."""
        return sum(_aligned(shape, dtype) for shape, dtype in self.regions().values())

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """The regions of a uint8 buffer of nbytes(). ValueError if it is another."""
        want = self.nbytes()
        if buffer.dtype != torch.uint8 or buffer.shape != (want,) or not buffer.is_contiguous():
            raise ValueError(f"buffer must be contiguous uint8 ({want},), got {buffer.dtype} {tuple(buffer.shape)}")
        found, start = {}, 0
        for name, (shape, dtype) in self.regions().items():
            found[name] = buffer[start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape)
            start += _aligned(shape, dtype)
        return found

    def layers(self, regions: dict[str, torch.Tensor]) -> tuple[LayerState, ...]:
        """By layer, a prediction layer last."""
        ratios = self.config.compress_ratios
        return tuple(
            self._layer(regions, number, ratio, ratios[:number].count(ratio)) for number, ratio in enumerate(ratios)
        )

    def _layer(self, regions: dict[str, torch.Tensor], number: int, ratio: int, nth: int) -> LayerState:
        """nth: how many layers before it have its ratio."""
        cfg = self.config

        def pages(name: str, index: int, per_page: int) -> Pages:
            kind, width = (self.key_kind, cfg.index_head_dim) if name == "index_keys" else (self.kind, cfg.head_dim)
            return Pages(regions[name][index], per_page, kind, width, cfg.qk_rope_head_dim)

        window = pages("window", number, PAGE_TOKENS)
        if not ratio:
            return LayerState(ratio, window, None, None, None, None)
        per_page = BLOCK_TOKENS // ratio
        if ratio == HCA:
            return LayerState(ratio, window, regions["hca_tail"][nth], pages("hca_cache", nth, per_page), None, None)
        return LayerState(
            ratio,
            window,
            regions["csa_tail"][nth],
            pages("csa_cache", nth, per_page),
            regions["index_tail"][nth],
            pages("index_keys", nth, per_page),
        )

    def _pages(self, layers: int, pages: int, per_page: int, keys: bool = False) -> Region:
        cfg = self.config
        kind, width = (self.key_kind, cfg.index_head_dim) if keys else (self.kind, cfg.head_dim)
        dtype = torch.float32 if self.format == "fp32" else torch.bfloat16  # of plain pages
        shape, dtype = Pages.shape(kind, pages, per_page, width, cfg.qk_rope_head_dim, dtype)
        return (layers, *shape), dtype


def _aligned(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return -(-prod(shape) * dtype.itemsize // ALIGN) * ALIGN
