"""peer_humming: Humming's W4A16 dense and grouped GEMMs; left out of the time: repacking, plans, routing tables.

The wheel is humming-kernels 0.1.19. A matrix is a dense GEMM of the package; one with groups an indexed GEMM over as
many experts, each with its own rows of the input. A quantised input is rounded to bf16 in front of it, by a Triton
kernel of ours, which is timed. It serves nvfp4 only. The folder that holds libnvrtc-builtins must be
on LD_LIBRARY_PATH.
"""

import json
from typing import NamedTuple

import humming
import torch
from humming.kernel.humming import HummingKernel
from humming.layer import HummingLayer
from humming.tune import get_heuristics_config
from task import Matrix, Weights, input_t, output_t, parts, unpack_call, unpack_weights
from torch.nn.functional import pad

from problems.common import triton_inputs

TARGETS = ("sm90",)
REQUIRES = ("humming", "triton")
ONLY = {"format": ("nvfp4", "nvfp4_a16")}  # the judge sends no other cases

VERSION = "0.1.19"  # of what the tables and plans below were checked against
TILE = 256  # rows and columns; the package wants n and k in whole tiles, of which this is the largest it plans with
FEWEST_ROWS = 8  # of an indexed GEMM; the package's table of plans rounds smaller counts up to it

if humming.__version__ != VERSION:
    raise ImportError(f"peer_humming needs humming-kernels {VERSION}, got {humming.__version__}")


class Prepared(NamedTuple):
    """What replaces the weights: a layer a matrix, n and k padded with zeros to whole tiles."""

    weights: Weights
    sizes: tuple[tuple[tuple[int, int, int], ...], ...]
    links: tuple[tuple[HummingLayer, ...], ...]


class Gemm(NamedTuple):
    """One matrix of a call: its layer, all arguments but the tensors, and where its output goes: None for its place."""

    layer: HummingLayer
    arguments: dict
    room: torch.Tensor | None


class Step(NamedTuple):
    """One link of a call. input: where its input is padded or put in order, None where it is taken as it is; rounded:
    where it is rounded, None where it is not quantised.
    """

    gemms: tuple[Gemm, ...]
    input: torch.Tensor | None
    rounded: torch.Tensor | None


def prepare(weights: Weights) -> Prepared:
    """Repack copies of the weights. ValueError: another format than nvfp4, or as unpack_weights says; RuntimeError with
    the package's reason chained if it cannot compile.
    """
    fmt, sizes = unpack_weights(weights)
    if fmt != "nvfp4":
        raise ValueError(f"format must be 'nvfp4', got {fmt!r}")
    device = weights.links[0][0].codes.device
    if device.type != "cuda":
        raise RuntimeError(f"peer_humming needs an NVIDIA GPU, got weights on {device}")
    with torch.device(device), torch.cuda.device(device):
        return Prepared(weights, sizes, tuple(tuple(map(_layer, link)) for link in weights.links))


def setup(data: input_t) -> list[Step]:
    """Choose and compile this call's GEMMs, make room. ValueError as unpack_call says; RuntimeError with the package's
    reason chained if it cannot compile.
    """
    prepared: Prepared = data.weights
    sizes = unpack_call(data.inputs, data.outputs, "nvfp4", prepared.sizes)
    with torch.device(data.inputs.x.device), torch.cuda.device(data.inputs.x.device):
        found = zip(prepared.weights.links, prepared.links, sizes.links, strict=True)
        return [_step(link[0].quantise, layers, shapes, sizes.tokens) for link, layers, shapes in found]


def custom_kernel(data: input_t, state: list[Step]) -> output_t:
    """Write data.outputs.out and return it; `state` is what setup(data) gave."""
    prepared, (v,), (out,) = data
    sizes = unpack_call(data.inputs, data.outputs, "nvfp4", prepared.sizes)
    for matrices, step, link, given in zip(prepared.weights.links, state, sizes.links, parts(out, sizes), strict=True):
        groups, _, k = link[0]
        for matrix, gemm, to, (_, n, _) in zip(matrices, step.gemms, given, link, strict=True):
            taken = v
            if step.rounded is not None:
                triton_inputs.round_input("nvfp4", matrix, v, step.rounded)
                taken = step.rounded
            if step.input is not None:  # rows by group, then token
                step.input[:, :k].view(groups, len(v), k).copy_(taken.view(len(v), groups, k).transpose(0, 1))
                taken = step.input
            room = to if gemm.room is None else gemm.room
            gemm.layer(taken, outputs=room, top_k=1, **gemm.arguments)
            if gemm.room is not None:
                rows = room[:, :n].unflatten(0, (groups, -1)).transpose(0, 1)
                to.view(len(to), groups, n).copy_(rows)
        v = given[0]
    return out


def _layer(matrix: Matrix) -> HummingLayer:
    groups, n, half = matrix.codes.shape
    rows, columns = -n % TILE, -2 * half % TILE
    codes = pad(matrix.codes, (0, columns // 2, 0, rows)).contiguous()
    scales = pad(matrix.scales.view(torch.uint8), (0, columns // 16, 0, rows)).contiguous().view(torch.float8_e4m3fn)
    layer = HummingLayer(
        shape_n=n + rows,
        shape_k=2 * half + columns,
        weight_config={"quant_method": "modelopt", "quant_algo": "nvfp4"},
        num_experts=groups if groups > 1 else None,
        torch_dtype=torch.bfloat16,
    )
    if groups == 1:
        codes, scales = codes[0], scales[0]
    factor = matrix.factor if matrix.input_scale is None else matrix.factor * matrix.input_scale
    layer.load_from_tensors({"weight": codes, "weight_scale": scales, "weight_scale_2": factor})
    try:  # the repacking compiles at its first use
        layer.transform()
    except Exception as error:
        raise _cannot("repack weights", layer, error) from error
    return layer


def _step(
    quantise: bool, layers: tuple[HummingLayer, ...], link: tuple[tuple[int, int, int], ...], tokens: int
) -> Step:
    groups, _, k = link[0]
    gemms = tuple(_gemm(layer, groups, n, tokens) for layer, (_, n, _) in zip(layers, link, strict=True))
    taken = None
    if groups > 1 or layers[0].shape_k != k:
        taken = torch.zeros(groups * tokens, layers[0].shape_k, dtype=torch.bfloat16)
    rounded = torch.empty(tokens, groups * k, dtype=torch.bfloat16) if quantise else None
    return Step(gemms, taken, rounded)


def _gemm(layer: HummingLayer, groups: int, n: int, tokens: int) -> Gemm:
    kind = "indexed" if groups > 1 else "dense"
    rows = groups * tokens
    try:
        shape_m = rows if groups == 1 else max(rows, FEWEST_ROWS)
        plan = get_heuristics_config(layer.humming_config, shape_m=shape_m, gemm_type=kind)
        config = {"compute_config": json.dumps({"gemm_type": kind}), "tuning_config": json.dumps(plan)}
        HummingKernel.prepare_kernels(layer.humming_config.to_str(), *config.values(), torch.empty(0).device)
    except Exception as error:
        raise _cannot(f"build its {kind} kernel for {rows} rows", layer, error) from error
    routes = _routes(groups, tokens, plan["block_shape"][0]) if groups > 1 else {}
    room = None if groups == 1 and layer.shape_n == n else torch.empty(rows, layer.shape_n, dtype=torch.bfloat16)
    return Gemm(layer, {**config, **routes}, room)


def _routes(groups: int, tokens: int, block: int) -> dict[str, torch.Tensor]:
    """Pass rows g T .. g T + T - 1 to expert g. sorted_ids lists them by expert, each padded to whole blocks with G T,
    no row's number.
    """
    blocks = -(-tokens // block)
    sorted_ids = torch.full((groups, blocks * block), groups * tokens, dtype=torch.int32)
    sorted_ids[:, :tokens] = torch.arange(groups * tokens, dtype=torch.int32).view(groups, tokens)
    return {
        "sorted_ids": sorted_ids.flatten(),
        "expert_ids": torch.arange(groups, dtype=torch.int32).repeat_interleave(blocks),
        "num_tokens_padded": torch.full((), groups * blocks * block, dtype=torch.int32),
    }


def _cannot(what: str, layer: HummingLayer, error: Exception) -> RuntimeError:
    shape = f"experts={layer.num_experts} n={layer.shape_n} k={layer.shape_k}"
    return RuntimeError(
        f"humming did not {what}, {shape} ({error!r}); NVRTC needs the folder of libnvrtc-builtins on LD_LIBRARY_PATH"
    )
