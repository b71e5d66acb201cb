"""peer_humming: Humming's W4A16 grouped GEMMs and its activation; left out of the time: repacking, routing tables.

Left out too: choosing and compiling the plans, which depend only on shapes, and making room for what stands between
the kernels. The wheel is humming-kernels 0.1.19. Timed are four kernels: an indexed GEMM that gathers the tokens'
rows, the clamped SwiGLU, an indexed GEMM over the slots (t * k + j), and, as the package has none, a weighted sum of
ours. One expert is a dense GEMM of the package instead, which needs no tables. It serves only activations in bf16, as
ONLY tells the judge: for NVFP4 ones the package has no kernel on Hopper, and weights that ask for them are refused.
The folder that holds libnvrtc-builtins must be on LD_LIBRARY_PATH.
"""

import json
from typing import NamedTuple

import humming
import torch
import triton
import triton.language as tl
from humming import ops
from humming.kernel.humming import HummingKernel
from humming.layer import HummingLayer
from humming.tune import get_heuristics_config
from task import LIMIT, Weights, input_t, output_t, unpack_call, unpack_weights
from torch.nn.functional import pad

TARGETS = ("sm90",)
REQUIRES = ("humming", "triton")
ONLY = {"activation": "bf16"}  # the judge sends no other cases

VERSION = "0.1.19"  # of what the tables and plans below were checked against
TILE = 128  # rows of weights; the package's plans want whole tiles, and these are the fewest
FEWEST_ROWS = 8  # of an indexed GEMM; the package's table of plans rounds smaller counts up to it
ACTIVATION = f"fminf(a, {LIMIT}f) / (1.f + __expf(-fminf(a, {LIMIT}f))) * fminf(fmaxf(b, -{LIMIT}f), {LIMIT}f)"

if humming.__version__ != VERSION:
    raise ImportError(f"peer_humming needs humming-kernels {VERSION}, got {humming.__version__}")


class Prepared(NamedTuple):
    """What stands for the weights: up (E,) 2 I x H; down (E,) H x I, H padded with zeros to whole tiles."""

    up: HummingLayer
    down: HummingLayer
    experts: int
    hidden: int
    inner: int


class Gemm(NamedTuple):
    """One of a call's two GEMMs: its layer, and all its arguments but the tensors."""

    layer: HummingLayer
    arguments: dict


class State(NamedTuple):
    """What a call needs besides data.

    up, down  the GEMMs
    gate_up   bf16 (T k, 2 I)
    inner     bf16 (T k, I)
    slots     bf16 (T k, padded H), what each expert makes of its token, without the routing weight
    """

    up: Gemm
    down: Gemm
    gate_up: torch.Tensor
    inner: torch.Tensor
    slots: torch.Tensor


@triton.jit
def _combine(slots, ids, weights, out, H, WIDTH, TOPK: tl.constexpr, COLUMNS: tl.constexpr):
    """out bf16 (T, H): rows of slots, bf16 (T TOPK, WIDTH), times weights, fp32 (T, TOPK), in the order of j, but for
    those with an id of -1, in whose rows is what memory held.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for j in tl.static_range(TOPK):
        slot = token * TOPK + j
        value = tl.load(slots + slot * WIDTH + column, mask=column < H, other=0.0)
        total += tl.where(tl.load(ids + slot) >= 0, tl.load(weights + slot) * value.to(tl.float32), 0.0)
    tl.store(out + token * H + column, total.to(tl.bfloat16), mask=column < H)


def prepare(weights: Weights) -> Prepared:
    """Repack copies of the weights. ValueError: activations in nvfp4, for which the package has no kernel on Hopper,
    or as unpack_weights says; RuntimeError with the package's reason chained if it cannot compile.
    """
    experts, hidden, inner, activation = unpack_weights(weights)
    if activation != "bf16":
        raise ValueError(f"activation must be 'bf16', the only one that humming has for NVFP4, got {activation!r}")
    device = weights.w13.device
    if device.type != "cuda":
        raise RuntimeError(f"peer_humming needs an NVIDIA GPU, got weights on {device}")
    with torch.device(device), torch.cuda.device(device):
        up = _layer(weights.w13, weights.s13, weights.g13)
        down = _layer(weights.w2, weights.s2, weights.g2)
        # Compiles the activation for all row counts; the tensors of a call make no difference.
        _activate(torch.zeros(1, 2 * inner, dtype=torch.bfloat16), torch.empty(1, inner, dtype=torch.bfloat16))
    return Prepared(up, down, experts, hidden, inner)


def setup(data: input_t) -> State:
    """Choose and compile this call's GEMMs, sort its slots, make room. The ids must be right: a recorded call cannot
    look at them. ValueError as unpack_call says; RuntimeError with the package's reason chained if it cannot compile.
    """
    prepared: Prepared = data.weights
    tokens, topk = unpack_call(data.inputs, data.outputs, prepared.hidden)
    ids, slots = data.inputs.topk_ids.flatten(), tokens * topk
    with torch.device(ids.device), torch.cuda.device(ids.device):
        up = _gemm(prepared.up, ids, prepared.experts, topk)
        down = _gemm(prepared.down, ids, prepared.experts, 1)
        widths = 2 * prepared.inner, prepared.inner, prepared.down.shape_n
        return State(up, down, *(torch.empty(slots, width, dtype=torch.bfloat16) for width in widths))


def custom_kernel(data: input_t, state: State) -> output_t:
    """Write into data.outputs.out and return it; `state` is what setup(data) gave."""
    (x, ids, weights), (out,) = data.inputs, data.outputs
    state.up.layer(x, outputs=state.gate_up, **state.up.arguments)
    _activate(state.gate_up, state.inner)
    state.down.layer(state.inner, outputs=state.slots, **state.down.arguments)
    columns = 256 if len(x) <= 64 else 1024  # of a program: many small ones where there are few tokens
    _combine[len(x), triton.cdiv(x.shape[1], columns)](
        state.slots, ids, weights, out, x.shape[1], state.slots.shape[1], TOPK=ids.shape[1], COLUMNS=columns
    )
    return out


def _layer(codes: torch.Tensor, scales: torch.Tensor, factors: torch.Tensor) -> HummingLayer:
    """codes, scales, factors: one of the weights with what belongs to it, as in task.Weights; copied."""
    experts, rows, half = codes.shape
    codes, scales = (pad(t.view(torch.uint8), (0, 0, 0, -rows % TILE)) if rows % TILE else t for t in (codes, scales))
    scales = scales.view(torch.float8_e4m3fn)
    layer = HummingLayer(
        shape_n=codes.shape[1],
        shape_k=2 * half,
        weight_config={"quant_method": "modelopt", "quant_algo": "nvfp4"},
        num_experts=experts if experts > 1 else None,
        torch_dtype=torch.bfloat16,
    )
    if experts == 1:
        codes, scales = codes[0], scales[0]
    layer.load_from_tensors({"weight": codes, "weight_scale": scales, "weight_scale_2": factors})
    del codes, scales
    try:  # the repacking compiles at its first use
        layer.transform()
    except Exception as error:
        raise _cannot("repack weights", layer, error) from error
    torch.cuda.empty_cache()  # the transform makes copies, of weights that may take half of the memory
    return layer


def _gemm(layer: HummingLayer, ids: torch.Tensor, experts: int, topk: int) -> Gemm:
    """ids: int32 (slots,); topk: slots that share a row of the GEMM's input."""
    kind = "indexed" if experts > 1 else "dense"
    rows = max(len(ids), FEWEST_ROWS) if experts > 1 else len(ids)
    try:
        plan = get_heuristics_config(layer.humming_config, shape_m=rows, gemm_type=kind)
        config = {"compute_config": json.dumps({"gemm_type": kind}), "tuning_config": json.dumps(plan)}
        HummingKernel.prepare_kernels(layer.humming_config.to_str(), *config.values(), ids.device)
    except Exception as error:
        raise _cannot(f"build its {kind} kernel for {rows} rows", layer, error) from error
    routes = _routes(ids, experts, plan["block_shape"][0]) if experts > 1 else {}
    return Gemm(layer, {**config, **routes, "top_k": topk})


def _routes(ids: torch.Tensor, experts: int, block: int) -> dict[str, torch.Tensor]:
    """Tables of the indexed GEMM. sorted_ids: slots by expert, ascending, each expert's padded to whole blocks with
    len(ids), no slot's number; those with an id of -1 are in no block. expert_ids: of each block; num_tokens_padded:
    how much of sorted_ids counts, which has room for any ids, since a recorded call cannot ask how many blocks there
    are.
    """
    most = len(ids) // block + min(len(ids), experts)
    key = torch.where(ids < 0, experts, ids).long()
    order = key.argsort(stable=True)  # slots of no expert come last
    counts = torch.zeros(experts + 1, dtype=torch.int64).index_add_(0, key, torch.ones_like(key))[:experts]
    blocks = (counts + block - 1) // block
    ends = blocks.cumsum(0)
    # How far an expert's slots move: by the padding of those before it. The others all go to a place behind the table.
    moved = (ends - blocks) * block - (counts.cumsum(0) - counts)
    places = torch.where(key[order] < experts, torch.arange(len(ids)) + pad(moved, (0, 1))[key[order]], most * block)
    sorted_ids = torch.full((most * block + 1,), len(ids), dtype=torch.int32)
    sorted_ids[places] = order.int()
    return {
        "sorted_ids": sorted_ids[:-1],
        "expert_ids": torch.searchsorted(ends, torch.arange(most), right=True, out_int32=True).clamp_(max=experts - 1),
        "num_tokens_padded": (ends[-1] * block).int(),
    }


def _activate(gate_up: torch.Tensor, result: torch.Tensor) -> None:
    """The clamped SwiGLU without the routing weight: bf16 (n, 2 I), gate first -> bf16 (n, I)."""
    ops.process_input(gate_up, outputs=result, activation_type="binary_split", activation_impl=ACTIVATION)


def _cannot(what: str, layer: HummingLayer, error: Exception) -> RuntimeError:
    shape = f"experts={layer.num_experts} n={layer.shape_n} k={layer.shape_k}"
    return RuntimeError(
        f"humming did not {what}, {shape} ({error!r}); NVRTC needs the folder of libnvrtc-builtins on LD_LIBRARY_PATH"
    )
