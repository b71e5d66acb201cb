"""A problem's data as JSON plus raw bytes: nested tuples, lists, dicts and NamedTuples of tensors, arrays, plain values
and other objects (harness/runner/objects.py).

`describe` turns such a value into a specification in which every tensor has a place in one of two flat buffers
("device" and "host"); `build` makes the same value again over another process's mapping of those buffers.
"""

import collections
import ctypes
import dataclasses
import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import GetSetDescriptorType, ModuleType
from typing import Any

import numpy
import torch

from harness.runner import objects
from harness.runner.failure import RefusedError

ALIGN = 512  # bytes; what torch's CUDA allocator gives, and more than a TMA descriptor (16) asks for
GUARD = 256  # bytes at least between two tensors, and at the ends of a buffer, which a call may read and not write
PLAIN = (int, float, str, bool, type(None))
DEPTH = 32  # tuples, lists, dicts and dataclasses around a part of an answer
NUMBERS = tuple({numpy.dtype(kind).type for kind in "?bhilqBHILQefd"})  # of numpy


@dataclass
class Layout:
    used: dict[str, int] = field(default_factory=lambda: {"device": 0, "host": 0})

    def place(self, space: str, nbytes: int) -> int:
        offset = self.used[space] or ALIGN  # there is a buffer for empty tensors too
        self.used[space] = -(-(offset + nbytes + GUARD) // ALIGN) * ALIGN
        return offset


def describe(value: Any, layout: Layout, above: tuple[int, ...] = ()) -> dict:
    """Return the specification of `value` as JSON, and place its tensors in `layout`. above: the ids of the containers
    that it is in. RefusedError: it holds an object that cannot be made in another process, contains itself, or is
    nested deeper than DEPTH.
    """
    if objects.is_strided(value):
        space = "device" if value.is_cuda else "host"
        nbytes = extent(value) * value.element_size()
        traits = [name for name, has in _TRAITS.items() if has(value)]
        return {
            "kind": "tensor",
            "space": space,
            "offset": layout.place(space, nbytes),
            "nbytes": nbytes,
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": list(value.shape),
            "stride": list(value.stride()),
            **({"traits": traits} if traits else {}),
        }
    spec, items = _opened(value)
    if items is None:
        return spec
    if id(value) in above:
        raise RefusedError(f"a call's data must not contain itself, and a {type(value).__name__} in it does")
    if len(above) == DEPTH:
        raise RefusedError(f"a call's data must be nested at most {DEPTH} deep, the limit of this judge")
    inside = (*above, id(value))
    return {**spec, "items": [describe(item, layout, inside) for item in items]}


def _opened(value: Any) -> tuple[dict, list[Any] | None]:
    """Return what a value is, and what is in it; None: it is nothing that holds tensors."""
    kind = type(value)
    if kind in PLAIN:
        return {"kind": "value", "value": value}, None
    if kind is torch.dtype:
        return {"kind": "dtype", "value": str(value).removeprefix("torch.")}, None
    if kind is torch.device:
        return {"kind": "device", "value": str(value)}, None
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        spec = {"kind": "named", "module": kind.__module__, "class": kind.__qualname__, "fields": list(value._fields)}
        return {**spec, "definitions": objects.definitions_of(kind)}, list(value)
    if kind in (tuple, list):
        return {"kind": kind.__name__}, list(value)
    if kind is dict and all(type(key) in PLAIN for key in value):
        return {"kind": "dict", "keys": list(value)}, list(value.values())
    if objects.is_array(value):
        return {"kind": "array"}, [shared(value)]
    spec, parts = objects.take_apart(value)
    return {"kind": "object", **spec}, parts


# What a specification says of a value itself, by kind; shapes, keys and classes are the rest.
VALUES = {"value": "value", "object": "pickled"}


def take_values(spec: dict, values: list) -> dict:
    """Return `spec` with numbers in place of its plain values and pickled objects, which are appended to `values`."""
    if "items" in spec:
        spec = {**spec, "items": [take_values(item, values) for item in spec["items"]]}
    name = VALUES.get(spec["kind"])
    if name is None:
        return spec
    values.append(spec[name])
    return {**{key: of for key, of in spec.items() if key != name}, "at": len(values) - 1}


def packed(values: list) -> bytes:
    """Return such values as JSON, filled up with blanks so that most contents of a case take as much."""
    said = json.dumps(values).encode()
    return said.ljust(-(-2 * len(said) // ALIGN) * ALIGN)


def unpacked(leaf: dict | None, host: torch.Tensor | None) -> Sequence:
    """Return the values that a call's memory `host` holds where the tensor `leaf` is. leaf: None where it has none;
    then host may be None, as of a call with memory on a device only. ValueError: a leaf without memory.
    """
    if leaf is None:
        return ()
    if host is None:
        raise ValueError("values of a call lie in memory of the host, and it has none")
    said = tensor(leaf, host)
    return json.loads(ctypes.string_at(said.data_ptr(), said.numel()))


def build(spec: dict, buffers: dict[str, torch.Tensor], task: ModuleType | None = None, values: Sequence = ()) -> Any:
    """Return the value that `spec` describes, with its tensors as views of `buffers` (uint8, flat). Classes come from
    `task` (an attribute of that name), from a module of this process, or from their definitions. values: what
    take_values took out of it.
    """
    kind = spec["kind"]
    if kind == "tensor":
        return _with_traits(tensor(spec, buffers[spec["space"]]), spec.get("traits", ()))
    if kind == "value":
        return _value(spec, values)
    if kind == "dtype":
        return getattr(torch, spec["value"])
    if kind == "device":
        return torch.device(spec["value"])
    items = [build(item, buffers, task, values) for item in spec["items"]]
    if kind == "named":
        named = objects.find(spec["module"], spec["class"], spec["definitions"], task)
        return (named if hasattr(named, "_fields") else collections.namedtuple(spec["class"], spec["fields"]))(*items)
    if kind == "dict":
        return dict(zip(spec["keys"], items, strict=True))
    if kind == "array":
        return items[0].numpy()
    if kind == "object":
        return objects.put_together({**spec, "pickled": _value(spec, values)}, items, task)
    return items if kind == "list" else tuple(items)


def _value(spec: dict, values: Sequence) -> Any:
    return values[spec["at"]] if "at" in spec else spec[VALUES[spec["kind"]]]


def is_mutable(spec: dict) -> bool:
    """Return whether a call could change the value besides what is in its tensors."""
    if spec["kind"] in ("list", "dict", "object") or "grad" in spec.get("traits", ()):
        return True
    return any(is_mutable(item) for item in spec.get("items", ()))


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
    if objects.is_strided(value):
        return [value]
    return [tensor for item in _opened(value)[1] or () for tensor in tensors(item)]


def parts(answer: object, above: tuple[int, ...] = ()) -> list[Any]:
    """What a call returned, without its containers (of dicts by key) and plain values: its tensors and arrays. above:
    the ids of the containers that it is in. RefusedError: it contains itself, or is nested deeper than DEPTH.
    """
    if (inner := within_answer(answer)) is not None:
        if id(answer) in above:
            raise RefusedError(f"an answer must not contain itself, and a {type(answer).__name__} in it does")
        if len(above) == DEPTH:
            raise RefusedError(f"an answer must be nested at most {DEPTH} deep, the limit of this judge")
        return [part for item in inner[1] for part in parts(item, (*above, id(answer)))]
    if (array := objects.array_of(answer)) is not None:
        return [shared(array)]
    return [] if isinstance(answer, PLAIN) or type(answer) in NUMBERS else [answer]


def within_answer(answer: Any) -> tuple[list[Any], list[Any]] | None:
    """Return the keys and the items of a tuple, list, dict or dataclass, None for all else. No method of a class of the
    submission runs: it would be work off the clock.
    """
    if isinstance(answer, tuple | list):
        items = list((tuple if isinstance(answer, tuple) else list).__iter__(answer))  # type: ignore[arg-type]
        return [], items
    if isinstance(answer, dict):
        keys = sorted(dict.keys(answer), key=lambda key: str(key) if type(key) in PLAIN else "")
        return keys, [dict.__getitem__(answer, key) for key in keys]
    if dataclasses.is_dataclass(answer) and not isinstance(answer, type):
        found = next((vars(kind)["__dict__"] for kind in type(answer).__mro__ if "__dict__" in vars(kind)), None)
        if isinstance(found, GetSetDescriptorType):
            held = found.__get__(answer)
            keys = [one.name for one in dataclasses.fields(answer) if one.name in held]
            return keys, [held[key] for key in keys]
    return None


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
    if objects.is_strided(value):
        copied = raw(value).clone()
        copied = copied.view(value.dtype).as_strided(value.shape, value.stride()) if value.numel() else value.detach()
        return _with_traits(copied, [name for name, has in _TRAITS.items() if has(value)])
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(clone(item) for item in value))
    if type(value) in (tuple, list):
        return type(value)(clone(item) for item in value)
    if type(value) is dict:
        return {key: clone(item) for key, item in value.items()}
    if objects.is_array(value):
        return value.copy()
    spec, items = _opened(value)
    # copy.deepcopy fails on a dict whose attributes are its keys.
    return value if items is None else objects.put_together(spec, [clone(item) for item in items], None)


def shared(array: Any) -> torch.Tensor:
    """Return a tensor over the memory of a numpy array, read-only ones too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of arrays that are read-only; this one is only read
        return torch.from_numpy(array)


# What a tensor is besides dtype, shape and stride. conj, neg: torch keeps its values conjugated or negated in memory.
_TRAITS: dict[str, Callable[[torch.Tensor], bool]] = {
    "conj": torch.Tensor.is_conj,
    "neg": torch.Tensor.is_neg,
    "grad": lambda value: value.requires_grad,
    "parameter": lambda value: type(value) is torch.nn.Parameter,
}


def _with_traits(value: torch.Tensor, traits: Sequence[str]) -> torch.Tensor:
    """Return a plain tensor with these of _TRAITS."""
    value = value.conj() if "conj" in traits else value
    value = torch._neg_view(value) if "neg" in traits else value
    if "parameter" in traits:
        return torch.nn.Parameter(value, requires_grad="grad" in traits)
    return value.requires_grad_() if "grad" in traits else value
