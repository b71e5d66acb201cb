"""peer_flashmla: FlashMLA's sparse prefill, behind a pass that makes bf16 rows of the pages and one list of both.

The wheel is tokenspeed-flashmla. Its kernel takes bf16 rows and one list a token, as engines feed it, so both passes,
two Triton kernels, are inside the time. Queries whose heads are not 64 or 128 are padded in setup. In the order
"tokens" with such heads the kernel writes into data.out itself: the package has no argument for that, so its allocation
is answered with it. Else out is copied, and lse always, within the call.
"""

import contextlib
from typing import NamedTuple

import flash_mla
import torch
import triton
import triton.language as tl
from task import HEAD_DIM, SCALE, WINDOW, input_t, memory_order, output_t, unpack
from torch.nn.functional import pad
from torch.utils._python_dispatch import TorchDispatchMode

TARGETS = ("sm90",)
REQUIRES = ("flash_mla", "triton")

HEADS = (64, 128)  # what the package computes
BLOCK = tl.constexpr(128)  # places; the package wants whole ones
ROWS = 8  # that a program of _decode makes


@triton.jit
def _decode(pages, out, count, P: tl.constexpr, STRIDE: tl.constexpr, ROWS: tl.constexpr):
    """out: bf16 (count, 512), the entries of the pages; those that no list names may be NaN."""
    entry, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, 512)
    some = (entry < count)[:, None]
    page, slot = pages + (entry // P).to(tl.int64) * STRIDE, entry % P
    payload = (page + slot * 576)[:, None]
    nope = (column < 448)[None, :]
    codes = tl.load(payload + column[None, :], mask=some & nope, other=0)
    byte = tl.load((page + P * 576 + slot * 8)[:, None] + column[None, :] // 64, mask=some & nope, other=127)
    scale = (byte.to(tl.int32) << 23).to(tl.float32, bitcast=True)  # 2^(byte - 127)
    value = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale
    pointer = (payload + 448 + 2 * (column[None, :] - 448)).to(tl.pointer_type(tl.bfloat16))
    rope = tl.load(pointer, mask=some & (column >= 448)[None, :], other=0.0)
    at = entry.to(tl.int64)[:, None] * 512 + column[None, :]
    tl.store(out + at, tl.where(nope, value.to(tl.bfloat16), rope), mask=some)


@triton.jit
def _join(starts, window, chosen, length, index, total, B, NW, NC, base, each, N: tl.constexpr, BLOCKS: tl.constexpr):
    """index: int32 (T, 128 * BLOCKS), the rows that a token sees, -1 for none; total: int32 (T,), places that count."""
    token, place, b = tl.program_id(0), tl.arange(0, BLOCK), tl.arange(0, N)
    begun = tl.load(starts + b, mask=b < B, other=0x7FFFFFFF) <= token
    sequence = tl.sum(begun.to(tl.int32), 0) - 1
    seen = window + sequence.to(tl.int64) * NW + token - tl.load(starts + sequence)
    many = tl.load(length + token)
    row = index + token.to(tl.int64) * (BLOCK * BLOCKS)
    tl.store(row + place, tl.load(seen + place))
    tl.store(total + token, BLOCK + many)
    own = chosen + tl.where(each != 0, token, sequence).to(tl.int64) * NC
    for block in tl.static_range(1, BLOCKS):
        at = (block - 1) * BLOCK + place
        entry = tl.load(own + at, mask=at < many, other=-1)
        tl.store(row + block * BLOCK + place, tl.where(entry < 0, -1, entry + base))


class State(NamedTuple):
    """What a call needs besides data: scratch, and queries and sinks with padded heads."""

    q: torch.Tensor  # bf16 (T, padded H, 512), data.q itself where H needs no padding
    sink: torch.Tensor
    rows: torch.Tensor  # bf16 (entries of both caches, 1, 512)
    index: torch.Tensor  # int32 (T, 1, places)
    total: torch.Tensor  # int32 (T,)


class _Into(TorchDispatchMode):
    """Within: an allocation of the shape and dtype of `out` is answered with that tensor."""

    def __init__(self, out: torch.Tensor) -> None:
        super().__init__()
        self.out = out

    def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        kwargs = kwargs or {}
        like = func is torch.ops.aten.empty.memory_format and tuple(args[0]) == tuple(self.out.shape)
        return self.out if like and kwargs.get("dtype") == self.out.dtype else func(*args, **kwargs)


def setup(data: input_t) -> State:
    """Scratch, and padded queries and sinks. ValueError: more than 128 heads, or as unpack says."""
    sizes, device = unpack(data), data.q.device
    if device.type != "cuda":
        raise RuntimeError(f"peer_flashmla needs an NVIDIA GPU, got data on {device}")
    padded = min((h for h in HEADS if h >= sizes.heads), default=0) - sizes.heads
    if padded < 0:
        raise ValueError(f"heads must be at most {HEADS[-1]}, got {sizes.heads}")
    q, sink = (pad(data.q, (0, 0, 0, padded)), pad(data.sink, (0, padded))) if padded else (data.q, data.sink)
    count = len(data.window) * sizes.page_window + len(data.compressed) * sizes.page_compressed
    rows = torch.empty(count, 1, HEAD_DIM, dtype=torch.bfloat16, device=device)
    places = WINDOW + -(-sizes.compressed // WINDOW) * WINDOW
    index = torch.empty(sizes.tokens, 1, places, dtype=torch.int32, device=device)
    return State(q, sink, rows, index, torch.empty(sizes.tokens, dtype=torch.int32, device=device))


def custom_kernel(data: input_t, state: State) -> output_t:
    """Write into data.out and data.lse and return them; `state` is what setup(data) gave.

    RuntimeError: the package allocates its results in another way than it did, so that they are somewhere else.
    """
    sizes, (q, sink, rows, index, total) = unpack(data), state
    base = len(data.window) * sizes.page_window
    caches = ((data.window, sizes.page_window, rows[:base]), (data.compressed, sizes.page_compressed, rows[base:]))
    for pages, per_page, out in caches:
        stride, grid = pages.shape[1], (triton.cdiv(len(out), ROWS),)
        _decode[grid](pages, out, len(out), P=per_page, STRIDE=stride, ROWS=ROWS, num_warps=4)
    lists = (data.starts, data.window_index, data.compressed_index, data.compressed_length, index, total)
    numbers = (sizes.batch, sizes.window, sizes.compressed, base, int(sizes.each))
    padded, blocks = triton.next_power_of_2(sizes.batch), index.shape[2] // WINDOW
    _join[(sizes.tokens,)](*lists, *numbers, N=padded, BLOCKS=blocks, num_warps=1)
    in_place = q is data.q and memory_order(data.out) == "tokens"
    with _Into(data.out) if in_place else contextlib.nullcontext():
        out, _, lse = flash_mla.flash_mla_sparse_fwd(q, rows, index, SCALE, HEAD_DIM, sink, total)
    if in_place and out.data_ptr() != data.out.data_ptr():
        raise RuntimeError("flash_mla did not write where it was told")
    if not in_place:
        data.out.copy_(out[:, : sizes.heads])
    data.lse.copy_(lse[:, : sizes.heads])
    return data.out, data.lse
