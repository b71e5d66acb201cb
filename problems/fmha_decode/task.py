"""fmha_decode: DeepSeek-V4 attention of one or a few new tokens to two paged FP8 caches of 584-byte entries.

Every head of a query attends to the same entries, 512 values that are key and value at once. A sink a head joins the
denominator. Out come the attention's result and the logarithm of its denominator without the sink.
"""

import random
from dataclasses import dataclass
from typing import NamedTuple

import torch
from allpairspy import AllPairs

HEAD_DIM = 512  # values of an entry, of a query and of an output: NOPE and then ROPE of them
NOPE = 448  # e4m3, a scale for each 64 of them
ROPE = 64  # bf16
SCALE = HEAD_DIM**-0.5  # of scores
ENTRY = 584  # bytes: NOPE codes, 2 * ROPE, 7 scales and a byte that means nothing
PAYLOAD = NOPE + 2 * ROPE  # bytes of an entry without its scales, 576


class Data(NamedTuple):
    """One call's tensors: contiguous, on one device, each based at a multiple of 256 bytes.

    q                  bf16 (B, S, H, 512)
    window             uint8 (pages, stride), see below
    window_index       int32 (B, S, nw), nw >= 1: page * P + slot of an entry, or -1: skip; -1 may stand anywhere
    window_length      int32 (B,): entries of the lists of sequence b that count, 0 to nw; what follows is any int32
    compressed         uint8 (pages, stride), a separate P and stride
    compressed_index   int32 (B, S, nc), nc >= 0
    compressed_length  int32 (B,), 0 to nc
    sink               fp32 (H,), -inf for none
    out                bf16 (B, S, H, 512), the output: sum_j p_j c_j over all entries c_j that the two lists name,
                       p_j = exp(a_j) / (sum_i exp(a_i) + exp(sink)), a_j = SCALE * q . c_j
    lse                fp32 (B, S, H), the output log(sum_j exp(a_j)), natural, without the sink
    An entry that is named twice counts twice. Without a single entry out is 0 and lse +inf.

    A page holds P entries, P a power of two that follows from the stride (page_entries): P payloads of 576 bytes, which
    are dims 0 to 447 in e4m3 and dims 448 to 511 in bf16; then from 576 * P on P times 8 scale bytes, the first 7 of
    which are ue8m0, one for each 64 e4m3; then padding up to a multiple of 576. problems/common/kv_pages.py reads and
    writes it. A value is e4m3 * 2^(byte - 127). Of entries that a list names, within its length, scale bytes lie in 3
    to 134, so that values are at most 57344 (what a writer's scale rule gives begins at 105, and values below 2^-126
    may be taken as 0); no e4m3 code is NaN (0x7F, 0xFF), no bf16 is infinite or NaN. All other bytes of the pages may
    be anything: entries that no list names, padding, the eighth scale byte.
    """

    q: torch.Tensor
    window: torch.Tensor
    window_index: torch.Tensor
    window_length: torch.Tensor
    compressed: torch.Tensor
    compressed_index: torch.Tensor
    compressed_length: torch.Tensor
    sink: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


class Sizes(NamedTuple):
    batch: int  # B
    queries: int  # S, of each sequence
    heads: int  # H
    window: int  # nw
    compressed: int  # nc
    page_window: int  # P of the window's pages
    page_compressed: int


input_t = Data
output_t = tuple[torch.Tensor, torch.Tensor]  # out and lse themselves
OUTPUTS = ("out", "lse")  # allocated and poisoned by the judge
BATCH, INVARIANT = "batch", ("call",)
OPAQUE = (
    "window",
    "window_index",
    "window_length",
    "compressed",
    "compressed_index",
    "compressed_length",
)
PRECISION = "bf16"  # of probabilities and dequantised entries

CONTENTS = ("plain", "maxima", "magnitudes", "cancelling", "sinks", "drowned", "duplicates")
ORDERS = ("random", "sequential")
LENGTHS = ("ragged", "empty", "none", "neighbours", "first")  # of lists


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
    window: int  # length of the window's lists, nw
    compressed: int  # length of the compressed lists, nc
    page_window: int  # entries of a page
    page_compressed: int
    pool: int  # compressed entries of each sequence, in pages shuffled over all sequences
    order: str  # of the lists: "random", distinct entries in no order, or "sequential", 0 to nc - 1 and the ring's
    content: str  # of CONTENTS, of LENGTHS, or "sinks-ragged", say; reference.generate_input describes them
    seed: int

    def __post_init__(self) -> None:
        kinds(self.content)
        if self.order not in ORDERS:
            raise ValueError(f"order must be random or sequential, got {self}")
        if self.window < 1 or not 0 <= self.compressed <= self.pool:
            raise ValueError(f"window must be 1 or more and compressed at most the pool, got {self}")

    def bytes_moved(self) -> int:
        """Least memory traffic: entries, queries, lists, lengths and sinks once, outputs once. Queries of a sequence
        share entries: the window moves on by one, of random compressed lists the union is counted as expected.
        """
        union = self.compressed
        if self.order == "random" and self.pool:
            union = round(self.pool * (1 - (1 - self.compressed / self.pool) ** self.queries))
        entries = self.batch * (self.window + self.queries - 1 + union)
        rows = self.batch * self.queries
        lists = 4 * rows * (self.window + self.compressed) + 8 * self.batch + 4 * self.heads
        return ENTRY * entries + lists + rows * self.heads * (4 * HEAD_DIM + 4)

    def flops(self) -> int:
        """Of both products, for lists without holes."""
        return 4 * self.batch * self.queries * self.heads * (self.window + self.compressed) * HEAD_DIM


def _cases(*rows: tuple, seed: int) -> list[Case]:
    """Rows (B, S, H, nw, nc, P of window, P of compressed, pool, order, content); each gets a separate seed."""
    return [Case(*row, seed=seed + i) for i, row in enumerate(rows)]


# Any two levels of two axes meet in a test. Lists around tiles of 64; every page size of the benchmarks and those that
# dsv4_forward's blocks of 128 tokens give (128 with 32 and with 1).
AXES = (
    (1, 2, 3, 8),  # B
    (1, 2, 3),  # S
    (1, 4, 16, 20, 64, 128),  # H
    (1, 33, 64, 65),  # nw
    ((0, 4), (1, 4), (33, 80), (64, 64), (65, 66)),  # nc and pool
    ((64, 64), (64, 2), (128, 32), (128, 1), (2, 32), (1, 128)),  # P
    ORDERS,
    CONTENTS,
    ("", *LENGTHS),
)


def tests(seed: int) -> list[Case]:
    """Return test cases. Another seed gives others."""
    rng = random.Random(seed)
    rows = AllPairs([rng.sample(levels, len(levels)) for levels in AXES])
    return _cases(
        *(
            (b, s, h, window, n[0], *p, n[1], order, f"{values}-{lengths}".strip("-"))
            for b, s, h, window, n, p, order, values, lengths in rows
        ),
        seed=seed,
    )


# Besides: longer lists.
TESTS = _cases(
    (3, 1, 20, 64, 0, 32, 64, 4, "random", "plain"),
    (3, 4, 8, 128, 70, 128, 32, 100, "random", "empty"),
    (1, 3, 64, 128, 129, 64, 64, 160, "random", "maxima"),
    (1, 1, 16, 64, 511, 64, 64, 511, "sequential", "maxima"),
    (3, 2, 64, 128, 512, 64, 64, 600, "random", "ragged"),
    (1, 1, 64, 128, 512, 64, 64, 1024, "random", "plain"),
    (3, 1, 128, 128, 1024, 64, 64, 1088, "random", "ragged"),
    (1, 1, 128, 128, 1024, 128, 32, 1024, "random", "sinks"),
    (1, 1, 128, 128, 128, 64, 64, 128, "random", "cancelling"),
    (1, 1, 64, 128, 8192, 64, 2, 8192, "sequential", "plain"),
    (3, 1, 16, 128, 512, 64, 64, 600, "random", "ragged"),
    seed=1000,
)
TESTS += tests(2000)


def _csa(heads: int, compressed: int, batches: tuple[int, ...], queries: int = 1) -> list[tuple]:
    """Chosen entries out of 4096 a sequence."""
    return [(b, queries, heads, 128, compressed, 64, 64, 4096, "random", "plain") for b in batches]


def _hca(compressed: int, batches: tuple[int, ...], heads: int = 64) -> list[tuple]:
    """All entries of a sequence, in pages of 2."""
    return [(b, 1, heads, 128, compressed, 64, 2, compressed, "sequential", "plain") for b in batches]


BENCHMARKS = _cases(
    *_csa(64, 512, (1, 8, 32, 128)),
    *_hca(256, (1, 32)),
    *_hca(1024, (32,)),
    *_hca(8192, (1, 8)),
    *_csa(128, 1024, (1, 8, 32, 128)),
    *_csa(64, 512, (32,), queries=2),
    # What tensor parallelism leaves of 64 and 128 heads.
    *_csa(16, 512, (1, 32, 128)),
    *_csa(32, 512, (32,)),
    *_csa(16, 1024, (32,)),
    *_hca(8192, (8,), heads=16),
    seed=1111,
)
BENCHMARKS_CPU = _cases(*_csa(64, 512, (1, 8)), *_csa(16, 512, (8,)), seed=1111)

# A row is one query's head. Its error in the 2-norm may be ROW_RTOL of the larger of the result's norm and of
# sqrt(sum_j p_j^2 |c_j|^2), which rounding each p_j to bf16 moves by 2^-9 at most and by 2^-9 / sqrt(3) at random; the
# rounding of the output adds as much. An honest emulation's worst rows: 2.4e-3 of Gaussian entries, 3.7e-3 of
# log-normal, 5.0e-3 of very different maxima with the sink inside the maximum, 4.2e-3 of cancelling entries.
ROW_RTOL = 6e-3
CASE_RTOL = 3e-3  # the same for all rows as one: FlashMLA has 2.0e-3
LSE_ATOL = 1e-4  # up to a |lse| of 100, where fp32 sums of 512 products give 1e-5; beyond in proportion


def page_entries(stride: int) -> int:
    """Entries P of a page of `stride` bytes. ValueError unless P is a power of two.

    A page has P rows of 576 bytes for payloads and one for each 72 entries' scales, so P + ceil(P / 72) in all: no
    two P give one stride.
    """
    rows = stride // PAYLOAD
    p = rows - -(-rows // 73)
    if p < 1 or p & (p - 1) or stride != PAYLOAD * (p - (-p // 72)):
        raise ValueError(f"a page must be of 1, 2, 4, ... entries (1152, 1728, 2880, ... bytes), got {stride} bytes")
    return p


def unpack(data: Data) -> Sizes:
    """Sizes of one call. ValueError, naming the tensor, where a dtype, shape, layout or device is not as `Data` says.

    Lists and lengths are not read: on a GPU that would wait for it.
    """
    if (data.q.dim(), data.window_index.dim(), data.compressed_index.dim()) != (4, 3, 3):
        raise ValueError(
            f"q must be (B, S, H, {HEAD_DIM}), window_index and compressed_index (B, S, n), got "
            f"{tuple(data.q.shape)}, {tuple(data.window_index.shape)}, {tuple(data.compressed_index.shape)}"
        )
    if data.window.dim() != 2 or data.compressed.dim() != 2:
        got = f"{tuple(data.window.shape)} and {tuple(data.compressed.shape)}"
        raise ValueError(f"window and compressed must be (pages, stride), got {got}")
    b, s, h, _ = data.q.shape
    nw, nc = data.window_index.shape[2], data.compressed_index.shape[2]
    if min(b, s, h, nw) < 1:
        raise ValueError(f"q and window_index must not be empty, got B={b} S={s} H={h} nw={nw}")
    bf16, u8, i32, fp32 = torch.bfloat16, torch.uint8, torch.int32, torch.float32
    wanted = (
        (bf16, (b, s, h, HEAD_DIM)),
        (u8, tuple(data.window.shape)),
        (i32, (b, s, nw)),
        (i32, (b,)),
        (u8, tuple(data.compressed.shape)),
        (i32, (b, s, nc)),
        (i32, (b,)),
        (fp32, (h,)),
        (bf16, (b, s, h, HEAD_DIM)),
        (fp32, (b, s, h)),
    )
    device = data.q.device
    for name, tensor, (dtype, shape) in zip(Data._fields, data, wanted, strict=True):
        if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous() or tensor.device != device:
            raise ValueError(
                f"{name} must be {dtype} {shape}, contiguous, on {device}, "
                f"got {tensor.dtype} {tuple(tensor.shape)} {tensor.stride()} on {tensor.device}"
            )
    return Sizes(b, s, h, nw, nc, _entries("window", data.window), _entries("compressed", data.compressed))


def _entries(name: str, pages: torch.Tensor) -> int:
    try:
        return page_entries(pages.shape[1])
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
