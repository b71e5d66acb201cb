"""Compute NVFP4 linears with the plain product of a variant of moe_gemm: those that nvfp4_gemv does not take.

A variant of moe_gemm may define two more functions, for one matrix of (n, k) weights, both multiples of 64:

    prepare_linear(packed, scales, g, in_scale) -> state
        packed: uint8 (n, k / 2), low nibble first; scales: e4m3 (n, k / 16), bytes 0x00 to 0x7E; both contiguous, at a
        multiple of 256 bytes (64 on a CPU). g: fp32 (). A weight is code * scale * g.
        in_scale: fp32 (), positive: inputs are quantised with it, as task.Data says of x; None: they are not.
        Bound as prepare's: state may keep 1.05 times the bytes of packed and scales, and what all states share.
        ValueError: a matrix that it cannot take, say one that is too wide; the reference does, and the report says why.
    linear(state, x, out)
        out = x w^T, summed in fp32, rounded once. x: bf16 (T, k), finite; out: bf16 (T, n); T >= 1; both contiguous, at
        a multiple of 64 bytes. Like custom_kernel it never waits for a GPU.

A variant without them computes experts only.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch

from problems.dsv4_forward.adapters import common, gemv
from problems.dsv4_forward.adapters.common import Adapted, Fallback, check_values, fits, placed, uneven, unplaced
from problems.dsv4_forward.weights.linear import Linear
from problems.dsv4_forward.weights.tree import ModelWeights

PRODUCT_ALIGNMENT = 64  # bytes, of x and out of a plain product


@dataclass(frozen=True)
class Matrix:
    """One NVFP4 Linear. state: what prepare_linear made of each group, () where `reason` says why not."""

    linear: Linear
    reason: str
    state: tuple[object, ...] = ()

    @property
    def name(self) -> str:
        return self.linear.name


@dataclass(frozen=True)
class Linears:
    """The two ops. product: the variant's `linear`; matrices: by id() of the Linear, which they keep alive; fallback:
    computes the calls that the variant does not serve.
    """

    product: Callable[[object, torch.Tensor, torch.Tensor], object]
    matrices: dict[int, Matrix]
    fallback: common.Linears

    def linear(self, x: torch.Tensor, w: Linear, out: torch.Tensor) -> None:
        """out = x w^T, as linear.linear, for bf16 x (N, k) and out (N, n); the fallback computes others, and other
        kinds of w. ValueError: a shape, or an NVFP4 matrix that was not prepared.
        """
        matrix = self._matrix(x, w, out)
        if matrix is None:
            self.fallback.linear(x, w, out)
            return
        _check_shapes(x, (len(x), w.k), out, (len(x), w.n), w.name)
        if not len(x):
            return
        room = out if fits(out, PRODUCT_ALIGNMENT) else torch.empty(out.shape, dtype=out.dtype, device=out.device)
        self.product(matrix.state[0], placed(x, PRODUCT_ALIGNMENT), room)
        if room is not out:
            out.copy_(room)

    def grouped_linear(self, x: torch.Tensor, w: Linear, out: torch.Tensor) -> None:
        """out[:, g] = x[:, g] w[g]^T, as linear.grouped_linear. x: (N, G, k); out: (N, G, n). Else as linear."""
        matrix = self._matrix(x, w, out)
        if matrix is None:
            self.fallback.grouped_linear(x, w, out)
            return
        groups = len(matrix.state)
        _check_shapes(x, (len(x), groups, w.k), out, (len(x), groups, w.n), w.name)
        if not len(x):
            return
        # Rows of 64 values or a multiple keep every group aligned as the first is.
        given = x.transpose(0, 1).contiguous()
        room = torch.empty(groups, len(x), w.n, dtype=out.dtype, device=out.device)
        for state, part, result in zip(matrix.state, placed(given, PRODUCT_ALIGNMENT), room, strict=True):
            self.product(state, part, result)
        out.copy_(room.transpose(0, 1))

    def _matrix(self, x: torch.Tensor, w: Linear, out: torch.Tensor) -> Matrix | None:
        if w.kind != "nvfp4" or {x.dtype, out.dtype} != {torch.bfloat16}:
            return None
        if id(w) not in self.matrices:
            raise ValueError(f"w ({w.name}) must be one of the weights that the kernels were chosen for")
        matrix = self.matrices[id(w)]
        return None if matrix.reason else matrix


def adapt(module: ModuleType, weights: ModelWeights, fallback: Fallback) -> Adapted:
    """Fit `module`, a variant of moe_gemm. -> linear and grouped_linear, {} if it has no plain product; and lines.

    ValueError as make_matrix.
    """
    name = common.label(module)
    if not (hasattr(module, "prepare_linear") and hasattr(module, "linear")):
        return Adapted(
            {}, (f"{name} has no plain product: linears that {gemv.PROBLEM} does not take are the reference's",)
        )
    matrices = [make_matrix(module, w) for w in weights.linears() if w.kind == "nvfp4"]
    made = Linears(module.linear, {id(matrix.linear): matrix for matrix in matrices}, fallback.ops)
    what = f"{name}, behind {gemv.PROBLEM}"
    lines = common.report(what, "NVFP4 matrices", matrices, weights, fallback.name)
    served = frozenset(id(matrix.linear) for matrix in matrices if not matrix.reason)
    return Adapted({"linear": made.linear, "grouped_linear": made.grouped_linear}, lines, served)


@torch.inference_mode(False)
def make_matrix(module: ModuleType, w: Linear) -> Matrix:
    """Prepare w for `module`: nvfp4, with or without groups. ValueError, naming the matrix: scales that are none."""
    if reason := unplaced(w) or uneven(n=w.n, k=w.k):
        return Matrix(w, reason)
    check_values(w)
    groups = [w] if w.weight.dim() == 2 else [w.select(g) for g in range(len(w.weight))]
    try:
        states = tuple(
            module.prepare_linear(g.weight, g.scale, g.scale_2, g.input_scale if g.quantise_input else None)
            for g in groups
        )
    except ValueError as error:
        return Matrix(w, str(error))
    return Matrix(w, "", states)


def _check_shapes(
    x: torch.Tensor, inner: tuple[int, ...], out: torch.Tensor, outer: tuple[int, ...], name: str
) -> None:
    if x.shape != inner or out.shape != outer:
        raise ValueError(f"x, out do not fit {name}: got {tuple(x.shape)}, {tuple(out.shape)}")
