"""linear_decode: the linear layers of DeepSeek-V4 at decode, 1 to 32 tokens times FP8, NVFP4 or bf16 matrices; and at
prefill, up to 8192 tokens.

One call computes several matrices of one input, groups of a matrix with separate inputs, or a chain of dependent
linears. At decode memory decides: each weight is read once for all tokens. At prefill tensor cores do.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from allpairspy import AllPairs

from problems.common import fp8, nvfp4

MOST_TOKENS = 8192
FEW_TOKENS = 32  # of decode; more are prefill
BLOCK = 128  # rows and columns of an FP8 matrix that share a scale; values of a token that share one
UNIT = 64  # n and k are multiples of it


class Matrix(NamedTuple):
    """G groups of n x k weights; contiguous, each tensor based at a multiple of 256 bytes.

    format | codes                         | scales                                  | factor    | a weight is
    fp8    | e4m3 (G, n, k)                | uint8 (G, ceil(n / 128), ceil(k / 128)) | None      | code * scale
    nvfp4  | uint8 (G, n, k / 2), two e2m1 | e4m3 (G, n, k / 16), bytes 0 to 0x7E    | fp32 (G,) | code * scale * factor
    bf16   | bf16 (G, n, k)                | None                                    | None      | code

    Of two e2m1 in a byte the low nibble is the first along k. A scale byte s of fp8, 63 to 191, is 2^(s - 127) for a
    block of 128 x 128. factor is positive, 2^-40 to 2^40. quantise: whether the matrix's input is quantised, see Data;
    False in bf16, and in fp8 with groups. input_scale: fp32 (G,), 2^-64 to 2^64, with which nvfp4 quantises; None in
    other formats, and where it does not.
    """

    codes: torch.Tensor
    scales: torch.Tensor | None
    factor: torch.Tensor | None
    quantise: bool
    input_scale: torch.Tensor | None = None


class Weights(NamedTuple):
    """format: "fp8", "nvfp4" or "bf16". links: one after another; the matrices of a link have the same input, and so
    the same k, and the same quantise; input_scale is each matrix's. A link has one to four matrices, with groups one.
    In nvfp4 all links quantise, or none.
    """

    format: str
    links: tuple[tuple[Matrix, ...], ...]


class Inputs(NamedTuple):
    """x: bf16 (T, G k) of the first link, contiguous, finite, based at a multiple of 256 bytes. T: 1 to MOST_TOKENS."""

    x: torch.Tensor


class Outputs(NamedTuple):
    """out: bf16, flat, each matrix' (T, G n) behind the one before (`parts`); based at a multiple of 256 bytes."""

    out: torch.Tensor


class Data(NamedTuple):
    """One call's tensors. With a submission's prepare(weights), `weights` holds what it returned instead.

    out of a matrix[t, g n + i] = sum over j of w[g, i, j] v[t, g k + j], summed in fp32 and rounded once to bf16.
    v is x; in the links behind the first one, the output of the first matrix of the link before, which has G k columns.

    quantise, in fp8: v goes through e4m3 first, in groups of 128 along k, as fp8.quantise_groups of problems/common
    does. A group's scale is the least power of two with 448 * scale >= the largest magnitude, of at least 1e-4; codes
    are v / scale to nearest, ties to even.

    quantise, in nvfp4: v goes through e2m1 first, in groups of 16 along k, as nvfp4.encode of problems/common does.
    With u = v / input_scale of the matrix and its group, in fp32, a group's scale is the largest |u| / 6 in fp32, at
    most 448, to e4m3; codes are u / scale in fp32, to nearest, ties to the even code, at most 6 in size. A scale of 0
    makes the group 0. The product takes code * scale * input_scale.

    Sums of |w v|, v and in nvfp4 v / input_scale are at most 2^120. Any of them may be small: outputs and v may be
    subnormal, of which a bf16 has 2^-133 to 2^-126; an output below 2^-126 may be written as 0.
    """

    weights: Weights
    inputs: Inputs
    outputs: Outputs


class Sizes(NamedTuple):
    """tokens: T. links: (groups, n, k) of each matrix, by link."""

    tokens: int
    format: str
    links: tuple[tuple[tuple[int, int, int], ...], ...]


input_t = Data
output_t = torch.Tensor  # outputs.out itself
OUTPUTS = ("out",)  # fields of Outputs, allocated and poisoned by the judge
BATCH, INVARIANT = "tokens", ("call",)

FORMATS = ("fp8", "nvfp4", "bf16")  # of Weights
KINDS = (*FORMATS, "nvfp4_a16")  # of Case: the last is nvfp4 with an input that stays bf16
CONTENTS = ("plain", "magnitudes", "subnormal", "extreme", "zeros")
WEIGHT_BYTES = {"fp8": 1.0, "nvfp4": 0.5625, "bf16": 2.0}  # of a weight, without fp8's scales


@dataclass(frozen=True)
class Case:
    """shape: matrices as n x k or groups x n x k, such as 1024x4096; + joins those of one link, _ links of a chain. In
    fp8 the input of a matrix with groups is not quantised, that of the others is, as in the released model, but in
    "extreme", where none is; in nvfp4 every input is.
    """

    format: str  # one of KINDS
    tokens: int  # T
    shape: str
    content: str  # one of CONTENTS, as reference.py describes them
    seed: int

    def __post_init__(self) -> None:
        for name, value, known in (("format", self.format, KINDS), ("content", self.content, CONTENTS)):
            if value not in known:
                raise ValueError(f"{name} must be one of {known}, got {value!r}")
        if not 1 <= self.tokens <= MOST_TOKENS:
            raise ValueError(f"tokens must be 1 to {MOST_TOKENS}, got {self.tokens}")
        links_of(self.shape)

    @property
    def weight_format(self) -> str:
        """One of FORMATS."""
        return self.format.removesuffix("_a16")

    def weight_bytes(self) -> int:
        total = 0
        for groups, n, k in self._matrices():
            total += round(groups * n * k * WEIGHT_BYTES[self.weight_format])
            if self.format == "fp8":
                total += groups * -(-n // BLOCK) * -(-k // BLOCK)
        return total

    def bytes_moved(self) -> int:
        """Least memory traffic: weights and x once, each output once; what a link reads of another is in a cache."""
        groups, _, k = links_of(self.shape)[0][0]
        return self.weight_bytes() + 2 * self.tokens * (groups * k + sum(g * n for g, n, _ in self._matrices()))

    def flops(self) -> int:
        """In the time of bf16's: at prefill products of e4m3 codes count half, as tensor cores do twice as many."""
        codes = self.format == "fp8" and self.tokens > FEW_TOKENS and self.content != "extreme"
        return self.tokens * sum((1 if codes and g == 1 else 2) * g * n * k for g, n, k in self._matrices())

    def _matrices(self) -> list[tuple[int, int, int]]:
        return [matrix for link in links_of(self.shape) for matrix in link]


def links_of(shape: str) -> tuple[tuple[tuple[int, int, int], ...], ...]:
    """The (groups, n, k) of each matrix of Case.shape, by link. ValueError: it is none, or links do not fit."""
    made = []
    for text in shape.split("_"):
        link = []
        for matrix in text.split("+"):
            sizes = matrix.split("x")
            if len(sizes) not in (2, 3) or not all(size.isdecimal() and int(size) for size in sizes):
                raise ValueError(
                    f"shape must be n x k or groups x n x k such as 8x1024x4096, got {matrix!r} in {shape!r}"
                )
            groups, n, k = map(int, sizes if len(sizes) == 3 else (1, *sizes))
            link.append((groups, n, k))
        made.append(tuple(link))
    _check_links(made)
    return tuple(made)


def _check_links(links: list[tuple[tuple[int, int, int], ...]]) -> None:
    """ValueError unless sizes are multiples of UNIT, matrices of a link have one input, and links fit each other."""
    before = None
    for link in links:
        groups, _, k = link[0]
        if any(n % UNIT or k % UNIT for _, n, k in link):
            raise ValueError(f"n and k must be multiples of {UNIT}, got {link}")
        if any(other[0] != 1 or other[2] != k for other in link) and len(link) > 1:
            raise ValueError(f"matrices of one link must have one k and no groups, got {link}")
        if before is not None and groups * k != before:
            raise ValueError(f"a link must take the {before} values that the one before gives, takes {groups * k}")
        before = groups * link[0][1]


FLASH = {
    "wq_a+wkv": "1024x4096+512x4096",
    "wq_b": "32768x1024",
    "wo_a": "8x1024x4096",
    "wo_b": "4096x8192",
    "shared": "4096x4096",
}
PRO = {
    "wq_a+wkv": "1536x7168+512x7168",
    "wq_b": "65536x1536",
    "wo_a": "16x1024x4096",
    "wo_b": "7168x16384",
    "shared": "6144x7168",
}
CHAIN = "_".join(FLASH[name] for name in ("wq_a+wkv", "wq_b", "wo_a", "wo_b"))


def _cases(*rows: tuple, seed: int) -> list[Case]:
    """Rows (format, tokens, shape, content); each gets a separate seed."""
    return [Case(*row, seed=seed + i) for i, row in enumerate(rows)]


# Any two levels of two axes meet in a test. Sizes that are odd multiples of 64 and of 128, so that blocks, tiles and
# splits of k end early; T on both sides of 8 and 16; groups; links of one to four matrices, behind the first one too;
# chains with groups in the first, a middle and the last link; more links than a launch of sm90_mma takes.
AXES = (
    KINDS,
    (1, 2, 7, 8, 9, 16, 17, 31, 32),
    (
        *("64x64", "192x320", "448x576", "704x832", "64x2112", "3x192x320", "5x64x192", "128x320+64x320"),
        *("64x448+192x448+320x448+128x448", "192x128+64x128_512x192_2x128x256_320x256"),
        *("2x128x192_448x256+64x256+128x256", "128x192_384x128+64x128_3x64x128_128x192+192x192_2x64x64"),
    ),
    CONTENTS,
)


def tests(seed: int) -> list[Case]:
    """Return test cases. Another seed gives others."""
    rng = random.Random(seed)
    levels = [rng.sample(axis, len(axis)) for axis in AXES]
    # Chains of extreme and of subnormal contents overflow.
    rows = AllPairs(levels, filter_func=lambda row: row[3:] not in (["extreme"], ["subnormal"]) or "_" not in row[2])
    return _cases(*rows, seed=seed)


# Besides: larger ones.
_LARGE = (
    (8, "256x512", "subnormal"),
    (7, "576x1088", "extreme"),
    (1, "8x128x512", "plain"),
    (1, "128x8256", "plain"),
    (32, "128x8256", "magnitudes"),
)
# Tokens of prefill, on both sides of tiles of 64, 128 and 256.
_PREFILL = (
    ("fp8", 65, "192x320", "magnitudes"),
    ("fp8", 64, "128x8256", "plain"),
    ("fp8", 257, "448x576", "subnormal"),
    ("fp8", 130, "2x128x192_448x256+64x256+128x256", "plain"),
    ("fp8", 64, "704x832", "extreme"),
    ("fp8", 127, "5x64x192", "magnitudes"),
    ("nvfp4", 129, "2x128x192_448x256+64x256+128x256", "magnitudes"),
    ("nvfp4_a16", 33, "3x192x320", "plain"),
    ("bf16", 300, "192x320", "zeros"),
)
TESTS = _cases(*((fmt, *row) for row in _LARGE for fmt in FORMATS), seed=1000) + tests(2000)
TESTS += _cases(*_PREFILL, seed=3000)

# Each shape in the format that it decides most for; tokens vary where the input's share of the time shows.
_GPU = (
    *(("fp8", t, FLASH["wq_b"], "plain") for t in (1, 2, 8, 32)),
    *(("fp8", t, FLASH["wo_b"], "plain") for t in (4, 16)),
    *(("fp8", t, FLASH["wq_a+wkv"], "plain") for t in (1, 8)),
    *(("fp8", 1, FLASH[name], "plain") for name in ("wo_a", "shared")),
    *(("fp8", 1, PRO[name], "plain") for name in ("wq_a+wkv", "wo_b")),
    *(("fp8", t, CHAIN, "plain") for t in (1, 8)),
    *(("nvfp4", t, FLASH["wo_b"], "plain") for t in (1, 8, 32)),
    *(("nvfp4", 1, FLASH[name], "plain") for name in ("wo_a", "wq_a+wkv")),
    ("nvfp4", 4, PRO["wq_b"], "plain"),
    ("nvfp4", 1, CHAIN, "plain"),
    ("nvfp4_a16", 1, FLASH["wo_b"], "plain"),
    ("bf16", 1, FLASH["wq_a+wkv"], "plain"),
    ("bf16", 8, PRO["shared"], "plain"),
    ("bf16", 1, PRO["wo_a"], "plain"),
    *(("fp8", t, FLASH["wq_b"], "plain") for t in (256, 1024)),
    *(("fp8", t, FLASH["wo_b"], "plain") for t in (1024, 4096)),
    ("fp8", 1024, FLASH["wo_a"], "plain"),
    ("nvfp4", 1024, FLASH["wo_b"], "plain"),
)
BENCHMARKS = _cases(*_GPU, seed=1111)
BENCHMARKS_CPU = _cases(
    *((fmt, t, "1024x4096", "plain") for fmt in KINDS for t in (1, 8)),
    *((fmt, 1, "384x1024+128x1024_2048x384_2x256x1024_1024x512", "plain") for fmt in FORMATS),
    seed=1111,
)

# A bf16 has 8 bits, so rounding to nearest moves a value by at most 2^-8 of it; the excess admits the little by which
# an inexact sum shifts that.
RTOL = 2**-8 * (1 + 2**-6)
# Of sqrt(sum of (w v)^2), the size of a sum of terms of random signs. Sums in fp32, in any order, are off by less than
# 2^-18 of it at k = 16384, sums of blocks of 128 that are cut to 14 bits by 2^-13. FP8 tensor cores cut each addend:
# their outputs were off by a standard deviation of 2^-12.8 of it, so that some of a million are not admitted.
SUM_RTOL = 2**-11
# The same of prefill where fp8 quantises: sums of 128 columns by FP8 tensor cores, added up in fp32, are admitted.
# Simulated, each addend of 32 columns cut at 2^-13 of the largest one, and rounded to bf16, of 200,000 outputs with
# k = 1024 1 in 840 needs 2^-11, in 4,800 2^-10.5, in 50,000 2^-10, none 2^-9.7: at 2^-8 none of the 10^9 of a timed
# case. README.md has what it refuses.
SUM_RTOL_FP8_PREFILL = 2**-8
LEAST = 2.0**-126  # an output below it may be 0
# Frobenius norm, of each matrix. Humming rounds parts of a sum to bf16: 3.5e-3 was measured.
PEER_TOL = 1e-2


def parts(out: torch.Tensor, sizes: Sizes) -> list[list[torch.Tensor]]:
    """Views (T, G n) of the flat `out`, one a matrix, by link."""
    found, start = [], 0
    for link in sizes.links:
        views = []
        for groups, n, _ in link:
            length = sizes.tokens * groups * n
            views.append(out[start : start + length].view(sizes.tokens, groups * n))
            start += length
        found.append(views)
    return found


def unpack(data: Data) -> Sizes:
    """Sizes of one call, weights as they came. ValueError, naming the tensor, for one that is not as the types say."""
    fmt, links = unpack_weights(data.weights)
    sizes = unpack_call(data.inputs, data.outputs, fmt, links)
    device = data.weights.links[0][0].codes.device
    if data.inputs.x.device != device:
        raise ValueError(f"x must be on the weights' {device}, got {data.inputs.x.device}")
    return sizes


def unpack_weights(weights: Weights) -> tuple[str, tuple[tuple[tuple[int, int, int], ...], ...]]:
    """-> (format, (groups, n, k) of each matrix by link), for prepare. ValueError as unpack says."""
    if weights.format not in FORMATS:
        raise ValueError(f"format must be one of {FORMATS}, got {weights.format!r}")
    if not weights.links or not all(weights.links):
        raise ValueError("links must hold a link or more, each of a matrix or more")
    links = [tuple(_unpack_matrix(matrix, weights.format) for matrix in link) for link in weights.links]
    _check_links(links)
    for link in weights.links:
        if len({matrix.quantise for matrix in link}) > 1:
            raise ValueError("matrices of one link must agree in quantise: they have one input")
    return weights.format, tuple(links)


def unpack_expert(w13: Weights, w2: Weights) -> tuple[str, tuple[tuple[tuple[int, int, int], ...], ...]]:
    """-> (format, sizes of both links) of an expert, whose second product takes silu(gate) up: gate is the first half
    of w13's output, up the second. ValueError as unpack says, or they are not a matrix (1, 2 I, k) and one (1, n, I).
    """
    (fmt, first), (other, second) = unpack_weights(w13), unpack_weights(w2)
    links = (*first, *second)
    if fmt != other or len(links) != 2 or any(len(link) != 1 or link[0][0] != 1 for link in links):
        raise ValueError(
            f"w13 and w2 must be a matrix each, of one format and without groups, got {fmt} and {other}, {links}"
        )
    if links[0][0][1] != 2 * links[1][0][2]:
        raise ValueError(f"w13 must have twice as many rows as w2 columns, got {links[0][0][1]} and {links[1][0][2]}")
    return fmt, links


def unpack_call(
    inputs: Inputs, outputs: Outputs, fmt: str, links: tuple[tuple[tuple[int, int, int], ...], ...]
) -> Sizes:
    """Sizes, for what comes with each call; fmt, links: what unpack_weights returned. ValueError as unpack says."""
    groups, _, k = links[0][0]
    x, out = inputs.x, outputs.out
    if x.dim() != 2 or not 1 <= len(x) <= MOST_TOKENS:
        raise ValueError(f"x must be (T, {groups * k}) with T of 1 to {MOST_TOKENS}, got {tuple(x.shape)}")
    _check("x", x, torch.bfloat16, (len(x), groups * k), x.device)
    columns = sum(g * n for link in links for g, n, _ in link)
    _check("out", out, torch.bfloat16, (len(x) * columns,), x.device)
    return Sizes(len(x), fmt, links)


def _unpack_matrix(matrix: Matrix, fmt: str) -> tuple[int, int, int]:
    codes = matrix.codes
    if codes.dim() != 3 or not codes.numel():
        raise ValueError(f"codes must be (G, n, k), not empty, got {tuple(codes.shape)}")
    g, n, k = codes.shape[0], codes.shape[1], codes.shape[2] * (2 if fmt == "nvfp4" else 1)
    u8, e4m3, bf16, fp32 = torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32
    wanted = {
        "fp8": ((e4m3, (g, n, k)), (u8, (g, -(-n // BLOCK), -(-k // BLOCK))), None),
        "nvfp4": ((u8, (g, n, k // 2)), (e4m3, (g, n, k // 16)), (fp32, (g,))),
        "bf16": ((bf16, (g, n, k)), None, None),
    }[fmt]
    wanted = (*wanted, (fp32, (g,)) if fmt == "nvfp4" and matrix.quantise is True else None)
    given = {"codes": codes, "scales": matrix.scales, "factor": matrix.factor, "input_scale": matrix.input_scale}
    for (name, tensor), want in zip(given.items(), wanted, strict=True):
        if want is None and tensor is not None:
            quantised = f" with quantise = {matrix.quantise}" if name == "input_scale" else ""
            raise ValueError(f"{name} must be None in {fmt}{quantised}, got {tensor.dtype} {tuple(tensor.shape)}")
        if want is not None:
            _check(name, tensor, *want, codes.device)
    if not isinstance(matrix.quantise, bool) or (matrix.quantise and fmt == "bf16"):
        raise ValueError(f"quantise must be a bool, False in {fmt}, got {matrix.quantise!r}")
    return g, n, k


def _check(
    name: str, tensor: torch.Tensor | None, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device
) -> None:
    if tensor is None:
        raise ValueError(f"{name} must be {dtype} {shape}, got None")
    if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous() or tensor.device != device:
        raise ValueError(
            f"{name} must be {dtype} {shape}, contiguous, on {device}, "
            f"got {tensor.dtype} {tuple(tensor.shape)} {tensor.stride()} on {tensor.device}"
        )


def input_values(fmt: str, matrix: Matrix, v: torch.Tensor) -> torch.Tensor:
    """What of v, bf16 (T, G k), meets the matrix's weights: fp32 (T, G k), rounded as Data says if it quantises."""
    if not matrix.quantise:
        return v.float()
    if fmt == "fp8":
        return fp8.round_trip(v.float(), BLOCK)
    return nvfp4.round_trip(v.float().unflatten(1, (len(matrix.codes), -1)), matrix.input_scale).flatten(1)


def sum_rtol(fmt: str, matrix: Matrix, tokens: int) -> float:
    """What a sum may be off by, of sqrt(sum of (w v)^2)."""
    return SUM_RTOL_FP8_PREFILL if fmt == "fp8" and matrix.quantise and tokens > FEW_TOKENS else SUM_RTOL


def matrices(weights: Weights) -> Iterator[Matrix]:
    """All matrices, in the order of the outputs."""
    for link in weights.links:
        yield from link
