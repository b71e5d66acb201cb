"""Convert to and from NVFP4 on the host: e2m1 codes, two a byte, and one e4m3 scale per 16 along the last axis.

value = E2M1[code] * scale.  Byte j of a row holds element 2j in its low nibble and 2j + 1 in its high nibble.
Scales are the finite, non-negative e4m3 values (bytes 0x00 to 0x7E); a scale byte 0x7F or 0xFF is NaN, 0x80 to 0xFE
negative.
Shapes below write ... for any leading axes. Format: OCP MX v1.0 (e2m1), OCP FP8 v1.0 (e4m3).
"""

import functools

import torch

BLOCK = 16  # elements that share a scale
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)  # value of each code
E2M1_MAX = 6.0
E4M3_MAX = 448.0
SCALE_BYTE_MAX = 0x7E  # 448; 0x7F is NaN and the sign bit is never set
# Halfway points between neighbouring magnitudes; a tie goes to the even code, so odd codes own neither end.
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """codes: uint8 (..., k), each 0..15, k even -> uint8 (..., k // 2), low nibble first."""
    if codes.dtype != torch.uint8 or codes.shape[-1] % 2:
        raise ValueError(f"codes must be uint8 with an even last axis, got {codes.dtype} {tuple(codes.shape)}")
    if codes.numel() and int(codes.max()) > 15:
        raise ValueError(f"codes must be 0..15, got {int(codes.max())}")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """packed: uint8 or float4_e2m1fn_x2 (..., k // 2) -> codes uint8 (..., k)."""
    packed = packed.view(torch.uint8)
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


@functools.cache
def _table(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.tensor(E2M1, dtype=dtype, device=device)  # once: a call that is recorded copies nothing from the host


def dequantise(packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """packed: uint8 or float4_e2m1fn_x2 (..., k // 2); scales: e4m3 (..., k // 16) -> values (..., k) in `dtype`.

    Exact in fp16, fp32 and fp64: a value has at most 6 significant bits and lies in 2^-10 .. 2688 or is zero
    (bf16 is exact too). A NaN scale makes its 16 values NaN; a negative scale flips their sign.
    """
    if scales.dtype != torch.float8_e4m3fn:
        raise ValueError(f"scales must be float8_e4m3fn, got {scales.dtype}")
    codes = unpack(packed)
    if codes.shape[-1] != BLOCK * scales.shape[-1]:
        raise ValueError(f"packed holds {codes.shape[-1]} values a row, scales cover {BLOCK * scales.shape[-1]}")
    values = _table(dtype, packed.device)[codes.int()].unflatten(-1, (-1, BLOCK)) * scales.to(dtype).unsqueeze(-1)
    return values.flatten(-2)


def round_e2m1(x: torch.Tensor) -> torch.Tensor:
    """x: float (...) -> codes uint8 (...), nearest, ties to the even code, saturating at 6. ValueError on NaN."""
    if bool(torch.isnan(x).any()):
        raise ValueError("x must not hold NaN: e2m1 has no code for it")
    magnitude = x.abs()
    code = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for lower, midpoint in enumerate(_MIDPOINTS):
        # The tie goes up exactly when the code below it is odd.
        code += (magnitude >= midpoint) if lower % 2 else (magnitude > midpoint)
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x: fp32 or fp64 (..., k), k a multiple of 16 -> (packed uint8 (..., k // 2), scales e4m3 (..., k // 16)).

    Block scale = amax / 6 rounded to e4m3 (ties to even); codes are taken against the rounded scale, the one a reader
    will use. A block whose scale rounds to 0 gets codes of 0 with its signs. ValueError: NaN, infinity, or an amax that
    needs a scale over 448 (2688 and a half step), since bytes above 0x7E are not scales.
    """
    if x.dtype not in (torch.float32, torch.float64) or x.shape[-1] % BLOCK:
        raise ValueError(f"x must be fp32 or fp64 with a last axis in 16s, got {x.dtype} {tuple(x.shape)}")
    if not bool(torch.isfinite(x).all()):
        raise ValueError("x must be finite, got NaN or infinity")
    blocks = x.unflatten(-1, (-1, BLOCK))
    wanted = blocks.abs().amax(-1) / E2M1_MAX
    if wanted.numel() and float(wanted.max()) > 464:  # 464: the tie between 448 and the next step, which has no byte
        raise ValueError(f"x needs a block scale of {float(wanted.max()):.6g}, the largest is {E4M3_MAX:g}")
    scales = _round_e4m3(wanted)
    check_scales(scales)
    divisor = scales.to(x.dtype).unsqueeze(-1)
    scaled = torch.where(divisor > 0, blocks / divisor, torch.copysign(torch.zeros_like(blocks), blocks))
    return pack(round_e2m1(scaled).flatten(-2)), scales


def _round_e4m3(x: torch.Tensor) -> torch.Tensor:
    """x: fp32 or fp64 (...), 0 to 464 -> e4m3 (...), nearest, ties to even. A cast would round fp64 to fp32 first."""
    _, exponent = torch.frexp(x)
    step = torch.ldexp(torch.ones_like(x), exponent.clamp(min=-5) - 4)  # 8 to each power of two, 2^-9 below 2^-6
    return ((x / step).round() * step).to(torch.float8_e4m3fn)


def check_scales(scales: torch.Tensor) -> None:
    """scales: e4m3 (...). ValueError unless every byte is 0x00 to 0x7E, naming the first that is not."""
    raw = scales.view(torch.uint8)
    bad = raw > SCALE_BYTE_MAX
    if bool(bad.any()):
        index = tuple(bad.nonzero()[0].tolist())
        raise ValueError(f"scale bytes must be 0x00 to 0x7E, got 0x{int(raw[index]):02X} at {index}")


def permute_scales(scales: torch.Tensor) -> torch.Tensor:
    """scales: e4m3 (mn, k // 16, l) -> e4m3 (32, 4, ceil(mn / 128), 4, ceil(k / 64), l), the cuBLAS 128x4 block layout.

    Element (i, j, b) lands at [i % 32, i % 128 // 32, i // 128, j % 4, j // 4, b]. In memory the axes run
    (l, rest_m, rest_k, 32, 4, 4): blocks of 512 bytes, 128 rows by 4 scales each. Padding is 0.
    """
    mn, kb, l = scales.shape
    rest_m, rest_k = -(-mn // 128), -(-kb // 4)
    padded = torch.zeros(l, rest_m * 128, rest_k * 4, dtype=torch.uint8, device=scales.device)
    padded[:, :mn, :kb] = scales.view(torch.uint8).permute(2, 0, 1)
    # (l, rest_m, 4, 32, rest_k, 4) -> memory order (l, rest_m, rest_k, 32, 4, 4)
    memory = padded.view(l, rest_m, 4, 32, rest_k, 4).permute(0, 1, 4, 3, 2, 5).contiguous()
    return memory.view(torch.float8_e4m3fn).permute(3, 4, 1, 5, 2, 0)


def scales_of_mxfp4(scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """ue8m0 scales of MXFP4 codes, uint8 (e, n, k // 32), within 2^14 of each matrix' largest -> (scales e4m3
    (e, n, k // 16), factors fp32 (e,)) with which NVFP4 holds the same values.
    """
    largest = scales.amax((1, 2))
    powers = scales - largest[:, None, None] + 15 << 3  # 2^8 for the largest, and no subnormals
    return powers.repeat_interleave(2, 2).view(torch.float8_e4m3fn), torch.exp2(largest.float() - (127 + 8))


# ---- unchecked, for activations: nothing below reads a device's data on the host ----


def encode(x: torch.Tensor, input_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x: fp32 (..., k), k a multiple of 16; input_scale: fp32, one a row, broadcast to (...) ->
    (packed uint8 (..., k // 2), scales e4m3 (..., k // 16)), with x close to dequantise(packed, scales) * input_scale.

    Same bits as quantise(x / input_scale) where that accepts its input; beyond it scales and codes saturate, at 448 and
    6. A block with NaN gets scale NaN.
    """
    values, scales = _nearest_blocks(x, input_scale)
    return pack_nearest(values.flatten(-2)), scales


def round_trip(x: torch.Tensor, input_scale: torch.Tensor) -> torch.Tensor:
    """x, input_scale: as encode -> fp32 (..., k), the values of what encode returns: (code * scale) * input_scale."""
    values, scales = _nearest_blocks(x, input_scale)
    return values.mul_(scales.float().unsqueeze(-1)).flatten(-2).mul_(input_scale.unsqueeze(-1))


def decode(packed: torch.Tensor) -> torch.Tensor:
    """packed: uint8 or float4_e2m1fn_x2 (..., k // 2) -> fp32 (..., k), the codes' values without a scale.

    Looks up both values of a byte at once, in a table made on the device: dequantise's costs a copy from the host.
    """
    byte = torch.arange(256, dtype=torch.uint8, device=packed.device)
    codes = torch.stack([byte & 15, byte >> 4], dim=-1)
    # A code is an e4m3 with three bits of exponent too few and two of mantissa, so 2^-6 of its value.
    table = ((codes & 8) << 4 | (codes & 7) << 2).view(torch.float8_e4m3fn).float().mul_(64)
    index = packed.view(torch.uint8).to(torch.int32).reshape(-1)
    pairs = table.view(torch.int64).view(-1).index_select(0, index)  # a pair of fp32 moves as one word
    return pairs.view(torch.float32).view(*packed.shape[:-1], 2 * packed.shape[-1])


def nearest_e2m1(x: torch.Tensor) -> torch.Tensor:
    """x: fp32 (...) -> fp32 (...), the nearest e2m1 value, ties to the even code, saturating at 6. NaN stays."""
    x = x.clamp(-E2M1_MAX, E2M1_MAX)
    # The power of two at or below |x|, at least 1: values are half of it apart, and even codes a whole of it.
    power = x.abs().clamp_(min=1).view(torch.int32).bitwise_and_(0x7F800000).view(torch.float32)
    return x.mul_(2).div_(power).round_().mul_(power).mul_(0.5)


def pack_nearest(values: torch.Tensor) -> torch.Tensor:
    """values: fp32 (..., k), each an e2m1 value, k even -> packed uint8 (..., k // 2). NaN becomes a 6."""
    byte = (values / 64).to(torch.float8_e4m3fn).view(torch.uint8)
    codes = (byte >> 2 & 7).bitwise_or_(byte >> 4 & 8)
    return codes[..., 0::2] | codes[..., 1::2] << 4


def _nearest_blocks(x: torch.Tensor, input_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """-> (e2m1 values fp32 (..., k // 16, 16), scales e4m3 (..., k // 16)) of x / input_scale."""
    if x.dtype != torch.float32 or input_scale.dtype != torch.float32 or x.shape[-1] % BLOCK:
        raise ValueError(
            f"x and input_scale must be fp32, x with a last axis in 16s, got {x.dtype} {tuple(x.shape)} "
            f"and {input_scale.dtype}"
        )
    blocks = (x / input_scale.unsqueeze(-1)).unflatten(-1, (-1, BLOCK))
    amax = blocks.abs().amax(-1)
    # A tensor as the divisor: by a number, torch multiplies with its rounded inverse on CUDA. The clamp: whether the
    # cast saturates or gives NaN depends on torch's version.
    scales = amax.div_(amax.new_full((), E2M1_MAX)).clamp_(max=E4M3_MAX).to(torch.float8_e4m3fn)
    divisor = scales.float()
    divisor.masked_fill_(divisor == 0, torch.inf)  # scale 0: codes of 0 with the signs
    return nearest_e2m1(blocks.div_(divisor.unsqueeze(-1))), scales
