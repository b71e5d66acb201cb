"""Tensors of any element type as numbers and as bits: packed e2m1, fp8 to fp64, integers, truth values."""

import torch

from harness.runner import tree
from harness.runner.failure import RefusedError
from problems.common import nvfp4

FP4 = torch.float4_e2m1fn_x2
GOLDEN = (5**0.5 - 1) / 2  # whose multiples, less their whole part, never repeat
# Floating-point types with one value per element: bits after the leading one.
BITS = {
    torch.float64: 52,
    torch.float32: 23,
    torch.float16: 10,
    torch.bfloat16: 7,
    torch.float8_e4m3fn: 3,
    torch.float8_e5m2: 2,
}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as integers of the elements' width, which every operation takes."""
    _see_real(tensor.dtype)
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def _see_real(dtype: torch.dtype) -> None:
    if dtype.is_complex:
        raise RefusedError(f"the lint takes no complex tensors, got {dtype}: return torch.view_as_real of it")


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return packed values as their bytes, other tensors unchanged."""
    return tensor.view(torch.uint8) if tensor.dtype == FP4 else tensor


def numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values in fp64, shape kept; of packed e2m1 a flat tensor of its elements."""
    if tensor.dtype == FP4:
        table = torch.tensor(nvfp4.E2M1, dtype=torch.float64, device=tensor.device)
        return table[nvfp4.unpack(tensor.view(torch.uint8).flatten()).int()]
    return tensor.double()


def cast(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp64 values in another type, saturated; infinities and NaN stay if it has them. Packed e2m1: its bytes."""
    _see_real(dtype)
    if dtype == torch.bool:
        return values != 0
    if dtype in BITS:
        limit = torch.finfo(dtype).max
        return torch.where(torch.isfinite(values), values.clamp(-limit, limit), values).to(dtype)
    info = torch.iinfo(torch.uint8 if dtype == FP4 else dtype)
    # Beyond 2^53 a bound would round up, out of the type.
    whole = values.nan_to_num(0, 0, 0).round().clamp(max(info.min, -(2**53)), min(info.max, 2**53))
    return whole.to(torch.uint8).view(FP4) if dtype == FP4 else whole.to(dtype)


def converted(truth: torch.Tensor, form: torch.Tensor) -> torch.Tensor:
    """Return `truth` in the type of `form`: rounded, never saturated."""
    if truth.dtype == form.dtype:
        return truth
    return truth.to(form.dtype) if form.dtype in BITS else cast(numbers(truth), form.dtype)


def like(form: torch.Tensor, content: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the type, shape and strides of `form` that holds `content`, of that type and shape."""
    expanded = held(form).shape != form.shape
    copy = torch.empty_like(form, memory_format=torch.contiguous_format) if expanded else tree.clone(form)
    bits(copy).copy_(bits(content))
    return copy


def held(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of what is in memory once: of axes along which a tensor is expanded the first place."""
    for axis, (count, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        tensor = tensor.narrow(axis, 0, 1) if count > 1 and not stride else tensor
    return tensor


def positions(where: torch.Tensor) -> torch.Tensor:
    """Return the flat positions of the true elements, int64 (n,)."""
    return where.flatten().nonzero().flatten()


def put(tensor: torch.Tensor, at: torch.Tensor, value: float) -> torch.Tensor:
    """Return a copy with the elements at flat positions `at` set to `value`; of packed ones, the byte."""
    whole = torch.tensor([value], dtype=torch.uint8 if tensor.dtype == FP4 else tensor.dtype, device=tensor.device)
    flat = bits(tensor).flatten().clone()  # flatten gives a view where it can
    flat[at] = bits(whole)
    return like(tensor, flat.view(tensor.shape))


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values plus 5 to 10, without a period; integers and packed values moved by one element."""
    if tensor.dtype in BITS:
        values = numbers(tensor)
        more = torch.arange(values.numel(), dtype=torch.float64, device=values.device).mul_(GOLDEN).frac_()
        return cast(values + 5 * (1 + more.view(values.shape)), tensor.dtype)
    return bits(tensor).flatten().roll(1).view(tensor.shape).view(tensor.dtype)


def rounded(values: torch.Tensor, kept: int) -> torch.Tensor:
    """Return fp64 values rounded to `kept` bits after the leading one, to nearest even; exponents stay."""
    significand, exponent = torch.frexp(values)
    scale = 2.0 ** (kept + 1)
    return torch.where(torch.isfinite(values), torch.ldexp((significand * scale).round() / scale, exponent), values)


def neighbours(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors are equal, or nowhere over one representable value apart, which any tolerance must admit."""
    if left.dtype not in BITS:
        return torch.equal(bits(left), bits(right))
    x, y, type_ = numbers(left), numbers(right), torch.finfo(left.dtype)
    same = (x == y) | (torch.isnan(x) & torch.isnan(y))
    step = type_.eps * torch.maximum(x.abs(), y.abs()).clamp(min=type_.tiny)  # at least from one value to the next
    return bool((same | (torch.isfinite(x) & torch.isfinite(y) & ((x - y).abs() <= step))).all())
