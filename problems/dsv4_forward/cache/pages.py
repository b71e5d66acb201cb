"""`Pages`: the paged rows of a cache, in the layouts that kernels read. Row r of page p has the index p * P + r.

kind   | data                            | a row of D values
plain  | fp32 or bf16 (n_pages, P, D)    | as it is
entry  | uint8 (n_pages, page_bytes)     | D - rope e4m3 with a ue8m0 scale a 64, then rope bf16: common/kv_pages.py
index  | uint8 (n_pages, P * D * 17/32)  | MXFP4: P times D / 2 code bytes a page, then P times D / 32 scale bytes
"""

from dataclasses import dataclass

import torch

from problems.common import fp8, kv_pages
from problems.dsv4_forward.weights import formats

KINDS = ("plain", "entry", "index")


@dataclass(frozen=True)
class Pages:
    """data: of `shape`, contiguous; per_page: P; width: D; rope: bf16 values at a row's end ("entry" only).

    ValueError where data does not have that form.
    """

    data: torch.Tensor
    per_page: int
    kind: str
    width: int
    rope: int = 0

    def __post_init__(self) -> None:
        shape, dtype = self.shape(self.kind, len(self.data), self.per_page, self.width, self.rope, self.data.dtype)
        if tuple(self.data.shape) != shape or self.data.dtype != dtype or not self.data.is_contiguous():
            came = f"{self.data.dtype} {tuple(self.data.shape)} with strides {self.data.stride()}"
            raise ValueError(f"data of {self.kind} pages must be {dtype} {shape}, contiguous, got {came}")

    @staticmethod
    def shape(
        kind: str, n_pages: int, per_page: int, width: int, rope: int = 0, dtype: torch.dtype = torch.bfloat16
    ) -> tuple[tuple[int, ...], torch.dtype]:
        """-> (shape, dtype) of such pages; `dtype` is only for plain ones."""
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {KINDS}, got {kind!r}")
        if kind == "plain":
            if dtype not in (torch.float32, torch.bfloat16):
                raise ValueError(f"dtype of plain pages must be float32 or bfloat16, got {dtype}")
            return (n_pages, per_page, width), dtype
        if kind == "entry":
            return (n_pages, kv_pages.page_bytes(per_page, width - rope, rope)), torch.uint8
        if width % formats.GROUP:
            raise ValueError(f"width of index pages must be a multiple of {formats.GROUP}, got {width}")
        return (n_pages, per_page * (width // 2 + width // formats.GROUP)), torch.uint8

    def write(self, index: torch.Tensor, rows: torch.Tensor) -> None:
        """index: int64 (E,), >= 0; rows: fp32 or bf16 (E, D), rounded as the kind says: to nearest, ties to even.

        Of two rows with one index either may win.
        """
        if tuple(rows.shape) != (len(index), self.width):
            raise ValueError(f"rows must be {(len(index), self.width)}, got {tuple(rows.shape)}")
        if self.kind == "plain":
            self.data.view(-1, self.width).index_copy_(0, index, rows.to(self.data.dtype))
        elif self.kind == "entry":
            nope, rope = rows.split([self.width - self.rope, self.rope], dim=-1)
            codes, scales = fp8.quantise_groups(nope, kv_pages.GROUP)
            kv_pages.write(self.data, self.per_page, index, codes, scales, rope.to(torch.bfloat16))
        else:
            codes, scales = self._key_views()
            page, row = index // self.per_page, index % self.per_page
            codes[page, row], scales[page, row] = formats.quantise_mxfp4(rows)

    def read(self, index: torch.Tensor) -> torch.Tensor:
        """index: int32 or int64 (...) -> fp32 (..., D), exactly what is stored. A negative index reads entry 0."""
        if self.kind == "entry":
            nope = self.width - self.rope
            codes, scales, rope = kv_pages.read(self.data, self.per_page, index, nope, self.rope)
            out = torch.empty(*index.shape, self.width, dtype=torch.float32, device=self.data.device)
            out[..., :nope] = fp8.dequantise_groups(codes, scales, kv_pages.GROUP)
            out[..., nope:] = rope
            return out
        flat = index.reshape(-1).clamp(min=0)
        if self.kind == "plain":
            rows = self.data.view(-1, self.width).index_select(0, flat).float()
        else:
            codes, scales = self._key_views()
            page, row = flat // self.per_page, flat % self.per_page
            rows = formats.dequantise_mxfp4(codes[page, row], scales[page, row])
        return rows.view(*index.shape, self.width)

    def _key_views(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes (n_pages, P, D / 2) and scales (n_pages, P, D / 32) of the index pages."""
        sizes = [self.width // 2, self.width // formats.GROUP]
        parts = self.data.split([self.per_page * size for size in sizes], dim=-1)
        codes, scales = (p.unflatten(-1, (self.per_page, size)) for p, size in zip(parts, sizes, strict=True))
        return codes, scales
