"""Compute the ops linear and grouped_linear with nvfp4_gemv: NVFP4 matrices times a few tokens, codes against codes.

The kernel's fp16 output has no second scale, and with scales as checkpoints have them most outputs would overflow.
So powers of two move out of the block scales into the two second scales, which are applied in fp32 behind the kernel:
out = c * (scale_2 * 2^weight_shift) * (input_scale * 2^input_shift). The weights' scales move as far as is exact, bit
for bit. The activations' scales move the rest of the way; their smallest blocks then keep fewer bits of their scales.

A call is the encoding, the kernel once a token, and the product with the second scales: 3 launches for one token. The
kernel reads the matrix once for each token, so that from two tokens on the fallback takes every matrix that it serves;
of a grouped one, which it multiplies group by group, from as many tokens on as there are groups.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import NamedTuple

import torch

from problems.common import load, nvfp4
from problems.dsv4_forward.adapters.common import Adapted, Fallback
from problems.dsv4_forward.kernels import vectors
from problems.dsv4_forward.kernels.vectors import Rows
from problems.dsv4_forward.weights.linear import Linear
from problems.dsv4_forward.weights.tree import ModelWeights

PROBLEM = "nvfp4_gemv"
TOKENS = 16  # most in a call that goes through the kernel: it reads the matrix once for each
FP16_MAX = 65504.0
SIGMAS = 6  # standard deviations of an output that must fit
# With it an activation's code times its block scale is at most 6 * 448 / 2^9 = 5.25. No more is taken than is needed:
# scales below 2^-6 lose bits, and tokens at 0.03 of the calibrated range came out 11 % off with 2^9, 0.02 % with 2^3.
MOST_INPUT_SHIFT = 9
PADDED = 128  # rows of b in the problem's layout, of which the first is the vector
SPACING = PADDED // TOKENS  # rows between tokens' vectors, which lie in each other's padding
CHUNK = 2**22  # bytes of codes looked at together when a matrix is measured


@dataclass(frozen=True)
class Fit:
    """How far a matrix's scales move, in powers of two. reach: SIGMAS standard deviations of its largest output then,
    every activation being as large as its format allows (6 x the largest block scale) and of random sign.
    """

    weight_shift: int
    input_shift: int
    reach: float

    @property
    def fits(self) -> bool:
        return self.reach <= FP16_MAX


@dataclass(frozen=True)
class Vectors:
    """Room for TOKENS times l vectors of length k, shared by all matrices of that k and l.

    operands: b, sfb, sfb_permuted of each token as the problem wants them; rows[N]: the same memory to write N into.
    """

    operands: tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], ...]
    rows: tuple[Rows, ...]


@dataclass(frozen=True)
class Matrix:
    """One NVFP4 Linear, l = 1 or its groups. calls: the problem's Data by token, () where `reason` says why not."""

    linear: Linear
    fit: Fit
    reason: str
    calls: tuple[NamedTuple, ...] = ()
    vectors: Vectors | None = None
    products: torch.Tensor | None = None  # fp16 (TOKENS, l, m): the calls' outputs
    input_scale: torch.Tensor | None = None  # fp32 (l,), of the activations' encoding
    limit: tuple[torch.Tensor, torch.Tensor] | None = None  # fp32 (l, 1), where activations saturate unshifted
    factor: torch.Tensor | None = None  # fp32 (l, 1), both second scales


@dataclass(frozen=True)
class Gemv:
    """The two ops. kernel: a custom_kernel of the problem; matrices: by id() of the Linear, which they keep alive;
    fallback: computes the calls that the kernel does not serve; edges: encodes before it and scales behind it.
    """

    kernel: Callable[[NamedTuple], torch.Tensor]
    matrices: dict[int, Matrix]
    fallback: Fallback
    edges: vectors.TorchVectors | vectors.Vectors = field(default_factory=vectors.TorchVectors)

    def linear(self, x: torch.Tensor, w: Linear, out: torch.Tensor) -> None:
        """out = x w^T, as linear.linear. x: (N, k), no NaN (the kernel's scales have none); out: (N, n).

        ValueError: a shape, or an NVFP4 matrix that was not prepared.
        """
        matrix = self._matrix(x, w, out)
        if matrix is None:
            self.fallback.ops.linear(x, w, out)
        else:
            self._multiply(matrix, x.unsqueeze(1), out.unsqueeze(1))

    def grouped_linear(self, x: torch.Tensor, w: Linear, out: torch.Tensor) -> None:
        """out[:, g] = x[:, g] w[g]^T, as linear.grouped_linear. x: (N, G, k); out: (N, G, n). Else as linear."""
        matrix = self._matrix(x, w, out)
        if matrix is None:
            self.fallback.ops.grouped_linear(x, w, out)
        else:
            self._multiply(matrix, x, out)

    def _matrix(self, x: torch.Tensor, w: Linear, out: torch.Tensor) -> Matrix | None:
        if w.kind != "nvfp4" or len(x) > TOKENS:
            return None
        if id(w) not in self.matrices:
            raise ValueError(f"w ({w.name}) must be one of the weights that the kernels were chosen for")
        matrix = self.matrices[id(w)]
        if not matrix.calls:
            return None
        # The plain product takes bf16 only.
        most = most_tokens(matrix, self.fallback) if {x.dtype, out.dtype} == {torch.bfloat16} else TOKENS
        return matrix if len(x) <= most else None

    def _multiply(self, matrix: Matrix, x: torch.Tensor, out: torch.Tensor) -> None:
        """x: (N, l, k); out: (N, l, m)."""
        tokens = len(x)
        l, m = matrix.products.shape[1:]
        if x.shape != (tokens, l, 2 * matrix.linear.weight.shape[-1]) or out.shape != (tokens, l, m):
            raise ValueError(f"x, out do not fit {matrix.linear.name}: got {tuple(x.shape)}, {tuple(out.shape)}")
        rows = matrix.vectors.rows[tokens]
        # Encoded as without a shift, and no further than `fit` reckons with: to fp32, saturating where the format does.
        self.edges.encode(x, matrix.input_scale, *matrix.limit, rows)
        for data in matrix.calls[:tokens]:
            self.kernel(data)
        self.edges.scale(matrix.products[:tokens], matrix.factor, out)


def most_tokens(matrix: Matrix, fallback: Fallback) -> int:
    """Return how many tokens a call of the kernel has at most, the matrix being one that it can multiply by."""
    return max(1, len(matrix.factor) - 1) if id(matrix.linear) in fallback.served else TOKENS


def make_vectors(k: int, l: int, device: torch.device) -> Vectors:
    """Token t's vectors are rows SPACING * t of the padded blocks, and t of the permuted ones: the problem's padding
    may hold anything, and both keep them aligned to 16 bytes for every k that is a multiple of 64.
    """

    def room(size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8, device=device).view(dtype)

    rows, steps = PADDED * l + PADDED - SPACING, k // 64
    codes = room(rows * k // 2, torch.uint8)
    scales = room(rows * k // 16, torch.float8_e4m3fn)
    permuted = room(l * steps * 512 + 16 * (TOKENS - 1), torch.float8_e4m3fn)
    b, fp4 = codes.as_strided((PADDED, k // 2, l), (k // 2, 1, 64 * k)), torch.float4_e2m1fn_x2
    sfb = scales.as_strided((PADDED, k // 16, l), (k // 16, 1, 8 * k))
    sfb_permuted = permuted.as_strided((32, 4, 1, 4, steps, l), (16, 4, 512 * steps, 1, 512, 512 * steps))
    operands = tuple(
        (_at(b, t * SPACING * k // 2).view(fp4), _at(sfb, t * SPACING * k // 16), _at(sfb_permuted, 16 * t))
        for t in range(TOKENS)
    )
    every = Rows(
        codes.as_strided((TOKENS, l, k // 2), (SPACING * k // 2, 64 * k, 1)),
        scales.as_strided((TOKENS, l, k // 16), (SPACING * k // 16, 8 * k, 1)),
        permuted.as_strided((TOKENS, l, steps, 4), (16, 512 * steps, 512, 1)),
    )
    return Vectors(operands, tuple(Rows(*(part[:n] for part in every)) for n in range(TOKENS + 1)))


def _at(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """The same shape and strides, `offset` elements further on."""
    return tensor.as_strided(tensor.shape, tensor.stride(), offset)


def make_products(l: int, m: int, device: torch.device) -> torch.Tensor:
    """-> fp16 (TOKENS, l, m)."""
    return torch.empty(TOKENS, l, m, dtype=torch.float16, device=device)


def adapt(module: ModuleType, weights: ModelWeights, fallback: Fallback) -> Adapted:
    """Fit `module`, a variant of the problem, to the weights. -> the ops, and lines on the matrices that it leaves."""
    matrices = prepare(weights)
    by_id = {id(matrix.linear): matrix for matrix in matrices}
    gemv = Gemv(module.custom_kernel, by_id, fallback, make_edges(weights))
    served = frozenset(number for number, matrix in by_id.items() if matrix.calls)
    return Adapted({"linear": gemv.linear, "grouped_linear": gemv.grouped_linear}, report(matrices, fallback), served)


def make_edges(weights: ModelWeights) -> vectors.TorchVectors | vectors.Vectors:
    """Return what encodes and scales where the weights are: CUDA kernels on a GPU that they are for, else torch."""
    target = load.device_target(weights.embed.device)
    return vectors.Vectors(target) if target in vectors.TARGETS else vectors.TorchVectors()


def report(matrices: list[Matrix], fallback: Fallback) -> tuple[str, ...]:
    """How many matrices the kernel multiplies and how many tokens at most, and each that the fallback does, with the
    reason.
    """
    served = [matrix for matrix in matrices if matrix.calls]
    shifts = f", activations moved by up to 2^{max(matrix.fit.input_shift for matrix in served)}" if served else ""
    lines = [f"{PROBLEM}: {len(served)} of {len(matrices)} NVFP4 matrices{shifts}"]
    counts = Counter(most_tokens(matrix, fallback) for matrix in served if id(matrix.linear) in fallback.served)
    for tokens, count in sorted(counts.items()):
        calls = f"at most {_count(tokens, 'token', 'tokens')} of {_count(count, 'matrix', 'matrices')}"
        lines.append(f"{PROBLEM}: calls of {calls}; {fallback.name} has the others")
    lines += [f"{matrix.linear.name}: {fallback.name} ({matrix.reason})" for matrix in matrices if not matrix.calls]
    return tuple(lines)


def _count(number: int, one: str, more: str) -> str:
    return f"{number} {one if number == 1 else more}"


@torch.inference_mode(False)  # buffers made in inference mode could not be written outside it
def prepare(weights: ModelWeights) -> list[Matrix]:
    """Prepare what a call needs of each NVFP4 matrix that the two ops receive.

    Reads the weights, waits for the device; makes a permuted copy of the scales, and a shifted one where they shift,
    and never copies codes. ValueError: a scale that is NaN or negative.
    """
    data = load.module(load.PROBLEMS / PROBLEM, "task").Data
    # Calls run one after another, so matrices of one shape share their buffers.
    vectors, products = functools.cache(make_vectors), functools.cache(make_products)
    return [make_matrix(w, data, vectors, products) for w in weights.linears() if w.kind == "nvfp4"]


def make_matrix(w: Linear, data: type, vectors: Callable = make_vectors, products: Callable = make_products) -> Matrix:
    """w: nvfp4, with or without a leading axis of groups. data: task.Data. ValueError as prepare."""
    codes, scales = (t if t.dim() == 3 else t.unsqueeze(0) for t in (w.weight, w.scale))
    try:
        nvfp4.check_scales(scales)
    except ValueError as error:
        raise ValueError(f"{w.name}: {error}") from error
    found = fit(codes, scales)
    if reason := _refusal(w, codes, scales, found):
        return Matrix(w, found, reason)
    l, m, _ = codes.shape
    room, product = vectors(w.k, l, codes.device), products(l, m, codes.device)
    a, sfa = codes.view(torch.float4_e2m1fn_x2).permute(1, 2, 0), shifted(scales, found.weight_shift).permute(1, 2, 0)
    permuted = nvfp4.permute_scales(sfa)
    calls = tuple(
        data(a, b, sfa, sfb, permuted, sfb_permuted, c.unsqueeze(2).permute(1, 2, 0))
        for (b, sfb, sfb_permuted), c in zip(room.operands, product, strict=True)
    )
    nominal = w.input_scale.reshape(l)
    input_scale, limit = nominal * 2.0**found.input_shift, nominal.unsqueeze(1) * nvfp4.E2M1_MAX * nvfp4.E4M3_MAX
    factor = w.scale_2.reshape(l) * 2.0**found.weight_shift * input_scale
    return Matrix(w, found, "", calls, room, product, input_scale, (-limit, limit), factor.unsqueeze(1))


def _refusal(w: Linear, codes: torch.Tensor, scales: torch.Tensor, found: Fit) -> str:
    """Why the kernel cannot multiply by w, "" if it can."""
    if not w.quantise_input:
        return "its input is not quantised"
    if codes.shape[-1] % 32:
        return f"k must be a multiple of 64, is {2 * codes.shape[-1]}"
    if not (codes.is_contiguous() and scales.is_contiguous()):
        return "its codes or scales are not contiguous"
    if codes.data_ptr() % 16 or scales.data_ptr() % 16:
        return "its codes or scales do not start at a multiple of 16 bytes"
    if not found.fits:
        moved = f"2^{found.weight_shift} from the weights, exactly, and 2^{found.input_shift} from the activations"
        return f"{SIGMAS} standard deviations of an output reach {found.reach:.3g} of {FP16_MAX:g} with {moved}"
    return ""


def fit(codes: torch.Tensor, scales: torch.Tensor) -> Fit:
    """codes: uint8 (l, m, k // 2); scales: e4m3 (l, m, k // 16). The least shift of the activations that fp16 needs,
    and the least of the weights with which that is possible.
    """
    reach = SIGMAS * nvfp4.E2M1_MAX * nvfp4.E4M3_MAX * largest_norm(codes, scales)
    wanted = math.ceil(math.log2(reach / FP16_MAX)) if reach > FP16_MAX else 0
    weight_shift = exact_shift(scales, wanted)
    input_shift = min(wanted - weight_shift, MOST_INPUT_SHIFT)
    return Fit(weight_shift, input_shift, reach * 2.0 ** -(weight_shift + input_shift))


def largest_norm(codes: torch.Tensor, scales: torch.Tensor) -> float:
    """The largest Euclidean norm of a row of code x scale; codes, scales as in `fit`."""
    value = torch.tensor(nvfp4.E2M1, device=codes.device)
    square = (value**2 + value.unsqueeze(1) ** 2).flatten()  # of the pair of codes in a byte
    codes, scales = codes.flatten(0, 1), scales.flatten(0, 1)
    rows = max(1, CHUNK // codes.shape[1])
    largest = 0.0
    for pairs, part in zip(codes.split(rows), scales.split(rows), strict=True):
        blocks = square[pairs.int()].unflatten(1, (-1, nvfp4.BLOCK // 2)).sum(2)
        largest = max(largest, float((blocks * part.float() ** 2).sum(1).max()))
    return math.sqrt(largest)


def exact_shift(scales: torch.Tensor, most: int) -> int:
    """The largest s <= most for which every scale (e4m3) times 2^-s is an e4m3 value."""
    present = torch.bincount(scales.view(torch.uint8).flatten().int(), minlength=256).nonzero().flatten()
    values = present.to(torch.uint8).view(torch.float8_e4m3fn).float()
    for shift in range(most, 0, -1):
        moved = values * 2.0**-shift
        if torch.equal(moved.to(torch.float8_e4m3fn).float(), moved):
            return shift
    return 0


def shifted(scales: torch.Tensor, shift: int) -> torch.Tensor:
    """scales (e4m3) times 2^-shift; themselves for 0."""
    return (scales.float() * 2.0**-shift).to(scales.dtype) if shift else scales
