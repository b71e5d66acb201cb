"""Compute the ops linear, grouped_linear and shared with linear_decode: FP8 and bf16 matrices times 1 to 32 tokens.

The model's matrices are those of the problem, as they lie in memory. A call of more tokens, of other types of
activations or with a matrix that the problem has not goes to the fallback. The shared expert is two calls, gate and up
rounded to bf16 between them, as the released model's linears round them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch

from problems.common import load
from problems.dsv4_forward.adapters import common
from problems.dsv4_forward.adapters.common import ALIGNMENT, Adapted, AllOps, Fallback, fits, placed, uneven
from problems.dsv4_forward.torch_ops import experts
from problems.dsv4_forward.weights.linear import Linear
from problems.dsv4_forward.weights.tree import ModelWeights

PROBLEM = "linear_decode"
KINDS = {"fp8": "fp8", "plain": "bf16"}  # of a Linear -> the problem's format


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
class Linears:
    """The three ops. task: the problem's; kernel: a custom_kernel of it; matrices: by id() of the Linear, which they
    keep alive; fallback: computes the calls that the kernel does not serve.
    """

    task: ModuleType
    kernel: Callable[..., object]
    matrices: dict[int, Matrix]
    fallback: AllOps

    def linear(self, x: torch.Tensor, w: Linear, out: torch.Tensor) -> None:
        """out = x w^T, as linear.linear. x: (N, k); out: (N, n).

        ValueError: a shape, or an FP8 or plain matrix that was not prepared.
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

    def shared(self, x: torch.Tensor, w13: Linear, w2: Linear, limit: float, out: torch.Tensor) -> None:
        """As experts.shared, with gate, up and the result rounded to bf16. Else as linear."""
        mixed = torch.empty(len(x), w13.n, dtype=torch.bfloat16, device=x.device)
        if not (self._serves(x, w13, mixed) and self._serves(x, w2, mixed)):
            self.fallback.shared(x, w13, w2, limit, out)
            return
        self._run(x, w13, mixed, (), "shared")
        v = experts.gated(mixed.float(), limit, None, torch.bfloat16)
        self._run(v, w2, out, (), "shared")

    def _serves(self, x: torch.Tensor, w: Linear, out: torch.Tensor) -> bool:
        if w.kind not in KINDS or x.dtype != torch.bfloat16 or not 1 <= len(x) <= self.task.MOST_TOKENS:
            return False
        if id(w) not in self.matrices:
            raise ValueError(f"w ({w.name}) must be one of the weights that the kernels were chosen for")
        return not self.matrices[id(w)].reason

    def _run(self, x: torch.Tensor, w: Linear, out: torch.Tensor, groups: tuple[int, ...], op: str) -> None:
        tokens = len(x)
        if x.shape != (tokens, *groups, w.k) or out.shape != (tokens, *groups, w.n):
            raise ValueError(f"x, out do not fit {w.name} in {op}: got {tuple(x.shape)}, {tuple(out.shape)}")
        alignment = ALIGNMENT[x.device.type]
        mine = out.dtype == torch.bfloat16 and fits(out, alignment)
        room = out if mine else torch.empty(out.shape, dtype=torch.bfloat16, device=out.device)
        inputs = self.task.Inputs(placed(x, alignment).view(tokens, -1))
        self.kernel(self.task.Data(self.matrices[id(w)].state, inputs, self.task.Outputs(room.view(-1))))
        if room is not out:
            out.copy_(room)


def serves(fmt: str, kind: str) -> str:
    """Return why a format whose linears are of `kind` has none for the problem, "" if it has."""
    return "" if kind == "fp8" or fmt == "bf16" else f"no FP8 or bf16 linears in {fmt}"


def adapt_linears(module: ModuleType, weights: ModelWeights, fallback: Fallback) -> Adapted:
    """Fit `module`, a variant of the problem. -> linear and grouped_linear, and lines on what it keeps and leaves.

    Reads the weights, waits for the device. ValueError, naming the matrix: scales that are none.
    """
    made = _linears(module, list(weights.linears()), fallback)
    functions = {"linear": made.linear, "grouped_linear": made.grouped_linear}
    return _adapted(module, "linears", made, functions, weights, fallback.name)


def adapt_shared(module: ModuleType, weights: ModelWeights, fallback: Fallback) -> Adapted:
    """Fit `module`, a variant of the problem. -> the op shared, and lines. Else as adapt_linears."""
    both = [w for block in weights.blocks() for w in (block.ffn.shared_w13, block.ffn.shared_w2)]
    made = _linears(module, both, fallback)
    return _adapted(module, "shared experts", made, {"shared": made.shared}, weights, fallback.name)


def _linears(module: ModuleType, given: list[Linear], fallback: Fallback) -> Linears:
    task = load.module(load.PROBLEMS / PROBLEM, "task")
    matrices = [make_matrix(module, task, w) for w in given if w.kind in KINDS]
    return Linears(task, module.custom_kernel, {id(matrix.linear): matrix for matrix in matrices}, fallback.ops)


def _adapted(
    module: ModuleType, what: str, made: Linears, functions: dict[str, Callable], weights: ModelWeights, other: str
) -> Adapted:
    matrices = list(made.matrices.values())
    label = f"{PROBLEM}/{module.__name__.rpartition('.')[2]}, {what}"
    lines = common.report(label, "matrices", matrices, weights, other)
    return Adapted(functions, lines, frozenset(id(matrix.linear) for matrix in matrices if not matrix.reason))


@torch.inference_mode(False)  # what is made in inference mode could not be used everywhere outside it
def make_matrix(module: ModuleType, task: ModuleType, w: Linear) -> Matrix:
    """Prepare w, fp8 or plain, for `module`. ValueError, naming the matrix: scale bytes that are none."""
    if reason := _refusal(w):
        return Matrix(w, reason)
    codes, scale = (t if t is None or t.dim() == 3 else t.unsqueeze(0) for t in (w.weight, w.scale))
    if scale is not None:
        scale = scale.view(torch.uint8)
        if bool((scale == 0).any() | (scale == 255).any()):
            raise ValueError(f"{w.name}: scale bytes must be 1 to 254, got {int(scale.min())} to {int(scale.max())}")
    quantise = w.kind == "fp8" and w.quantise_input
    weights = task.Weights(KINDS[w.kind], ((task.Matrix(codes, scale, None, quantise),),))
    try:
        task.unpack_weights(weights)
        return Matrix(w, "", module.prepare(weights) if hasattr(module, "prepare") else weights)
    except ValueError as error:
        return Matrix(w, str(error))


def _refusal(w: Linear) -> str:
    """Why the problem has no such matrix, "" if it has."""
    if w.kind == "plain" and w.weight.dtype != torch.bfloat16:
        return f"its weights are {w.weight.dtype}"
    if w.weight.dim() > 3:
        return f"it has {w.weight.dim()} axes"
    alignment = ALIGNMENT[w.weight.device.type]
    if not all(t is None or fits(t, alignment) for t in (w.weight, w.scale)):
        return f"its codes or scales are not contiguous, or do not start at a multiple of {alignment} bytes"
    return uneven(n=w.n, k=w.k)
