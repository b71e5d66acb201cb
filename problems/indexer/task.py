"""indexer: DeepSeek-V4's lightning indexer: score paged MXFP4 or FP8 keys with 64 heads, keep the top k, exactly.

One key of 128 values an entry is shared by all index heads. Out come the places of the chosen entries in the pages, as
attention takes them. Scores are needed by nothing else.
"""

import random
from dataclasses import dataclass
from typing import NamedTuple

import torch
from allpairspy import AllPairs

from problems.common import fp8, index_pages, nvfp4

DIM = index_pages.DIM  # values of a key and of a query's head, 128
HEADS = (32, 64)  # index heads of a query, of the tiny and of the released models
RATIO = 4  # tokens that an entry stands for


class Data(NamedTuple):
    """One call's tensors: contiguous, on one device, each based at a multiple of 256 bytes.

    q        bf16 (B, S, H, 128), H 32 or 64; the values of a head are those of e4m3 times one power of two
    weights  fp32 (B, S, H), of either sign
    keys     uint8 (pages, stride): pages of P keys in mxfp4 or fp8, as problems/common/index_pages.py describes them;
             P and the format follow from the stride
    table    int32 (B, blocks): entry i of sequence b is the key at place table[b, i // P] * P + i % P
    visible  int32 (B, S), 0 to blocks * P: query (b, s) sees the entries 0 to visible[b, s] - 1 of its sequence
    out      int32 (B, S, k), the output: the places of the min(k, visible) entries of the highest scores, in any order,
             and -1 behind them; score_i = sum_h weights[h] * max(0, q[h] . key_i). Of equal scores the lower i wins; a
             score of -0 equals +0.

    Blocks that visible entries lie in are different pages of a row of the table, in no order; of two rows they may be
    the same. All else may be anything: entries of the table behind them, keys that no query sees, NaN codes there too.
    Of keys that are seen: no code is NaN; in mxfp4 a group's scale byte is at most 14 below the largest of the key's
    groups that are not zero, a group of zeros has any byte up to that one; an fp8 scale is positive. Magnitudes other
    than 0 are: of q 2^-30 to 2^20, of weights 2^-30 to 2^20, of key values 2^-40 to 2^40, so that fp32 has room for
    their products. k is 1 to 2048; it may be larger than blocks * P.
    """

    q: torch.Tensor
    weights: torch.Tensor
    keys: torch.Tensor
    table: torch.Tensor
    visible: torch.Tensor
    out: torch.Tensor


class Sizes(NamedTuple):
    batch: int  # B
    queries: int  # S, of each sequence
    heads: int  # H
    topk: int  # k
    blocks: int  # of a row of the table
    per_page: int  # P
    kind: str  # "mxfp4" or "fp8"


input_t = Data
output_t = torch.Tensor  # out itself
OUTPUTS = ("out",)  # allocated and poisoned by the judge
BATCH, INVARIANT = "batch", ("call",)
OPAQUE = ("keys", "table", "visible")
PRECISION = "e4m3"  # of queries and keys, which have no more bits

CONTENTS = ("plain", "magnitudes", "spread", "exact", "dense", "near", "sparse")
CONTENTS += ("ties", "zeros", "negative", "outlier", "rising", "falling")
LENGTHS = ("ragged", "none", "one", "neighbours")  # of what sequences see


def kinds(content: str) -> tuple[str, str]:
    """Return which of CONTENTS and of LENGTHS a case has, "" for none. ValueError: `content` names something else."""
    values, _, lengths = (f"plain-{content}" if content in LENGTHS else content).partition("-")
    if values not in CONTENTS or lengths not in ("", *LENGTHS):
        raise ValueError(f"content must be of {CONTENTS}, of {LENGTHS}, or of both, got {content!r}")
    return values, lengths


@dataclass(frozen=True)
class Case:
    batch: int  # sequences, B
    queries: int  # new tokens of each, S
    heads: int  # H
    entries: int  # that the last query sees
    topk: int  # k
    kind: str  # format of the keys, "mxfp4" or "fp8"
    per_page: int  # P
    content: str  # of CONTENTS, of LENGTHS, or "ties-ragged", say; reference.generate_input describes them
    seed: int

    def __post_init__(self) -> None:
        kinds(self.content)
        if self.kind not in index_pages.CODES or self.heads not in HEADS:
            raise ValueError(f"kind must be mxfp4 or fp8, heads of {HEADS}, got {self}")
        index_pages.form(index_pages.page_bytes(self.per_page, self.kind))

    def seen(self) -> list[int]:
        """Entries that each query of a sequence sees whose tokens fill its last entry: one more every RATIO tokens."""
        tokens = RATIO * self.entries
        return [max(0, (tokens - self.queries + s + 1) // RATIO) for s in range(self.queries)]

    def bytes_moved(self) -> int:
        """Least memory traffic: keys, queries, weights, table and lengths once, places once. Queries of a sequence
        share its keys; where every visible entry is chosen no key is read.
        """
        keys = self.entries if self.entries > self.topk else 0
        blocks = -(-self.entries // self.per_page)
        rows = self.batch * self.queries
        query = sum(n > self.topk for n in self.seen()) * self.batch * self.heads * (2 * DIM + 4)
        shared = self.batch * (keys * index_pages.page_bytes(1, self.kind) + 4 * blocks)
        return shared + query + rows * 4 * (1 + self.topk)

    def flops(self) -> int:
        """Of the products of queries and keys, of queries that see more than k entries."""
        return 2 * DIM * self.heads * self.batch * sum(n for n in self.seen() if n > self.topk)


def _cases(*rows: tuple, seed: int) -> list[Case]:
    """Rows (B, S, H, entries, k, format, P, content); each gets a separate seed."""
    return [Case(*row, seed=seed + i) for i, row in enumerate(rows)]


# Any two levels of two axes meet in a test. Entries around tiles of 16 to 128 and pages, around k, and prime; k of one,
# more than there are entries, odd, powers of two and the most.
AXES = (
    (1, 2, 3, 6, 8),  # B
    (1, 2, 3),  # S
    HEADS,
    (("mxfp4", 16), ("mxfp4", 32), ("mxfp4", 64), ("fp8", 16), ("fp8", 32), ("fp8", 64)),  # P
    ((40, 1), (24, 96), (131, 32), (257, 64), (520, 512), (611, 129)),  # entries and k
    CONTENTS,
    ("", *LENGTHS),
)


def tests(seed: int) -> list[Case]:
    """Return test cases. Another seed gives others."""
    rng = random.Random(seed)
    rows = AllPairs([rng.sample(levels, len(levels)) for levels in AXES])
    return _cases(
        *((b, s, h, *n, *p, f"{values}-{seen}".strip("-")) for b, s, h, p, n, values, seen in rows), seed=seed
    )


# Besides: larger ones, more queries, other pages, and more places than 16 bits name.
TESTS = _cases(
    (1, 1, 64, 40, 1, "mxfp4", 16, "plain"),
    (3, 1, 64, 777, 256, "mxfp4", 32, "magnitudes"),
    (2, 1, 64, 500, 64, "fp8", 32, "magnitudes"),
    (2, 1, 64, 900, 101, "mxfp4", 32, "spread"),
    (2, 1, 64, 608, 128, "mxfp4", 128, "rising"),
    (1, 75, 64, 18, 8, "mxfp4", 16, "exact"),
    (2, 64, 32, 33, 16, "mxfp4", 32, "plain"),
    (1, 1, 64, 1537, 1024, "fp8", 64, "plain"),
    (1, 1, 64, 4099, 1023, "mxfp4", 32, "near"),
    (1, 1, 64, 8192, 512, "mxfp4", 32, "plain"),
    (1, 1, 64, 2600, 2048, "mxfp4", 512, "zeros"),
    (1, 1, 32, 40000, 512, "mxfp4", 32, "rising"),
    (1, 1, 32, 70001, 300, "mxfp4", 32, "exact"),
    seed=1000,
)
TESTS += tests(2000)


def _decode(entries: int, batches: tuple[int, ...], k: int = 512, kind: str = "mxfp4", queries: int = 1) -> list[tuple]:
    return [(b, queries, 64, entries, k, kind, {"mxfp4": 32, "fp8": 64}[kind], "plain") for b in batches]


BENCHMARKS = _cases(
    *_decode(1024, (32,)),
    *_decode(8192, (1, 32, 128)),
    *_decode(32768, (1, 8, 32)),
    *_decode(262144, (1, 4)),
    *_decode(32768, (1,), k=1024),
    *_decode(32768, (8,), kind="fp8"),
    *_decode(32768, (8,), queries=2),
    *_decode(1024, (1,), queries=4096),  # prefill of 4096 tokens
    seed=1111,
)
BENCHMARKS_CPU = _cases(*_decode(8192, (1, 4)), *_decode(8192, (1,), kind="fp8"), seed=1111)

# A row is one query. It is exact if for all its heads and visible entries the values of q are whole multiples of some
# power of two and those of the key too, with sum_d |q_d key_d| <= 2^DOT_BITS times their product, so that tensor cores,
# which keep 13 bits behind the leading one of a step's largest term or sum, lose nothing; and if likewise
# sum_h |w_h| sum_d |q_hd key_d| <= 2^SUM_BITS times the least multiple among its heads, so that fp32 loses nothing in
# any order. Then the chosen entries must be those of the reference.
DOT_BITS = 12
SUM_BITS = 24
# Otherwise score_i may be off by RTOL |key_i| sqrt(sum_h w_h^2 |q_h|^2), and no chosen entry may be so much worse
# than one left out that this does not explain it. FP8 tensor cores cut each of the 33 terms of a step at 2^-13 of the
# power of two of the largest: of Gaussian values, whose sum reaches 8 times a term's root mean square, that is an error
# of 0.6 * sqrt(33) * 8 / 2^13 terms a step, twice that in four steps, or 2^-14.4 |q| |key|, and heads add up
# independently. DeepGEMM's scores on an H200 are off by 1.4e-4 of their norm, which is 2^-16.3 in this measure. A bound
# of 5 times the former. Cut towards zero, scores whose products have one sign all lose 6e-4 of themselves, with a
# standard deviation of 9e-5 in an emulation of rising and falling ones: only differences of two count.
RTOL = 2.0**-12
CUT = 2.0**-12  # of the score besides


def unpack(data: Data) -> Sizes:
    """Sizes of one call. ValueError, naming the tensor, where a dtype, shape, layout or device is not as `Data` says.

    The table and what is visible are not read: on a GPU that would wait for it.
    """
    if (data.q.dim(), data.table.dim(), data.out.dim(), data.keys.dim()) != (4, 2, 3, 2):
        raise ValueError(
            f"q must be (B, S, H, {DIM}), keys (pages, stride), table (B, blocks), out (B, S, k), got "
            f"{tuple(data.q.shape)}, {tuple(data.keys.shape)}, {tuple(data.table.shape)}, {tuple(data.out.shape)}"
        )
    b, s, h, _ = data.q.shape
    blocks, k = data.table.shape[1], data.out.shape[2]
    if min(b, s, blocks, k, len(data.keys)) < 1 or h not in HEADS:
        raise ValueError(
            f"q, keys, table and out must not be empty, and H one of {HEADS}, got B={b} S={s} H={h} k={k} "
            f"blocks={blocks} pages={len(data.keys)}"
        )
    wanted = (
        (torch.bfloat16, (b, s, h, DIM)),
        (torch.float32, (b, s, h)),
        (torch.uint8, tuple(data.keys.shape)),
        (torch.int32, (b, blocks)),
        (torch.int32, (b, s)),
        (torch.int32, (b, s, k)),
    )
    device = data.q.device
    for name, tensor, (dtype, shape) in zip(Data._fields, data, wanted, strict=True):
        if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous() or tensor.device != device:
            raise ValueError(
                f"{name} must be {dtype} {shape}, contiguous, on {device}, "
                f"got {tensor.dtype} {tuple(tensor.shape)} {tensor.stride()} on {tensor.device}"
            )
    try:
        per_page, kind = index_pages.form(data.keys.shape[1])
    except ValueError as error:
        raise ValueError(f"keys: {error}") from None
    return Sizes(b, s, h, k, blocks, per_page, kind)


def dequantise(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """codes: uint8 (..., 64 or 128), scales: uint8 (..., 4) -> fp32 (..., 128), rounded once for odd fp8 scales."""
    if codes.shape[-1] == DIM:
        return fp8.decode_e4m3(codes.view(torch.float8_e4m3fn)).mul_(scales.contiguous().view(torch.float32))
    return (
        nvfp4.decode(codes)
        .unflatten(-1, (-1, index_pages.GROUP))
        .mul_(fp8.decode_ue8m0(scales).unsqueeze(-1))
        .flatten(-2)
    )


def read_keys(pages: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """place: int64 (...) -> the keys there, fp32 (..., 128), as dequantise gives them; index_pages.read says what comes
    of places outside of the pages.
    """
    return dequantise(*index_pages.read(pages, place))
