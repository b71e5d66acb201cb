"""sm90_grouped: weights repacked for tensor cores; read once by mma.sync for few tokens an expert, wgmma for many."""

import functools
from ctypes import addressof, c_int, c_void_p
from pathlib import Path
from typing import NamedTuple

import torch
from task import Weights, input_t, output_t, unpack_call, unpack_weights

from problems.common import build, early, load, nvfp4, tma

TARGETS = ("sm90", "sm100")  # sm100: only the kernel for few tokens, which has no wgmma
SOURCE = Path(__file__).with_suffix(".cu")
UNIT = 1152  # bytes of 32 rows by 64 columns, see nvfp4_units.cuh
MXFP4_UNIT = 2176  # bytes of 32 rows by 128 columns, see sm90_mxfp4_units.cuh
BOX = 8  # unit rows that a copy of the kernel for many brings
MOST_TOKENS = 256  # of a launch of the kernel for few
MOST_WITH_SHARED = 32  # tokens of a call of `with_shared`: more pass over the shared expert's weights too often
MANY = 12  # tokens an expert on average from which the kernel for many is quicker in bf16, beyond MOST_TOKENS
DENSE = range(12, 257)  # tokens of a single expert for which its columns are split over blocks
FORMS = "bf16", "nvfp4", "fp8"  # of activations, by the numbers that decode_experts and prefill_experts take


class State(NamedTuple):
    """What prepare keeps: units in the weights' place, of equal size; the other tensors as they were.

    activation: one of the problem's, or "fp8".
    """

    w13: torch.Tensor  # uint8 (E, 2 I / 32, H / 64, 1152)
    g13: torch.Tensor
    w2: torch.Tensor  # uint8 (E, H / 32, I / 64, 1152)
    g2: torch.Tensor
    in_scale13: torch.Tensor
    in_scale2: torch.Tensor
    arrived: torch.Tensor  # int64, counters of the kernel for few, see sm90_decode_groups.cuh
    met: torch.Tensor  # int32 (), counter of the kernel for a single expert, see sm90_dense.cuh
    map13: tma.Fields  # of w13 and of w2, for the kernel for many
    map2: tma.Fields
    activation: str


class Mxfp4State(NamedTuple):
    """The same of weights in MXFP4 on Hopper: units, and the power of two that they leave out of each matrix."""

    w13: torch.Tensor  # uint8 (E, ceil(2 I / 256), ceil(H / 128), 8, 2176)
    g13: torch.Tensor
    w2: torch.Tensor  # uint8 (E, ceil(H / 256), ceil(I / 128), 8, 2176)
    g2: torch.Tensor
    hidden: int
    inner: int


def compile_for(target: str) -> list[build.Artefact]:
    """Compile for `target`, without a GPU."""
    return [build.cuda(SOURCE, target)]


def prepare(weights: Weights) -> "State | Mxfp4State":
    """Units of both matrices. ValueError as unpack_weights says; RuntimeError: the launch."""
    unpack_weights(weights)
    if weights.activation == "fp8":
        if load.device_target(weights.w13.device) == "sm90":
            return _prepare_mxfp4(weights)
        (s13, g13), (s2, g2) = map(nvfp4.scales_of_mxfp4, (weights.s13, weights.s2))
        return prepare_fp8(weights._replace(s13=s13, g13=g13, s2=s2, g2=g2, activation="bf16"))
    w13, w2 = _both(weights)
    return _state(w13, w2, [scale.clone() for scale in _scales(weights)], weights.activation)


def prepare_fp8(weights: Weights) -> State:
    """As prepare, for calls of custom_kernel that round x and v to e4m3 with a power of two as the scale of each 128
    values, as fp8.round_trip does; a last group may have 64. Values of x are below 2^124.

    weights: with activation "bf16". ValueError: with another, or as prepare.
    """
    if weights.activation != "bf16":
        raise ValueError(f"weights must have activation bf16, got {weights.activation}")
    return prepare(weights)._replace(activation="fp8")


def _scales(weights: Weights) -> tuple[torch.Tensor, ...]:
    return weights.g13, weights.g2, weights.in_scale13, weights.in_scale2


def _both(*weights: Weights) -> tuple[torch.Tensor, torch.Tensor]:
    """Units of w13 and of w2, of all weights one behind the other."""
    return (
        _units(True, *((one.w13, one.s13) for one in weights)),
        _units(False, *((one.w2, one.s2) for one in weights)),
    )


def _state(w13: torch.Tensor, w2: torch.Tensor, scales: list[torch.Tensor], activation: str) -> State:
    """scales: as _scales."""
    g13, g2, in_scale13, in_scale2 = scales
    counters = build.cuda(SOURCE, load.device_target(w13.device)).function("decode_counters")()
    return State(
        w13,
        g13,
        w2,
        g2,
        in_scale13,
        in_scale2,
        torch.zeros(counters, dtype=torch.int64, device=w13.device),
        torch.zeros((), dtype=torch.int32, device=w13.device),
        _map(w13),
        _map(w2),
        activation,
    )


def prepare_with_shared(weights: Weights, shared: Weights) -> tuple[State, State]:
    """Units of the routed experts, as prepare, and of these with the shared one behind them, in the same memory.

    shared: of one expert, with H, I and the activation of `weights`. ValueError: it is not that, or as prepare.
    """
    unpack_weights(weights)
    unpack_weights(shared)
    if weights.activation == "fp8":
        raise ValueError("weights must have activation bf16 or nvfp4, got fp8")
    if len(shared.w13) != 1 or shared.w13.shape[1:] != weights.w13.shape[1:] or shared.activation != weights.activation:
        raise ValueError(
            f"shared must have one expert as the {len(weights.w13)} others, w13 (1, {weights.w13.shape[1]}, "
            f"{weights.w13.shape[2]}) and activation {weights.activation}, got {tuple(shared.w13.shape)} and "
            f"{shared.activation}"
        )
    both = weights, shared
    w13, w2 = _both(*both)
    scales = [torch.cat(pair) for pair in zip(*map(_scales, both), strict=True)]
    everyone = _state(w13, w2, scales, weights.activation)
    return _state(w13[:-1], w2[:-1], [one[:-1] for one in scales], weights.activation), everyone


def custom_kernel(data: input_t) -> output_t:
    """Write data.outputs.out, bf16 (T, H), and return it; data.weights is what prepare returned.

    ValueError as unpack_call says, or H or I over 8192; RuntimeError: the launch.
    """
    state, (x, ids, routing), (out,) = data
    if isinstance(state, Mxfp4State):
        _run_mxfp4(data)
        return out
    hidden, inner = _sizes(state)
    tokens, topk = unpack_call(data.inputs, data.outputs, hidden)
    experts, target = len(state.w13), load.device_target(x.device)
    wgmma, bf16 = target == "sm90", state.activation == "bf16"
    if wgmma and bf16 and experts == 1 and tokens in DENSE:
        _run("dense", state, data, (tokens, hidden, inner))
        return out
    if wgmma and tokens > MOST_TOKENS and (not bf16 or tokens * topk >= MANY * experts):
        _run("prefill", state, data, (tokens, topk, experts, hidden, inner))
        return out
    _decode(data, tokens, topk, shared=False)
    return out


def with_shared(data: input_t) -> output_t:
    """Do as custom_kernel, and add the shared expert's output, with weight 1, before the sum is rounded.

    data.weights: the second state of prepare_with_shared; topk_ids: routed experts only. For few tokens,
    MOST_WITH_SHARED or less. ValueError, RuntimeError as custom_kernel.
    """
    tokens, topk = unpack_call(data.inputs, data.outputs, _sizes(data.weights)[0])
    _decode(data, tokens, topk + 1, shared=True)
    return data.outputs.out


def _sizes(state: State) -> tuple[int, int]:
    """-> (H, I)."""
    return 64 * state.w13.shape[2], 64 * state.w2.shape[2]


def _decode(data: input_t, tokens: int, topk: int, shared: bool) -> None:
    """The kernel for few tokens. shared: the last expert has all of them, and counts in topk."""
    state, (x, ids, routing), (out,) = data
    (hidden, inner), experts = _sizes(state), len(state.w13)
    _check_columns(max(hidden, inner))
    tiles = 2 if tokens * topk > 2 * experts and hidden <= 4096 and inner <= 2048 else 1
    slots, quantised = min(tokens, MOST_TOKENS) * topk, state.activation == "nvfp4"
    form = FORMS.index(state.activation)
    v = torch.empty(slots, inner, dtype=torch.bfloat16, device=x.device)
    rows = torch.empty(slots if quantised else 0, hidden, dtype=torch.bfloat16, device=x.device)
    run = build.cuda(SOURCE, load.device_target(x.device)).function("decode_experts", *[c_void_p] * 13, *[c_int] * 10)
    for first in range(0, tokens, MOST_TOKENS):
        count = min(MOST_TOKENS, tokens - first)
        code = run(
            state.w13.data_ptr(),
            state.g13.data_ptr(),
            state.in_scale13.data_ptr(),
            state.w2.data_ptr(),
            state.g2.data_ptr(),
            state.in_scale2.data_ptr(),
            x[first].data_ptr(),
            ids[first].data_ptr(),
            routing[first].data_ptr(),
            out[first].data_ptr(),
            v.data_ptr(),
            rows.data_ptr(),
            state.arrived.data_ptr(),
            count,
            topk,
            experts,
            hidden,
            inner,
            form,
            shared,
            tiles,
            _blocks(x.device),
            early.allowed(),
        )
        build.check(code, "decode_experts")


def _run(kernel: str, state: State, data: input_t, sizes: tuple[int, ...]) -> None:
    """dense or prefill, for a call of these sizes."""
    x, ids, routing = data.inputs
    artefact = build.cuda(SOURCE, "sm90")
    kib = artefact.function(f"{kernel}_workspace", *[c_int] * len(sizes))(*sizes)
    scratch = torch.empty(kib, 1024, dtype=torch.uint8, device=x.device)
    many = kernel == "prefill"
    w13, w2 = (addressof(state.map13), addressof(state.map2)) if many else (state.w13.data_ptr(), state.w2.data_ptr())
    last = (state.in_scale13, state.in_scale2) if many else (state.met,)
    others = [t.data_ptr() for t in (x, ids, routing, data.outputs.out, scratch, *last)]
    sizes = (*sizes, FORMS.index(state.activation)) if many else sizes
    run = artefact.function(f"{kernel}_experts", *[c_void_p] * (4 + len(others)), *[c_int] * len(sizes))
    build.check(run(w13, state.g13.data_ptr(), w2, state.g2.data_ptr(), *others, *sizes), f"{kernel}_experts")


def _run_mxfp4(data: input_t) -> None:
    state, (x, ids, routing), (out,) = data
    sizes = (*unpack_call(data.inputs, data.outputs, state.hidden), len(state.w13), state.hidden, state.inner)
    artefact = build.cuda(SOURCE, "sm90")
    kib = artefact.function("mxfp4_workspace", *[c_int] * 5)(*sizes)
    scratch = torch.empty(kib, 1024, dtype=torch.uint8, device=x.device)
    run = artefact.function("mxfp4_experts", *[c_void_p] * 9, *[c_int] * 5)
    build.check(run(*(t.data_ptr() for t in (*state[:4], x, ids, routing, out, scratch)), *sizes), "mxfp4_experts")


def _prepare_mxfp4(weights: Weights) -> Mxfp4State:
    _, hidden, inner, _ = unpack_weights(weights)
    w13, w2 = _mxfp4_units(True, weights.w13, weights.s13), _mxfp4_units(False, weights.w2, weights.s2)
    return Mxfp4State(*w13, *w2, hidden, inner)


def _mxfp4_units(interleaved: bool, packed: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (E, rows, columns / 2) and scales (E, rows, columns / 32) -> units, and fp32 (E,), 2^6 below the largest
    scales.
    """
    experts, rows, columns = packed.shape[0], packed.shape[1], 2 * packed.shape[2]
    shape = experts, (rows + 255) // 256, (columns + 127) // 128, 8, MXFP4_UNIT
    units = torch.empty(shape, dtype=torch.uint8, device=packed.device)
    largest = scales.amax((1, 2))
    run = build.cuda(SOURCE, "sm90").function("repack_mxfp4", *[c_void_p] * 4, *[c_int] * 4)
    pointers = (tensor.data_ptr() for tensor in (packed, scales, largest, units))
    build.check(run(*pointers, experts, rows, columns, interleaved), "repack_mxfp4")
    return units, torch.exp2(largest.float() - (127 + 6))


def _units(interleaved: bool, *parts: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Of pairs of codes (E, rows, columns / 2) and scales (E, rows, columns / 16), one behind the other: uint8 (all E,
    rows / 32, columns / 64, UNIT).
    """
    packed = parts[0][0]
    rows, columns = packed.shape[1], 2 * packed.shape[2]
    shape = sum(len(packed) for packed, _ in parts), rows // 32, columns // 64, UNIT
    units = torch.empty(shape, dtype=torch.uint8, device=packed.device)
    run = build.cuda(SOURCE, load.device_target(packed.device)).function("repack_units", *[c_void_p] * 3, *[c_int] * 4)
    first = 0
    for packed, scales in parts:
        pointers = packed.data_ptr(), scales.data_ptr(), units[first].data_ptr()
        build.check(run(*pointers, len(packed), rows, columns, interleaved), "repack_units")
        first += len(packed)
    return units


def _map(units: torch.Tensor) -> tma.Fields:
    """Units (E, rows, chunks, 1152) as elements of 8 bytes, in boxes of BOX rows by one unit."""
    experts, rows, chunks, _ = units.shape
    row = chunks * UNIT
    described = tma.check("uint64", (row // 8, rows, experts), (row, rows * row), (UNIT // 8, BOX, 1))
    return described.at(units.data_ptr(), units.nbytes).fields()


def _check_columns(most: int) -> None:
    if most > 8192:
        raise ValueError(f"hidden and inner must be at most 8192, got {most}")


@functools.cache
def _blocks(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
