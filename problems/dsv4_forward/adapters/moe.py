"""Compute the ops experts, shared and all_experts with a variant of moe_gemm.

The model has gate and up rows in one matrix, in that order, with one scale_2 and one input_scale an expert, so that the
problem's Weights are views of its tensors. (Loading refuses a checkpoint whose w1 and w3 differ in these two.) What a
variant's prepare lays out anew comes on top; the report says how much.

A variant may define two functions more, and MOST_WITH_SHARED, and compute all_experts then:

* `prepare_with_shared(weights, shared)`: Weights of the routed experts, and of the shared one as a single expert ->
  (state of the first, as prepare returns it; state of all). ValueError: as prepare.
* `with_shared(data)`: as custom_kernel of a call of up to MOST_WITH_SHARED tokens, with the second state, and the
  shared expert's output, with weight 1, in the sum that is rounded.

One function more, and it computes routed experts in MXFP4 too, whose activations are FP8:

* `prepare_fp8(weights)`: Weights with activation "bf16" -> what custom_kernel gets as its weights in calls that round x
  and v as fp8.round_trip does, a group of 128. ValueError: as prepare. The weights are the model's in NVFP4, which
  holds them exactly where the scales of each expert's matrix are within 2^17. Their scales are gone after the call.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch

from problems.common import load, nvfp4
from problems.dsv4_forward.adapters.common import (
    ALIGNMENT,
    Adapted,
    AllOps,
    Fallback,
    Joined,
    Rounding,
    check_values,
    fits,
    label,
    placed,
    report,
    uneven,
    unplaced,
)
from problems.dsv4_forward.weights import formats
from problems.dsv4_forward.weights.linear import Linear
from problems.dsv4_forward.weights.tree import ModelWeights

PROBLEM = "moe_gemm"
KINDS = ("nvfp4", "mxfp4")  # of routed experts' weights
CONVERTED = 16  # experts whose scales are converted at once
ROOM = 4096  # tokens; for more, the shared expert's ids and weights are made in each call, which is long then


@dataclass(frozen=True)
class PreparedExperts:
    """The experts of a layer, routed or shared. state: what the variant's calls get as their weights, None where
    `reason` says why there are none; everyone: the same of routed experts with the shared one, where there is that.
    """

    w13: Linear
    w2: Linear
    reason: str
    state: object = None
    everyone: object = None

    @property
    def name(self) -> str:
        return self.w13.name.removesuffix(".w13")


@dataclass(frozen=True)
class Experts:
    """The ops. task: the problem's; kernel: a custom_kernel of it; prepared: by id() of w13, which they keep alive;
    fallback: computes the calls that the kernel does not serve. ids, weights: int32 zeros and fp32 ones (ROOM, 1), the
    routing of a shared expert. with_shared: of the variant, for `most` tokens, 0 where there is none.
    """

    task: ModuleType
    kernel: Callable[..., object]
    prepared: dict[int, PreparedExperts]
    fallback: AllOps
    ids: torch.Tensor
    weights: torch.Tensor
    with_shared: Callable[..., object] | None = None
    most: int = 0

    def experts(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        w13: Linear,
        w2: Linear,
        limit: float,
        out: torch.Tensor,
    ) -> None:
        """As experts.experts, for bf16 x; the fallback computes others, and other kinds of weights. An fp32 out gets
        what the kernel rounds to bf16, the only outputs that the problem has. No expert may be twice in a row of ids.

        ValueError: FP4 weights that were not prepared, another limit than the problem's, task.unpack_call; on the CPU
        only, ids as task.validate says.
        """
        held = self._weights_of(x, w13, w2, out)
        if held is None:
            self.fallback.experts(x, ids, weights, w13, w2, limit, out)
        else:
            self._run(held, limit, x, ids, weights, out)

    def shared(self, x: torch.Tensor, w13: Linear, w2: Linear, limit: float, out: torch.Tensor) -> None:
        """As experts.shared: every token's one expert, with weight 1. Else as experts."""
        held = self._weights_of(x, w13, w2, out)
        if held is None:
            self.fallback.shared(x, w13, w2, limit, out)
        else:
            self._run(held, limit, x, *self._everyone(len(x)), out)

    def serves(self, w13: Linear, x: torch.Tensor) -> bool:
        """Return whether all_experts has a kernel for w13 and x."""
        held = self.prepared.get(id(w13)) if x.dtype == torch.bfloat16 and len(x) <= self.most else None
        return held is not None and held.everyone is not None

    def all_experts(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        w13: Linear,
        w2: Linear,
        shared_w13: Linear,
        shared_w2: Linear,
        limit: float,
        out: torch.Tensor,
    ) -> None:
        """As chains.all_experts; the fallback computes what this does not serve. ValueError: as experts."""
        if self.serves(w13, x):
            held = self._weights_of(x, w13, w2, out)
            self._run(held, limit, x, ids, weights, out, held.everyone)
        else:
            self.fallback.all_experts(x, ids, weights, w13, w2, shared_w13, shared_w2, limit, out)

    def written(self, w13: Linear, dtype: torch.dtype) -> torch.dtype:
        """Return bf16 if the kernel serves w13 and x of `dtype`, else fp32."""
        held = self.prepared.get(id(w13)) if dtype == torch.bfloat16 else None
        return torch.bfloat16 if held and not held.reason else torch.float32

    def _everyone(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        if tokens <= ROOM:
            return self.ids[:tokens], self.weights[:tokens]
        return self.ids.new_zeros(tokens, 1), self.weights.new_ones(tokens, 1)

    def _weights_of(self, x: torch.Tensor, w13: Linear, w2: Linear, out: torch.Tensor) -> PreparedExperts | None:
        if w13.kind not in KINDS or x.dtype != torch.bfloat16:
            return None
        held = self.prepared.get(id(w13))
        if held is None or held.w2 is not w2:
            raise ValueError(f"w13 ({w13.name}) and w2 must be of the weights that the kernels were chosen for")
        return None if held.reason else held

    def _run(
        self,
        held: PreparedExperts,
        limit: float,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        out: torch.Tensor,
        everyone: object = None,
    ) -> None:
        if limit != self.task.LIMIT:
            raise ValueError(f"limit must be {self.task.LIMIT}, got {limit}")
        if not len(x):
            return
        alignment = ALIGNMENT[x.device.type]
        inputs = self.task.Inputs(*(placed(tensor, alignment) for tensor in (x, ids, weights)))
        mine = out.dtype == torch.bfloat16 and fits(out, alignment)
        room = out if mine else torch.empty(out.shape, dtype=torch.bfloat16, device=out.device)
        outputs = self.task.Outputs(room)
        if x.device.type == "cpu":  # elsewhere to look at ids would wait for the device
            self.task.unpack_call(inputs, outputs, held.w13.k)
            self.task.validate(inputs, len(held.w13.weight))
        if everyone is None:
            self.kernel(self.task.Data(held.state, inputs, outputs))
        else:
            self.with_shared(self.task.Data(everyone, inputs, outputs))
        if room is not out:
            out.copy_(room)


# ---------------------------------------------------------------- adapters


def adapt_experts(module: ModuleType, weights: ModelWeights, fallback: Fallback) -> Adapted:
    """Fit `module`, a variant of the problem. -> the ops experts and all_experts, and lines on what it keeps and does
    not serve.

    Reads the weights, waits for the device. ValueError, naming the layer: weights that the problem has not, or what the
    variant's prepare refuses.
    """
    prepared = [
        prepare_experts(
            module, block.ffn.w13, block.ffn.w2, block.ffn.router.table, (block.ffn.shared_w13, block.ffn.shared_w2)
        )
        for block in weights.blocks()
        if block.ffn.w13.kind in KINDS
    ]
    made = _experts(module, weights, prepared, fallback)
    lines = report(f"{label(module)}, routed experts", "layers", prepared, weights)
    if made.most:
        together = sum(one.everyone is not None for one in prepared)
        said = f"up to {made.most} tokens with the shared expert: {together} of {len(prepared)} layers"
        lines = (*lines, f"{label(module)}, {said}")
    joined = Joined(made.all_experts, made.serves)
    return Adapted({"experts": Rounding(made.experts, made.written), "all_experts": joined}, lines)


def adapt_shared(module: ModuleType, weights: ModelWeights, fallback: Fallback) -> Adapted:
    """Fit `module`, a variant of the problem. -> the op shared, and lines. Else as adapt_experts."""
    prepared = [
        prepare_experts(module, block.ffn.shared_w13, block.ffn.shared_w2)
        for block in weights.blocks()
        if block.ffn.shared_w13.kind == "nvfp4"
    ]
    made = _experts(module, weights, prepared, fallback)
    lines = report(f"{label(module)}, shared experts", "layers", prepared, weights)
    return Adapted({"shared": Rounding(made.shared, made.written)}, lines)


def limit() -> float:
    """Return the clamp that the problem has."""
    return load.module(load.PROBLEMS / PROBLEM, "task").LIMIT


@torch.inference_mode(False)  # what is made in inference mode could not be used everywhere outside it
def _experts(module: ModuleType, weights: ModelWeights, prepared: list[PreparedExperts], fallback: Fallback) -> Experts:
    task, device = load.module(load.PROBLEMS / PROBLEM, "task"), weights.embed.device
    ids = torch.zeros(ROOM, 1, dtype=torch.int32, device=device)
    ones = torch.ones(ROOM, 1, dtype=torch.float32, device=device)
    known = {id(one.w13): one for one in prepared}
    more = (module.with_shared, module.MOST_WITH_SHARED) if hasattr(module, "with_shared") else ()
    return Experts(task, module.custom_kernel, known, fallback.ops, ids, ones, *more)


# ---------------------------------------------------------------- weights


@torch.inference_mode(False)  # buffers made in inference mode could not be written outside it
def prepare_experts(
    module: ModuleType,
    w13: Linear,
    w2: Linear,
    table: torch.Tensor | None = None,
    shared: tuple[Linear, Linear] | None = None,
) -> PreparedExperts:
    """Prepare the experts of one layer for `module`.

    w13 (E, 2 I, H), nvfp4 or mxfp4; w2 (E, H, I). table: int64 (V, K), the experts of a token, where the router has
    one. shared: the same of the shared expert, which counts as one more where the module has that and it is of their
    form.
    ValueError as adapt_experts.
    """
    made = PreparedExperts(w13, w2, _refusal(w13, w2, table))
    if made.reason:
        return made
    if w13.kind == "mxfp4":
        return _prepare_mxfp4(module, made)
    weights = _weights(w13, w2)
    together = shared and hasattr(module, "prepare_with_shared") and _alike(w13, w2, *shared)
    one_more = _weights(*shared) if together else None
    try:
        if one_more is not None:
            state, everyone = module.prepare_with_shared(weights, one_more)
            return dataclasses.replace(made, state=state, everyone=everyone)
        state = module.prepare(weights) if hasattr(module, "prepare") else weights
    except ValueError as error:
        raise ValueError(f"{made.name}: {error}") from error
    return dataclasses.replace(made, state=state)


def unprepared(module: ModuleType) -> str:
    """Return why `module` cannot compute experts in MXFP4, "" if it can."""
    return "" if hasattr(module, "prepare_fp8") else f"{label(module)} has no FP8 activations"


def _prepare_mxfp4(module: ModuleType, made: PreparedExperts) -> PreparedExperts:
    if reason := unprepared(module):
        return dataclasses.replace(made, reason=reason)
    both = [_as_nvfp4(w) for w in (made.w13, made.w2)]
    spread = torch.stack([outside for _, outside in both]).tolist()  # the one wait for the device
    for w, outside in zip((made.w13, made.w2), spread, strict=True):
        if outside:
            reason = f"scales of a matrix of {w.name} are NaN or not within 2^{formats.NVFP4_SPREAD} of each other"
            return dataclasses.replace(made, reason=reason)
    try:
        return dataclasses.replace(made, state=module.prepare_fp8(_weights(*(w for w, _ in both))))
    except ValueError as error:
        raise ValueError(f"{made.name}: {error}") from error


def _as_nvfp4(w: Linear) -> tuple[Linear, torch.Tensor]:
    """-> w (E, n, k) in NVFP4, its codes where they are, and bool (): whether it has no such scales."""
    scale = torch.empty(*w.weight.shape[:2], w.k // nvfp4.BLOCK, dtype=torch.float8_e4m3fn, device=w.weight.device)
    scale_2 = torch.empty(len(w.weight), dtype=torch.float32, device=w.weight.device)
    outside = torch.zeros((), dtype=torch.bool, device=w.weight.device)
    for first in range(0, len(w.weight), CONVERTED):
        some = slice(first, first + CONVERTED)
        part, scale_2[some], bad = formats.nvfp4_scales(w.weight[some], w.scale[some])
        scale[some].view(torch.uint8).copy_(part.view(torch.uint8))
        outside.logical_or_(bad.any())
    return Linear("nvfp4", w.weight, scale, scale_2, quantise_input=False, name=w.name), outside


def _weights(w13: Linear, w2: Linear) -> tuple:
    """The problem's Weights. ValueError: values that it has not."""
    task = load.module(load.PROBLEMS / PROBLEM, "task")
    for w in (w13, w2):
        check_values(w)
    in_scales = [torch.ones_like(w.scale_2) if w.input_scale is None else w.input_scale for w in (w13, w2)]
    weights = task.Weights(
        w13.weight,
        w13.scale,
        w13.scale_2,
        w2.weight,
        w2.scale,
        w2.scale_2,
        *in_scales,
        activation="nvfp4" if w13.quantise_input else "bf16",
    )
    try:
        task.unpack_weights(weights)
    except ValueError as error:
        raise ValueError(f"{w13.name.removesuffix('.w13')}: {error}") from error
    return weights


def _alike(w13: Linear, w2: Linear, shared_w13: Linear, shared_w2: Linear) -> bool:
    """Whether the shared expert is as one of the routed experts."""
    if shared_w13.kind != "nvfp4" or _refusal(shared_w13, shared_w2, None):
        return False
    same = (w13.quantise_input, w13.n, w13.k) == (shared_w13.quantise_input, shared_w13.n, shared_w13.k)
    return same and (w2.n, w2.k) == (shared_w2.n, shared_w2.k)


def _refusal(w13: Linear, w2: Linear, table: torch.Tensor | None) -> str:
    """Why the problem has no such weights, "" if it has."""
    if w2.kind != w13.kind:
        return f"its w2 is {w2.kind}"
    if w13.quantise_input != w2.quantise_input:
        return "the input of one of w13 and w2 is quantised, that of the other is not"
    if w13.kind == "mxfp4" and not w13.quantise_input:
        return "its weights are in MXFP4 and its inputs are not in FP8"
    if table is not None and _repeats(table):
        return "its table names an expert twice for a token"
    return uneven(H=w13.k, I=w2.k) or unplaced(w13) or unplaced(w2)


def _repeats(table: torch.Tensor) -> bool:
    ordered = table.sort(1).values
    return bool((ordered[:, 1:] == ordered[:, :-1]).any())
