"""moe_gemm: the routed experts of DeepSeek-V4 in FP4, from one token to thousands. Memory-bound up to some hundreds.

Each token goes through k of E experts, two products with a clamped SwiGLU between them. With one expert and k = 1 it is
the shared expert. Weights are in NVFP4, or, as DeepSeek released them, in MXFP4 with activations in FP8.
"""

import random
from dataclasses import dataclass
from typing import NamedTuple

import torch
from allpairspy import AllPairs

LIMIT = 10.0  # of the clamp: gate from above, up on both sides


class Weights(NamedTuple):
    """E experts, H hidden and I inner values, multiples of 64; contiguous, each based at a multiple of 256 bytes.

    w13         uint8 (E, 2 I, H / 2): e2m1, two a byte, the low nibble first along H; rows 0 to I - 1 of an expert are
                gate, I to 2 I - 1 are up
    s13         e4m3 (E, 2 I, H / 16): a scale for each 16 along H, bytes 0x00 to 0x7E
    g13         fp32 (E,): a scale for the whole of w13[e]
    w2          uint8 (E, H, I / 2), packed along I
    s2          e4m3 (E, H, I / 16)
    g2          fp32 (E,)
    in_scale13  fp32 (E,), positive: of the activations that meet w13[e], see Data. Means nothing in "bf16"
    in_scale2   fp32 (E,), positive: of those that meet w2[e]
    activation  "bf16", "nvfp4" or "fp8"
    A weight is code * s * g, codes and scales as in problems/common/nvfp4.py.

    With "fp8" weights are in MXFP4: s13 is uint8 (E, 2 I, H / 32) and s2 uint8 (E, H, I / 32), a ue8m0 scale for each
    32, 2^(byte - 127), bytes 1 to 254. Those of w13[e], and of w2[e], are within 2^SPAN of each other, so that e4m3
    holds code * s exactly under one scale for the matrix. g13 and g2 are 1, in_scales mean nothing.
    """

    w13: torch.Tensor
    s13: torch.Tensor
    g13: torch.Tensor
    w2: torch.Tensor
    s2: torch.Tensor
    g2: torch.Tensor
    in_scale13: torch.Tensor
    in_scale2: torch.Tensor
    activation: str


class Inputs(NamedTuple):
    """T tokens, contiguous, on the weights' device, each based at a multiple of 256 bytes. All finite.

    x             bf16 (T, H)
    topk_ids      int32 (T, k), 0 to E - 1, in a row all different, or -1, any number of times: no expert (validate). On
                  a GPU no kernel may write out of bounds for others, but what it then answers is free
    topk_weights  fp32 (T, k), of any sign; where the id is -1 it means nothing
    """

    x: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor


class Outputs(NamedTuple):
    """out: bf16 (T, H), see Data."""

    out: torch.Tensor


class Data(NamedTuple):
    """One call's tensors. With a submission's prepare(weights), `weights` holds what it returned instead.

    out[t] = sum over j = 0 .. k - 1, in that order, in fp32, of w2[e] v, rounded once to bf16, with e = topk_ids[t, j]
    v = bf16(silu(min(gate, LIMIT)) * clip(up, -LIMIT, LIMIT) * topk_weights[t, j]),  (gate, up) = w13[e] x[t]
    Where e is -1 nothing is added, so that a token without any expert gets zeros. Servers with expert parallelism pass
    -1 for the experts of other ranks.

    Products are summed in fp32. "nvfp4": before its product x[t] is quantised with in_scale13[e], and v with
    in_scale2[e], as nvfp4.encode of problems/common does: an e4m3 scale of amax / (6 in_scale) for each 16, codes of
    the value / (scale in_scale), to nearest, ties to even. A value is code * scale * in_scale.
    "fp8": both are quantised as fp8.quantise_groups of problems/common does for groups of FP8_GROUP: the least power of
    two from 2^-22 up with amax <= 448 scale, e4m3 codes of the value / scale, to nearest, ties to even. A last group
    may have 64.
    """

    weights: Weights
    inputs: Inputs
    outputs: Outputs


class Sizes(NamedTuple):
    tokens: int  # T
    experts: int  # E
    topk: int  # k
    hidden: int  # H
    inner: int  # I
    activation: str


input_t = Data
output_t = torch.Tensor  # outputs.out itself
OUTPUTS = ("out",)  # fields of Outputs, allocated and poisoned by the judge
BATCH, INVARIANT = "tokens", ("call",)
PRECISION = "bf16"  # of v, and of dequantised weights, which it holds exactly without g

ACTIVATIONS = ("bf16", "nvfp4", "fp8")
ROUTERS = ("uniform", "zipf", "one", "part", "none")
CONTENTS = ("plain", "clamped", "magnitudes", "subnormal", "extreme", "zeros")
WEIGHT_BYTES = {"bf16": 0.5625, "nvfp4": 0.5625, "fp8": 0.53125}  # of a weight: 4 bits, and 8 for each 16 or 32
FP8_GROUP, MX_BLOCK = 128, 32  # values of "fp8" that share a scale: of activations, of weights
SPAN = 14  # binades between the scales of a matrix of "fp8"


@dataclass(frozen=True)
class Case:
    """router: how tokens choose their k different experts. "uniform": all sets alike; "zipf": drawn one after another
    with chances 1, 1/2, 1/3, ... of experts in an order of the call's own; "one": all tokens the same k; "part": as
    "uniform", but half of the slots, drawn at random, and all of tokens 1 and 2 of each four are -1; "none": all are.
    """

    tokens: int  # T
    experts: int  # E
    topk: int  # experts of a token, k
    hidden: int  # H
    inner: int  # I
    activation: str  # one of ACTIVATIONS
    router: str  # one of ROUTERS
    content: str  # one of CONTENTS, as reference.py describes them
    seed: int

    def __post_init__(self) -> None:
        for name, value, known in (
            ("activation", self.activation, ACTIVATIONS),
            ("router", self.router, ROUTERS),
            ("content", self.content, CONTENTS),
        ):
            if value not in known:
                raise ValueError(f"{name} must be one of {known}, got {value!r}")
        if self.hidden % 64 or self.inner % 64 or min(self.hidden, self.inner, self.tokens) < 1:
            raise ValueError(f"hidden and inner must be multiples of 64 and tokens at least 1, got {self}")
        if not 1 <= self.topk <= self.experts:
            raise ValueError(f"topk must be 1 to the {self.experts} experts, got {self.topk}")

    def experts_hit(self) -> float:
        """Experts that some token chose: expected, for "one" exactly."""
        if self.router == "one":
            return float(self.topk)
        tokens = {"none": 0, "part": (self.tokens + 3) // 4 + self.tokens // 4}.get(self.router, self.tokens)
        return sum(1 - (1 - chance) ** tokens for chance in self._chances())

    def bytes_moved(self) -> int:
        """Least memory traffic: weights of the experts hit, as expected, x, ids and routing weights once, out once."""
        return self._bytes(self.experts_hit())

    def bytes_of(self, inputs: Inputs) -> int:
        """The same for the experts that these inputs hit."""
        return self._bytes(len(inputs.topk_ids[inputs.topk_ids >= 0].unique()))

    def _bytes(self, experts_hit: float) -> int:
        weights = experts_hit * 3 * self.hidden * self.inner * WEIGHT_BYTES[self.activation]
        return round(weights) + self.tokens * (2 * 2 * self.hidden + 2 * 4 * self.topk)

    def weight_bytes(self) -> int:
        return round(3 * self.experts * self.hidden * self.inner * WEIGHT_BYTES[self.activation])

    def flops(self) -> int:
        """Of all slots, as if none were -1, in the time of bf16's: e4m3's of "fp8" count half, as tensor cores do twice
        as many.
        """
        return (3 if self.activation == "fp8" else 6) * self.tokens * self.topk * self.hidden * self.inner

    def _chances(self) -> list[float]:
        """That a token chooses expert e, by e: their sum is k.

        "zipf": draws without replacement are the first k of exponential clocks with these rates, and at the time by
        which k of them have rung on average, each has rung with 1 - exp(-rate time): within 2 % in the experts hit.
        """
        if self.router != "zipf" or self.topk == self.experts:
            return [self.topk / self.experts / (2 if self.router == "part" else 1)] * self.experts
        rates = 1 / torch.arange(1, self.experts + 1, dtype=torch.float64)
        if self.topk == 1:
            return (rates / rates.sum()).tolist()
        low, high = 0.0, 1e6
        for _ in range(100):
            time = (low + high) / 2
            low, high = (time, high) if float((1 - (-rates * time).exp()).sum()) < self.topk else (low, time)
        return (1 - (-rates * low).exp()).tolist()


def _cases(*rows: tuple, seed: int) -> list[Case]:
    """Rows (T, E, k, H, I, activation, router, content); each gets a separate seed."""
    return [Case(*row, seed=seed + i) for i, row in enumerate(rows)]


# Any two levels of two axes meet in a test. T around tiles of 64 and 128; H and I odd multiples of 64 and of 128, never
# the same. Of routers "none" is left out: of such a case nothing else is seen.
AXES = (
    (1, 2, 3, 7, 64, 129),  # T
    ((1, 1), (2, 2), (8, 6), (17, 1), (256, 6)),  # E and k
    CONTENTS,
    ("bf16", "nvfp4") * 2,  # each is in about half of these tests
    ROUTERS[:-1],
    ((192, 64), (128, 192), (384, 64), (64, 320)),  # H and I
)
LEAST_INNER = {1: 448, 2: 320, 6: 128}  # by k, if quantised: of few values, one on the other side of a rounding is much


def tests(seed: int) -> list[Case]:
    """Return test cases, the first without any expert, the second of many tokens. Another seed gives others."""
    rng = random.Random(seed)
    rows = [*AllPairs([rng.sample(levels, len(levels)) for levels in AXES])]
    rows[:0] = [*rows[0][:4], "none", rows[0][5]], [1000, *rows[1][1:]]
    rows += [(*row[:3], "fp8", *row[4:]) for row in rows[1::4]]
    return _cases(
        *(
            (t, e, k, h, max(i, LEAST_INNER[k] * (kind != "bf16")), kind, router, content)
            for t, (e, k), content, kind, router, (h, i) in rows
        ),
        seed=seed,
    )


# Besides: larger ones.
TESTS = _cases(
    (1, 1, 1, 128, 64, "bf16", "uniform", "plain"),
    (3, 384, 6, 64, 192, "bf16", "uniform", "plain"),
    (7, 8, 2, 1088, 192, "bf16", "uniform", "plain"),
    (64, 17, 6, 192, 448, "bf16", "zipf", "plain"),
    (64, 8, 2, 320, 704, "nvfp4", "zipf", "plain"),
    (129, 2, 1, 128, 1088, "bf16", "uniform", "subnormal"),
    (1000, 8, 2, 192, 320, "bf16", "zipf", "magnitudes"),
    (1000, 17, 1, 64, 192, "bf16", "one", "plain"),
    (1000, 256, 6, 64, 128, "nvfp4", "part", "clamped"),
    (1, 1, 1, 4288, 64, "bf16", "none", "plain"),  # more rows than one unit of 32 for each multiprocessor
    seed=1000,
)
TESTS += tests(4800)  # of all but the first some output is not zero
TESTS += _cases(
    (64, 8, 2, 320, 704, "fp8", "zipf", "plain"),
    (300, 17, 6, 192, 448, "fp8", "uniform", "subnormal"),
    (1000, 256, 6, 64, 320, "fp8", "part", "clamped"),  # neighbours without tokens
    (129, 2, 2, 1088, 320, "fp8", "one", "magnitudes"),  # of all tokens: items of more than 128
    seed=2000,
)

_FLASH = (256, 6, 4096, 2048)  # E, k, H, I of V4-Flash
_SHARED = (1, 1, 4096, 2048)
_PRO = (384, 6, 7168, 3072)
BENCHMARKS = _cases(
    *((t, *_FLASH, "bf16", "uniform", "plain") for t in (1, 8, 64, 256, 1024, 4096)),
    *((t, *_FLASH, "bf16", "zipf", "plain") for t in (64, 4096)),
    *((t, *_SHARED, "bf16", "uniform", "plain") for t in (1, 64)),
    *((t, *_PRO, "bf16", "uniform", "plain") for t in (1, 64)),
    seed=1111,
)
# A tensor core of sm100 takes FP4 on both sides, so there the format with FP4 activations is timed.
BENCHMARKS_SM100 = [Case(**{**vars(case), "activation": "nvfp4"}) for case in BENCHMARKS]
BENCHMARKS += _cases(*((t, *_FLASH, "fp8", "uniform", "plain") for t in (256, 1024, 4096)), seed=1131)
# What variants for a target may be confined to.
ONLY_BY_TARGET = {"sm100": {"activation": "nvfp4"}, "cpu": {"activation": ("bf16", "nvfp4")}}
BENCHMARKS_CPU = _cases(*((t, 8, 2, 1024, 512, "bf16", "uniform", "plain") for t in (1, 8, 64, 256)), seed=1111)

# Relative errors in the 2-norm. Rounding v and out to bf16 costs 1.65e-3 each on average: an honest kernel has 1.7e-3
# (rows to 2.5e-3), one that leaves v in fp32 2.4e-3 (rows to 4.3e-3), and one that rounds gate, up and each expert's
# output to bf16 as well, as public kernels do, 3.6e-3 (rows to 6.9e-3).
RTOL = 6e-3  # of all rows as one
ROW_RTOL = 1e-2  # of any row; one of zeros must be zeros
PEER_TOL = 1e-2  # of peers, of all rows as one; rows have no separate bound
# "nvfp4": sums that differ by 1e-6 put 3 of 10 million codes of v on the other side of a rounding, sums in fp32 some
# more. That is a step in one value, or in 16 where it is a scale. Seen: 2e-3 in all; 1.8e-2 in a row, and 4.4e-2 in
# one of "zeros", with few values. To quantise v without rounding it to bf16 first is another function: 2.5e-2 in all.
NVFP4_RTOL = 2e-2
NVFP4_ROW_RTOL = 0.1
# "fp8": Hopper's FP8 tensor cores cut addends 2^-13 below the largest, so that sums of 128 products, added up in fp32,
# are off by 2^-12 of a sum's standard deviation. An error d puts a value on the other side of a rounding to e4m3, whose
# steps are s = 2^-4 to 2^-3, in d / s of all cases, and then costs s: sqrt(d s) = 5e-3 in all. Seen with 2^-12: 5e-3,
# rows to 4e-2; with 2^-11 1e-2 and 4e-2. Without quantising x 5e-2 are seen, without quantising v 2.2e-2 and more.
FP8_RTOL = 1.5e-2
FP8_ROW_RTOL = 8e-2


def unpack(data: Data) -> Sizes:
    """Sizes of one call with the weights as they came. ValueError, naming the tensor, where a dtype, shape, layout or
    device is not as the types say. topk_ids are not read: on a GPU that would wait for it (validate).
    """
    experts, hidden, inner, activation = unpack_weights(data.weights)
    tokens, topk = unpack_call(data.inputs, data.outputs, hidden)
    if topk > experts:
        raise ValueError(f"topk_ids must have at most {experts} columns, the experts, got {topk}")
    if data.inputs.x.device != data.weights.w13.device:
        raise ValueError(f"x must be on the weights' {data.weights.w13.device}, got {data.inputs.x.device}")
    return Sizes(tokens, experts, topk, hidden, inner, activation)


def unpack_weights(weights: Weights) -> tuple[int, int, int, str]:
    """-> (E, H, I, activation), for prepare. ValueError as unpack says."""
    if weights.w13.dim() != 3 or weights.w2.dim() != 3:
        raise ValueError(
            f"w13 must be (E, 2 I, H / 2) and w2 (E, H, I / 2), got {tuple(weights.w13.shape)} and "
            f"{tuple(weights.w2.shape)}"
        )
    e, h, i = weights.w13.shape[0], 2 * weights.w13.shape[2], 2 * weights.w2.shape[2]
    if e < 1 or min(h, i) < 64 or h % 64 or i % 64:
        raise ValueError(f"w13 and w2 must have H and I in multiples of 64 and an expert, got E={e} H={h} I={i}")
    if weights.activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {ACTIVATIONS}, got {weights.activation!r}")
    u8, e4m3, fp32 = torch.uint8, torch.float8_e4m3fn, torch.float32
    scale, block = (u8, MX_BLOCK) if weights.activation == "fp8" else (e4m3, 16)
    wanted = (
        (u8, (e, 2 * i, h // 2)),
        (scale, (e, 2 * i, h // block)),
        (fp32, (e,)),
        (u8, (e, h, i // 2)),
        (scale, (e, h, i // block)),
        (fp32, (e,)),
        (fp32, (e,)),
        (fp32, (e,)),
    )
    for name, tensor, (dtype, shape) in zip(Weights._fields, weights, wanted, strict=False):  # activation is left
        _check(name, tensor, dtype, shape, weights.w13.device)
    return e, h, i, weights.activation


def unpack_call(inputs: Inputs, outputs: Outputs, hidden: int) -> tuple[int, int]:
    """-> (T, k), for what comes with each call; hidden: H of the weights. ValueError as unpack says."""
    if inputs.x.dim() != 2 or inputs.topk_ids.dim() != 2 or min(inputs.topk_ids.shape) < 1:
        raise ValueError(
            f"x must be (T, H) and topk_ids (T, k), not empty, got {tuple(inputs.x.shape)} and "
            f"{tuple(inputs.topk_ids.shape)}"
        )
    t, k = inputs.topk_ids.shape
    for name, tensor, dtype, shape in (
        ("x", inputs.x, torch.bfloat16, (t, hidden)),
        ("topk_ids", inputs.topk_ids, torch.int32, (t, k)),
        ("topk_weights", inputs.topk_weights, torch.float32, (t, k)),
        ("out", outputs.out, torch.bfloat16, (t, hidden)),
    ):
        _check(name, tensor, dtype, shape, inputs.x.device)
    return t, k


def validate(inputs: Inputs, experts: int) -> None:
    """ValueError unless topk_ids are -1, or 0 to experts - 1 and different in each row. Reads them on the host."""
    ids = inputs.topk_ids
    bad = (ids < -1) | (ids >= experts)
    if bool(bad.any()):
        t, j = bad.nonzero()[0].tolist()
        raise ValueError(f"topk_ids must be -1 to {experts - 1}, got {int(ids[t, j])} at ({t}, {j})")
    ordered = ids.sort(1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if bool(twice.any()):
        t, j = twice.nonzero()[0].tolist()
        raise ValueError(f"topk_ids must be all different in a row, got {int(ordered[t, j])} twice in row {t}")


def _check(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous() or tensor.device != device:
        raise ValueError(
            f"{name} must be {dtype} {shape}, contiguous, on {device}, "
            f"got {tensor.dtype} {tuple(tensor.shape)} {tensor.stride()} on {tensor.device}"
        )
