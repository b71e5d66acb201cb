"""Compute the model's linear, grouped_linear, two_linears, norm_linears and shared: matrices times 1 to 32 tokens.

The model's matrices are those of the problem, as they lie in memory. A variant may define two functions for linear at
prefill, of MANY tokens and more; else other kernels have it:

    prepare_few(weights) -> state
        As prepare, without copies that only calls of more than 32 tokens need.
    many(state, tokens) -> bool
        Whether custom_kernel takes a call of so many tokens; state: what prepare_few returned.

It may define two more, for the shared expert:

    prepare_expert(w13, w2) -> state
        w13, w2: task.Weights of a matrix each, (1, 2 I, k) and (1, n, I), of one format. Bound as prepare's.
        ValueError: matrices that it cannot take; the report says why.
    expert(state, limit, x, out)
        out = w2 (silu(min(gate, limit)) * clip(up, -limit, limit)), gate the first half of w13 x and up the second.
        Both products' inputs as their matrices want them, sums in fp32, rounded to bf16 behind the product of gate and
        up, and at the end. x: bf16 (T, k), out: bf16 (T, n), both contiguous; T is 1 to 32.

And two more, which norm the input of a matrix:

    norms(state, tokens) -> bool
        Whether with_norm takes a call of so many tokens; state: what prepare returned.
    with_norm(data, weight, eps) -> outputs
        As custom_kernel of x / sqrt(mean of its squares + eps) * weight, computed in fp32 and rounded to bf16 once.
        weight: bf16 (k,), contiguous and aligned. Bits are to be those of both steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from task import FEW_TOKENS, Data, Inputs, Matrix, Outputs, Weights, unpack_weights

from problems.dsv4_forward.prepared import (
    ALIGNMENT,
    Fitted,
    Prepared,
    by_first,
    check_values,
    find,
    fits,
    label,
    placed,
    report,
    room_for,
    uneven,
)
from problems.dsv4_forward.weights.linear import Linear
from problems.dsv4_forward.weights.tree import ModelWeights

KINDS = {"fp8": "fp8", "plain": "bf16", "nvfp4": "nvfp4"}  # of a Linear -> the problem's format
MANY = 512  # tokens of linear from which a variant's custom_kernel is taken, not cuBLAS on values in bf16
INPUT_SCALE = 2.0**64  # the largest that the problem has, and one over the least
OPTIONAL = {"norm_linears": ("norms", "with_norm"), "shared": ("prepare_expert", "expert")}


def fit(variant: ModuleType, weights: ModelWeights, wanted: Sequence[str]) -> Fitted:
    """Fit a variant as prepared.py says."""
    if weights.format == "fp32":
        return Fitted(refused=dict.fromkeys(wanted, "no FP8, NVFP4 or bf16 linears in fp32"))
    lacking = {op: names for op, names in OPTIONAL.items() if not all(hasattr(variant, name) for name in names)}
    refused = {op: f"it has no {' and '.join(lacking[op])}" for op in wanted if op in lacking}
    ops = [op for op in wanted if op not in refused]
    groups = {
        "matrices": [(w,) for w in weights.linears() if {"linear", "grouped_linear", "norm_linears"} & {*ops}],
        "pairs of one input": [(b.attn.wq_a, b.attn.wkv) for b in weights.blocks() if "two_linears" in ops],
        "shared experts": [(b.ffn.shared_w13, b.ffn.shared_w2) for b in weights.blocks() if "shared" in ops],
    }
    made = {
        unit: [prepare(variant, *one, expert=unit == "shared experts") for one in given if one[0].kind in KINDS]
        for unit, given in groups.items()
    }
    calls = Calls(variant, *(by_first(several) for several in made.values()))
    lines = (line for unit, some in made.items() if some for line in report(label(variant), unit, some, weights))
    return Fitted({op: getattr(calls, op) for op in ops}, refused, tuple(lines))


@dataclass(frozen=True)
class Calls:
    """The ops, for bf16 activations. The matrices by id() of the first one. ValueError: a shape, or a matrix of one of
    KINDS that was not prepared.
    """

    variant: ModuleType
    matrices: dict[int, Prepared]
    pairs: dict[int, Prepared]
    experts: dict[int, Prepared]

    def linear(self, x: torch.Tensor, w: Linear, out: torch.Tensor) -> object:
        """out = x w^T. x: (N, k); out: (N, n)."""
        held = self._of_many(x, w) if len(x) >= MANY else _held(self.matrices, x, w)
        return _multiply(self.variant.custom_kernel, held, x, out, (), "linear") if held else NotImplemented

    def _of_many(self, x: torch.Tensor, w: Linear) -> Prepared | None:
        """The matrix, if the variant multiplies so many tokens by it."""
        if w.kind not in KINDS or x.dtype != torch.bfloat16 or not hasattr(self.variant, "many"):
            return None
        held = find(self.matrices, w)
        return held if held and self.variant.many(held.state, len(x)) else None

    def grouped_linear(self, x: torch.Tensor, w: Linear, out: torch.Tensor) -> object:
        """out[:, g] = x[:, g] w[g]^T. x: (N, G, k); out: (N, G, n)."""
        held, groups = _held(self.matrices, x, w), w.weight.shape[:1]
        return _multiply(self.variant.custom_kernel, held, x, out, groups, "grouped_linear") if held else NotImplemented

    def two_linears(
        self, x: torch.Tensor, first: Linear, second: Linear, first_out: torch.Tensor, second_out: torch.Tensor
    ) -> object:
        """Both products in one call. Nothing is copied where both outputs are bf16, one behind the other in memory."""
        pair = _held(self.pairs, x, first, second)
        if pair is None:
            return NotImplemented
        tokens, outs = len(x), (first_out, second_out)
        if x.shape != (tokens, first.k) or [out.shape for out in outs] != [(tokens, w.n) for w in (first, second)]:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (x, *outs))
            raise ValueError(f"x, outs do not fit {pair.name} in two_linears: got {shapes}")
        alignment, sizes = ALIGNMENT[x.device.type], [tokens * w.n for w in (first, second)]
        mine = _adjacent(first_out, second_out, alignment)
        room = first_out.as_strided((sum(sizes),), (1,)) if mine else x.new_empty(sum(sizes))
        self.variant.custom_kernel(Data(pair.state, Inputs(placed(x, alignment)), Outputs(room)))
        if not mine:
            for out, part in zip(outs, room.split(sizes), strict=True):
                out.copy_(part.view(out.shape))
        return None

    def norm_linears(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        matrices: Sequence[Linear],
        outs: Sequence[torch.Tensor],
    ) -> object:
        """Each matrix norms x by itself."""
        if weight.dtype != torch.bfloat16 or not fits(weight, ALIGNMENT[x.device.type]):
            return NotImplemented
        held = [_held(self.matrices, x, w) for w in matrices]
        if not all(one and self.variant.norms(one.state, len(x)) for one in held):
            return NotImplemented
        for one, out in zip(held, outs, strict=True):
            _multiply(self.variant.with_norm, one, x, out, (), "norm_linears", weight, eps)
        return None

    def shared(self, x: torch.Tensor, w13: Linear, w2: Linear, limit: float, out: torch.Tensor) -> object:
        """The expert of every token. x: (N, k); out: (N, n)."""
        held = _held(self.experts, x, w13, w2)
        if held is None:
            return NotImplemented
        if x.shape != (len(x), w13.k) or out.shape != (len(x), w2.n):
            raise ValueError(f"x, out do not fit {w13.name} in shared: got {tuple(x.shape)}, {tuple(out.shape)}")
        alignment = ALIGNMENT[x.device.type]
        room = room_for(out, alignment)
        self.variant.expert(held.state, limit, placed(x, alignment), room)
        if room is not out:
            out.copy_(room)
        return None


def _held(known: dict[int, Prepared], x: torch.Tensor, *matrices: Linear) -> Prepared | None:
    """What was made of the matrices; None for a call that the problem has not."""
    if matrices[0].kind not in KINDS or x.dtype != torch.bfloat16 or not 1 <= len(x) <= FEW_TOKENS:
        return None
    return find(known, *matrices)


def _multiply(
    kernel: object, held: Prepared, x: torch.Tensor, out: torch.Tensor, groups: tuple[int, ...], op: str, *norm: object
) -> None:
    """groups: () or (G,), the axis between tokens and values; norm: weight and eps where x is to be normed."""
    tokens, (w,) = len(x), held.matrices
    if x.shape != (tokens, *groups, w.k) or out.shape != (tokens, *groups, w.n):
        raise ValueError(f"x, out do not fit {w.name} in {op}: got {tuple(x.shape)}, {tuple(out.shape)}")
    alignment = ALIGNMENT[x.device.type]
    room = room_for(out, alignment)
    kernel(Data(held.state, Inputs(placed(x, alignment).view(tokens, -1)), Outputs(room.view(-1))), *norm)
    if room is not out:
        out.copy_(room)


def _adjacent(first: torch.Tensor, second: torch.Tensor, alignment: int) -> bool:
    """Whether both are bf16, contiguous, and `second` begins where `first` ends, which a kernel can take."""
    return (
        first.dtype == second.dtype == torch.bfloat16
        and fits(first, alignment)
        and second.is_contiguous()
        and first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
        and second.data_ptr() == first.data_ptr() + first.nbytes
    )


@torch.inference_mode(False)  # what is made in inference mode could not be used everywhere outside it
def prepare(variant: ModuleType, *matrices: Linear, expert: bool = False) -> Prepared:
    """Prepare matrices, the first of one of KINDS, for one call: as one link, or as both of an expert.

    ValueError, naming the matrix: scales that are none.
    """
    first, *others = matrices
    unlike = [f"one is {first.kind}, the other {w.kind}" for w in others if w.kind != first.kind]
    if reasons := [reason for reason in (*unlike, *map(_refusal, matrices)) if reason]:
        return Prepared(matrices, reasons[0])
    links = [(_matrix(w),) for w in matrices] if expert else [tuple(_matrix(w) for w in matrices)]
    given = [Weights(KINDS[first.kind], (link,)) for link in links]
    try:
        if expert:
            return Prepared(matrices, state=variant.prepare_expert(*given))
        unpack_weights(*given)
        made = getattr(variant, "prepare_few", getattr(variant, "prepare", None))
        return Prepared(matrices, state=made(*given) if made else given[0])
    except ValueError as error:
        return Prepared(matrices, str(error))


def _matrix(w: Linear) -> Matrix:
    """A task.Matrix on the memory of w. ValueError as prepare."""
    codes, scale = (t if t is None or t.dim() == 3 else t.unsqueeze(0) for t in (w.weight, w.scale))
    if w.kind == "plain":
        return Matrix(codes, None, None, False)
    if w.kind == "nvfp4":
        check_values(w)
        input_scale = w.input_scale.reshape(-1) if w.quantise_input else None
        return Matrix(codes, scale, w.scale_2.reshape(-1), w.quantise_input, input_scale)
    scale = scale.view(torch.uint8)
    if bool((scale == 255).any()):
        raise ValueError(f"{w.name}: scale bytes must be 0 to 254, got {int(scale.min())} to {int(scale.max())}")
    return Matrix(codes, scale, None, w.quantise_input)


def _refusal(w: Linear) -> str:
    """Why the problem has no such matrix, "" if it has."""
    if w.kind not in KINDS or (w.kind == "plain" and w.weight.dtype != torch.bfloat16):
        return f"its weights are {w.kind}, {w.weight.dtype}"
    if w.weight.dim() > 3:
        return f"it has {w.weight.dim()} axes"
    alignment = ALIGNMENT[w.weight.device.type]
    if not all(t is None or fits(t, alignment) for t in (w.weight, w.scale)):
        return f"its codes or scales are not contiguous, or do not start at a multiple of {alignment} bytes"
    if w.kind == "fp8" and bool((w.scale.view(torch.uint8) == 0).any()):  # 2^-127, which fp32 holds as a subnormal
        return "its scale bytes must be 1 or more, some are 0"
    if w.kind == "nvfp4" and w.quantise_input:
        low, high = float(w.input_scale.min()), float(w.input_scale.max())
        if low > 0 and not 1 / INPUT_SCALE <= low <= high <= INPUT_SCALE:  # others are errors
            return f"its input scales must be 2^-64 to 2^64, are {low:g} to {high:g}"
    return uneven(n=w.n, k=w.k)
