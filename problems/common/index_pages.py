"""Read and write pages of the lightning indexer's keys: 128 values, one key for all index heads, in MXFP4 or FP8.

A page of P keys is one block of bytes: the codes of all P keys, then their scales, without padding. Key i of a page:
    mxfp4   codes at 64 i: 128 e2m1, the even value in the low nibble; scales at 64 P + 4 i: ue8m0, one a 32 values
    fp8     codes at 128 i: 128 e4m3; scale at 128 P + 4 i: fp32, of the whole key
value = code * scale. A key's place is page * P + i. mxfp4 is what dsv4_forward stores, fp8 with P = 64 what DeepGEMM
reads. P is a power of two of at least 16, so that kernels find 16 keys of a page side by side, aligned.
"""

import torch

DIM = 128  # values of a key
GROUP = 32  # values that share a scale in mxfp4
CODES = {"mxfp4": DIM // 2, "fp8": DIM}  # bytes of a key's codes
SCALES = 4  # bytes of a key's scales, in either format
LEAST = 16  # keys of a page


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


def views(pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """pages: uint8 (n_pages, stride), contiguous -> codes (n_pages, P, 64 or 128) and scales (n_pages, P, 4), views."""
    per_page, kind = form(pages.shape[1])
    codes, scales = pages.split([per_page * CODES[kind], per_page * SCALES], dim=1)
    return codes.unflatten(1, (per_page, -1)), scales.unflatten(1, (per_page, -1))


def write(pages: torch.Tensor, place: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Puts keys at their places. place: int64 (E,); codes: uint8 (E, 64 or 128); scales: uint8 (E, 4)."""
    to_codes, to_scales = views(pages)
    per_page = to_codes.shape[1]
    to_codes[place // per_page, place % per_page] = codes
    to_scales[place // per_page, place % per_page] = scales


def read(pages: torch.Tensor, place: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """place: int64 (...) -> what is stored: codes uint8 (..., 64 or 128) and scales uint8 (..., 4). A place outside of
    the pages reads their first or last key, for callers that mask.
    """
    codes, scales = views(pages)
    per_page = codes.shape[1]
    place = place.clamp(0, len(pages) * per_page - 1)
    return codes[place // per_page, place % per_page], scales[place // per_page, place % per_page]
