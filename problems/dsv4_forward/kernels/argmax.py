"""The token with the largest logit, in one launch on a GPU (torch takes 37 us for a row of 129,280 there)."""

from ctypes import c_int, c_void_p
from dataclasses import dataclass
from pathlib import Path

import torch

from problems.common import build, load

TARGETS = ("sm90", "sm100")
SOURCE = Path(__file__).with_suffix(".cu")


def compile_for(target: str) -> list[build.Artefact]:
    """Compile for `target`, without a GPU."""
    return [build.cuda(SOURCE, target)]


@dataclass(frozen=True)
class Longer:
    """length[sequences[i]] += advance[i], for row i of the logits. All int64, contiguous; length (S,), the others (B,);
    no sequence is there twice.
    """

    length: torch.Tensor
    sequences: torch.Tensor
    advance: torch.Tensor


def argmax(logits: torch.Tensor, out: torch.Tensor, longer: Longer | None = None) -> None:
    """Write the place of the largest logit of each row, of equal ones the first; a NaN is larger than any number.

    logits: fp32 (B, V); out: int64 (B,), contiguous. As torch.argmax, which computes what no kernel here is for.
    longer: done as well, in the same launch. Never waits for a GPU. ValueError: shapes or dtypes; BuildError as
    build.cuda.
    """
    rows = () if longer is None else (longer.sequences, longer.advance)
    counts = (*rows, longer.length) if longer else ()
    if any(one.shape != out.shape for one in rows) or any(
        one.dtype != torch.int64 or one.dim() != 1 or not one.is_contiguous() for one in counts
    ):
        came = ", ".join(f"{one.dtype} {tuple(one.shape)}" for one in counts)
        raise ValueError(f"sequences, advance, length must be int64 vectors, the first two of {len(out)}, got {came}")
    if logits.dim() != 2 or out.shape != logits.shape[:1] or (logits.dtype, out.dtype) != (torch.float32, torch.int64):
        raise ValueError(
            f"logits, out must be fp32 (B, V) and int64 (B,), got {logits.dtype} {tuple(logits.shape)}, {out.dtype} "
            f"{tuple(out.shape)}"
        )
    target = load.device_target(logits.device)
    served = target in TARGETS and logits.is_contiguous() and out.is_contiguous() and logits.data_ptr() % 16 == 0
    if not served or not logits.numel():
        torch.argmax(logits, 1, out=out)
        if longer:
            longer.length.index_add_(0, longer.sequences, longer.advance)
        return
    pointers = [c_void_p] * 3
    launch = build.cuda(SOURCE, target).function("launch_argmax", *pointers[:2], c_int, c_int, *pointers)
    added = (longer.length, longer.sequences, longer.advance) if longer else ()
    addresses = [one.data_ptr() for one in added] or [None] * 3
    build.check(launch(logits.data_ptr(), out.data_ptr(), *logits.shape, *addresses), "argmax")
