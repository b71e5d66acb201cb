"""A problem's data and a call's answer as JSON: tensors, arrays, numbers and texts in tuples, lists, sets, dicts and
objects (dataclasses, modules of torch.nn, objects of classes that the folder's reference defines). Nothing is pickled.

`walk` turns such a value into a specification: of a container {"type": one of CONTAINERS, "value": its class, "keys",
"items"}, of a leaf what its reader says. `made` makes the value again. Of data (`describe`, `build`) each tensor has a
place in a flat buffer, on the device or on the host, that another process maps.
"""

import collections
import ctypes
import json
import warnings
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from types import GetSetDescriptorType, ModuleType, SimpleNamespace
from typing import Any

import numpy
import torch

from harness.runner import objects
from harness.runner.failure import RefusedError

ALIGN = 512  # bytes; what torch's CUDA allocator gives, and more than a TMA descriptor (16) asks for
GUARD = 256  # bytes at least between two tensors, and at the ends of a buffer, which a call may read and not write
PLAIN = (int, float, str, bool, type(None))
NUMBERS = tuple({numpy.dtype(kind).type for kind in "?bhilqBHILQefd"})  # of numpy; they arrive as Python's
SEQUENCES = {"tuple": tuple, "list": list, "set": set}
CONTAINERS = (*SEQUENCES, "named", "dict", "object")
DEPTH = 32  # containers around a leaf
KEPT = "tensors, arrays, numbers and texts, in tuples, lists, dicts, dataclasses and objects of the reference's classes"


@dataclass
class Layout:
    """The taken bytes of a buffer. values: takes plain values, then contents; None: the specification has them."""

    used: int = 0
    values: list | None = None

    def place(self, nbytes: int) -> int:
        offset = self.used or ALIGN  # there is a buffer for empty tensors too
        self.used = -(-(offset + nbytes + GUARD) // ALIGN) * ALIGN
        return offset

    def leaf(self, value: Any, name: str) -> dict:
        """Return the specification of a leaf of data; a tensor gets a place. RefusedError: data may not hold it."""
        if type(value) in PLAIN and self.values is not None:
            self.values.append(value)
            return {"type": "value", "at": len(self.values) - 1}
        if type(value) in PLAIN:
            return {"type": "value", "value": value}
        if type(value) is torch.device:
            return {"type": "device", "value": str(value)}
        if class_name := objects.name_of(value):
            return {"type": "class", "value": class_name}
        see_strided(value, name, "a call's data may hold")
        nbytes = extent(value) * value.element_size()
        place = {"offset": self.place(nbytes), "nbytes": nbytes}
        return {"type": "Tensor", "name": name, **form(value), **place, "traits": _traits(value)}


def describe(value: Any, layout: Layout) -> dict:
    """Return the specification of data, whose tensors get places in `layout`. RefusedError: data may not be such."""
    spec = walk(value, layout.leaf)
    for node in nodes(spec):
        objects.see_found(node)
    return spec


def rearrange(spec: dict, writable: Container[int], page: int) -> tuple[int, Layout]:
    """Place tensors on the device: first what a call only reads, from a page on `writable`. -> bytes of both."""
    layout, numbered, first = Layout(), list(enumerate(leaves(spec))), 0
    for written in (False, True):
        first = layout.used = -(-layout.used // page) * page
        for _, leaf in (pair for pair in numbered if (pair[0] in writable) is written):
            leaf["offset"] = layout.place(leaf["nbytes"])
    return first, layout


def walk(
    value: Any, leaf: Callable[[Any, str], dict], answer: bool = False, name: str = "", above: tuple[int, ...] = ()
) -> dict:
    """Return the specification of a value. leaf: gives that of what is no container, from it and its name: the keys,
    fields and positions that lead to it, joined by dots. answer: dicts are by text, and in its order. above: the ids of
    the containers around the value. RefusedError: it contains itself, or is nested too deep.
    """
    if type(value) is numpy.ndarray:
        return {**leaf(shared(value), name), "value": "ndarray"}
    kind, items = _opened(value)
    if not kind or (answer and kind == "dict" and not all(type(key) is str for key, _ in items)):
        return leaf(value.item() if type(value) in NUMBERS else value, name)
    if id(value) in above:
        raise RefusedError(f"data and answers must not contain themselves, and a {type(value).__name__} does")
    if len(above) == DEPTH:
        raise RefusedError(f"data and answers must be nested at most {DEPTH} deep, the limit of this judge")
    if kind == "dict" and answer:
        items.sort(key=lambda item: item[0])
    inside, dot = (*above, id(value)), "." if name else ""
    return {
        "type": kind,
        "value": objects.name_of(type(value)),
        "keys": [] if kind in SEQUENCES else [key for key, _ in items],
        "items": [walk(item, leaf, answer, f"{name}{dot}{key}", inside) for key, item in items],
    }


def _opened(value: Any) -> tuple[str, list[tuple[Any, Any]]]:
    """Which of CONTAINERS a value is ("": none), and items with keys. No method of its class runs, off the clock."""
    kind = type(value)
    if issubclass(kind, tuple):  # a torch.Size and a struct sequence arrive as plain ones
        fields, items = getattr(kind, "_fields", ()), list(tuple.__iter__(value))
        return ("named" if fields else "tuple"), list(zip(fields or range(len(items)), items, strict=True))
    if kind in (list, set):
        return kind.__name__, list(enumerate(value))
    if kind in (dict, collections.OrderedDict) and all(type(key) in PLAIN for key in value):
        return "dict", list(value.items())
    bases = [vars(base) for base in kind.__mro__]
    allowed = torch.nn.Module in kind.__mro__ or any("__dataclass_fields__" in base for base in bases)
    held = next((base["__dict__"] for base in bases if "__dict__" in base), None)
    allowed |= kind.__module__.startswith("problems.") and kind.__module__.endswith(".reference")
    if isinstance(held, GetSetDescriptorType) and allowed:
        return "object", list(held.__get__(value).items())
    return "", []


def made(spec: dict, leaf: Callable[[dict], Any], find: Callable[[str], Any]) -> Any:
    """Return the value of `spec`. leaf: gives what is no container; find: a class by its name. May raise anything."""
    kind = spec["type"]
    if kind not in CONTAINERS:
        return leaf(spec).numpy() if spec.get("value") == "ndarray" else leaf(spec)
    items = [made(item, leaf, find) for item in spec["items"]]
    if kind in SEQUENCES:
        return SEQUENCES[kind](items)
    keyed = dict(zip(spec["keys"], items, strict=True))
    if kind == "dict":
        return keyed
    cls = find(spec["value"])
    if kind == "named":
        return tuple.__new__(cls, items) if list(getattr(cls, "_fields", ())) == spec["keys"] else tuple(items)
    again = object.__new__(cls) if cls else SimpleNamespace()
    vars(again).update(keyed)
    return again


def build(spec: dict, buffer: torch.Tensor, task: ModuleType | None = None, values: Sequence = ()) -> Any:
    """Return the data of `spec`, with tensors in `buffer` (uint8, flat). task: has classes; values: its own."""

    def leaf(spec: dict) -> Any:
        if spec["type"] == "value":
            return values[spec["at"]] if "at" in spec else spec["value"]
        if spec["type"] == "device":
            return torch.device(spec["value"])
        return objects.find(spec["value"], task) if spec["type"] == "class" else tensor(spec, buffer)

    return made(spec, leaf, lambda name: objects.find(name, task))


def packed(values: list) -> bytes:
    """Return plain values as JSON, filled up with blanks so that most contents of a case take as much."""
    data = json.dumps(values).encode()
    return data.ljust(-(-2 * len(data) // ALIGN) * ALIGN)


def unpacked(leaf: dict | None, memory: torch.Tensor) -> Sequence:
    """Return the values that a call's memory holds where the tensor `leaf` is, () without one."""
    if leaf is None:
        return ()
    view = tensor(leaf, memory)
    return json.loads(ctypes.string_at(view.data_ptr(), view.numel()))


def nodes(spec: dict) -> Iterator[dict]:
    """Yield a specification and all within it, in order."""
    yield spec
    for item in spec["items"] if spec["type"] in CONTAINERS else ():
        yield from nodes(item)


def leaves(spec: dict) -> list[dict]:
    """Return the specifications of tensors within `spec`, in order; in an answer also those of unknown objects."""
    return [node for node in nodes(spec) if node["type"] not in (*CONTAINERS, "value", "device", "class")]


def within(spec: dict, names: tuple[str, ...]) -> list[int]:
    """Return which leaves of a specification are in these fields of a named tuple, or under these keys of a dict."""
    pairs = zip(spec.get("keys", ()), spec.get("items", ()), strict=False)
    return [i for i, part in enumerate(part for part, item in pairs for _ in leaves(item)) if part in names]


def tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors within `value`, and those over its arrays, in the order of `leaves`."""
    return [leaf for leaf in taken_apart(value)[1] if isinstance(leaf, torch.Tensor)]


def taken_apart(value: Any, answer: bool = False) -> tuple[dict, list[Any]]:
    """Return the containers of a value as `walk` does, and its leaves in order; those over its arrays are tensors."""
    flat: list[Any] = []
    return walk(value, lambda leaf, _: {"type": "", "at": flat.append(leaf)}, answer), flat


def clone(value: Any) -> Any:
    """Return a copy with separate memory for every tensor, strides kept."""
    spec, flat = taken_apart(value)
    rest = map(_cloned, flat)
    return made(spec, lambda _: next(rest), objects.find)


def _cloned(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    copied = raw(value).clone()
    copied = copied.view(value.dtype).as_strided(value.shape, value.stride()) if value.numel() else value.detach()
    return _with_traits(copied, _traits(value))


def see_strided(value: Any, name: str, wanted: str) -> None:
    """RefusedError: a leaf is no tensor with dtype, shape and stride, or its memory means more than that."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_quantized:
        kind = f"{value.layout} {value.dtype} " if isinstance(value, torch.Tensor) else ""
        kind += "dict by other keys" if type(value) is dict else type(value).__name__
        raise RefusedError(f"{wanted} {KEPT}, got {kind}{f' at {name}' if name else ''}")


def shared(array: Any) -> torch.Tensor:
    """Return a tensor over the memory of a numpy array, read-only ones too; of a copy if it has a stride below 0."""
    array = array if all(stride >= 0 for stride in array.strides) else array.copy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of arrays that are read-only; this one is only read
        return torch.from_numpy(array)


def form(value: torch.Tensor) -> dict:
    """Return the dtype, shape, stride and kind of device of a tensor."""
    dtype, device = str(value.dtype).removeprefix("torch."), value.device.type
    return {"dtype": dtype, "shape": list(value.shape), "stride": list(value.stride()), "device": device}


def tensor(spec: dict, buffer: torch.Tensor) -> torch.Tensor:
    """Return the strided view of `buffer` (uint8, flat) that a tensor specification describes."""
    dtype = getattr(torch, spec["dtype"])
    region = buffer[spec["offset"] : spec["offset"] + spec["nbytes"]]
    view = region.view(dtype).as_strided(spec["shape"], spec["stride"], region.storage_offset() // dtype.itemsize)
    return _with_traits(view, spec.get("traits", ()))


def raw(value: torch.Tensor) -> torch.Tensor:
    """Return the bytes that a strided tensor spans, gaps included, as a flat uint8 view of its storage."""
    start, length = value.storage_offset() * value.element_size(), extent(value) * value.element_size()
    return torch.empty(0, dtype=torch.uint8, device=value.device).set_(value.untyped_storage(), start, (length,), (1,))


def extent(value: torch.Tensor) -> int:
    """Return the number of elements from the first to the last that a strided tensor touches."""
    return span(value.shape, value.stride())


def span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return the same of a shape and a stride."""
    return 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) if all(shape) else 0


def with_strides(dense: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """Return a view of contiguous memory with these strides, where they leave no gaps; else as it is."""
    fits = len(stride) == dense.dim() and span(dense.shape, stride) == dense.numel()
    return dense.as_strided(dense.shape, stride) if fits else dense


def _traits(value: torch.Tensor) -> list[str]:
    """Return what a tensor is besides dtype, shape and stride. conj, neg: its memory has conjugates, negatives."""
    has = (value.is_conj(), value.is_neg(), value.requires_grad, type(value) is torch.nn.Parameter)
    return [name for name, true in zip(("conj", "neg", "grad", "parameter"), has, strict=True) if true]


def _with_traits(value: torch.Tensor, traits: Sequence[str]) -> torch.Tensor:
    value = value.conj() if "conj" in traits else value
    value = torch._neg_view(value) if "neg" in traits else value
    if "parameter" in traits:
        return torch.nn.Parameter(value, requires_grad="grad" in traits)
    return value.requires_grad_() if "grad" in traits else value
