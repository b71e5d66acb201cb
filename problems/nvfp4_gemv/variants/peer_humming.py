"""peer_humming: Humming's W4A16 GEMM, activations more precise than W4A4; left out of the time: repacking A, b to fp16.

Left out too: choosing the plan and building the routing tables, which depend only on shapes. The wheel is
humming-kernels 0.1.19.

Dense for l = 1, an indexed GEMM over l experts with one row each for l > 1, in fp16 with fp32 accumulation. The plan is
the package's own tuned choice for the row count. Its kernels compile through NVRTC at the first call of a shape, in
setup; the folder that holds libnvrtc-builtins must be on LD_LIBRARY_PATH.
"""

import functools
import json
from typing import NamedTuple

import humming
import torch
from humming import transform
from humming.forward import humming_forward
from humming.kernel.humming import HummingKernel
from humming.layer import HummingLayer
from humming.tune import get_heuristics_config
from task import input_t, output_t, unpack

from problems.common import nvfp4

TARGETS = ("sm90",)
REQUIRES = ("humming", "triton")

VERSION = "0.1.19"  # of what is called below
TILE = 256  # rows and columns; the package wants n and k in whole tiles, of which this is the largest it plans with
FEWEST_ROWS = 8  # of an indexed GEMM; the package's table of plans rounds smaller counts up to it


if humming.__version__ != VERSION:
    raise ImportError(f"peer_humming needs humming-kernels {VERSION}, got {humming.__version__}")


class Tables:
    """torch, as humming.transform uses it: a table is copied from the host once, so that a set-up can be recorded."""

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)

    def tensor(self, values: list[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return _table(tuple(values), dtype, device)


@functools.cache
def _table(values: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


transform.torch = Tables()


class State(NamedTuple):
    """What a call needs besides data.

    layer   the package's, of this shape, without weights
    weights by name, the repacked weights, (l,) n x k with n and k padded to TILE
    x       fp16 (l, k padded to TILE), zero behind k
    out     fp16 (l, n): data.c itself where m fills whole tiles, else a buffer
    config  kind of GEMM and plan, as the package's JSON strings
    routes  tables of the indexed GEMM by argument name, {} for the dense one
    """

    layer: HummingLayer
    weights: dict[str, torch.Tensor]
    x: torch.Tensor
    out: torch.Tensor
    config: dict[str, str]
    routes: dict[str, torch.Tensor]


def setup(data: input_t) -> State:
    """Repack the weights of this call, dequantise its vector, choose and compile the kernel.

    ValueError as unpack says; RuntimeError with the package's reason chained if it cannot compile.
    """
    m, k, l = unpack(data)
    device = data.a.device
    if device.type != "cuda":
        raise RuntimeError(f"peer_humming needs an NVIDIA GPU, got data on {device}")
    pad_m, pad_k = -m % TILE, -k % TILE
    with torch.device(device), torch.cuda.device(device):
        layer, config, routes = _layer(m + pad_m, k + pad_k, l, device)
        weight = _padded(data.a, pad_m, pad_k // 2).view(torch.int32)
        scale = _padded(data.sfa, pad_m, pad_k // nvfp4.BLOCK).view(torch.float8_e4m3fn)
        if l == 1:
            weight, scale = weight[0], scale[0]
        given = {"weight": weight, "weight_scale": scale, "weight_scale_2": torch.ones(l)}
        weights = transform.transform_humming_tensors(layer.humming_config, given)
        x = torch.zeros(l, k + pad_k, dtype=torch.float16)
        x[:, :k] = nvfp4.dequantise(data.b[0].T, data.sfb[0].T, torch.float16)
        out = torch.empty(l, m + pad_m, dtype=torch.float16) if pad_m else data.c[:, 0].T
        return State(layer, weights, x, out, config, routes)


def custom_kernel(data: input_t, state: State) -> output_t:
    """Write A b into data.c, fp16 (m, 1, l), and return it; `state` is what setup(data) gave."""
    given = {**state.weights, **state.config, **state.routes, "locks": state.layer.locks}
    humming_forward(state.layer.humming_config, state.x, outputs=state.out, top_k=1, **given)
    if state.out.data_ptr() != data.c.data_ptr():
        data.c[:, 0] = state.out[:, : len(data.c)].T
    return data.c


@functools.cache
def _layer(
    n: int, k: int, l: int, device: torch.device
) -> tuple[HummingLayer, dict[str, str], dict[str, torch.Tensor]]:
    """A layer of the package for weights of this shape, the call's plan, compiled, and its routes; for all calls."""
    kind, experts = ("dense", None) if l == 1 else ("indexed", l)
    layer = HummingLayer(
        shape_n=n,
        shape_k=k,
        weight_config={"quant_method": "modelopt", "quant_algo": "nvfp4"},
        num_experts=experts,
        torch_dtype=torch.float16,
    )
    lead = () if experts is None else (l,)
    weight = torch.zeros(*lead, n, k // 2, dtype=torch.uint8)
    scale = torch.zeros(*lead, n, k // nvfp4.BLOCK, dtype=torch.uint8).view(torch.float8_e4m3fn)
    layer.load_from_tensors({"weight": weight, "weight_scale": scale, "weight_scale_2": torch.ones(l)})
    try:  # the repacking and the GEMM both compile at first use
        layer.transform()
        rows = 1 if experts is None else max(l, FEWEST_ROWS)
        plan = get_heuristics_config(layer.humming_config, shape_m=rows, gemm_type=kind)
        config = {"compute_config": json.dumps({"gemm_type": kind}), "tuning_config": json.dumps(plan)}
        HummingKernel.prepare_kernels(layer.humming_config.to_str(), *config.values(), device)
    except Exception as error:
        raise RuntimeError(
            f"humming did not build its {kind} kernel for {n=} {k=} ({error}); "
            "NVRTC needs the folder of libnvrtc-builtins on LD_LIBRARY_PATH"
        ) from error
    for name, _ in list(layer.named_parameters()):  # zeros: each call has weights of its own
        delattr(layer, name)
    return layer, config, {} if experts is None else _routes(l, plan["block_shape"][0])


def _padded(tensor: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """tensor: one byte an element, (m, n, l) -> uint8 (l, m + rows, n + columns), contiguous, zero behind."""
    return torch.nn.functional.pad(tensor.view(torch.uint8).permute(2, 0, 1), (0, columns, 0, rows)).contiguous()


def _routes(l: int, block: int) -> dict[str, torch.Tensor]:
    """Pass row i to expert i. sorted_ids lists the rows by expert, each padded to `block` with l, no row's id."""
    sorted_ids = torch.full((l, block), l, dtype=torch.int32)
    sorted_ids[:, 0] = torch.arange(l)
    return {
        "sorted_ids": sorted_ids.flatten(),
        "expert_ids": torch.arange(l, dtype=torch.int32),
        "num_tokens_padded": torch.tensor(l * block, dtype=torch.int32),
    }
