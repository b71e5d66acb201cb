"""Compute the ops linear, grouped_linear and shared with linear_decode: matrices times 1 to 32 tokens.

The model's matrices are those of the problem, as they lie in memory. A call of more tokens, of other types of
activations or with a matrix that the problem has not goes to the fallback.

A variant of linear_decode may define two more functions, for the shared expert:

    prepare_expert(w13, w2) -> state
        w13, w2: task.Weights of a matrix each, (1, 2 I, k) and (1, n, I), of one format. Bound as prepare's.
        ValueError: matrices that it cannot take; the fallback does, and the report says why.
    expert(state, limit, x, out)
        out = w2 (silu(min(gate, limit)) * clip(up, -limit, limit)), gate the first half of w13 x and up the second.
        Both products' inputs as their matrices want them, sums in fp32, rounded to bf16 behind the product of gate and
        up, and at the end. x: bf16 (T, k), out: bf16 (T, n), both contiguous; T is 1 to 32.

Without them the fallback computes the shared expert.

And two more, which norm the input of a matrix:

    norms(state, tokens) -> bool
        Whether with_norm takes a call of so many tokens; state: what prepare returned.
    with_norm(data, weight, eps) -> outputs
        As custom_kernel of x / sqrt(mean of its squares + eps) * weight, computed in fp32 and rounded to bf16 once.
        weight: bf16 (k,), contiguous and aligned. Bits are to be those of both steps.

Without them norm_linears is the chain of rms_norm and linear.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import NamedTuple

import torch

from problems.common import load
from problems.dsv4_forward.adapters import common
from problems.dsv4_forward.adapters.common import (
    ALIGNMENT,
    Adapted,
    AllOps,
    Fallback,
    Partial,
    Rounding,
    check_values,
    fits,
    placed,
    uneven,
)
from problems.dsv4_forward.weights.linear import Linear
from problems.dsv4_forward.weights.tree import ModelWeights

PROBLEM = "linear_decode"
KINDS = {"fp8": "fp8", "plain": "bf16", "nvfp4": "nvfp4"}  # of a Linear -> the problem's format

INPUT_SCALE = 2.0**64  # the largest that the problem has, and one over the least


@dataclass(frozen=True)
class Matrix:
    """One Linear. state: what a call gets as its weights, None where `reason` says why there is none."""

    linear: Linear
    reason: str
    state: object = None

    @property
    def name(self) -> str:
        return self.linear.name


@dataclass(frozen=True)
class Pair:
    """Two Linears of one input, in one call. Else as Matrix."""

    first: Linear
    second: Linear
    reason: str
    state: object = None

    @property
    def name(self) -> str:
        return f"{self.first.name} with {self.second.name}"


@dataclass(frozen=True)
class Linears:
    """The ops. task: the problem's; kernel: a custom_kernel of it; matrices: by id() of the Linear, which they keep
    alive; fallback: computes the calls that the kernel does not serve; pairs: by id() of both. with_norm, takes_norm:
    of the variant, with_norm and norms, or None.
    """

    task: ModuleType
    kernel: Callable[..., object]
    matrices: dict[int, Matrix]
    fallback: AllOps
    pairs: dict[tuple[int, int], Pair] = field(default_factory=dict)
    with_norm: Callable[..., object] | None = None
    takes_norm: Callable[[object, int], bool] | None = None

    def linear(self, x: torch.Tensor, w: Linear, out: torch.Tensor) -> None:
        """out = x w^T, as linear.linear. x: (N, k); out: (N, n).

        ValueError: a shape, or a matrix of one of KINDS that was not prepared.
        """
        if self._serves(x, w, out):
            self._run(x, w, out, (), "linear")
        else:
            self.fallback.linear(x, w, out)

    def grouped_linear(self, x: torch.Tensor, w: Linear, out: torch.Tensor) -> None:
        """out[:, g] = x[:, g] w[g]^T, as linear.grouped_linear. x: (N, G, k); out: (N, G, n). Else as linear."""
        if self._serves(x, w, out):
            self._run(x, w, out, (len(w.weight),), "grouped_linear")
        else:
            self.fallback.grouped_linear(x, w, out)

    def two_linears(
        self, x: torch.Tensor, first: Linear, second: Linear, first_out: torch.Tensor, second_out: torch.Tensor
    ) -> None:
        """As chains.two_linears: one call for a pair that was prepared, else two of linear. Nothing is copied where the
        outputs are bf16 and one behind the other in memory.
        """
        pair = self.pairs.get((id(first), id(second)))
        if pair is None or pair.reason or not self._serves(x, first, first_out):
            self.linear(x, first, first_out)
            self.linear(x, second, second_out)
            return
        tokens, outs = len(x), (first_out, second_out)
        if x.shape != (tokens, first.k) or [out.shape for out in outs] != [(tokens, w.n) for w in (first, second)]:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (x, *outs))
            raise ValueError(f"x, outs do not fit {pair.name} in two_linears: got {shapes}")
        alignment, sizes = ALIGNMENT[x.device.type], [tokens * w.n for w in (first, second)]
        mine = _adjacent(first_out, second_out, alignment)
        room = first_out.as_strided((sum(sizes),), (1,)) if mine else x.new_empty(sum(sizes))
        inputs = self.task.Inputs(placed(x, alignment))
        self.kernel(self.task.Data(pair.state, inputs, self.task.Outputs(room)))
        if not mine:
            for out, part in zip(outs, room.split(sizes), strict=True):
                out.copy_(part.view(out.shape))

    def norm_linears(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        matrices: Sequence[Linear],
        outs: Sequence[torch.Tensor],
    ) -> None:
        """As chains.norm_linears, of calls that `norms` takes: each matrix norms x by itself."""
        for w, out in zip(matrices, outs, strict=True):
            self._run(x, w, out, (), "norm_linears", (weight, eps))

    def norms(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        matrices: Sequence[Linear],
        outs: Sequence[torch.Tensor],
    ) -> bool:
        """Return whether the variant has a call of norm_linears. ValueError as linear."""
        if self.with_norm is None or weight.dtype != torch.bfloat16 or not fits(weight, ALIGNMENT[x.device.type]):
            return False
        served = all(self._serves(x, w, out) for w, out in zip(matrices, outs, strict=True))
        return served and all(self.takes_norm(self.matrices[id(w)].state, len(x)) for w in matrices)

    def _serves(self, x: torch.Tensor, w: Linear, out: torch.Tensor) -> bool:
        if w.kind not in KINDS or x.dtype != torch.bfloat16 or not 1 <= len(x) <= self.task.MOST_TOKENS:
            return False
        if id(w) not in self.matrices:
            raise ValueError(f"w ({w.name}) must be one of the weights that the kernels were chosen for")
        return not self.matrices[id(w)].reason

    def _run(
        self, x: torch.Tensor, w: Linear, out: torch.Tensor, groups: tuple[int, ...], op: str, norm: tuple = ()
    ) -> None:
        """norm: weight and eps where x is to be normed."""
        tokens = len(x)
        if x.shape != (tokens, *groups, w.k) or out.shape != (tokens, *groups, w.n):
            raise ValueError(f"x, out do not fit {w.name} in {op}: got {tuple(x.shape)}, {tuple(out.shape)}")
        alignment = ALIGNMENT[x.device.type]
        mine = out.dtype == torch.bfloat16 and fits(out, alignment)
        room = out if mine else torch.empty(out.shape, dtype=torch.bfloat16, device=out.device)
        inputs = self.task.Inputs(placed(x, alignment).view(tokens, -1))
        kernel = self.with_norm if norm else self.kernel
        kernel(self.task.Data(self.matrices[id(w)].state, inputs, self.task.Outputs(room.view(-1))), *norm)
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


@dataclass(frozen=True)
class Expert:
    """The shared expert of one layer. state: of prepare_expert, None where `reason` says why there is none."""

    w13: Linear
    w2: Linear
    reason: str
    state: object = None

    @property
    def name(self) -> str:
        return self.w13.name.removesuffix(".w13")


@dataclass(frozen=True)
class Experts:
    """The op shared. most: tokens of a call; kernel: the variant's `expert`; prepared: by id() of w13, which they keep
    alive; fallback: computes the calls that the variant does not serve.
    """

    most: int
    kernel: Callable[..., None] | None
    prepared: dict[int, Expert]
    fallback: AllOps

    def shared(self, x: torch.Tensor, w13: Linear, w2: Linear, limit: float, out: torch.Tensor) -> None:
        """As experts.shared, for bf16 x of 1 to `most` tokens; the fallback computes others. ValueError: a shape, or
        weights that were not prepared.
        """
        if w13.kind not in KINDS or x.dtype != torch.bfloat16 or not 1 <= len(x) <= self.most:
            self.fallback.shared(x, w13, w2, limit, out)
            return
        held = self.prepared.get(id(w13))
        if held is None or held.w2 is not w2:
            raise ValueError(f"w13 ({w13.name}) and w2 must be of the weights that the kernels were chosen for")
        if held.reason:
            self.fallback.shared(x, w13, w2, limit, out)
            return
        if x.shape != (len(x), w13.k) or out.shape != (len(x), w2.n):
            raise ValueError(f"x, out do not fit {w13.name} in shared: got {tuple(x.shape)}, {tuple(out.shape)}")
        alignment = ALIGNMENT[x.device.type]
        mine = out.dtype == torch.bfloat16 and fits(out, alignment)
        room = out if mine else torch.empty(out.shape, dtype=torch.bfloat16, device=out.device)
        self.kernel(held.state, limit, placed(x, alignment), room)
        if room is not out:
            out.copy_(room)

    def written(self, w13: Linear, dtype: torch.dtype) -> torch.dtype:
        """Return bf16 if the kernel serves w13 and x of `dtype`, else fp32."""
        held = self.prepared.get(id(w13)) if dtype == torch.bfloat16 else None
        return torch.bfloat16 if held and not held.reason else torch.float32


def serves(fmt: str) -> str:
    """Return why a format has no linears for the problem, "" if it has."""
    return "" if fmt != "fp32" else f"no FP8, NVFP4 or bf16 linears in {fmt}"


def adapt_linears(module: ModuleType, weights: ModelWeights, fallback: Fallback) -> Adapted:
    """Fit `module`, a variant of the problem. -> linear, grouped_linear, two_linears and norm_linears, and lines on
    what it keeps and leaves.

    Reads the weights, waits for the device. ValueError, naming the matrix: scales that are none.
    """
    made = _linears(module, list(weights.linears()), fallback)
    together = [(block.attn.wq_a, block.attn.wkv) for block in weights.blocks() if block.attn.wq_a.kind in KINDS]
    pairs = [make_pair(module, made, *pair) for pair in together]
    made = replace(made, pairs={(id(pair.first), id(pair.second)): pair for pair in pairs})
    functions = {"linear": made.linear, "grouped_linear": made.grouped_linear, "two_linears": made.two_linears}
    functions["norm_linears"] = Partial(made.norm_linears, made.norms)
    found = _adapted(module, "linears", made, functions, weights, fallback.name)
    lines = common.report(_label(module, "of one input"), "pairs", pairs, weights, "two calls")
    return found._replace(report=(*found.report, *lines))


def adapt_shared(module: ModuleType, weights: ModelWeights, fallback: Fallback) -> Adapted:
    """Fit `module`, a variant of the problem. -> the op shared, and lines. Else as adapt_linears."""
    pairs = [(block.ffn.shared_w13, block.ffn.shared_w2) for block in weights.blocks()]
    task = load.module(load.PROBLEMS / PROBLEM, "task")
    prepared = [make_expert(module, task, *pair) for pair in pairs if pair[0].kind in KINDS]
    both = Experts(
        task.MOST_TOKENS, getattr(module, "expert", None), {id(one.w13): one for one in prepared}, fallback.ops
    )
    lines = common.report(_label(module, "shared experts"), "layers", prepared, weights, fallback.name)
    served = frozenset(id(w) for one in prepared if not one.reason for w in (one.w13, one.w2))
    return Adapted({"shared": Rounding(both.shared, both.written)}, lines, served)


def _linears(module: ModuleType, given: list[Linear], fallback: Fallback) -> Linears:
    task = load.module(load.PROBLEMS / PROBLEM, "task")
    matrices = [make_matrix(module, task, w) for w in given if w.kind in KINDS]
    known = {id(matrix.linear): matrix for matrix in matrices}
    with_norm, norms = getattr(module, "with_norm", None), getattr(module, "norms", None)
    return Linears(task, module.custom_kernel, known, fallback.ops, {}, with_norm, norms)


def _adapted(
    module: ModuleType, what: str, made: Linears, functions: dict[str, Callable], weights: ModelWeights, other: str
) -> Adapted:
    matrices = list(made.matrices.values())
    lines = common.report(_label(module, what), "matrices", matrices, weights, other)
    return Adapted(functions, lines, frozenset(id(matrix.linear) for matrix in matrices if not matrix.reason))


def _label(module: ModuleType, what: str) -> str:
    return f"{PROBLEM}/{module.__name__.rpartition('.')[2]}, {what}"


@torch.inference_mode(False)  # what is made in inference mode could not be used everywhere outside it
def make_matrix(module: ModuleType, task: ModuleType, w: Linear) -> Matrix:
    """Prepare w, of one of KINDS, for `module`. ValueError, naming the matrix: scales that are none."""
    if reason := _refusal(w):
        return Matrix(w, reason)
    weights = task.Weights(KINDS[w.kind], ((_matrix(task, w),),))
    try:
        task.unpack_weights(weights)
        return Matrix(w, "", module.prepare(weights) if hasattr(module, "prepare") else weights)
    except ValueError as error:
        return Matrix(w, str(error))


@torch.inference_mode(False)
def make_pair(module: ModuleType, made: Linears, first: Linear, second: Linear) -> Pair:
    """Prepare two matrices of one input, which are among those of `made`, for one call."""
    refused = [matrix for matrix in (made.matrices[id(first)], made.matrices[id(second)]) if matrix.reason]
    if refused:
        return Pair(first, second, refused[0].reason)
    if first.kind != second.kind:
        return Pair(first, second, f"one is {first.kind}, the other {second.kind}")
    link = tuple(_matrix(made.task, w) for w in (first, second))
    weights = made.task.Weights(KINDS[first.kind], (link,))
    try:
        made.task.unpack_weights(weights)
        return Pair(first, second, "", module.prepare(weights) if hasattr(module, "prepare") else weights)
    except ValueError as error:
        return Pair(first, second, str(error))


@torch.inference_mode(False)
def make_expert(module: ModuleType, task: ModuleType, w13: Linear, w2: Linear) -> Expert:
    """Prepare both matrices of a shared expert, of one of KINDS, for `module`. ValueError as make_matrix."""
    if not (hasattr(module, "prepare_expert") and hasattr(module, "expert")):
        return Expert(w13, w2, "the variant has no prepare_expert and expert")
    if w2.kind != w13.kind:
        return Expert(w13, w2, f"its w2 is {w2.kind}")
    if reason := _refusal(w13) or _refusal(w2):
        return Expert(w13, w2, reason)
    given = [task.Weights(KINDS[w.kind], ((_matrix(task, w),),)) for w in (w13, w2)]
    try:
        return Expert(w13, w2, "", module.prepare_expert(*given))
    except ValueError as error:
        return Expert(w13, w2, str(error))


def _matrix(task: ModuleType, w: Linear) -> NamedTuple:
    """A task.Matrix on the memory of w. ValueError as make_matrix."""
    codes, scale = (t if t is None or t.dim() == 3 else t.unsqueeze(0) for t in (w.weight, w.scale))
    if w.kind == "plain":
        return task.Matrix(codes, None, None, False)
    if w.kind == "nvfp4":
        check_values(w)
        input_scale = w.input_scale.reshape(-1) if w.quantise_input else None
        return task.Matrix(codes, scale, w.scale_2.reshape(-1), w.quantise_input, input_scale)
    scale = scale.view(torch.uint8)
    if bool((scale == 255).any()):
        raise ValueError(f"{w.name}: scale bytes must be 0 to 254, got {int(scale.min())} to {int(scale.max())}")
    return task.Matrix(codes, scale, None, w.quantise_input)


def _refusal(w: Linear) -> str:
    """Why the problem has no such matrix, "" if it has."""
    if w.kind == "plain" and w.weight.dtype != torch.bfloat16:
        return f"its weights are {w.weight.dtype}"
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
