"""fmha_prefill: DeepSeek-V4 attention of the tokens of a prefill chunk to two paged FP8 caches of 584-byte entries.

Every head of a query attends to the same entries, 512 values that are key and value at once: the last 128 positions,
and compressed ones. A sink a head joins the denominator. Out come the result and the logarithm of its denominator
without the sink.
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
WINDOW = 128  # positions that a query sees, with its own
ENTRY = 584  # bytes: NOPE codes, 2 * ROPE, 7 scales and a byte that means nothing
PAYLOAD = NOPE + 2 * ROPE  # bytes of an entry without its scales


class Data(NamedTuple):
    """One call's tensors, on one device, each based at a multiple of 256 bytes; contiguous but for q and out.

    q                  bf16 (T, H, 512), dense, in the memory order (T, H, 512) or (H, T, 512)
    starts             int32 (B + 1), from 0 to T: sequence b has the tokens starts[b] to starts[b + 1] - 1, or none
    first              int32 (B,), >= 0: position of a sequence's first token; token t's is first[b] + t - starts[b]
    window             uint8 (pages, stride), see below
    window_index       int32 (B, nw): page * P + slot of the entry of position first[b] - 127 + i, or -1: skip. -1 may
                       stand anywhere, and does below position 0 and behind the last token. nw is at least 127 plus the
                       tokens of any sequence: token t sees the places t - starts[b] to t - starts[b] + 127
    compressed         uint8 (pages, stride), a separate P and stride
    compressed_index   int32, likewise, nc >= 0: (T, nc), a list a token, or, unless B = T, (B, nc), one a sequence
    compressed_length  int32 (T,), 0 to nc: entries that t sees of its list; what no token sees of it is any int32
    sink               fp32 (H,), -inf for none
    out                bf16 (T, H, 512), in q's memory order, the output: sum_j p_j c_j over the entries that t sees,
                       p_j = exp(a_j) / (sum_i exp(a_i) + exp(sink)), a_j = SCALE * q . c_j
    lse                fp32 (T, H), the output log(sum_j exp(a_j)), natural, without the sink
    An entry that is named twice counts twice. Without a single entry out is 0 and lse +inf.

    problems/common/kv_pages.py describes pages and entries (nope 448, rope 64); P, a power of two, follows from the
    stride. A value is e4m3 * 2^(byte - 127). Of entries that a list names, and some token sees, scale bytes lie in 3 to
    134, so that values are at most 57344 (those below 2^-126 may be taken as 0); no e4m3 code is NaN (0x7F, 0xFF), no
    bf16 is infinite or NaN. All other bytes of the pages may be anything.
    """

    q: torch.Tensor
    starts: torch.Tensor
    first: torch.Tensor
    window: torch.Tensor
    window_index: torch.Tensor
    compressed: torch.Tensor
    compressed_index: torch.Tensor
    compressed_length: torch.Tensor
    sink: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


class Sizes(NamedTuple):
    tokens: int  # T
    batch: int  # B
    heads: int  # H
    window: int  # nw
    compressed: int  # nc
    each: bool  # whether each token has a list, which it has where B = T
    page_window: int  # P of the window's pages
    page_compressed: int


input_t = Data
output_t = tuple[torch.Tensor, torch.Tensor]  # out and lse themselves
OUTPUTS = ("out", "lse")  # allocated and poisoned by the judge
BATCH, INVARIANT = "tokens", ("call",)
OPAQUE = ("starts", "first", "window", "window_index", "compressed", "compressed_index", "compressed_length")
PRECISION = "bf16"  # of probabilities and dequantised entries

CONTENTS = ("plain", "maxima", "magnitudes", "cancelling", "sinks", "drowned", "duplicates")
LISTS = ("chosen", "all")  # of compressed entries: those that an indexer chose for a token, or all of a sequence
ORDERS = ("tokens", "heads")  # the outer axis of q and out in memory
LENGTHS = ("ragged", "empty", "none", "neighbours", "first")  # of sequences and lists


def kinds(content: str) -> tuple[str, str]:
    """Return which of CONTENTS and of LENGTHS a case has, "" for none. ValueError: `content` names something else."""
    values, _, lengths = (f"plain-{content}" if content in LENGTHS else content).partition("-")
    if values not in CONTENTS or lengths not in ("", *LENGTHS):
        raise ValueError(f"content must be of {CONTENTS}, of {LENGTHS}, or of both, got {content!r}")
    return values, lengths


@dataclass(frozen=True)
class Case:
    tokens: int  # of all sequences, T
    batch: int  # sequences, B
    heads: int  # H
    position: int  # of the first token of each sequence; with LENGTHS of the first sequence
    lists: str  # of LISTS
    compressed: int  # length of the compressed lists, nc
    ratio: int  # tokens that a compressed entry stands for: it is seen from the last of them on
    page_window: int  # entries of a page
    page_compressed: int
    order: str  # of ORDERS
    content: str  # of CONTENTS, of LENGTHS, or "sinks-ragged", say; reference.generate_input describes them
    seed: int

    def __post_init__(self) -> None:
        kinds(self.content)
        if self.lists not in LISTS or self.order not in ORDERS:
            raise ValueError(f"lists must be of {LISTS} and order of {ORDERS}, got {self}")
        for name, least in {"tokens": 1, "batch": 1, "heads": 1, "position": 0, "compressed": 0, "ratio": 1}.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be {least} or more, got {self}")

    def bytes_moved(self) -> int:
        """Least memory traffic for lengths as `plain` has them: entries and places that a token sees, all else once."""
        entries, numbers = 0, self.tokens + self.heads + 2 * self.batch + 1
        for count in filter(None, self._counts()):
            seen = [self._visible(self.position + i) for i in range(count)]
            window, named = count + min(self.position, WINDOW - 1), sum(seen) if self.lists == "chosen" else max(seen)
            entries += window + min(named, (self.position + count) // self.ratio)
            numbers += window + named
        return ENTRY * entries + 4 * numbers + self.tokens * self.heads * (4 * HEAD_DIM + 4)

    def flops(self) -> int:
        """Of both products, for such lengths."""
        places = (self.position + i for count in self._counts() for i in range(count))
        return 4 * self.heads * HEAD_DIM * sum(min(p + 1, WINDOW) + self._visible(p) for p in places)

    def _counts(self) -> list[int]:  # tokens of each sequence
        return [(self.tokens + i) // self.batch for i in range(self.batch)]

    def _visible(self, position: int) -> int:  # compressed entries
        return min(self.compressed, (position + 1) // self.ratio)


def _cases(*rows: tuple, seed: int) -> list[Case]:
    """Rows (T, B, H, position, lists, nc, ratio, P of window, P of compressed, order, content); each gets a seed."""
    return [Case(*row, seed=seed + i) for i, row in enumerate(rows)]


# Any two levels of two axes meet in a test. Lists around tiles of 64, positions around the window's length.
AXES = (
    (5, 8, 17, 40),  # T
    (1, 2, 3, 7),  # B
    (1, 4, 16, 20),  # H
    (0, 1, 127, 128, 129, 200),  # position
    (*(("chosen", *n) for n in ((0, 4), (1, 4), (33, 4), (64, 1), (65, 1))), ("all", 2, 128), ("all", 66, 4)),
    ((64, 64), (64, 2), (128, 32), (128, 1), (2, 32), (1, 128)),  # P
    ORDERS,
    CONTENTS,
    ("", *LENGTHS),
)


def tests(seed: int) -> list[Case]:
    """Return test cases. Another seed gives others."""
    rng = random.Random(seed)
    rows = AllPairs([rng.sample(levels, len(levels)) for levels in AXES])
    said = ((*row, *lists, *p, order, f"{a}-{b}".strip("-")) for *row, lists, p, order, a, b in rows)
    return _cases(*said, seed=seed)


# Besides: more heads, more tokens than the window has, longer lists.
TESTS = _cases(
    (2, 1, 2, 1, "all", 2, 2, 64, 64, "tokens", "plain"),
    (3, 3, 16, 127, "all", 33, 4, 64, 2, "heads", "plain"),
    (40, 3, 64, 0, "chosen", 64, 4, 64, 64, "heads", "ragged"),
    (9, 1, 128, 4200, "chosen", 1024, 4, 64, 64, "tokens", "plain"),
    (9, 2, 64, 8190, "all", 64, 128, 64, 2, "heads", "maxima"),
    (20, 4, 16, 2500, "chosen", 512, 4, 64, 64, "tokens", "empty"),
    (300, 2, 2, 0, "chosen", 64, 4, 64, 64, "tokens", "plain"),
    (280, 3, 2, 129, "all", 129, 4, 32, 2, "heads", "ragged"),
    seed=1000,
)
TESTS += tests(2000)

CSA, HCA = (4, 64, 64), (128, 64, 2)  # ratio and P of both caches
BENCHMARKS = _cases(
    (512, 1, 64, 0, "chosen", 512, *CSA, "tokens", "plain"),
    (4096, 1, 64, 0, "chosen", 512, *CSA, "tokens", "plain"),
    (4096, 1, 128, 0, "chosen", 1024, *CSA, "heads", "plain"),
    (4096, 1, 64, 0, "chosen", 0, *CSA, "heads", "plain"),  # the window alone
    (8192, 1, 64, 0, "all", 64, *HCA, "tokens", "plain"),
    (4096, 1, 16, 0, "chosen", 512, *CSA, "tokens", "plain"),  # what tensor parallelism leaves of 64 heads
    (2048, 1, 64, 65536, "chosen", 512, *CSA, "heads", "plain"),  # a chunk of a long prompt
    (4096, 4, 64, 0, "chosen", 512, *CSA, "tokens", "plain"),
    seed=1111,
)
BENCHMARKS_CPU = _cases(
    (64, 1, 16, 4096, "chosen", 512, *CSA, "tokens", "plain"),
    (64, 1, 64, 8192, "all", 64, *HCA, "heads", "plain"),
    seed=1111,
)

# A row is one token's head. Its error in the 2-norm may be ROW_RTOL of the larger of the result's norm and of
# sqrt(sum_j p_j^2 |c_j|^2), which rounding each p_j to bf16 moves by 2^-9 at most and by 2^-9 / sqrt(3) at random; the
# rounding of the output adds as much. fmha_decode, which has the same sums, measured what honest kernels need.
ROW_RTOL = 6e-3
CASE_RTOL = 3e-3  # the same for all rows as one: FlashMLA's decode has 2.0e-3
LSE_ATOL = 1e-4  # up to a |lse| of 100, where fp32 sums of 512 products give 1e-5; beyond in proportion


def memory_order(tensor: torch.Tensor) -> str:
    """Of ORDERS the one of a tensor (T, H, 512), "tokens" where both are, "" where neither is."""
    if tensor.is_contiguous():
        return "tokens"
    return "heads" if tensor.transpose(0, 1).is_contiguous() else ""


def sequence_of(data: Data) -> torch.Tensor:
    """int64 (T,): the sequence of each token."""
    tokens = torch.arange(len(data.q), device=data.q.device, dtype=torch.int32)
    return torch.searchsorted(data.starts[1:], tokens, right=True)


def unpack(data: Data) -> Sizes:
    """Sizes of one call. ValueError, naming the tensor: a dtype, shape, layout or device is not as `Data` says.

    Contents are not read: on a GPU that would wait for it.
    """
    bf16, u8, i32, fp32 = torch.bfloat16, torch.uint8, torch.int32, torch.float32
    t, h = (*data.q.shape, 0, 0)[:2]
    b, (lists, nc), nw = len(data.first), (*data.compressed_index.shape, 0, 0)[:2], data.window_index.shape[-1]
    wanted = (
        (bf16, (t, h, HEAD_DIM)),
        (i32, (b + 1,)),
        (i32, (b,)),
        (u8, (len(data.window), data.window.shape[-1])),
        (i32, (b, nw)),
        (u8, (len(data.compressed), data.compressed.shape[-1])),
        (i32, (lists if lists in (t, b) else t, nc)),
        (i32, (t,)),
        (fp32, (h,)),
        (bf16, (t, h, HEAD_DIM)),
        (fp32, (t, h)),
    )
    for name, tensor, (dtype, shape) in zip(Data._fields, data, wanted, strict=True):
        good = tensor.dtype == dtype and tensor.shape == shape and tensor.device == data.q.device
        if not good or not (memory_order(tensor) if name in ("q", "out") else tensor.is_contiguous()):
            form = f"{dtype} {shape}, {'dense' if name in ('q', 'out') else 'contiguous'}, on {data.q.device}"
            got = f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()} on {tensor.device}"
            raise ValueError(f"{name} must be {form}, got {got}")
    if min(t, h, b) < 1 or nw < WINDOW:
        raise ValueError(f"q, first must not be empty, window_index be {WINDOW} places or more: {t}, {h}, {b}, {nw}")
    if min(t, h) > 1 and memory_order(data.q) != memory_order(data.out):
        raise ValueError(f"out must have q's strides {data.q.stride()}, got {data.out.stride()}")
    per_page = (_page_entries("window", data.window), _page_entries("compressed", data.compressed))
    return Sizes(t, b, h, nw, nc, lists == t, *per_page)


def _page_entries(name: str, pages: torch.Tensor) -> int:
    """Entries P of a page, which has P rows of 576 bytes for payloads and one for each 72 entries' scales."""
    stride = pages.shape[1]
    p = stride // PAYLOAD - -(-(stride // PAYLOAD) // 73)
    if p < 1 or p & (p - 1) or stride != PAYLOAD * (p - (-p // 72)):
        raise ValueError(f"{name} must be pages of 1, 2, 4, ... entries (1152, 1728, 2880, ... bytes), got {stride}")
    return p
