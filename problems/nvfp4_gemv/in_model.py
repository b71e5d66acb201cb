"""Compute linear and grouped_linear of NVFP4 matrices for up to 16 tokens, codes against codes: one call a token.

It leads in no op: `--kernels winners,nvfp4_gemv=winner` puts it in front. torch encodes vectors and scales outputs.

The kernel's fp16 output has no second scale, and with scales as checkpoints have them most outputs would overflow.
So powers of two move out of the block scales into the two second scales, which are applied in fp32 behind the kernel:
out = c * (scale_2 * 2^weight_shift) * (input_scale * 2^input_shift). The weights' scales move as far as is exact, bit
for bit. The activations' scales move the rest of the way; their smallest blocks then keep fewer bits of their scales.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import torch
from task import Data

from problems.common import nvfp4
from problems.dsv4_forward.prepared import Fitted, Prepared, by_first, find, label, report
from problems.dsv4_forward.weights.linear import Linear
from problems.dsv4_forward.weights.tree import ModelWeights

TOKENS = 16  # most in a call: the kernel reads the matrix once for each
FP16_MAX = 65504.0
SIGMAS = 6  # standard deviations of an output that must fit
# With it an activation's code times its block scale is at most 6 * 448 / 2^9 = 5.25. No more is taken than is needed:
# scales below 2^-6 lose bits, and tokens at 0.03 of the calibrated range came out 11 % off with 2^9, 0.02 % with 2^3.
MOST_INPUT_SHIFT = 9
PADDED = 128  # rows of b in the problem's layout, of which the first is the vector
CHUNK = 2**22  # bytes of codes looked at together when a matrix is measured


def fit(variant: ModuleType, weights: ModelWeights, wanted: Sequence[str]) -> Fitted:
    """Fit a variant as prepared.py says. Makes a permuted copy of the scales, and a shifted one where they shift."""
    found = [w for w in weights.linears() if w.kind == "nvfp4"]
    if not found:
        return Fitted(refused=dict.fromkeys(wanted, f"no NVFP4 linears in {weights.format}"))
    made = [prepare(w) for w in found]
    calls = Calls(variant, by_first(made))
    functions = {op: getattr(calls, op) for op in wanted}
    return Fitted(functions, report=report(label(variant), "NVFP4 matrices", made, weights))


class State(NamedTuple):
    """Of a matrix, l = 1 or its groups. a, sfa, sfa_permuted: as Data has them; input_scale: fp32 (l,), of the
    activations' encoding; limits: fp32 (l, 1), where activations saturate unshifted; factor: fp32 (l, 1), both second
    scales.
    """

    a: torch.Tensor
    sfa: torch.Tensor
    sfa_permuted: torch.Tensor
    input_scale: torch.Tensor
    limits: tuple[torch.Tensor, torch.Tensor]
    factor: torch.Tensor


@dataclass(frozen=True)
class Calls:
    """The two ops, for x and out in bf16 or fp32, x without NaN (the kernel's scales have none).

    ValueError: a shape, or an NVFP4 matrix that was not prepared.
    """

    variant: ModuleType
    matrices: dict[int, Prepared]

    def linear(self, x: torch.Tensor, w: Linear, out: torch.Tensor) -> object:
        """out = x w^T. x: (N, k); out: (N, n)."""
        return self.grouped_linear(x.unsqueeze(1), w, out.unsqueeze(1))

    def grouped_linear(self, x: torch.Tensor, w: Linear, out: torch.Tensor) -> object:
        """out[:, g] = x[:, g] w[g]^T. x: (N, G, k); out: (N, G, n)."""
        if w.kind != "nvfp4" or len(x) > TOKENS or not {x.dtype, out.dtype} <= {torch.bfloat16, torch.float32}:
            return NotImplemented
        held = find(self.matrices, w)
        if held is None:
            return NotImplemented
        state, tokens = held.state, len(x)
        m, _, l = state.a.shape
        if x.shape != (tokens, l, w.k) or out.shape != (tokens, l, m):
            raise ValueError(f"x, out do not fit {w.name}: got {tuple(x.shape)}, {tuple(out.shape)}")
        # Encoded as without a shift, and no further than `measure` reckons with: to fp32, saturating where the format
        # does.
        codes, scales = nvfp4.encode(torch.clamp(x, *state.limits), state.input_scale)
        b, sfb = _padded(codes).view(torch.float4_e2m1fn_x2), _padded(scales)
        products = torch.empty(tokens, l, m, dtype=torch.float16, device=x.device)
        for token in range(tokens):
            vector = sfb[token].permute(1, 2, 0)
            data = Data(
                state.a,
                b[token].permute(1, 2, 0),
                state.sfa,
                vector,
                state.sfa_permuted,
                nvfp4.permute_scales(vector),
                products[token].unsqueeze(2).permute(1, 2, 0),
            )
            self.variant.custom_kernel(data)
        torch.mul(products, state.factor, out=out)
        return None


def _padded(rows: torch.Tensor) -> torch.Tensor:
    """(N, l, width) -> (N, l, PADDED, width), of which the first rows are these."""
    room = torch.zeros(*rows.shape[:2], PADDED, rows.shape[2], dtype=torch.uint8, device=rows.device)
    room[:, :, 0].copy_(rows.view(torch.uint8))
    return room.view(rows.dtype)


@torch.inference_mode(False)  # what is made in inference mode could not be used everywhere outside it
def prepare(w: Linear) -> Prepared:
    """w: nvfp4, with or without a leading axis of groups. ValueError: a scale that is NaN or negative."""
    codes, scales = (t if t.dim() == 3 else t.unsqueeze(0) for t in (w.weight, w.scale))
    try:
        nvfp4.check_scales(scales)
    except ValueError as error:
        raise ValueError(f"{w.name}: {error}") from error
    weight_shift, input_shift, reach = measure(codes, scales)
    if reason := _refusal(w, codes, scales):
        return Prepared((w,), reason)
    if reach > FP16_MAX:
        moved = f"2^{weight_shift} from the weights, exactly, and 2^{input_shift} from the activations"
        reason = f"{SIGMAS} standard deviations of an output reach {reach:.3g} of {FP16_MAX:g} with {moved}"
        return Prepared((w,), reason)
    a, sfa = codes.view(torch.float4_e2m1fn_x2).permute(1, 2, 0), shifted(scales, weight_shift).permute(1, 2, 0)
    nominal = w.input_scale.reshape(-1)
    input_scale, limit = nominal * 2.0**input_shift, nominal.unsqueeze(1) * nvfp4.E2M1_MAX * nvfp4.E4M3_MAX
    factor = w.scale_2.reshape(-1) * 2.0**weight_shift * input_scale
    state = State(a, sfa, nvfp4.permute_scales(sfa), input_scale, (-limit, limit), factor.unsqueeze(1))
    return Prepared((w,), state=state)


def _refusal(w: Linear, codes: torch.Tensor, scales: torch.Tensor) -> str:
    """Why the kernel cannot multiply by w, "" if it can."""
    if not w.quantise_input:
        return "its input is not quantised"
    if w.k % 64:
        return f"k must be a multiple of 64, is {w.k}"
    if not (codes.is_contiguous() and scales.is_contiguous()):
        return "its codes or scales are not contiguous"
    if codes.data_ptr() % 16 or scales.data_ptr() % 16:
        return "its codes or scales do not start at a multiple of 16 bytes"
    return ""


def measure(codes: torch.Tensor, scales: torch.Tensor) -> tuple[int, int, float]:
    """How far a matrix's scales move, in powers of two: the least shift of the activations that fp16 needs, and the
    least of the weights with which that is possible.

    codes: uint8 (l, m, k // 2); scales: e4m3 (l, m, k // 16). -> shift of the weights, of the activations, and SIGMAS
    standard deviations of the largest output then, every activation being as large as its format allows (6 x the
    largest block scale) and of random sign.
    """
    reach = SIGMAS * nvfp4.E2M1_MAX * nvfp4.E4M3_MAX * largest_norm(codes, scales)
    wanted = math.ceil(math.log2(reach / FP16_MAX)) if reach > FP16_MAX else 0
    weight_shift = exact_shift(scales, wanted)
    input_shift = min(wanted - weight_shift, MOST_INPUT_SHIFT)
    return weight_shift, input_shift, reach * 2.0 ** -(weight_shift + input_shift)


def largest_norm(codes: torch.Tensor, scales: torch.Tensor) -> float:
    """The largest Euclidean norm of a row of code x scale; codes, scales as in `measure`."""
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
