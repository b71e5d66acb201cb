"""mhc_site: what lies between two sublayers of DeepSeek-V4: mHC's post, mix, Sinkhorn and pre, and the next norm.

The residual is n = 4 hc copies of d values a token. A site adds a sublayer's output to them and makes the next one's
input. Memory-bound: the copies once in and once out, and fn, which is most of the bytes of few tokens.
"""

import random
from dataclasses import dataclass
from typing import NamedTuple

import torch
from allpairspy import AllPairs

COPIES = 4  # n, hc copies of the residual
ROWS = (2 + COPIES) * COPIES  # of fn: n of pre, n of post, n x n of the combination, row-major
ITERATIONS = 20  # of Sinkhorn
HC_EPS = 1e-6  # of pre and of Sinkhorn
NORM_EPS = 1e-6  # of both RMS norms


class Data(NamedTuple):
    """One call's tensors: T tokens, d a multiple of 64, contiguous, on one device, based at multiples of 256 bytes.

    y           bf16 (T, d): what the sublayer ahead returned; or bf16 or fp32: the first of two addends of it, as
                experts return them, the routed and the shared ones
    second      bf16 or fp32 (T, d): the second addend; (0, d) where there is none
    copies      bf16 (T, 4, d): the hc copies ahead of it, x_j
    post        fp32 (T, 4) and
    comb        fp32 (T, 4, 4): with which weights it is written to them; from the site ahead
    fn          fp32 (24, 4 d): rows 0 to 3 of pre, 4 to 7 of post, 8 + 4 j + k of the combination
    base        fp32 (24,)
    scale       fp32 (3,): of the rows of pre, of post, of the combination
    norm        bf16 (d,): the weight of the next sublayer's norm
    new_copies  bf16 (T, 4, d), output: x'_k = post_k s + sum_j comb_jk x_j; the sum is over the first index of comb;
                s = y + second, an fp32 sum rounded once to bf16
    out         bf16 (T, d), output: norm * u / sqrt(mean(u^2) + NORM_EPS), u = sum_j pre_j x'_j
    new_post    fp32 (T, 4), output: 2 sigmoid(scale_1 z_(4 + k) + base_(4 + k))
    new_comb    fp32 (T, 4, 4), output: A_jk = scale_2 z_(8 + 4 j + k) + base_(8 + 4 j + k), then
                M = softmax of A over k, + HC_EPS; columns (over j) divided by their sum + HC_EPS; and 19 times rows,
                then columns, likewise
    with pre_j = sigmoid(scale_0 z_j + base_j) + HC_EPS and z = (fn v) / sqrt(mean(v^2) + NORM_EPS), where v, 4 d
    values, is x' of the token, one copy behind the other. z and u are of x' as rounded to bf16; u may be rounded to
    bf16 before its norm. All sums are in fp32 or better: fn in TF32 is too little.

    A value of an output below 2^-126 may be written as 0. Magnitudes are: of y, second and copies at most 2^40, of
    scale and base at most 2^10; post and comb are what a site makes. So logits may be beyond what an exponential in
    fp32 holds, and copies beyond fp16.
    """

    y: torch.Tensor
    second: torch.Tensor
    copies: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor
    fn: torch.Tensor
    base: torch.Tensor
    scale: torch.Tensor
    norm: torch.Tensor
    new_copies: torch.Tensor
    out: torch.Tensor
    new_post: torch.Tensor
    new_comb: torch.Tensor


input_t = Data
output_t = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # the four outputs themselves, in order
OUTPUTS = ("new_copies", "out", "new_post", "new_comb")  # allocated and poisoned by the judge
BATCH, INVARIANT = "tokens", ("call",)

CONTENTS = ("plain", "alike", "magnitudes", "cancelling", "saturated", "tiny_pre", "zeros", "positive")


KINDS = {"bf16": torch.bfloat16, "fp32": torch.float32}
ADDENDS = ("bf16", "bf16+bf16", "fp32+fp32", "bf16+fp32", "fp32+bf16")  # dtypes of y, or of y and second


@dataclass(frozen=True)
class Case:
    tokens: int  # T
    hidden: int  # d
    addends: str  # one of ADDENDS
    content: str  # one of CONTENTS, as reference.generate_input describes them
    seed: int

    def __post_init__(self) -> None:
        if self.content not in CONTENTS:
            raise ValueError(f"content must be one of {CONTENTS}, got {self.content!r}")
        if self.addends not in ADDENDS:
            raise ValueError(f"addends must be one of {ADDENDS}, got {self.addends!r}")
        if self.tokens < 1 or self.hidden < 64 or self.hidden % 64:
            raise ValueError(f"tokens must be at least 1 and hidden a multiple of 64, got {self}")

    def bytes_moved(self) -> int:
        """Least memory traffic: inputs once, outputs once."""
        added = sum(KINDS[kind].itemsize for kind in self.addends.split("+"))
        activations = (2 * (2 * COPIES + 1) + added) * self.hidden
        mixing = 2 * 4 * (COPIES + COPIES**2)
        weights = 4 * (ROWS * COPIES * self.hidden + ROWS + 3) + 2 * self.hidden
        return self.tokens * (activations + mixing) + weights

    def flops(self) -> int:
        """Of post, of the product with fn, of the sum of squares, of u and its norm."""
        return 2 * self.tokens * self.hidden * (COPIES * (1 + COPIES) + ROWS * COPIES + COPIES + COPIES + 2)


def _cases(*rows: tuple, seed: int) -> list[Case]:
    """Rows (T, d, addends, content); each gets a separate seed."""
    return [Case(*row, seed=seed + i) for i, row in enumerate(rows)]


# Any two levels of two axes meet in a test. T one, prime, around tiles of 8 to 64; d odd multiples of 64 and of 128.
AXES = ((1, 2, 7, 8, 9, 15, 17, 31, 32, 65), (64, 128, 192, 320, 448), ADDENDS, CONTENTS)


def tests(seed: int) -> list[Case]:
    """Return test cases. Another seed gives others."""
    rng = random.Random(seed)
    return _cases(*AllPairs([rng.sample(levels, len(levels)) for levels in AXES]), seed=seed)


# Besides: more tokens, both models' d, and more.
TESTS = _cases(
    (1, 4096, "bf16", "plain"),
    (129, 192, "bf16+bf16", "cancelling"),
    (257, 64, "bf16+fp32", "tiny_pre"),
    (4, 8256, "fp32+bf16", "alike"),
    (19, 4096, "bf16", "magnitudes"),
    (1, 7168, "bf16+bf16", "alike"),
    (6, 7168, "fp32+fp32", "positive"),
    (37, 7168, "bf16+fp32", "plain"),
    (1001, 128, "bf16", "plain"),
    seed=1000,
)
TESTS += tests(2400)

_TOKENS = (1, 8, 32, 128, 1024, 4096)
# Behind attention, and behind the experts.
BENCHMARKS = _cases(
    *((t, d, "bf16", "alike") for d in (4096, 7168) for t in _TOKENS),
    *((t, 4096, "bf16+bf16", "alike") for t in (1, 8, 128, 4096)),
    seed=1111,
)
BENCHMARKS_CPU = _cases(
    *((t, 4096, "bf16", "alike") for t in _TOKENS[:4]),
    (8, 4096, "bf16+bf16", "alike"),
    (1, 7168, "bf16", "alike"),
    seed=1111,
)

# Errors admitted. Each output is compared with what follows from the outputs ahead of it: z, pre and u from the
# submission's x', so that a value on the other side of a rounding does not count twice.
HALF_ULP = 2**-8  # relative, of a rounding to bf16
SUM = 2**-21  # of the terms' magnitudes: fp32 sums of up to five terms, with room for exponentials and reciprocals
# Of z, two parts. Of the root of the sum of squared terms: in fp32 a sum of 16384 in one chain is off by 3e-6 of it
# at random, in blocks 5e-7; fn as two bf16 3e-6, and 5 times that in the worst of 100,000 sums; in TF32 2e-4. Of z
# itself: what rounding always down costs.
Z_TERMS = 2**-15
Z_RTOL = 2**-20
SINKHORN = 2**-17  # relative: 40 normalisations of three roundings each, if none corrects another
OUT_RTOL = 2.25 * HALF_ULP  # u may be rounded, out is; a quarter of a rounding for what that does to the norm
# What the roundings of a token's out, and of its u, make of all of it together: each is off at random, by a standard
# deviation of HALF_ULP / sqrt(3) of itself at most, and so is their sum, weighted with out. So many deviations, beside
# what rounding to nearest makes of the token's values: a chance of 2e-9 a token. An out that is cut off leans by 0.7 of
# HALF_ULP, and would pass element by element.
LEAN_DEVIATIONS = 6
NORM_SUM = 2**-21  # of the norm, times (sum_j pre_j |x'_j|)^2 / |u|^2: |u|^2 may be summed from the products x'_j x'_k
# Of baselines, relative, in the norm of all rows of an output: they may round more often, and multiply in TF32.
PEER_TOL = 5e-3


def summed(data: Data) -> torch.Tensor:
    """What the sublayer ahead returned, bf16 (T, d): y, or the fp32 sum of both addends, rounded once."""
    return (data.y.float() + data.second.float() if len(data.second) else data.y).bfloat16()


def addend_bytes(data: Data) -> tuple[int, int]:
    """Bytes of a value of y, and of second, 0 where there is none: how a launcher tells kernels the kinds."""
    return data.y.element_size(), data.second.element_size() if len(data.second) else 0


def _kind(addend: torch.Tensor) -> torch.dtype:
    """The dtype that an addend must have: its own, if that is one of KINDS."""
    return addend.dtype if addend.dtype in KINDS.values() else torch.bfloat16


def unpack(data: Data) -> tuple[int, int]:
    """-> (T, d). ValueError, naming the tensor, where a dtype, shape, layout or device is not as `Data` says."""
    if data.y.dim() != 2 or min(data.y.shape) < 1 or data.y.shape[1] % 64:
        raise ValueError(f"y must be (T, d), not empty, d a multiple of 64, got {tuple(data.y.shape)}")
    t, d = data.y.shape
    bf16, fp32 = torch.bfloat16, torch.float32
    wanted = (
        (_kind(data.y) if len(data.second) else bf16, (t, d)),
        (_kind(data.second), (t if len(data.second) else 0, d)),
        (bf16, (t, COPIES, d)),
        (fp32, (t, COPIES)),
        (fp32, (t, COPIES, COPIES)),
        (fp32, (ROWS, COPIES * d)),
        (fp32, (ROWS,)),
        (fp32, (3,)),
        (bf16, (d,)),
        (bf16, (t, COPIES, d)),
        (bf16, (t, d)),
        (fp32, (t, COPIES)),
        (fp32, (t, COPIES, COPIES)),
    )
    for name, tensor, (dtype, shape) in zip(Data._fields, data, wanted, strict=True):
        if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be {dtype} {shape}, contiguous, got {tensor.dtype} {tuple(tensor.shape)} "
                f"{tensor.stride()}"
            )
        if tensor.device != data.y.device:
            raise ValueError(f"{name} must be on {data.y.device}, as y is, got {tensor.device}")
    return t, d
