"""Read and write pages of attention entries in FlashMLA's layout: FP8 values, bf16 positions, then all scales.

A page of P entries is one block of bytes, for entries of `nope` + `rope` values:
    offset 0           : P payloads of nope + 2 * rope bytes: nope e4m3, then rope bf16
    offset P * payload : P times 8 scale bytes: ue8m0, one a 64 consecutive e4m3; bytes beyond nope / 64 are unused
    then padding, up to a multiple of the payload (the Blackwell kernels read a page as rows of it)
nope = 448, rope = 64 is DeepSeek-V4's entry of 584 bytes. An entry's index is page * P + slot.
"""

import torch

GROUP = 64  # e4m3 values that share a scale
SCALE_BYTES = 8  # of an entry


def payload_bytes(nope: int, rope: int) -> int:
    """Bytes of an entry without its scales. ValueError unless nope is 64, 128, ... 512 and rope a multiple of 4."""
    if nope % GROUP or not 0 < nope <= GROUP * SCALE_BYTES or rope < 0 or rope % 4:
        raise ValueError(f"nope must be a multiple of 64 up to 512 and rope of 4, got {nope} and {rope}")
    return nope + 2 * rope


def page_bytes(per_page: int, nope: int, rope: int) -> int:
    """Bytes from one page of `per_page` entries to the next: 37440 for 64 entries of 448 + 64."""
    payload = payload_bytes(nope, rope)
    return -(-per_page * (payload + SCALE_BYTES) // payload) * payload


def write(
    pages: torch.Tensor,
    per_page: int,
    index: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    rope: torch.Tensor,
) -> None:
    """Puts entries in their places.

    pages: uint8 (n_pages, page_bytes), contiguous; index: int64 (E,), >= 0; codes: float8_e4m3fn (E, nope);
    scales: uint8 (E, nope / 64); rope: bf16 (E, rope). Of two entries with one index either may win.
    """
    if codes.dtype != torch.float8_e4m3fn or scales.dtype != torch.uint8 or rope.dtype != torch.bfloat16:
        raise ValueError(f"want float8_e4m3fn, uint8, bfloat16, got {codes.dtype}, {scales.dtype}, {rope.dtype}")
    nope, groups = codes.shape[-1], codes.shape[-1] // GROUP
    if tuple(scales.shape) != (len(index), groups) or len(codes) != len(index) or len(rope) != len(index):
        raise ValueError(
            f"index {tuple(index.shape)} wants as many rows of codes {tuple(codes.shape)}, rope {tuple(rope.shape)} "
            f"and scales {tuple(scales.shape)} with {groups} scales a row"
        )
    payloads, scale_rows = _views(pages, per_page, nope, rope.shape[-1])
    payload_row, scale_row = _rows(index, per_page, nope, rope.shape[-1])
    payload = torch.cat([codes.view(torch.uint8), rope.contiguous().view(torch.uint8)], dim=-1)
    payloads.index_copy_(0, payload_row, payload)
    scale_rows[:, :groups].index_copy_(0, scale_row, scales)


def read(
    pages: torch.Tensor, per_page: int, index: torch.Tensor, nope: int, rope: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """pages: as write; index: int32 or int64 (...) -> what is stored: codes float8_e4m3fn (..., nope), scales uint8
    (..., nope / 64), rope bf16 (..., rope).

    A negative index reads entry 0, for callers that mask.
    """
    payloads, scale_rows = _views(pages, per_page, nope, rope)
    payload_row, scale_row = _rows(index.reshape(-1).long().clamp(min=0), per_page, nope, rope)
    payload = payloads.index_select(0, payload_row).view(*index.shape, nope + 2 * rope)
    scales = scale_rows[:, : nope // GROUP].index_select(0, scale_row).view(*index.shape, nope // GROUP)
    codes, rest = payload.split([nope, 2 * rope], dim=-1)
    return codes.view(torch.float8_e4m3fn), scales, rest.contiguous().view(torch.bfloat16)


def magnitudes(
    count: int, nope: int, rope: int, gen: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw codes, scales and rope of `count` entries, as write takes them, for tests: every code but NaN, at sizes of
    2^-20 to 2 by group; a quarter of the groups only subnormal codes, of the same sizes; an eighth with a scale byte of
    3 to 99, which nothing comes through from but garbage.
    """
    device = gen.device
    codes = torch.randint(256, (count, nope // GROUP, GROUP), generator=gen, device=device)
    codes -= (codes & 0x7F == 0x7F).int()  # NaN becomes the largest number
    size = torch.randint(-20, 2, codes.shape[:2], generator=gen, device=device)
    kind = torch.randint(8, size.shape, generator=gen, device=device)
    subnormal = kind < 2
    codes = torch.where(subnormal.unsqueeze(2), codes & 0x87, codes)
    scales = torch.where(subnormal, size + 133, size + 120)  # 7 * 2^-9 and 448 times that are near 2^size
    scales = torch.where(kind == 2, torch.randint(3, 100, size.shape, generator=gen, device=device), scales)
    values = torch.randn(count, rope, generator=gen, device=device)
    values *= torch.randint(-20, 2, (count, 1), generator=gen, device=device).exp2()
    return codes.flatten(1).byte().view(torch.float8_e4m3fn), scales.byte(), values.bfloat16()


def _views(pages: torch.Tensor, per_page: int, nope: int, rope: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes of all pages as rows of one payload and as rows of one entry's scales."""
    stride = page_bytes(per_page, nope, rope)
    if pages.dtype != torch.uint8 or pages.dim() != 2 or pages.shape[1] != stride or not pages.is_contiguous():
        raise ValueError(f"pages must be uint8 (n_pages, {stride}), contiguous, got {pages.dtype} {tuple(pages.shape)}")
    return pages.view(-1, payload_bytes(nope, rope)), pages.view(-1, SCALE_BYTES)


def _rows(index: torch.Tensor, per_page: int, nope: int, rope: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the entries lie in the views: a page is a whole number of rows of either, by its padding."""
    payload, stride = payload_bytes(nope, rope), page_bytes(per_page, nope, rope)
    page, slot = index // per_page, index % per_page
    scales = page * (stride // SCALE_BYTES) + slot + per_page * payload // SCALE_BYTES
    return page * (stride // payload) + slot, scales
