"""Convert to and from FP8 with power-of-two scales: e4m3 codes, one ue8m0 scale byte a group or 128x128 block.

value = e4m3 * 2^(byte - 127). Groups run along the last axis and weights take a scale a 128x128 block; a last group or
block may be partial. Nothing here synchronises with a device.
Shapes below write ... for any leading axes. Formats: OCP FP8 v1.0 (e4m3), OCP MX v1.0 (ue8m0, byte 255 is NaN); the
scale's rounding up is that of DeepSeek-V4's released inference code.
"""

import torch
from torch.nn.functional import pad

BLOCK = 128  # rows and columns of a weight that share a scale
E4M3_MAX = 448.0
GROUP_FLOOR = 1e-4  # least amax of a group of activations, as in the released model
BLOCK_FLOOR = E4M3_MAX * 2.0**-126  # least amax of a block of weights: its scale is the least normal number
_INFINITY_BITS = 0x7F800000  # of fp32
_MANTISSA_BITS = 0x7FFFFF
_SIGN_BIT = -(2**31)


def ue8m0_scale(amax: torch.Tensor, largest: float, floor: float) -> torch.Tensor:
    """amax: fp32 (...), >= 0 -> uint8 (...), the least byte with largest * 2^(byte - 127) >= max(amax, floor).

    floor / largest must be 2^-126 or more. NaN and infinity give byte 255, NaN. The quotient is rounded to fp32, which
    moves no amax across a power of two for largest = 448 or 6.
    """
    if amax.dtype != torch.float32:
        raise ValueError(f"amax must be float32, got {amax.dtype}")
    if floor / largest < 2.0**-126:
        raise ValueError(f"floor must be {largest:g} * 2^-126 or more, got {floor:g}")
    bits = amax.clamp(min=floor).div_(largest).view(torch.int32)
    bits.bitwise_and_(~_SIGN_BIT).clamp_(max=_INFINITY_BITS)  # any NaN as infinity
    return bits.add_(_MANTISSA_BITS).bitwise_right_shift_(23).to(torch.uint8)  # a mantissa other than 0 carries


def decode_ue8m0(scales: torch.Tensor) -> torch.Tensor:
    """scales: uint8 or float8_e8m0fnu (...) -> fp32 (...), 2^(byte - 127) exactly, NaN for byte 255."""
    return scales.view(torch.float8_e8m0fnu).float()


def decode_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """codes: float8_e4m3fn (...) -> fp32 (...), exactly. A table: three times as fast as the cast on a CPU."""
    table = torch.arange(256, dtype=torch.uint8, device=codes.device).view(torch.float8_e4m3fn).float()
    index = codes.view(torch.uint8).to(torch.int32)
    return table.index_select(0, index.reshape(-1)).view(codes.shape)


def quantise_groups(x: torch.Tensor, group: int, floor: float = GROUP_FLOOR) -> tuple[torch.Tensor, torch.Tensor]:
    """x: float (..., k) -> (codes float8_e4m3fn (..., k), scales uint8 (..., ceil(k / group))).

    A group's scale is the least power of two with amax <= 448 * scale, for amax of at least `floor`; codes are to
    nearest, ties to even. A group with NaN or infinity gets scale NaN.
    """
    codes, scales = _quantise(_grouped(x.float(), group), floor)
    return _ungrouped(codes, x.shape[-1]).contiguous(), scales


def dequantise_groups(
    codes: torch.Tensor, scales: torch.Tensor, group: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """codes: float8_e4m3fn (..., k); scales: uint8 or float8_e8m0fnu (..., ceil(k / group)) -> (..., k) in `dtype`.

    The product is taken in fp32, where it is exact, and rounded once. ValueError: another dtype or shape.
    """
    if codes.dtype != torch.float8_e4m3fn:
        raise ValueError(f"codes must be float8_e4m3fn, got {codes.dtype}")
    wanted = (*codes.shape[:-1], -(-codes.shape[-1] // group))
    if tuple(scales.shape) != wanted:
        raise ValueError(f"scales must be {wanted} for codes {tuple(codes.shape)}, got {tuple(scales.shape)}")
    values = _grouped(decode_e4m3(codes), group).mul_(decode_ue8m0(scales).unsqueeze(-1))
    return _ungrouped(values, codes.shape[-1]).to(dtype)


def round_trip(
    x: torch.Tensor, group: int, floor: float = GROUP_FLOOR, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x: float (..., k) -> x as quantise_groups holds it, in x.dtype, in `out` if given (out may be x).

    Exact in fp32 and bf16, up to infinity where a value of at least 248 * 2^120 rounds up to 2^128.
    """
    grouped = _grouped(x.float(), group)
    codes, scales = _quantise(grouped, floor)
    values = _ungrouped(codes.float().mul_(decode_ue8m0(scales).unsqueeze(-1)), x.shape[-1])
    return values.to(x.dtype) if out is None else out.copy_(values)


def quantise_blocks(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """w: float (..., n, k) -> (codes float8_e4m3fn (..., n, k), scales uint8 (..., ceil(n / 128), ceil(k / 128)))."""
    n, k = w.shape[-2:]
    blocks = pad(w.float(), (0, -k % BLOCK, 0, -n % BLOCK)).unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))
    scales = ue8m0_scale(blocks.abs().amax((-3, -1)), E4M3_MAX, BLOCK_FLOOR)
    codes = _nearest(blocks / decode_ue8m0(scales)[..., None, :, None])
    return codes.flatten(-2).flatten(-3, -2)[..., :n, :k].contiguous(), scales


def dequantise_blocks(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """codes: float8_e4m3fn (..., n, k); scales: uint8 or float8_e8m0fnu (..., ceil(n / 128), ceil(k / 128)) ->
    (..., n, k) in `dtype`, as dequantise_groups.
    """
    n = codes.shape[-2]
    if scales.shape[-2] != -(-n // BLOCK):
        raise ValueError(f"scales must have {-(-n // BLOCK)} rows of blocks for {n} rows, got {tuple(scales.shape)}")
    rows = scales.view(torch.uint8).repeat_interleave(BLOCK, -2)[..., :n, :]
    return dequantise_groups(codes, rows, BLOCK, dtype)


def _quantise(grouped: torch.Tensor, floor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """grouped: fp32 (..., groups, group) -> (codes of that shape, scales uint8 (..., groups))."""
    scales = ue8m0_scale(grouped.abs().amax(-1), E4M3_MAX, floor)
    return _nearest(grouped / decode_ue8m0(scales).unsqueeze(-1)), scales


def _nearest(x: torch.Tensor) -> torch.Tensor:
    """x: fp32 (...), NaN or at most 448 in magnitude -> float8_e4m3fn (...), nearest, ties to even."""
    return x.to(torch.float8_e4m3fn)  # needs no clamp: a scale is never below amax / 448


def _grouped(x: torch.Tensor, group: int) -> torch.Tensor:
    """(..., k) -> (..., ceil(k / group), group), zeros after the end."""
    short = -x.shape[-1] % group
    return (pad(x, (0, short)) if short else x).unflatten(-1, (-1, group))


def _ungrouped(x: torch.Tensor, k: int) -> torch.Tensor:
    """(..., groups, group) -> (..., k), without what _grouped added."""
    return x.flatten(-2)[..., :k]
