"""Compute the model's experts, shared and all_experts, for any number of tokens.

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

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from task import LIMIT, Data, Inputs, Outputs, Weights, unpack_call, unpack_weights, validate

from problems.common import nvfp4
from problems.dsv4_forward.prepared import (
    ALIGNMENT,
    Fitted,
    Prepared,
    by_first,
    check_values,
    find,
    label,
    placed,
    report,
    room_for,
    uneven,
    unplaced,
)
from problems.dsv4_forward.weights import formats, layout
from problems.dsv4_forward.weights.linear import Linear
from problems.dsv4_forward.weights.tree import ModelWeights

KINDS = ("nvfp4", "mxfp4")  # of routed experts' weights
CONVERTED = 16  # experts whose scales are converted at once
ROOM = 4096  # tokens; for more, the shared expert's ids and weights are made in each call, which is long then


def fit(variant: ModuleType, weights: ModelWeights, wanted: Sequence[str]) -> Fitted:
    """Fit a variant as prepared.py says. ValueError too, naming the layer: what the variant's prepare refuses."""
    refused = {op: reason for op in wanted if (reason := _unserved(variant, weights, op))}
    ops, blocks = {*wanted} - {*refused}, list(weights.blocks())
    routed, shared = [], []
    if ops & {"experts", "all_experts"}:
        frees = weights.disposable and "experts" in ops and hasattr(variant, "prepare")
        for ffn in (block.ffn for block in blocks if block.ffn.w13.kind in KINDS):
            made = prepare(variant, ffn.w13, ffn.w2, ffn.router.table, (ffn.shared_w13, ffn.shared_w2))
            routed.append(made)
            if frees and not made.reason:
                for tensor in (part for w in made.matrices for part in (w.weight, w.scale)):
                    tensor.untyped_storage().resize_(0)
    if "shared" in ops:
        shared = [prepare(variant, block.ffn.shared_w13, block.ffn.shared_w2) for block in blocks]
    calls = make_calls(variant, [*routed, *shared])
    units = {"layers of routed experts": routed, "layers of shared experts": shared}
    lines = [line for unit, made in units.items() if made for line in report(label(variant), unit, made, weights)]
    if "all_experts" in ops:
        together = sum(not one.reason and one.state[1] is not None for one in routed)
        said = f"up to {variant.MOST_WITH_SHARED} tokens with the shared expert: {together} of {len(routed)} layers"
        lines.append(f"{label(variant)}, {said}")
    return Fitted({op: getattr(calls, op) for op in ops}, refused, tuple(lines))


def _unserved(variant: ModuleType, weights: ModelWeights, op: str) -> str:
    """Why the variant serves no call of the op, "" if it does."""
    kinds, limit = layout.KINDS[weights.format], weights.config.swiglu_limit
    if op == "experts" and kinds.experts not in KINDS:
        return f"no FP4 experts in {weights.format}"
    if op == "all_experts" and kinds.experts != "nvfp4":
        return f"no NVFP4 experts in {weights.format}"
    if op == "shared" and kinds.linear != "nvfp4":
        return f"no NVFP4 linears in {weights.format}"
    if limit != LIMIT:
        return f"swiglu_limit must be {LIMIT:g}, is {limit:g}"
    if op == "all_experts" and not hasattr(variant, "with_shared"):
        return "it has no prepare_with_shared and with_shared"
    return _no_mxfp4(variant) if op == "experts" and kinds.experts == "mxfp4" else ""


def _no_mxfp4(variant: ModuleType) -> str:
    return "" if hasattr(variant, "prepare_fp8") else "it has no prepare_fp8"


@torch.inference_mode(False)  # what is made in inference mode could not be used everywhere outside it
def make_calls(variant: ModuleType, layers: Sequence[Prepared]) -> "Calls":
    """The ops for what `prepare` made."""
    device = layers[0].matrices[0].weight.device if layers else "cpu"
    ids = torch.zeros(ROOM, 1, dtype=torch.int32, device=device)
    return Calls(variant, by_first(layers), ids, torch.ones(ids.shape, device=device))


@dataclass(frozen=True)
class Calls:
    """The ops, for bf16 x. layers: experts, routed or shared; state: (what the variant gets as their weights, the same
    of routed experts with the shared one, or None). ids, weights: int32 zeros and fp32 ones (ROOM, 1), the routing of a
    shared expert.

    ValueError: FP4 weights that were not prepared, another limit than the problem's, a shape; on the CPU only, ids as
    task.validate says. No expert may be twice in a row of ids.
    """

    variant: ModuleType
    layers: dict[int, Prepared]
    ids: torch.Tensor
    weights: torch.Tensor

    def experts(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        w13: Linear,
        w2: Linear,
        limit: float,
        out: torch.Tensor,
    ) -> object:
        """An fp32 out gets what the kernel rounds to bf16, the only outputs that the problem has."""
        held = self._held(x, w13, w2)
        if held is None:
            return NotImplemented
        return _run(self.variant.custom_kernel, held.state[0], w13, limit, (x, ids, weights), out)

    def shared(self, x: torch.Tensor, w13: Linear, w2: Linear, limit: float, out: torch.Tensor) -> object:
        """Every token's one expert, with weight 1."""
        held, tokens = self._held(x, w13, w2), len(x)
        if held is None:
            return NotImplemented
        routing = self.ids[:tokens], self.weights[:tokens]
        if tokens > ROOM:
            routing = self.ids.new_zeros(tokens, 1), self.weights.new_ones(tokens, 1)
        return _run(self.variant.custom_kernel, held.state[0], w13, limit, (x, *routing), out)

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
    ) -> object:
        """The routed experts and the shared one, of a layer where they are alike."""
        held = self._held(x, w13, w2)
        if held is None or held.state[1] is None or len(x) > self.variant.MOST_WITH_SHARED:
            return NotImplemented
        return _run(self.variant.with_shared, held.state[1], w13, limit, (x, ids, weights), out)

    def _held(self, x: torch.Tensor, w13: Linear, w2: Linear) -> Prepared | None:
        return find(self.layers, w13, w2) if w13.kind in KINDS and x.dtype == torch.bfloat16 else None


def _run(
    kernel: object, state: object, w13: Linear, limit: float, given: tuple[torch.Tensor, ...], out: torch.Tensor
) -> None:
    """given: x, ids, weights."""
    if limit != LIMIT:
        raise ValueError(f"limit must be {LIMIT}, got {limit}")
    if not len(out):
        return
    alignment = ALIGNMENT[out.device.type]
    room = room_for(out, alignment)
    inputs, outputs = Inputs(*(placed(tensor, alignment) for tensor in given)), Outputs(room)
    if out.device.type == "cpu":  # elsewhere to look at ids would wait for the device
        unpack_call(inputs, outputs, w13.k)
        validate(inputs, len(w13.weight))
    kernel(Data(state, inputs, outputs))
    if room is not out:
        out.copy_(room)


# ---------------------------------------------------------------- weights


@torch.inference_mode(False)
def prepare(
    variant: ModuleType,
    w13: Linear,
    w2: Linear,
    table: torch.Tensor | None = None,
    shared: tuple[Linear, Linear] | None = None,
) -> Prepared:
    """Prepare the experts of one layer, with the shared expert as one more where the variant has that and it is alike.

    w13: (E, 2 I, H), nvfp4 or mxfp4; w2: (E, H, I). table: int64 (V, K), the experts of a token, where the router has
    one. shared: w13 and w2 of the shared expert. ValueError as fit.
    """
    both = w13, w2
    mxfp4 = w13.kind == "mxfp4"
    if reason := _refusal(w13, w2, table) or (mxfp4 and _no_mxfp4(variant)):
        return Prepared(both, reason)
    if mxfp4:
        converted = [_as_nvfp4(w) for w in both]
        spread = torch.stack([outside for _, outside in converted]).tolist()  # the one wait for the device
        for w, outside in zip(both, spread, strict=True):
            if outside:
                reason = f"scales of a matrix of {w.name} are NaN or not within 2^{formats.NVFP4_SPREAD} of each other"
                return Prepared(both, reason)
        weights = _weights(*(w for w, _ in converted))
    else:
        weights = _weights(w13, w2)
    try:
        if mxfp4:
            return Prepared(both, state=(variant.prepare_fp8(weights), None))
        if shared and hasattr(variant, "prepare_with_shared") and _alike(both, shared):
            return Prepared(both, state=variant.prepare_with_shared(weights, _weights(*shared)))
        return Prepared(both, state=(variant.prepare(weights) if hasattr(variant, "prepare") else weights, None))
    except ValueError as error:
        raise ValueError(f"{w13.name.removesuffix('.w13')}: {error}") from error


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


def _weights(w13: Linear, w2: Linear) -> Weights:
    """The problem's Weights. ValueError: values that it has not."""
    for w in (w13, w2):
        check_values(w)
    in_scales = [torch.ones_like(w.scale_2) if w.input_scale is None else w.input_scale for w in (w13, w2)]
    tensors = [tensor for w in (w13, w2) for tensor in (w.weight, w.scale, w.scale_2)]
    weights = Weights(*tensors, *in_scales, activation="nvfp4" if w13.quantise_input else "bf16")
    try:
        unpack_weights(weights)
    except ValueError as error:
        raise ValueError(f"{w13.name.removesuffix('.w13')}: {error}") from error
    return weights


def _alike(routed: tuple[Linear, Linear], shared: tuple[Linear, Linear]) -> bool:
    """Whether the shared expert is as one of the routed experts, in NVFP4."""
    forms = [[(w.kind, w.quantise_input, w.n, w.k) for w in both] for both in (routed, shared)]
    return forms[0] == forms[1] and not _refusal(*shared, None)


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
