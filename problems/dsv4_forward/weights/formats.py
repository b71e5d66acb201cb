"""Convert to and from MXFP4, the format of the released experts; rotate the indexer's vectors (Hadamard).

MXFP4: e2m1 codes, two a byte, the even element in the low nibble; one ue8m0 byte a 32 along the last axis:
value = e2m1 * 2^(byte - 127). Only mxfp4_to_nvfp4 and mxfp4_to_fp8 read a device's data on the host, for loading
weights.
Shapes below write ... for any leading axes. Format: OCP MX v1.0.
"""

import torch

from problems.common import fp8, nvfp4

GROUP = 32  # elements that share a scale
FLOOR = nvfp4.E2M1_MAX * 2.0**-126  # least amax of a group: its scale is the least normal number
NVFP4_SPREAD = 17  # e4m3 holds the powers of two from 2^-9 to 2^8
_NAN_BYTE = 255
_NOT_NAN = "scales must not be NaN (byte 255)"


def quantise_mxfp4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x: float (..., k), k a multiple of 32 -> (packed uint8 (..., k / 2), scales uint8 (..., k / 32)).

    A group's scale is the least power of two with amax <= 6 * scale; codes are to nearest, ties to the even code. A
    group with NaN or infinity gets scale NaN.
    """
    values, scales = _nearest_groups(x, GROUP)
    return nvfp4.pack_nearest(values.flatten(-2)), scales


def dequantise_mxfp4(packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """packed: uint8 (..., k / 2); scales: uint8 or float8_e8m0fnu (..., k / 32) -> values (..., k) in `dtype`.

    Exact in fp32 and, but for subnormals, in bf16. ValueError where the shapes do not fit.
    """
    _check_shapes(packed, scales)
    values = nvfp4.decode(packed).unflatten(-1, (-1, GROUP)).mul_(fp8.decode_ue8m0(scales).unsqueeze(-1))
    return values.flatten(-2).to(dtype)


def round_trip_fp4(x: torch.Tensor, group: int = GROUP) -> torch.Tensor:
    """x: float (..., k), k a multiple of `group` -> x as quantise_mxfp4 holds it, in x.dtype.

    Exact, up to infinity where a value of at least 3.5 * 2^126 rounds up to 2^128.
    """
    values, scales = _nearest_groups(x, group)
    return values.mul_(fp8.decode_ue8m0(scales).unsqueeze(-1)).flatten(-2).to(x.dtype)


def mxfp4_to_nvfp4(packed: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """packed: uint8 (..., n, k / 2); scales: uint8 or float8_e8m0fnu (..., n, k / 32) -> the same values in NVFP4:
    (packed itself, scales e4m3 (..., n, k / 16), scale_2 fp32 (...)), one scale_2 a matrix.

    As nvfp4_scales. ValueError, naming the matrix and its rows, where a scale is too far from the largest or NaN.
    """
    _refuse(scales.view(torch.uint8) == _NAN_BYTE, _NOT_NAN)
    scale, scale_2, outside = nvfp4_scales(packed, scales)
    _refuse(outside, f"mxfp4_to_nvfp4: scales of a matrix must be within 2^{NVFP4_SPREAD} of its largest")
    return packed, scale, scale_2


def nvfp4_scales(packed: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """packed, scales: as mxfp4_to_nvfp4 -> (scale, scale_2, bool (..., n, k / 32): where NVFP4 has no such scale).
    Does not wait for the device.

    With 2^kmax the largest scale of a matrix: scale_2 = 2^(kmax - 8), scale = 2^(k_j - kmax + 8). Groups of zeros count
    for nothing. NVFP4 has no scale below 2^(kmax - 17), and NaN is none. ValueError where the shapes do not fit.
    """
    _check_shapes(packed, scales)
    scales = scales.view(torch.uint8)
    byte = _live(packed, scales)
    largest = byte.amax((-2, -1))
    behind = torch.where(byte >= 0, largest[..., None, None] - byte, 0)
    e4m3 = (15 - behind << 3).where(behind < 15, 1 << (NVFP4_SPREAD - behind).clamp(min=0))  # from 2^-7 on subnormal
    scale_2 = fp8.decode_ue8m0(torch.where(largest >= 0, largest, 127).to(torch.uint8)) * 2.0**-8
    scale = e4m3.to(torch.uint8).repeat_interleave(2, -1).view(torch.float8_e4m3fn)
    return scale, scale_2, (behind > NVFP4_SPREAD) | (scales == _NAN_BYTE)


def mxfp4_to_fp8(packed: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """packed: uint8 (..., n, k / 2); scales: uint8 or float8_e8m0fnu (..., n, k / 32) -> the same values in FP8:
    (codes float8_e4m3fn (..., n, k), scales uint8 (..., ceil(n / 128), ceil(k / 128))).

    A block's scale is 2^-6 of its largest, so that codes reach 6 * 64 = 384. Scales within 2^14 of a block's largest
    always fit; below, it depends on the codes. ValueError, naming matrix and rows, where a value would change.
    """
    values = dequantise_mxfp4(packed, scales)
    byte = _live_bytes(packed, scales)
    n, groups = byte.shape[-2:]
    per_block = fp8.BLOCK // GROUP
    padded = torch.nn.functional.pad(byte, (0, -groups % per_block, 0, -n % fp8.BLOCK), value=-1)
    largest = padded.unflatten(-1, (-1, per_block)).unflatten(-3, (-1, fp8.BLOCK)).amax((-3, -1))
    scale = torch.where(largest >= 0, (largest - 6).clamp(min=0), 127).to(torch.uint8)
    spread = scale.repeat_interleave(fp8.BLOCK, -2)[..., :n, :].repeat_interleave(fp8.BLOCK, -1)
    codes = (values / fp8.decode_ue8m0(spread[..., : values.shape[-1]])).to(torch.float8_e4m3fn)
    changed = fp8.dequantise_blocks(codes, scale) != values
    _refuse(changed, "mxfp4_to_fp8: scales of a 128x128 block must be near enough for e4m3 to hold every value")
    return codes, scale


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """x: float (..., d), d a power of two -> x @ H / sqrt(d) in x.dtype, H the Sylvester matrix in natural order.

    H is symmetric, and the inverse of itself once scaled. The product is taken in fp32 and rounded once.
    """
    d = x.shape[-1]
    if d < 1 or d & d - 1:
        raise ValueError(f"x must have a power of two as its last axis, got {tuple(x.shape)}")
    i = torch.arange(d, device=x.device)
    bits = (i[:, None] >> i[: d.bit_length() - 1] & 1).float()
    signs = (bits @ bits.T).remainder_(2).mul_(-2).add_(1)  # H[i, j] = (-1)^(ones in i & j)
    return (x.float() @ signs).mul_(d**-0.5).to(x.dtype)


def _nearest_groups(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """-> (e2m1 values fp32 (..., k / group, group), scales uint8 (..., k / group))."""
    if x.shape[-1] % group:
        raise ValueError(f"x must have a last axis in {group}s, got {tuple(x.shape)}")
    groups = x.float().unflatten(-1, (-1, group))
    scales = fp8.ue8m0_scale(groups.abs().amax(-1), nvfp4.E2M1_MAX, FLOOR)
    return nvfp4.nearest_e2m1(groups / fp8.decode_ue8m0(scales).unsqueeze(-1)), scales


def _check_shapes(packed: torch.Tensor, scales: torch.Tensor) -> None:
    """ValueError unless there is a scale for each 16 bytes."""
    wanted = (*packed.shape[:-1], packed.shape[-1] // (GROUP // 2))
    if packed.shape[-1] % (GROUP // 2) or tuple(scales.shape) != wanted:
        raise ValueError(f"scales must be one a 16 bytes of packed {tuple(packed.shape)}, got {tuple(scales.shape)}")


def _live_bytes(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """scales as int32, but -1 where a group's codes are all +0 or -0: their scale means nothing. ValueError: NaN."""
    _check_shapes(packed, scales)
    scales = scales.view(torch.uint8)
    _refuse(scales == _NAN_BYTE, _NOT_NAN)
    return _live(packed, scales)


def _live(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    live = ((packed & 0x77) != 0).unflatten(-1, (-1, GROUP // 2)).any(-1)
    return torch.where(live, scales.to(torch.int32), -1)


def _refuse(bad: torch.Tensor, rule: str) -> None:
    """bad: bool (..., n, k). ValueError with the rule, and the rows of the first matrix that breaks it."""
    if not bool(bad.any()):
        return
    rows = bad.any(-1)
    matrix = tuple(rows.any(-1).nonzero()[0].tolist())
    broken = rows[matrix].nonzero().flatten().tolist()
    shown = ", ".join(map(str, broken[:8])) + (", ..." if len(broken) > 8 else "")
    raise ValueError(f"{rule}; broken in matrix {matrix}, {len(broken)} rows: {shown}")
