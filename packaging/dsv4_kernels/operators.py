"""Register the problems' winners as operators of torch (torch.ops.dsv4.*), for tracing and torch.compile.

An operator takes the tensors of its problem's task.Data, writes the outputs in place and returns nothing: by the winner
for the device of the first tensor. ValueError as task.unpack says, or where the device has no winner, or a tensor does
not begin at a multiple of ALIGNED bytes. Weights that a winner may lay out anew are held beforehand, and named: then
the operator's first argument is the name. On a GPU it works in torch's current stream, and CUDA graphs can record it.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from problems.common import load


@functools.cache
def winner(problem: str, device: torch.device) -> ModuleType:
    """The variant that submission.py would choose. ValueError: none for the device."""
    return load.variant(problem, load.winner(load.PROBLEMS / problem, load.device_target(device)))


ALIGNED = 16  # bytes that the widest loads, stores and bulk copies of the winners take at once
LEGACY, PER_THREAD = 0, 2  # streams of CUDA: which no graph records; the default one of the winners' launchers


@contextmanager
def queue_of_winners(device: torch.device) -> Iterator[None]:
    """Within: torch's current stream is the one that the winners launch to, behind all that is in the current one now.
    What is in the current one afterwards comes behind them; in a CUDA graph both are edges, and cost nothing.
    """
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        current, own = torch.cuda.current_stream(), torch.cuda.ExternalStream(PER_THREAD)
        if current.cuda_stream in (LEGACY, PER_THREAD):  # CUDA itself keeps the order of these two
            yield
            return
        own.wait_stream(current)
        with torch.cuda.stream(own):
            yield
        current.wait_stream(own)


def check_addresses(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """ValueError, naming the tensor: one does not begin at a multiple of ALIGNED bytes. An empty one is at 0."""
    for name, tensor in named:
        if tensor.data_ptr() % ALIGNED:
            raise ValueError(f"{name} must begin at a multiple of {ALIGNED} bytes, got {tensor.data_ptr():#x}")


@functools.cache
def task(problem: str) -> ModuleType:
    """A problem's task.py, which says what its tensors are."""
    return load.module(load.PROBLEMS / problem, "task")


def _operator(
    problem: str, names: tuple[str, ...], outputs: int, data: Callable[..., tuple], held: bool = False
) -> torch.library.CustomOpDef:
    """names: of the tensors, of which the last `outputs` are written; data: the arguments -> task.Data, and what the
    winner gets in its place, or None; held: the first argument is the name of weights.
    """
    inputs, written = names[:-outputs], names[-outputs:]
    arguments = ["str name"] * held + [f"Tensor {name}" for name in inputs]
    arguments += [f"Tensor(a{i}!) {name}" for i, name in enumerate(written)]

    def checked(*given: Any) -> tuple:
        for name, tensor in zip(names, given[held:], strict=True):
            if tensor is None or not tensor.dim():  # torch lets None pass for a tensor
                raise ValueError(f"{name} must be a tensor with dimensions, got {tensor}")
        return data(*given)

    def call(*given: Any) -> None:
        plain, mine = checked(*given)
        check_addresses(zip(names, given[held:], strict=True))  # here: what is fake has no address
        if held:  # elsewhere the winner does this
            task(problem).unpack(plain)
        with queue_of_winners(given[-1].device):
            winner(problem, given[-1].device).custom_kernel(mine or plain)

    def fake(*given: Any) -> None:
        task(problem).unpack(checked(*given)[0])

    schema = f"({', '.join(arguments)}) -> ()"
    made = torch.library.custom_op(f"dsv4::{problem}", call, mutates_args=written, schema=schema)
    made.register_fake(fake)
    return made


def _plain(problem: str, outputs: int) -> torch.library.CustomOpDef:
    """The operator of a problem without weights, whose data are tensors."""
    made = task(problem).Data
    return _operator(problem, made._fields, outputs, lambda *tensors: (made(*tensors), None))


def _gemv_data(*tensors: torch.Tensor) -> tuple[tuple, None]:
    """nvfp4_gemv's task.Data of its tensors, or of their bytes as uint8: torch's checks of an operator copy and compare
    its inputs, which it cannot for fp4 and fp8.
    """
    given = task("nvfp4_gemv").Data(*tensors)
    if given.a.dim() != 3:
        raise ValueError(f"a must be (m, k / 2, l), got {tuple(given.a.shape)}")
    for name, tensor in list(given._asdict().items())[:-1]:
        dtype = torch.float4_e2m1fn_x2 if name in ("a", "b") else torch.float8_e4m3fn
        if tensor.dtype not in (dtype, torch.uint8):
            raise ValueError(f"{name} must be {dtype}, or its bytes as torch.uint8, got {tensor.dtype}")
        given = given._replace(**{name: tensor.view(dtype)})
    return given, None


# By problem and name: task.Weights, what the winner made of them.
_held: dict[tuple[str, str], tuple[tuple, object]] = {}


@torch.inference_mode(False)  # buffers made in inference mode could not be written outside it
def _hold(problem: str, name: str, weights: Any, device_of: Callable[[Any], torch.device]) -> None:
    if weights is None:
        _held.pop((problem, name), None)
        return
    if (fields := task(problem).Weights._fields) != getattr(weights, "_fields", None):
        raise ValueError(f"weights must be task({problem!r}).Weights, of {fields}, got {type(weights).__name__}")
    task(problem).unpack_weights(weights)
    leaves = pytree.tree_flatten_with_path(weights)[0]
    check_addresses((pytree.keystr(at)[1:], part) for at, part in leaves if isinstance(part, torch.Tensor))
    device = device_of(weights)
    variant = winner(problem, device)
    with queue_of_winners(device):
        _held.pop((problem, name), None)  # before there are new ones, which may need the memory
        _held[problem, name] = weights, variant.prepare(weights) if hasattr(variant, "prepare") else weights


def hold_moe_gemm(name: str, weights: Any) -> None:
    """Prepare task.Weights of moe_gemm with the winner for their device, for calls of moe_gemm with `name`, and
    hold them instead of those before; None: hold none. ValueError as unpack_weights says, or a device without a winner.
    """
    _hold("moe_gemm", name, weights, lambda of: of.w13.device)


def hold_linear_decode(name: str, weights: Any) -> None:
    """The same for task.Weights of linear_decode, and calls of linear_decode."""
    _hold("linear_decode", name, weights, lambda of: of.links[0][0].codes.device)


def _weighted(problem: str) -> torch.library.CustomOpDef:
    """The operator of a problem with weights. ValueError too: a name that is not held."""
    of = task(problem)
    names = (*of.Inputs._fields, *of.Outputs._fields)

    def data(name: str, *tensors: torch.Tensor) -> tuple[tuple, tuple]:
        if (problem, name) not in _held:
            known = sorted(held for owner, held in _held if owner == problem)
            raise ValueError(f"name must be one of {known}, which are held, got {name!r}")
        weights, prepared = _held[problem, name]
        count = len(of.Inputs._fields)
        made = of.Data(weights, of.Inputs(*tensors[:count]), of.Outputs(*tensors[count:]))
        return made, made._replace(weights=prepared)

    return _operator(problem, names, len(of.Outputs._fields), data, held=True)


nvfp4_gemv = _operator("nvfp4_gemv", task("nvfp4_gemv").Data._fields, 1, _gemv_data)
fmha_decode, fmha_prefill = _plain("fmha_decode", 2), _plain("fmha_prefill", 2)
mhc_site, indexer = _plain("mhc_site", 4), _plain("indexer", 1)
moe_gemm, linear_decode = _weighted("moe_gemm"), _weighted("linear_decode")
