"""Calibrate the model: plant one error in the PTX of a right kernel, and see whether the model finds it.

    .venv/bin/python -m ptx_model.tools.mutants

runs every mutant under the orders of asynchronous work until one finds it, writes mutants.jsonl beside this file, and
the table of ptx_model/README.md from that file. `--table` only renders the table. With keys of KERNELS behind it, it
runs these and keeps the other results.
"""

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.results import output
from problems.common import load
from ptx_model.tools.check import ORDERS, check_call, make_inputs, set_order

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE = Path(__file__).with_suffix(".jsonl"), ROOT / "ptx_model" / "README.md"
_MARKS = ("<!-- mutants:begin -->", "<!-- mutants:end -->")
MULTIPROCESSORS = 4  # so few that blocks which persist take several turns in a small case


@dataclass(frozen=True)
class Kernel:
    """A right kernel: problem, variant, target, the case, a part of the name of the kernel that is edited."""

    problem: str
    variant: str
    target: str
    case: dict
    part: str


@dataclass(frozen=True)
class Mutant:
    """what: the error. pattern: of the instruction, of which the n-th gets `to`; \\1 and so on are its groups."""

    kernel: str
    what: str
    pattern: str
    to: str
    n: int = 0

    def edited(self, name: str, ptx: str) -> str:
        """The PTX with the error. LookupError: there is no such instruction."""
        if KERNELS[self.kernel].part not in name:
            return ptx
        start = ptx.index(f".entry {name}")
        end = ptx.find(".entry ", start + 7)
        end = len(ptx) if end < 0 else end
        found = list(re.finditer(self.pattern, ptx[start:end]))
        if len(found) <= self.n:
            raise LookupError(f"{self.what}: {name} has {len(found)} of {self.pattern!r}")
        hit = found[self.n]
        return ptx[: start + hit.start()] + hit.expand(self.to) + ptx[start + hit.end() :]


EXPERTS = {
    "tokens": 11,
    "experts": 6,
    "topk": 3,
    "hidden": 704,
    "inner": 320,
    "activation": "nvfp4",
    "router": "one",
    "content": "plain",
    "seed": 5,
}
KERNELS = {
    "ring": Kernel("nvfp4_gemv", "sm100_native", "sm100", {"m": 40, "k": 5184, "l": 1, "seed": 5}, "gemv"),
    "tma": Kernel("nvfp4_gemv", "sm90_classic_tma", "sm90", {"m": 300, "k": 17472, "l": 1, "seed": 5}, "rank2"),
    "cluster": Kernel("nvfp4_gemv", "sm90_classic_tma", "sm90", {"m": 300, "k": 17472, "l": 2, "seed": 5}, "rank3"),
    "attention": Kernel(
        "fmha_decode",
        "sm90_wgmma",
        "sm90",
        {
            "batch": 1,
            "queries": 2,
            "heads": 64,
            "window": 64,
            "compressed": 63,
            "page_window": 64,
            "page_compressed": 64,
            "pool": 8,
            "order": "random",
            "content": "plain",
            "seed": 5,
        },
        "fmha6attend",
    ),
    "experts": Kernel("moe_gemm", "sm100_cute", "sm100", EXPERTS, "multiply_experts"),
    "first product": Kernel("moe_gemm", "sm100_cute", "sm100", EXPERTS, "gme_2"),
    "tokens": Kernel("moe_gemm", "sm100_cute", "sm100", EXPERTS, "quantise"),
    # Three tiles a block: a chunk of shared memory is filled three times.
    "transposed": Kernel(
        "fmha_decode",
        "sm100_cute",
        "sm100",
        {
            "batch": 2,
            "queries": 1,
            "heads": 72,
            "window": 100,
            "compressed": 250,
            "page_window": 64,
            "page_compressed": 2,
            "pool": 300,
            "order": "random",
            "content": "ragged",
            "seed": 5,
        },
        "attend",
    ),
    # Scores rise along the list, so that tiles rescale what others have added.
    "rescaled": Kernel(
        "fmha_decode",
        "sm100_cute",
        "sm100",
        {
            "batch": 2,
            "queries": 1,
            "heads": 128,
            "window": 1,
            "compressed": 511,
            "page_window": 64,
            "page_compressed": 64,
            "pool": 511,
            "order": "sequential",
            "content": "maxima",
            "seed": 5,
        },
        "attend",
    ),
    "joined": Kernel(
        "fmha_decode",
        "sm100_cute",
        "sm100",
        {
            "batch": 1,
            "queries": 1,
            "heads": 20,
            "window": 64,
            "compressed": 450,
            "page_window": 64,
            "page_compressed": 64,
            "pool": 450,
            "order": "random",
            "content": "maxima",
            "seed": 5,
        },
        "combine",
    ),
}
_WAIT = r"mbarrier\.try_wait\S+ p, \[[^\]]*\], [^;]*;"
_WAIT_PARITY = r"(mbarrier\.try_wait\S+ p, \[[^\]]*\]), [^;]*;"
_EXPECT = r"(mbarrier\.arrive\.expect_tx\S+ _, \[[^\]]*\], )(%r\d+);"
_ARRIVE = r"mbarrier\.arrive\.shared\S+ _, \[[^\]]*\];"
_INIT = r"(mbarrier\.init\S+\s+\[[^\]]*\]), [^;]*;"
_TENSOR = r"(cp\.async\.bulk\.tensor\S+ )\[(%r\d+)\], \[(%rd\d+), \{(%r\d+), (%r\d+)(, %r\d+)?\}\]"
_BLOCK = r"(bar\.sync\s+%r\d+), 256;"
_MEET = r"barrier\.cluster\.arrive\.release\.aligned;\s*barrier\.cluster\.wait\.acquire\.aligned;"
_REMOTE = r"mbarrier\.arrive\.release\.cluster\S+ _, \[remote\];"
_FENCE = r"fence\.proxy\.async\S*;"
_WGMMA = r"(wgmma\.mma_async\S+ \{[^}]*\}, )(%rd\d+)"
_STRIDE = rf"xor.b64 \2, \2, {(1024 ^ 512) // 16 << 32}; \1\2"  # that of a descriptor becomes 512 bytes
_NONE = "mov.b32 %r1, %r1;"


def _tma(kernel: str, waits: int) -> list[Mutant]:
    names = ("consumer of the weights", "consumer of x", "producer of x", "producer of the weights")[:waits]
    found = []
    for n, name in enumerate(names):
        found.append(Mutant(kernel, f"{name} does not wait", _WAIT, "setp.eq.u32 p, 0, 0;", n))
        found.append(Mutant(kernel, f"{name}: parity pinned to 0", _WAIT_PARITY, r"\1, 0;", n))
        found.append(Mutant(kernel, f"{name}: parity pinned to 1", _WAIT_PARITY, r"\1, 1;", n))
    for n in (0, 1):
        found += [
            Mutant(kernel, f"transaction {n} expects 16 bytes too many", _EXPECT, r"add.u32 \2, \2, 16; \1\2;", n),
            Mutant(kernel, f"transaction {n} expects 16 bytes too few", _EXPECT, r"sub.u32 \2, \2, 16; \1\2;", n),
        ]
    found += [
        Mutant(kernel, "first arrival is missing", _ARRIVE, _NONE, 0),
        Mutant(kernel, "barrier 9 counts 257 arrivals", _INIT, r"\1, 257;", 9),
        Mutant(kernel, "barrier 8 counts 3 arrivals", _INIT, r"\1, 3;", 8),
        Mutant(kernel, "load 12 has its coordinates swapped", _TENSOR, r"\1[\2], [\3, {\5, \4\6}]", 12),
        Mutant(kernel, "load 13 has its coordinates swapped", _TENSOR, r"\1[\2], [\3, {\5, \4\6}]", 13),
        Mutant(kernel, "load 0 lands 128 bytes on", _TENSOR, r"\1[\2+128], [\3, {\4, \5\6}]", 0),
        Mutant(kernel, "load 1 lands 16 bytes on", _TENSOR, r"\1[\2+16], [\3, {\4, \5\6}]", 1),
        Mutant(kernel, "first barrier of the block is missing", _BLOCK, _NONE, 0),
        Mutant(kernel, "second barrier of the block is missing", _BLOCK, _NONE, 1),
        Mutant(kernel, "a barrier of the block for 128 threads", _BLOCK, r"\1, 128;", 0),
        Mutant(
            kernel,
            "sum over the warp by 8 lanes only",
            r"(shfl\.sync\.bfly\S+\s+%r\d+\|%p\d+, %r\d+), %r\d+,",
            r"\1, 8,",
            0,
        ),
    ]
    return found


_WAIT_LOOP = r"(mbarrier\.try_wait\S+ P1, \[[^\]]*\]), [^;]*;"
_EXPECT_STATE = r"(mbarrier\.arrive\.expect_tx\S+ %rd\d+, \[[^\]]*\], )(%r\d+);"
_COMMIT = r"tcgen05\.commit\S+ \[%r\d+\];"
_PRODUCT = r"(tcgen05\.mma\S+ \[%r\d+\], )(%rd\d+), (%rd\d+), (%r\d+), (\[%r\d+\]), (\[%r\d+\]), p;"
_SPREAD = r"(tcgen05\.cp\S+ )\[(%r\d+)\], (%rd\d+);"
_LOADED = r"(tcgen05\.ld\.\S+ \{[^}]*\}, )\[(%r\d+)\];"
_BULK = r"(cp\.async\.bulk\.shared\S+ )\[(%r\d+)\], \[(%rd\d+)\], (%r\d+),"
_SHUFFLE = r"(shfl\.sync\.bfly\S+\s+[^;]*), {}, 31, -1;"
_CODES = r"(cvt\.rn\.satfinite\.e2m1x2\.f32 byte{}), ([^,]*), ([^;]*);"
_SET_BIT = r"xor.b32 \4, \4, {0:#x}; \1\2, \3, \4, \5, \6, p; xor.b32 \4, \4, {0:#x};"


def _experts() -> list[Mutant]:
    """Of both products of moe_gemm/sm100_cute, and of what only the first one has."""
    key = "experts"
    waits = {0: "copies", 1: "products, for sums to be taken", 2: "products, for copies", 4: "epilogue"}
    found = []
    for n, name in waits.items():
        found.append(Mutant(key, f"wait of {name} is missing", _WAIT_LOOP, "setp.eq.u32 P1, 0, 0;", n))
        found += [Mutant(key, f"wait of {name}: parity pinned to {p}", _WAIT_LOOP, rf"\1, {p};", n) for p in (0, 1)]
    found += [
        Mutant(key, "a step expects 16 bytes too many", _EXPECT_STATE, r"add.u32 \2, \2, 16; \1\2;"),
        Mutant(key, "a step expects 16 bytes too few", _EXPECT_STATE, r"sub.u32 \2, \2, 16; \1\2;"),
        Mutant(key, "a stage is never given back", _COMMIT, _NONE, 0),
        Mutant(key, "sums are never said to be complete", _COMMIT, _NONE, 1),
        Mutant(key, "sums are never given back", r"mbarrier\.arrive\.shared\S+ %rd\d+, [^;]*;", _NONE, 0),
        Mutant(key, "sums are given back by 3 of 4 warps", _INIT, r"\1, 96;", 20),
        Mutant(key, "sums are given back by 129 threads", _INIT, r"\1, 129;", 20),
        Mutant(key, "a stage's barrier counts 2 arrivals", _INIT, r"\1, 2;", 3),
        Mutant(key, "64 columns become 32", r"(tcgen05\.alloc\S+\s+\[%r\d+\]), %r\d+;", r"\1, 32;"),
        Mutant(key, "tensor memory is never freed", r"tcgen05\.dealloc[^;]*;", _NONE),
        Mutant(key, "weights: 8 rows 512 bytes apart", _PRODUCT, rf"xor.b64 \2, \2, {(256 ^ 512) >> 4 << 32}; \g<0>"),
        Mutant(key, "tokens: 8 rows 512 bytes apart", _PRODUCT, rf"xor.b64 \3, \3, {(256 ^ 512) >> 4 << 32}; \g<0>"),
        Mutant(
            key, "weights: next 16 bytes of K 256 on", _PRODUCT, rf"xor.b64 \2, \2, {(128 ^ 256) >> 4 << 16}; \g<0>"
        ),
        Mutant(key, "tokens: 16 bytes on", _PRODUCT, r"add.s64 \3, \3, 1; \g<0>", 1),
        Mutant(key, "weights: a swizzle of 128 bytes", _PRODUCT, rf"xor.b64 \2, \2, {2 << 61}; \g<0>"),
        Mutant(key, "the first product of a tile adds", _PRODUCT, r"setp.eq.u32 p, 0, 0; \g<0>"),
        Mutant(key, "no product adds", _PRODUCT, r"setp.ne.u32 p, 0, 0; \g<0>", 1),
        Mutant(key, "scales as powers of two", _PRODUCT, _SET_BIT.format(1 << 23)),
        Mutant(key, "32 tokens instead of 16", _PRODUCT, _SET_BIT.format(6 << 17)),
        Mutant(key, "64 rows instead of 128", _PRODUCT, _SET_BIT.format(12 << 24)),
        Mutant(key, "scales of weights and of tokens exchanged", _PRODUCT, r"\1\2, \3, \4, \6, \5, p;"),
        Mutant(key, "scales of weights are not copied", _SPREAD, _NONE, 0),
        Mutant(key, "scales of tokens are not copied", _SPREAD, _NONE, 3),
        Mutant(key, "scales of tokens land 4 columns on", _SPREAD, r"add.u32 \2, \2, 4; \g<0> sub.u32 \2, \2, 4;", 1),
        Mutant(key, "scales come from 16 bytes on", _SPREAD, r"add.s64 \3, \3, 1; \g<0>", 2),
        Mutant(key, "sums are read a column on", _LOADED, r"\1[\2+1];"),
        Mutant(key, "every warp reads the lanes of the first", _LOADED, r"and.b32 \2, \2, 65535; \g<0>"),
        Mutant(key, "weights of a step land 128 bytes on", _BULK, r"\1[\2+128], [\3], \4,", 0),
        Mutant(key, "weights of a step come from 16 bytes on", _BULK, r"\1[\2], [\3+16], \4,", 0),
        Mutant(key, "tokens of a step come from 16 bytes on", _BULK, r"\1[\2], [\3+16], \4,", 1),
        Mutant(key, "tokens of a step: 16 bytes fewer", _BULK, r"sub.u32 \4, \4, 16; \g<0>", 1),
        Mutant(key, "barriers are used before all have met", r"bar\.sync\s+0;", _NONE, 0),
        Mutant(key, "the epilogue's warps do not meet", r"bar\.sync\s+1, 128;", _NONE, 0),
        Mutant(key, "a fence ahead of products is missing", r"tcgen05\.fence::after_thread_sync;", _NONE, 2),
    ]
    first = "first product"
    found += [
        Mutant(first, "a unit of v is stored before all have written it", r"bar\.sync\s+1, 128;", _NONE, 1),
        Mutant(first, "a unit of v is stored without a fence", _FENCE, _NONE),
        Mutant(first, "a unit of v is written while it is stored", r"cp\.async\.bulk\.wait_group\.read\s+0;", _NONE),
        Mutant(first, "gate and up meet those of 8 lanes on", _SHUFFLE.format(16), r"\1, 8, 31, -1;"),
        Mutant(first, "the largest of a block misses a step", _SHUFFLE.format(8), r"\1, 4, 31, -1;"),
        Mutant(first, "halves of a pair of codes exchanged", _CODES.format(0), r"\1, \3, \2;"),
        Mutant("tokens", "halves of a pair of codes exchanged", _CODES.format(2), r"\1, \3, \2;"),
        Mutant("tokens", "a token of the next slot", r"(st\.global\.v2\S+\s+\[%rd\d+)\]", r"\1+16]"),
    ]
    return found


# Of PTX that CuTe DSL writes.
_DSL_WAIT = r"(mbarrier\.try_wait\S+ P1, \[[^\]]*\]), [^;]*(, \d+);"
_DSL_COMMIT = r"tcgen05\.commit\S+\s+\[[^\]]*\];"
_DSL_INIT = r"(mbarrier\.init\.shared\.b64\s+\[[^\]]*\]), [^;]*;"
_DSL_ARRIVE = r"mbarrier\.arrive\.shared\.b64\s+%rd\d+, \[[^\]]*\], [^;]*;"
_DSL_EXPECT = r"(mbarrier\.arrive\.expect_tx\S+\s+%rd\d+, \[[^\]]*\], )(%r\d+);"
_DSL_TENSOR = r"(cp\.async\.bulk\.tensor\.3d\S+\s+)\[([^\]]*)\], \[(%rd\d+), \{(%r\d+), (%r\d+), (%r\d+)\}\]"
_UMMA = r"(tcgen05\.mma\S+\s+)\[(%r\d+)\], (%rd\d+), (%rd\d+), (%r\d+), (\{[^}]*\}), (%p\d+);"
_SAME_UMMA = r"\1[\2], \3, \4, \5, \6, \7;"
_TMEM_LOAD = r"(tcgen05\.ld\S+\s+\{[^}]*\}, \[%r\d+)\];"
_TMEM_STORE = r"tcgen05\.st\S+\s+\[%r\d+\], \{[^}]*\};"
_STORE16 = r"st\.shared\.v4\.b32\s+\[(%r\d+)(\+\d+)?\], (\{[^}]*\});"
_LOAD = r"(ld\.global\.L1::no_allocate{}\S*\s+{}, \[%rd\d+) \+ {}\]"
_RESCALES = r"bar\.sync\s+1, 128;"


def _moved(register: int, by: int) -> str:
    """Instruction text: group `register`, an address, is `by` bytes or columns more."""
    return rf"add.s32 \{register}, \{register}, {by}; "


def _transposed() -> list[Mutant]:
    """Of fmha_decode/sm100_cute. In its text products come first, then softmax, then gathering and output."""
    waits = (
        (0, "queries", ""),
        (1, "a chunk of K", "both"),
        (2, "P^T", "both"),
        (3, "scores", "both"),
        (4, "a free chunk", "both"),
        (8, "O^T", ""),
    )
    edits = []
    for n, what, parities in waits:
        edits.append((f"{what}: no wait", _DSL_WAIT, "setp.eq.u32 P1, 0, 0;", n))
        if parities:
            edits += [(f"{what}: parity pinned to {p}", _DSL_WAIT, rf"\1, {p}\2;", n) for p in (0, 1)]
    edits += [
        *((f"commit for {w} is missing", _DSL_COMMIT, _NONE, n) for n, w in enumerate(("scores", "a chunk", "O^T"))),
        *((f"proxy fence ahead of {w} is missing", _FENCE, _NONE, n) for n, w in enumerate(("scores", "values"))),
        ("first scores are added to what is there", _UMMA, rf"setp.eq.u32 \7, 0, 0; {_SAME_UMMA}", 0),
        ("second scores are not added", _UMMA, rf"setp.ne.u32 \7, 0, 0; {_SAME_UMMA}", 1),
        ("first values are added to what is there", _UMMA, rf"setp.eq.u32 \7, 0, 0; {_SAME_UMMA}", 8),
        ("second values are not added", _UMMA, rf"setp.ne.u32 \7, 0, 0; {_SAME_UMMA}", 9),
        ("K of step 2 is that of step 3", _UMMA, rf"add.s64 \3, \3, 2; {_SAME_UMMA}", 2),
        ("Q of step 2 is that of step 3", _UMMA, rf"add.s64 \4, \4, 2; {_SAME_UMMA}", 2),
        ("V of step 2 is that of step 3", _UMMA, rf"add.s64 \3, \3, 128; {_SAME_UMMA}", 10),
        ("V is 64 dims on", _UMMA, rf"add.s64 \3, \3, 1024; {_SAME_UMMA}", 8),
        ("K: groups of 8 entries 512 bytes apart", _UMMA, rf"xor.b64 \3, \3, {96 << 32}; {_SAME_UMMA}", 0),
        ("V: 64 dims half as far apart", _UMMA, rf"xor.b64 \3, \3, {1536 << 16}; {_SAME_UMMA}", 8),
        ("Q: swizzle of 64 bytes", _UMMA, rf"xor.b64 \4, \4, {-(1 << 62)}; {_SAME_UMMA}", 0),
        ("V is read as K is", _UMMA, rf"xor.b32 \5, \5, {1 << 15}; {_SAME_UMMA}", 8),
        ("P^T is read as Q is", _UMMA, rf"xor.b32 \5, \5, {1 << 16}; {_SAME_UMMA}", 8),
        ("scores of 32 heads only", _UMMA, rf"xor.b32 \5, \5, {12 << 17}; {_SAME_UMMA}", 3),
        ("scores land 16 columns on", _UMMA, rf"{_moved(2, 16)}{_SAME_UMMA}{_moved(2, -16)}", 7),
        ("values of a chunk land in the next", _UMMA, rf"{_moved(2, 64)}{_SAME_UMMA}{_moved(2, -64)}", 15),
        ("queries: 16 bytes too many expected", _DSL_EXPECT, r"add.u32 \2, \2, 16; \1\2;", 0),
        ("queries: 16 bytes too few expected", _DSL_EXPECT, r"sub.u32 \2, \2, 16; \1\2;", 0),
        ("queries: dims and heads swapped", _DSL_TENSOR, r"\1[\2], [\3, {\5, \4, \6}]", 2),
        ("queries of another row", _DSL_TENSOR, r"\1[\2], [\3, {\4, \5, \5}]", 1),
        ("queries land 1024 bytes on", _DSL_TENSOR, r"\1[\2+1024], [\3, {\4, \5, \6}]", 0),
        ("a chunk counts 7 warps", _DSL_INIT, r"\1, 7;", 1),
        ("a chunk counts 9 warps", _DSL_INIT, r"\1, 9;", 2),
        ("P^T counts 3 warps", _DSL_INIT, r"\1, 3;", 10),
        ("arrival for P^T is missing", _DSL_ARRIVE, _NONE, 0),
        ("arrival for a chunk is missing", _DSL_ARRIVE, _NONE, 2),
        ("256 columns of tensor memory", r"(tcgen05\.alloc\S+\s+\[%r\d+\]), %r\d+;", r"\1, 256;", 0),
        ("tensor memory is not freed", r"tcgen05\.dealloc\S+\s+%r\d+, %r\d+;", _NONE, 0),
        ("scores of all warps from lanes 0 to 31", _TMEM_LOAD, r"\1+2097152];", 5),
        ("P^T: scores of heads 32 on for heads 0 on", _TMEM_LOAD, r"\1+32];", 5),
        ("output from 32 columns on", _TMEM_LOAD, r"\1+32];", 7),
        ("P^T is stored 16 bytes on", _STORE16, rf"{_moved(1, 16)}st.shared.v4.b32 [\1\2], \3;{_moved(1, -16)}", 1),
        ("16 bytes of P^T are not stored", _STORE16, _NONE, 3),
        ("K is stored 16 bytes on", _STORE16, rf"{_moved(1, 16)}st.shared.v4.b32 [\1\2], \3;{_moved(1, -16)}", 8),
        ("K is stored a row on", _STORE16, rf"{_moved(1, 128)}st.shared.v4.b32 [\1\2], \3;{_moved(1, -128)}", 14),
        ("16 bytes of K are not stored", _STORE16, _NONE, 20),
        ("warps do not meet after the vote", _RESCALES, _NONE, 0),
        ("warps do not meet after the last sums", _RESCALES, _NONE, 3),
        ("output does not wait for factors", r"bar\.sync\s+2, 384;", _NONE, 0),
        ("the block does not meet at the start", r"bar\.sync\s+0;", _NONE, 0),
        ("the block does not meet at the end", r"bar\.sync\s+0;", _NONE, 1),
        ("codes in another order", r"(st\.shared\.b32\s+\[%r\d+\+\d+\]), 12576;", r"\1, 12816;", 0),
        ("entries 64 bytes on", _LOAD.format(r"\.v4", r"\{[^}]*\}", 64), r"\1 + 128]", 2),
        ("scales of the next entry", _LOAD.format(r"\.v2", r"\{[^}]*\}", 0), r"\1 + 8]", 2),
        ("softmax looks at the next index", _LOAD.format("", r"%r\d+", 0), r"\1 + 4]", 1),
        ("gathering looks at the next index", _LOAD.format("", r"%r\d+", 0), r"\1 + 4]", 4),
        ("what is no entry counts", r"mov\.b32 (%r\d+), -1; @wanted", r"mov.b32 \1, 0; @wanted", 0),
        ("sums over 16 lanes", r"(shfl\.sync\.bfly\S+\s+[^;]*), 16, 31, -1;", r"\1, 8, 31, -1;", 0),
        ("pairs of dims from the wrong lane", r"(shfl\.sync\.bfly\S+\s+[^;]*), 1, 31, -1;", r"\1, 2, 31, -1;", 3),
    ]
    rescaled = [
        ("O^T is not scaled", _TMEM_STORE, _NONE, 0),
        ("warps do not meet ahead of the maxima", _RESCALES, _NONE, 1),
        ("warps do not meet ahead of the factors", _RESCALES, _NONE, 2),
    ]
    joined = [
        ("least reference of the shares", r"max(\.ftz)?\.f32", r"min\1.f32", 0),
        ("weight of another share", r"(shfl\.sync\.idx\S+\s+%r\d+, %r\d+, )%r\d+, 31", r"\g<1>1, 31", 0),
        ("sums of the next head", _LOAD.format(r"\.v4", r"\{[^}]*\}", 0), r"\1 + 2048]", 0),
    ]
    named = (("transposed", edits), ("rescaled", rescaled), ("joined", joined))
    return [Mutant(kernel, *edit) for kernel, found in named for edit in found]


def mutants() -> list[Mutant]:
    """All of them."""
    ring = [
        Mutant("ring", "ring waits for one group too few", r"cp\.async\.wait_group (\d);", "cp.async.wait_group 3;", 0),
        Mutant("ring", "ring does not wait at all", r"cp\.async\.wait_group (\d);", _NONE, 0),
        Mutant("ring", "groups are not committed", r"cp\.async\.commit_group;", _NONE, 0),
        Mutant("ring", "scales are read 2 bytes on", r"(ld\.shared\.u16\s+%rs\d+, \[%r\d+)(\+\d+)?\];", r"\1+2];", 0),
        Mutant("ring", "codes are read 16 bytes on", r"(ld\.shared\.v4\.u32\s+\{[^}]*\}, \[%r\d+)\];", r"\1+16];", 0),
        *(Mutant("ring", f"copy {n} lands 16 bytes on", r"(cp\.async\.cg\S+ \[%r\d+)\]", r"\1+16]", n) for n in (2, 3)),
        *(
            Mutant(
                "ring", f"copy {n} comes from 16 bytes on", r"(cp\.async\.cg\S+ \[%r\d+\], \[%rd\d+)\]", r"\1+16]", n
            )
            for n in (2, 3)
        ),
        Mutant(
            "ring",
            "4 of 16 bytes are copied",
            r"cp\.async\.cg(\S+ \[%r\d+\], \[%rd\d+\]), 16;",
            r"cp.async.ca\1, 4;",
            2,
        ),
        Mutant("ring", "copy to an odd place", r"(cp\.async\.cg\S+ \[%r\d+)\]", r"\1+8]", 2),
        Mutant(
            "ring",
            "sum over the warp misses a step",
            r"(shfl\.sync\.bfly\S+\s+[^;]*), 16, 31, -1;",
            r"\1, 8, 31, -1;",
            0,
        ),
        Mutant("ring", "halves of a pair of scales swapped", r"mov\.b32 \{low,high\}", "mov.b32 {high,low}", 0),
    ]
    cluster = [
        Mutant("cluster", "blocks do not meet before copies", _MEET, _NONE, 0),
        Mutant("cluster", "remote arrival is missing", _REMOTE, _NONE, 0),
        Mutant("cluster", "multicast to this block only", r"(multicast::cluster [^;]*), %rs\d+;", r"\1, 1;", 0),
    ]
    attention = [
        *(Mutant("attention", f"wait {n} is missing", _WAIT, "setp.eq.u32 p, 0, 0;", n) for n in range(4)),
        *(Mutant("attention", f"fence {n} ahead of wgmma is missing", _FENCE, _NONE, n) for n in range(2)),
        Mutant("attention", "wgmma: groups of 8 rows 512 bytes apart", _WGMMA, _STRIDE, 0),
        Mutant("attention", "products are not waited for", r"wgmma\.wait_group\S*\s+0;", _NONE, 0),
    ]
    return [*ring, *_tma("tma", 4), *_tma("cluster", 4), *cluster, *attention, *_experts(), *_transposed()]


def _short(text: str) -> str:
    """The first line, of a deadlock the second too, which names a barrier."""
    lines = text.splitlines()
    return " ".join(line.strip() for line in lines[: 2 if "deadlock" in lines[0] else 1])[:200]


def _run(target: str, keys: list[str]) -> int:
    """In a separate process: run the mutants of one target, one line of JSON each. keys: of KERNELS."""
    from ptx_model import driver

    model = driver.install(target)
    model.multiprocessors = MULTIPROCESSORS
    for key, kernel in KERNELS.items():
        if kernel.target != target or key not in keys:
            continue
        folder = ROOT / "problems" / kernel.problem
        task, reference = load.module(folder, "task"), load.module(folder, "reference")
        module = load.module(folder, f"variants/{kernel.variant}")
        pristine = make_inputs(task, reference, kernel.case)
        want = reference.ref_kernel(pristine)
        right = Mutant(key, "none: the kernel as it is", "", "")
        for mutant in (right, *(m for m in mutants() if m.kernel == key)):
            model.edit = mutant.edited if mutant.pattern else None
            found: dict[str, Any] = {"kernel": f"{kernel.problem}/{kernel.variant}, {key}", "mutant": mutant.what}
            found["said"] = {}
            for order in ORDERS:
                set_order(model, order)
                model.multiprocessors = MULTIPROCESSORS
                outcome = check_call(model, module, task, reference, pristine, want)
                ok, words = outcome.status == "MODEL_CHECKED", f"{outcome.status}: {outcome.reason}"
                found["said"][order.policy] = "right" if ok else _short(words)
                if "LookupError" in words:
                    raise SystemExit(f"{mutant.what}: {words}")
                if not ok and mutant is not right:
                    break
            print(json.dumps(found), flush=True)
    return 0


def table(results: list[dict]) -> str:
    """The table of ptx_model/README.md: how many errors of each kernel were found, and which survived every order."""
    errors = [one for one in results if not one["mutant"].startswith("none")]
    by_kernel: dict[str, list[dict]] = {}
    for one in errors:
        by_kernel.setdefault(one["kernel"], []).append(one)
    rows = ["| kernel | errors | found | not found |", "|---|---|---|---|"]
    for kernel, of_kernel in [*by_kernel.items(), ("all", errors)]:
        left = [one["mutant"] for one in of_kernel if set(one["said"].values()) == {"right"}]
        names = ", ".join(left) if kernel != "all" else ""
        rows.append(f"| {kernel} | {len(of_kernel)} | {len(of_kernel) - len(left)} | {names} |")
    return "\n".join(rows)


def main(argv: list[str]) -> int:
    """See the top of this file."""
    if argv[:1] == ["--target"]:
        return _run(argv[1], argv[2:])
    keys = argv or list(KERNELS)
    if argv != ["--table"]:
        if unknown := sorted({*keys} - {*KERNELS}):
            print(f"keys must be of {', '.join(KERNELS)}, got {', '.join(unknown)}", file=sys.stderr)
            return 2
        results = []
        for target in dict.fromkeys(KERNELS[key].target for key in keys):
            command = [sys.executable, "-m", "ptx_model.tools.mutants", "--target", target, *keys]
            ran = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
            results += [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
        done = tuple(f", {key}" for key in keys)
        kept = [json.loads(line) for line in RESULTS.read_text().splitlines()] if argv else []
        results = [one for one in kept if not one["kernel"].endswith(done)] + results
        RESULTS.write_text("".join(json.dumps(one) + "\n" for one in results))
    results = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    output.splice(PAGE, _MARKS, table(results))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
