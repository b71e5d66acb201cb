"""A problem's data as JSON plus raw bytes: nested tuples, lists, dicts, NamedTuples and dataclasses of tensors and
plain values.

`describe` turns such a value into a specification in which every tensor has a place in one of two flat buffers
("device" and "host"); `build` makes the same value again over another process's mapping of those buffers.
"""

import collections
import copy
import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

ALIGN = 512  # bytes; what torch's CUDA allocator gives, and more than a TMA descriptor (16) asks for
PLAIN = (int, float, str, bool, type(None))


class _Attributes:
    """Stands for a dataclass that only the reference knows: the same attributes, and no methods."""


@dataclass
class Layout:
    used: dict[str, int] = field(default_factory=lambda: {"device": 0, "host": 0})

    def place(self, space: str, nbytes: int) -> int:
        offset = self.used[space]
        self.used[space] = -(-(offset + nbytes) // ALIGN) * ALIGN
        return offset


def describe(value: Any, layout: Layout) -> dict:
    """Return the specification of `value` as JSON, and place its tensors in `layout`. TypeError for other types."""
    if isinstance(value, torch.Tensor):
        space = "device" if value.is_cuda else "host"
        nbytes = extent(value) * value.element_size()
        return {
            "kind": "tensor", "space": space, "offset": layout.place(space, nbytes), "nbytes": nbytes,
            "dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape),
            "stride": list(value.stride()),
        }  # fmt: skip
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        items = [describe(item, layout) for item in value]
        return {"kind": "named", "class": type(value).__name__, "fields": list(value._fields), "items": items}
    if _is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        items = [describe(getattr(value, name), layout) for name in names]
        return {"kind": "dataclass", "class": type(value).__name__, "fields": names, "items": items}
    if isinstance(value, tuple | list):
        items = [describe(item, layout) for item in value]
        return {"kind": "list" if isinstance(value, list) else "tuple", "items": items}
    if isinstance(value, dict) and all(isinstance(key, PLAIN) for key in value):
        return {"kind": "dict", "keys": list(value), "items": [describe(item, layout) for item in value.values()]}
    if isinstance(value, PLAIN):
        return {"kind": "value", "value": value}
    if isinstance(value, torch.dtype):
        return {"kind": "dtype", "value": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"kind": "device", "value": str(value)}
    raise TypeError(
        "data may hold tensors, numbers, strings, and tuples, lists, dicts and dataclasses of them, got "
        f"{type(value).__name__}: a call gets it in another process"
    )


def take_values(spec: dict, values: list) -> dict:
    """Return `spec` with numbers in the places of its plain values, which are appended to `values`."""
    if spec["kind"] == "value":
        values.append(spec["value"])
        return {"kind": "value", "at": len(values) - 1}
    return {**spec, "items": [take_values(item, values) for item in spec["items"]]} if "items" in spec else spec


def packed(values: list) -> bytes:
    """Return plain values as JSON, filled up with blanks so that most contents of a case take as much."""
    said = json.dumps(values).encode()
    return said.ljust(-(-2 * len(said) // ALIGN) * ALIGN)


def build(
    spec: dict, buffers: dict[str, torch.Tensor], task: ModuleType | None = None, values: Sequence = ()
) -> Any:  # fmt: skip
    """Return the value that `spec` describes, with its tensors as views of `buffers` (uint8, flat). Classes of
    NamedTuples and dataclasses come from `task` (an attribute of that name); without one only the fields' names do.
    values: what take_values took out of it.
    """
    kind = spec["kind"]
    if kind == "tensor":
        return tensor(spec, buffers[spec["space"]])
    if kind == "value":
        return values[spec["at"]] if "at" in spec else spec["value"]
    if kind == "dtype":
        return getattr(torch, spec["value"])
    if kind == "device":
        return torch.device(spec["value"])
    items = [build(item, buffers, task, values) for item in spec["items"]]
    if kind == "named":
        named = getattr(task, spec["class"], None) or collections.namedtuple(spec["class"], spec["fields"])
        return named(*items)
    if kind == "dataclass":
        wanted = getattr(task, spec["class"], _Attributes)
        made = object.__new__(wanted)  # a field may be none of __init__'s, and a frozen one is not assigned to
        for name, item in zip(spec["fields"], items, strict=True):
            object.__setattr__(made, name, item)
        return made
    if kind == "dict":
        return dict(zip(spec["keys"], items, strict=True))
    return items if kind == "list" else tuple(items)


def leaves(spec: dict) -> list[dict]:
    """Return the tensor specifications within `spec`, in order."""
    if spec["kind"] == "tensor":
        return [spec]
    return [leaf for item in spec.get("items", ()) for leaf in leaves(item)]


def names(spec: dict, path: str = "") -> list[str]:
    """Return a name for each of the leaves: its fields, keys or positions, joined by dots."""
    if spec["kind"] == "tensor":
        return [path or "0"]
    items = spec.get("items", [])
    parts = spec.get("fields") or spec.get("keys") or range(len(items))
    named = zip(parts, items, strict=True)
    return [name for part, item in named for name in names(item, f"{path}.{part}" if path else str(part))]


def within(spec: dict, names: tuple[str, ...]) -> list[int]:
    """Return which leaves of a specification are in these fields of a NamedTuple, or under these keys of a dict."""
    parts = spec.get("fields") or spec.get("keys") or ()
    of_leaves = [part for part, item in zip(parts, spec["items"] if parts else (), strict=True) for _ in leaves(item)]
    return [i for i, part in enumerate(of_leaves) if part in names]


def tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors within `value`, in the order of `leaves`."""
    if isinstance(value, torch.Tensor):
        return [value]
    if _is_dataclass(value):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return [tensor for item in items for tensor in tensors(item)]


def parts(answer: object) -> list[Any]:
    """What a call returned, without its tuples, lists, dicts (by key) and plain values: its tensors, in order."""
    if isinstance(answer, tuple | list):
        return [inner for item in answer for inner in parts(item)]
    if isinstance(answer, dict):
        return [inner for key in sorted(answer, key=str) for inner in parts(answer[key])]
    return [] if isinstance(answer, PLAIN) else [answer]


def tensor(spec: dict, buffer: torch.Tensor) -> torch.Tensor:
    """Return the strided view of `buffer` (uint8, flat) that a tensor specification describes."""
    dtype = getattr(torch, spec["dtype"])
    region = buffer[spec["offset"] : spec["offset"] + spec["nbytes"]]
    return region.view(dtype).as_strided(spec["shape"], spec["stride"], region.storage_offset() // dtype.itemsize)


def raw(value: torch.Tensor) -> torch.Tensor:
    """Return the bytes that a strided tensor spans, gaps included, as a flat uint8 view of its storage."""
    start, length = value.storage_offset() * value.element_size(), extent(value) * value.element_size()
    return torch.empty(0, dtype=torch.uint8, device=value.device).set_(value.untyped_storage(), start, (length,), (1,))


def extent(value: torch.Tensor) -> int:
    """Return the number of elements from the first to the last that a strided tensor touches."""
    if not value.numel():
        return 0
    return 1 + sum((n - 1) * stride for n, stride in zip(value.shape, value.stride(), strict=True))


def memory_order(shape: Sequence[int], stride: Sequence[int]) -> list[int] | None:
    """Return the dimensions from the outermost in memory to the innermost; None if elements overlap or leave gaps."""
    order = sorted(range(len(shape)), key=lambda i: (stride[i], shape[i]), reverse=True)
    step = 1
    for i in reversed(order):
        if shape[i] != 1 and stride[i] != step:
            return None
        step *= shape[i]
    return order


def in_memory_order(dense: torch.Tensor, order: list[int] | None) -> torch.Tensor:
    """Return a view of a contiguous tensor of a shape, whose elements lie in memory in the order of dimensions `order`;
    None: as they are.
    """
    if order is None:
        return dense
    inverse = sorted(range(len(order)), key=lambda i: order[i])
    return dense.view([dense.shape[i] for i in order]).permute(inverse)


def clone(value: Any) -> Any:
    """Return a copy with separate storage for every tensor, strides kept."""
    if isinstance(value, torch.Tensor):
        copied = raw(value).clone()
        return copied.view(value.dtype).as_strided(value.shape, value.stride()) if value.numel() else value.clone()
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(clone(item) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(clone(item) for item in value)
    if isinstance(value, dict):
        return {key: clone(item) for key, item in value.items()}
    if _is_dataclass(value):
        copied = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(copied, field.name, clone(getattr(value, field.name)))
        return copied
    return value


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
