"""The token with the largest logit, in one launch on a GPU (torch takes 37 us for a row of 129,280 there)."""

from ctypes import c_int, c_void_p
from pathlib import Path

import torch

from problems.common import build, load

TARGETS = ("sm90", "sm100")
SOURCE = Path(__file__).with_suffix(".cu")


def compile_for(target: str) -> list[build.Artefact]:
    """Compile for `target`, without a GPU."""
    return [build.cuda(SOURCE, target)]


def argmax(logits: torch.Tensor, out: torch.Tensor) -> None:
    """Write the place of the largest logit of each row, of equal ones the first; a NaN is larger than any number.

    logits: fp32 (B, V); out: int64 (B,), contiguous. As torch.argmax, which computes what no kernel here is for. Never
    waits for a GPU. ValueError: shapes or dtypes; BuildError as build.cuda.
    """
    if logits.dim() != 2 or out.shape != logits.shape[:1] or (logits.dtype, out.dtype) != (torch.float32, torch.int64):
        raise ValueError(
            f"logits, out must be fp32 (B, V) and int64 (B,), got {logits.dtype} {tuple(logits.shape)}, {out.dtype} "
            f"{tuple(out.shape)}"
        )
    target = load.device_target(logits.device)
    served = target in TARGETS and logits.is_contiguous() and out.is_contiguous() and logits.data_ptr() % 16 == 0
    if not served or not logits.numel():
        torch.argmax(logits, 1, out=out)
        return
    launch = build.cuda(SOURCE, target).function("launch_argmax", c_void_p, c_void_p, c_int, c_int)
    build.check(launch(logits.data_ptr(), out.data_ptr(), *logits.shape), "argmax")
