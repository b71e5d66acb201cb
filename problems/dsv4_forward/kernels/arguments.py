"""What this folder's kernels share: `Own`, checks of tensors, of which launchers see addresses only, and structs."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from ctypes import Structure, c_int, c_longlong, c_void_p
from pathlib import Path
from typing import ClassVar

import torch

from problems.common import build
from problems.dsv4_forward.cache.pages import Pages

KINDS = (torch.float32, torch.bfloat16)
PAGE_KINDS = {
    ("plain", torch.float32): 0,
    ("plain", torch.bfloat16): 1,
    ("entry", torch.uint8): 2,
    ("index", torch.uint8): 3,
}


class Own(ABC):
    """Kernels of a source of this folder, on one build. A subclass has a SOURCE, and a method for each of its OPS."""

    TARGETS = ("sm90", "sm100")
    SOURCE: ClassVar[Path]
    OPS: ClassVar[tuple[str, ...]]

    @abstractmethod
    def __init__(self, built: build.Artefact) -> None:
        """Take what is launched from `built`."""

    @classmethod
    def compile_for(cls, target: str) -> list[build.Artefact]:
        """Compile for `target`, without a GPU."""
        return [build.cuda(cls.SOURCE, target)]

    @classmethod
    def ops(cls, target: str) -> dict[str, Callable[..., object]]:
        """Build and load the kernels. -> by op. BuildError as build.cuda."""
        made = cls(build.cuda(cls.SOURCE, target))
        return {op: getattr(made, op) for op in cls.OPS}


def expect(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Raise ValueError, which names the tensor, unless it has this dtype and shape and is contiguous."""
    if tensor.dtype != dtype or tuple(tensor.shape) != tuple(shape) or not tensor.is_contiguous():
        came = f"{tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}"
        raise ValueError(f"{name} must be {dtype} {tuple(shape)}, contiguous, got {came}")


def is_bf16(name: str, tensor: torch.Tensor) -> int:
    """Return 1 for bf16, 0 for fp32. ValueError: it is neither."""
    if tensor.dtype not in KINDS:
        raise ValueError(f"{name} must be fp32 or bf16, got {tensor.dtype}")
    return KINDS.index(tensor.dtype)


def pointer(tensor: torch.Tensor | None) -> int | None:
    """Return where it lies; None for none."""
    return None if tensor is None else tensor.data_ptr()


def addresses(**tensors: torch.Tensor | None) -> dict[str, int | None]:
    """Return where each lies, by name; None for none."""
    return {name: pointer(tensor) for name, tensor in tensors.items()}


def fields(pointers: str, numbers: str) -> list[tuple[str, type]]:
    """Return the fields of a struct that has these pointers, then these ints."""
    return [(name, c_void_p) for name in pointers.split()] + [(name, c_int) for name in numbers.split()]


class PagesStruct(Structure):
    """rows.cuh's Pages."""

    _fields_ = [("data", c_void_p), ("page_bytes", c_longlong), *fields("", "kind per_page width rope")]


def pages_struct(pages: Pages) -> PagesStruct:
    """Return the kernels' form of pages."""
    size = pages.data[0].numel() * pages.data.element_size()
    kind = PAGE_KINDS[pages.kind, pages.data.dtype]
    return PagesStruct(pages.data.data_ptr(), size, kind, pages.per_page, pages.width, pages.rope)
