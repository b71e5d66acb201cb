"""Register the problems' winners as operators of torch (torch.ops.dsv4.*), for tracing and torch.compile.

An operator takes the tensors of its problem's task.Data, writes the outputs in place and returns nothing. Weights that
a winner may lay out anew are held beforehand, and named.
"""

import functools
from types import ModuleType

import torch

from problems.common import load


@functools.cache
def _winner(problem: str, device: torch.device) -> ModuleType:
    """The variant that submission.py would choose. ValueError: none for the device."""
    return load.variant(problem, load.winner(load.PROBLEMS / problem, load.device_target(device)))


@functools.cache
def _task(problem: str) -> ModuleType:
    return load.module(load.PROBLEMS / problem, "task")


def _gemv_data(*tensors: torch.Tensor) -> tuple:
    """The operator's tensors as task.Data."""
    data = _task("nvfp4_gemv").Data
    *inputs, c = tensors
    for name, tensor in zip(data._fields, inputs, strict=False):
        if tensor.dtype != torch.uint8:
            raise ValueError(f"{name} must be uint8, the bytes of its codes or scales, got {tensor.dtype}")
    codes = (tensor.view(torch.float4_e2m1fn_x2) for tensor in inputs[:2])
    scales = (tensor.view(torch.float8_e4m3fn) for tensor in inputs[2:])
    return data(*codes, *scales, c)


@torch.library.custom_op("dsv4::nvfp4_gemv", mutates_args=("c",))
def nvfp4_gemv(
    a: torch.Tensor,
    b: torch.Tensor,
    sfa: torch.Tensor,
    sfb: torch.Tensor,
    sfa_permuted: torch.Tensor,
    sfb_permuted: torch.Tensor,
    c: torch.Tensor,
) -> None:
    """c = A b by the winner for the device. Tensors as task.Data of nvfp4_gemv has them, but codes and scales as uint8,
    since torch's checks of an operator copy and compare its inputs, which it cannot for fp4 and fp8.
    ValueError as task.unpack says, or where the device has no winner.
    """
    _winner("nvfp4_gemv", a.device).custom_kernel(_gemv_data(a, b, sfa, sfb, sfa_permuted, sfb_permuted, c))


@nvfp4_gemv.register_fake
def _(
    a: torch.Tensor,
    b: torch.Tensor,
    sfa: torch.Tensor,
    sfb: torch.Tensor,
    sfa_permuted: torch.Tensor,
    sfb_permuted: torch.Tensor,
    c: torch.Tensor,
) -> None:
    _task("nvfp4_gemv").unpack(_gemv_data(a, b, sfa, sfb, sfa_permuted, sfb_permuted, c))


@torch.library.custom_op("dsv4::fmha_decode", mutates_args=("out", "lse"))
def fmha_decode(
    q: torch.Tensor,
    window: torch.Tensor,
    window_index: torch.Tensor,
    window_length: torch.Tensor,
    compressed: torch.Tensor,
    compressed_index: torch.Tensor,
    compressed_length: torch.Tensor,
    sink: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """out, lse = attention of q to the entries that the lists name, by the winner for the device. Tensors as task.Data
    of fmha_decode. ValueError as task.unpack says, or where the device has no winner.
    """
    data = _task("fmha_decode").Data(
        q, window, window_index, window_length, compressed, compressed_index, compressed_length, sink, out, lse
    )
    _winner("fmha_decode", q.device).custom_kernel(data)


@fmha_decode.register_fake
def _(
    q: torch.Tensor,
    window: torch.Tensor,
    window_index: torch.Tensor,
    window_length: torch.Tensor,
    compressed: torch.Tensor,
    compressed_index: torch.Tensor,
    compressed_length: torch.Tensor,
    sink: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    data = _task("fmha_decode").Data(
        q, window, window_index, window_length, compressed, compressed_index, compressed_length, sink, out, lse
    )
    _task("fmha_decode").unpack(data)


@torch.library.custom_op("dsv4::mhc_site", mutates_args=("new_copies", "out", "new_post", "new_comb"))
def mhc_site(
    y: torch.Tensor,
    second: torch.Tensor,
    copies: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm: torch.Tensor,
    new_copies: torch.Tensor,
    out: torch.Tensor,
    new_post: torch.Tensor,
    new_comb: torch.Tensor,
) -> None:
    """What lies between two sublayers, by the winner for the device. Tensors as task.Data of mhc_site. ValueError as
    task.unpack says, or where the device has no winner.
    """
    data = (y, second, copies, post, comb, fn, base, scale, norm, new_copies, out, new_post, new_comb)
    _winner("mhc_site", y.device).custom_kernel(_task("mhc_site").Data(*data))


@mhc_site.register_fake
def _(
    y: torch.Tensor,
    second: torch.Tensor,
    copies: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm: torch.Tensor,
    new_copies: torch.Tensor,
    out: torch.Tensor,
    new_post: torch.Tensor,
    new_comb: torch.Tensor,
) -> None:
    data = (y, second, copies, post, comb, fn, base, scale, norm, new_copies, out, new_post, new_comb)
    _task("mhc_site").unpack(_task("mhc_site").Data(*data))


@torch.library.custom_op("dsv4::indexer", mutates_args=("out",))
def indexer(
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    table: torch.Tensor,
    visible: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """out = the places of the k keys that q scores highest, by the winner for the device. Tensors as task.Data of
    indexer. ValueError as task.unpack says, or where the device has no winner.
    """
    _winner("indexer", q.device).custom_kernel(_task("indexer").Data(q, weights, keys, table, visible, out))


@indexer.register_fake
def _(
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    table: torch.Tensor,
    visible: torch.Tensor,
    out: torch.Tensor,
) -> None:
    _task("indexer").unpack(_task("indexer").Data(q, weights, keys, table, visible, out))


_held: dict[
    tuple[str, str], tuple[tuple, object]
] = {}  # by problem and name: task.Weights, what the winner made of them


@torch.inference_mode(False)  # buffers made in inference mode could not be written outside it
def _hold(problem: str, name: str, weights: tuple | None, device: torch.device | None) -> None:
    _held.pop((problem, name), None)
    if weights is not None:
        _task(problem).unpack_weights(weights)
        winner = _winner(problem, device)
        _held[problem, name] = weights, winner.prepare(weights) if hasattr(winner, "prepare") else weights


def _of_name(problem: str, name: str) -> tuple[tuple, object]:
    if (problem, name) not in _held:
        known = sorted(held for of, held in _held if of == problem)
        raise ValueError(f"name must be one of {known}, which are held, got {name!r}")
    return _held[problem, name]


def hold_moe_gemm(name: str, weights: tuple | None) -> None:
    """Prepare task.Weights of moe_gemm with the winner for their device, for calls of moe_gemm with `name`, and
    hold them instead of those before; None: hold none. ValueError as unpack_weights says, or a device without a winner.
    """
    _hold("moe_gemm", name, weights, None if weights is None else weights.w13.device)


def hold_linear_decode(name: str, weights: tuple | None) -> None:
    """The same for task.Weights of linear_decode, and calls of linear_decode."""
    _hold("linear_decode", name, weights, None if weights is None else weights.links[0][0].codes.device)


def _moe_data(name: str, *tensors: torch.Tensor) -> tuple[tuple, object]:
    """-> task.Data with the weights as they came, and what the winner made of them."""
    task, (weights, prepared) = _task("moe_gemm"), _of_name("moe_gemm", name)
    x, topk_ids, topk_weights, out = tensors
    return task.Data(weights, task.Inputs(x, topk_ids, topk_weights), task.Outputs(out)), prepared


@torch.library.custom_op("dsv4::moe_gemm", mutates_args=("out",))
def moe_gemm(name: str, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, out: torch.Tensor) -> None:
    """out = the experts' sum for x, by the winner for the device. name: of weights that hold_moe_gemm got; tensors as
    task.Inputs and task.Outputs of moe_gemm. ValueError as task.unpack says, or no such name.
    """
    data, prepared = _moe_data(name, x, topk_ids, topk_weights, out)
    _task("moe_gemm").unpack(data)
    _winner("moe_gemm", x.device).custom_kernel(data._replace(weights=prepared))


@moe_gemm.register_fake
def _(name: str, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, out: torch.Tensor) -> None:
    _task("moe_gemm").unpack(_moe_data(name, x, topk_ids, topk_weights, out)[0])


def _linear_data(name: str, x: torch.Tensor, out: torch.Tensor) -> tuple[tuple, object]:
    """As _moe_data."""
    task, (weights, prepared) = _task("linear_decode"), _of_name("linear_decode", name)
    return task.Data(weights, task.Inputs(x), task.Outputs(out)), prepared


@torch.library.custom_op("dsv4::linear_decode", mutates_args=("out",))
def linear_decode(name: str, x: torch.Tensor, out: torch.Tensor) -> None:
    """out = the products of x, by the winner for the device. name: of weights that hold_linear_decode got; tensors as
    task.Inputs and task.Outputs of linear_decode. ValueError as task.unpack says, or no such name.
    """
    data, prepared = _linear_data(name, x, out)
    _task("linear_decode").unpack(data)
    _winner("linear_decode", x.device).custom_kernel(data._replace(weights=prepared))


@linear_decode.register_fake
def _(name: str, x: torch.Tensor, out: torch.Tensor) -> None:
    _task("linear_decode").unpack(_linear_data(name, x, out)[0])
