"""Begin a pass in CUDA, in one launch: index lists, embeddings in all hc copies, angles.

In torch these are about 60 operations. The interfaces and formulas are those of torch_ops/start.py.
"""

from ctypes import POINTER, Structure, c_int
from pathlib import Path

import torch

from problems.common import build
from problems.dsv4_forward.cache.plan import Plan
from problems.dsv4_forward.kernels.arguments import Own, addresses, expect, fields, is_bf16
from problems.dsv4_forward.weights.config import CSA, HCA

RATIOS = (CSA, HCA)


class _Entries(Structure):
    _fields_ = fields("emit target visible index", "ratio emitted entries")


class _Plan(Structure):
    _fields_ = [
        *fields(
            "length given sequence sequence_ids table position window_target window_index rows",
            "tokens sequences blocks width ring unread",
        ),
        ("of", _Entries * len(RATIOS)),
    ]


class _Embedding(Structure):
    _fields_ = fields("tokens weight freqs copies cosine sine", "vocab n d kinds half")


class Start(Own):
    """The ops on one build. ValueError, in each: a tensor that is not contiguous, or of another dtype or shape."""

    SOURCE = Path(__file__).with_suffix(".cu")
    OPS = ("start", "embed")

    def __init__(self, built: build.Artefact) -> None:
        self._start = built.function("launch_start", POINTER(_Plan), POINTER(_Embedding), c_int, c_int)

    def embed(
        self,
        tokens: torch.Tensor,
        weight: torch.Tensor,
        position: torch.Tensor,
        freqs: torch.Tensor,
        copies: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> None:
        """Compute torch_ops start.embed."""
        to, kinds = made_embedding(tokens, weight, freqs, copies, cos, sin)
        expect("position", position, torch.int64, (len(tokens),))
        self._launch(_Plan(given=position.data_ptr(), tokens=len(tokens)), to, *kinds)

    def start(
        self,
        given: Plan,
        numbers: torch.Tensor,
        lists: torch.Tensor,
        tokens: torch.Tensor,
        weight: torch.Tensor,
        freqs: torch.Tensor,
        copies: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> None:
        """Compute torch_ops start.start."""
        to, kinds = made_embedding(tokens, weight, freqs, copies, cos, sin)
        expect("tokens", tokens, torch.int64, tuple(given.sequence.shape))
        self._launch(made_plan(given, numbers, lists), to, *kinds)

    def _launch(self, plan: _Plan, to: _Embedding, embedding_bf16: int, copies_bf16: int) -> None:
        if plan.tokens:
            build.check(self._start(plan, to, embedding_bf16, copies_bf16), "start")


def made_plan(given: Plan, numbers: torch.Tensor, lists: torch.Tensor) -> _Plan:
    """Return the kernel's form of a plan and the buffers of its lists. ValueError as Start."""
    count, long = len(given.sequence), torch.int64
    expect("length", given.length, long, (len(given.table),))
    expect("table", given.table, torch.int32, tuple(given.table.shape))
    expect("sequence", given.sequence, long, (count,))
    if given.position is not None:
        expect("position", given.position, long, (count,))
    expect("sequence_ids", given.sequence_ids, long, (len(given.sequence_ids),))
    expect("numbers", numbers, long, tuple(numbers.shape))
    expect("lists", lists, torch.int32, tuple(lists.shape))
    out = given.views(numbers, lists)
    width, blocks = given.table.shape[1], out.rows.shape[1]
    if blocks > width:
        raise ValueError(f"bound must be at most {width} blocks of tokens, got {given.bound} tokens")
    ids, places = given.sequence_ids, {"window_target": out.window_target, "window_index": out.window_index}
    read = addresses(length=given.length, given=given.position, sequence=given.sequence, table=given.table)
    written = addresses(sequence_ids=ids, position=out.position, rows=out.rows, **places)
    sizes = {"tokens": count, "sequences": len(ids), "blocks": blocks, "width": width}
    made = _Plan(**read, **written, **sizes, ring=given.ring, unread=given.unread)
    for place, (ratio, index) in enumerate(zip(RATIOS, (out.csa_index, out.hca_index), strict=True)):
        if ratio in given.emit:
            emit = given.emit[ratio]
            expect("emit", emit, long, (min(len(emit), count),))
            tensors = addresses(emit=emit, target=out.target[ratio], visible=out.visible[ratio], index=index)
            made.of[place] = _Entries(**tensors, ratio=ratio, emitted=len(emit), entries=given.entries[ratio])
    return made


def made_embedding(
    tokens: torch.Tensor,
    weight: torch.Tensor,
    freqs: torch.Tensor,
    copies: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> tuple[_Embedding, tuple[int, int]]:
    """Return the kernel's form, and whether the embedding and the copies are bf16. ValueError as Start."""
    (kinds, half), count = freqs.shape, len(tokens)
    expect("tokens", tokens, torch.int64, (count,))
    expect("freqs", freqs, torch.float32, (kinds, half))
    for name, tensor in (("cos", cos), ("sin", sin)):
        expect(name, tensor, torch.float32, (kinds, count, half))
    (vocab, d), n = weight.shape, copies.shape[1]
    kinds_of = is_bf16("weight", weight), is_bf16("copies", copies)
    for name, tensor, shape in (("weight", weight, (vocab, d)), ("copies", copies, (count, n, d))):
        expect(name, tensor, tensor.dtype, shape)
    pointers = (tensor.data_ptr() for tensor in (tokens, weight, freqs, copies, cos, sin))
    return _Embedding(*pointers, vocab, n, d, kinds, half), kinds_of
