"""Tensors in a buffer, for the checker: their bytes, comparison, poison, and copies from a runner's memory."""

import math
import os
import secrets

import torch

from harness.checker import values
from harness.runner import gate, tree
from harness.runner.buffers import Shared

WORD = 8  # bytes of an int64
SAMPLED = 2**16
E8M0, E8M0_LARGEST = torch.float8_e8m0fnu, 254  # as bits; 255 is NaN
NARROWER = {torch.float64: torch.float32, torch.int64: torch.int32, torch.complex128: torch.complex64}


def region(leaf: dict, buffer: Shared) -> torch.Tensor:
    """Return the bytes of one tensor of a specification in a buffer."""
    return buffer.memory[leaf["offset"] : leaf["offset"] + leaf["nbytes"]]


def same(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two flat uint8 tensors are equal: as words if aligned, since torch.equal makes a byte an element."""
    if tensor.numel() != other.numel():
        return False
    whole = tensor.numel() // WORD * WORD
    if whole and not any(place % WORD for t in (tensor, other) for place in (t.storage_offset(), t.data_ptr())):
        if not torch.equal(tensor[:whole].view(torch.int64), other[:whole].view(torch.int64)):
            return False
        tensor, other = tensor[whole:], other[whole:]
    return torch.equal(tensor, other)


def fetched(pid: int, address: int, nbytes: int) -> torch.Tensor:
    """Return memory of a stopped process, flat uint8. OSError: it cannot be read."""
    into = torch.empty(nbytes, dtype=torch.uint8)
    if nbytes and (code := gate.bindings().peek(pid, address, nbytes, into.data_ptr())):
        raise OSError(code, f"cannot read {nbytes} bytes of process {pid}: {os.strerror(code)}")
    return into


def interpret(output: torch.Tensor | None, layout: dict) -> torch.Tensor | None:
    """Return flat bytes as a tensor of a dtype, shape and stride; None where they hold no such tensor or have gaps."""
    dtype = getattr(torch, layout["dtype"], None)
    if output is None or not isinstance(dtype, torch.dtype) or len(layout["shape"]) != len(layout["stride"]):
        return None
    span = tree.span(layout["shape"], layout["stride"])
    if span * dtype.itemsize != output.numel() or span > math.prod(layout["shape"]):
        return None
    try:
        tensor = output[: span * dtype.itemsize].view(dtype).as_strided(layout["shape"], layout["stride"])
        tensor = tensor.conj().resolve_conj() if layout.get("conj") and dtype.is_complex else tensor
        return -tensor if layout.get("neg") else tensor
    except RuntimeError:  # such as a shape whose number of elements is no int64
        return None


def room_for(tensor: torch.Tensor, others: list[torch.Tensor]) -> dict:
    """Return the specification of a dense copy of an answer, without a place. A submission may give it in the dtype of
    any of `others` that has its shape: a buffer for it that the problem hands out. Where a reference computes in fp64,
    or torch gives indices as int64, also in fp32 or int32; of floating point in any, with a note, but on a GPU, where
    calls share its memory, in none wider than it and fp32: the folder's check says what it thinks.
    """
    usual = {other.dtype for other in others if other.shape == tensor.shape} | {tensor.dtype}
    usual |= {NARROWER[tensor.dtype]} if tensor.dtype in NARROWER else set()
    widest = max(4, tensor.itemsize) if tensor.is_cuda else 8
    floats = {type_ for type_ in values.BITS if type_.itemsize <= widest} if tensor.dtype in values.BITS else set()
    dtypes = usual | floats
    spec = tree.describe(torch.empty_like(tensor, memory_format=torch.contiguous_format, device="meta"), tree.Layout())
    most = tensor.numel() * max(dtype.itemsize for dtype in dtypes)
    names, few = (sorted(str(dtype).removeprefix("torch.") for dtype in some) for some in (dtypes, usual))
    return {**spec, "device": tensor.device.type, "most": most, "dtypes": names, "usual": few}


def copied(spec: dict, form: dict, buffer: Shared) -> torch.Tensor:
    """Return what a runner copied to a place of `room_for`, in the dtype, and stride without gaps, of `form`."""
    nbytes = math.prod(spec["shape"]) * getattr(torch, form["dtype"]).itemsize
    dense = tree.tensor({**spec, "dtype": form["dtype"], "nbytes": nbytes}, buffer.memory)
    return tree.with_strides(dense, form["stride"]).to(spec["device"])


def variety(data: object) -> list[float]:
    """Return of each tensor in `data` the share of distinct values in its first SAMPLED elements."""
    plain = [leaf for leaf in tree.tensors(data) if leaf.dtype.itemsize > 1 and not leaf.is_complex()]
    firsts = [tensor.flatten()[:SAMPLED].double() for tensor in plain]
    return [len(first.unique()) / max(1, len(first)) for first in firsts]


def poison(tensors: list[torch.Tensor], which: list[int]) -> None:
    """Fill these of the tensors so that an element that a call does not write is wrong: NaN; of signed integers the
    smallest value; of types where any one value may be a frequent answer (bool, unsigned, packed e2m1) secret bits; of
    e8m0, whose one NaN a check by bits admits where it is the answer, by secret bits NaN or the largest value.
    """
    for i in which:
        tensor = tensors[i].view(torch.uint8) if tensors[i].dtype == values.FP4 else tensors[i]
        dtype = tensor.dtype
        if dtype == E8M0:
            tensor.view(torch.uint8).copy_(_secret_bits(tensor, 2).view(tensor.shape).add_(E8M0_LARGEST))
            continue
        if dtype.is_complex:
            tensor.fill_(complex(math.nan, math.nan))
        elif dtype.is_floating_point:
            tensor.fill_(math.nan)
        elif dtype.is_signed:
            tensor.fill_(torch.iinfo(dtype).min)
        else:
            tensor.copy_(_secret_bits(tensor, 2 if dtype == torch.bool else 256).view(dtype).view(tensor.shape))


def unwritten(tensor: torch.Tensor) -> int:
    """Return how many elements hold, bit for bit, the NaN that `poison` fills floating point of 2 to 8 bytes with."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(tensor.dtype.itemsize)
    if bits is None or not tensor.dtype.is_floating_point:
        return 0
    poison = torch.full((1,), math.nan, dtype=tensor.dtype, device=tensor.device)
    return int((tensor.view(bits) == poison.view(bits)).sum())


def _secret_bits(tensor: torch.Tensor, most: int) -> torch.Tensor:
    """Return as many bytes as a tensor's elements take, each secret and below `most`, flat uint8."""
    secret = torch.Generator(tensor.device).manual_seed(secrets.randbits(63))
    count = tensor.numel() * tensor.element_size()
    return torch.randint(most, (count,), generator=secret, dtype=torch.uint8, device=tensor.device)
