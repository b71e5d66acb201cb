"""Read and write pages of the lightning indexer's keys: 128 values, one key for all index heads, in MXFP4 or FP8.

A page of P keys is one block of bytes: the codes of all P keys, then their scales, without padding. Key i of a page:
    mxfp4   codes at 64 i: 128 e2m1, the even value in the low nibble; scales at 64 P + 4 i: ue8m0, one a 32 values
    fp8     codes at 128 i: 128 e4m3; scale at 128 P + 4 i: fp32, of the whole key
value = code * scale. A key's place is page * P + i. mxfp4 is what dsv4_forward stores, fp8 with P = 64 what DeepGEMM
reads. P is a power of two of at least 16, so that kernels find 16 keys of a page side by side, aligned.
"""

import torch

from problems.common import fp8, nvfp4

DIM = 128  # values of a key
GROUP = 32  # values that share a scale in mxfp4
CODES = {"mxfp4": DIM // 2, "fp8": DIM}  # bytes of a key's codes
SCALES = 4  # bytes of a key's scales, in either format
LEAST = 16  # keys of a page
_FLOOR = nvfp4.E2M1_MAX * 2.0**-126  # least amax of a group: its scale is the least normal number


def page_bytes(per_page: int, kind: str) -> int:
    """Bytes of a page of `per_page` keys: 2176 for 32 in mxfp4, 8448 for 64 in fp8."""
    return per_page * (CODES[kind] + SCALES)


def form(stride: int) -> tuple[int, str]:
    """The keys P of a page of `stride` bytes, and their format. 17 P = 33 P' has no powers of two: it is never both.

    ValueError unless P is a power of two of at least 16 in either format.
    """
    for kind in CODES:
        each = page_bytes(1, kind)
        per_page = stride // each  # no divmod, which torch's symbolic sizes lack
        if per_page * each == stride and per_page >= LEAST and per_page & (per_page - 1) == 0:
            return per_page, kind
    raise ValueError(
        f"a page must be of P = {LEAST}, 32, 64, ... keys, P times {page_bytes(1, 'mxfp4')} bytes (mxfp4) or "
        f"{page_bytes(1, 'fp8')} (fp8), got {stride}"
    )


def quantise(x: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """x: fp32 (..., 128) -> (codes uint8 (..., 64 or 128), scales uint8 (..., 4)), to nearest, ties to even.

    Scales are the least powers of two with which no value saturates, of a group or in fp8 of a key.
    """
    if kind == "fp8":
        codes, exponents = fp8.quantise_groups(x, DIM, fp8.E4M3_MAX * 2.0**-126)
        return codes.view(torch.uint8), fp8.decode_ue8m0(exponents).view(torch.uint8)
    groups = x.float().unflatten(-1, (-1, GROUP))
    scales = fp8.ue8m0_scale(groups.abs().amax(-1), nvfp4.E2M1_MAX, _FLOOR)
    values = nvfp4.nearest_e2m1(groups / fp8.decode_ue8m0(scales).unsqueeze(-1))
    return nvfp4.pack_nearest(values.flatten(-2)), scales


def dequantise(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """codes: uint8 (..., 64 or 128); scales: uint8 (..., 4) -> fp32 (..., 128), exactly but for fp8 scales that are no
    powers of two, whose products are rounded once.
    """
    if codes.shape[-1] == CODES["fp8"]:
        return fp8.decode_e4m3(codes.view(torch.float8_e4m3fn)).mul_(scales.contiguous().view(torch.float32))
    return nvfp4.decode(codes).unflatten(-1, (-1, GROUP)).mul_(fp8.decode_ue8m0(scales).unsqueeze(-1)).flatten(-2)


def views(pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """pages: uint8 (n_pages, stride), contiguous -> codes (n_pages, P, 64 or 128) and scales (n_pages, P, 4), views."""
    per_page, kind = form(pages.shape[1])
    codes, scales = pages.split([per_page * CODES[kind], per_page * SCALES], dim=1)
    return codes.unflatten(1, (per_page, -1)), scales.unflatten(1, (per_page, -1))


def write(pages: torch.Tensor, place: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Puts keys at their places. place: int64 (E,); codes, scales: (E, ...), as quantise returns them."""
    to_codes, to_scales = views(pages)
    per_page = to_codes.shape[1]
    to_codes[place // per_page, place % per_page] = codes
    to_scales[place // per_page, place % per_page] = scales


def read(pages: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """place: int64 (...) -> fp32 (..., 128). A place outside of the pages reads their first or last key, for callers
    that mask.
    """
    codes, scales = views(pages)
    per_page = codes.shape[1]
    place = place.clamp(0, len(pages) * per_page - 1)
    return dequantise(codes[place // per_page, place % per_page], scales[place // per_page, place % per_page])
