"""The check that a submission replaced no Python object that the GPU's clock in a runner relies on.

A submission can swap the __code__ of a function in place, so the check keeps each function, its code and its constants.
It sees changes by Python code only; the judge's clock (harness/judge/call.py) and the checker bound native code. On a
CPU nothing in the runner is worth replacing. A library may set torch's global switches on import: they are put back.
"""

import builtins
import gc
import json
import os
import select
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType

import torch

# Named by hand: what harness.runner.runner, clock, native, buffers, tree and wire call, and what is patched to forge a
# time.
_MODULES: tuple[ModuleType, ...] = (time, json, socket, select, struct, gc, builtins)
_CLASSES: tuple[type, ...] = (socket.socket, json.JSONEncoder, json.JSONDecoder, torch.cuda.Event)
_OS = ("read", "write", "close", "open", "getpid", "sched_yield")
_CUDA = ("synchronize", "current_stream", "default_stream", "Event", "get_device_properties")
_TENSOR = (
    "copy_",
    "data_ptr",
    "view",
    "as_strided",
    "set_",
    "storage_offset",
    "untyped_storage",
    "numel",
    "stride",
    "element_size",
    "is_contiguous",
    "__eq__",
    "__getitem__",
    "shape",
    "dtype",
    "device",
)
_TORCH = ("empty", "as_tensor", "frombuffer", "equal", "zeros", "allclose")
_TESTING = ("assert_close",)
_PREFIXES = ("harness", "problems.common")


class IntegrityCheck:
    """A snapshot, taken before a submission is imported. `broken` returns what changed since."""

    def __init__(self) -> None:
        self._kept = [(name, names, key, value, _inner(value)) for name, names, key, value in _watched()]
        self._codes = [(inner.__code__, inner.__defaults__) if inner else None for *_, inner in self._kept]
        # Mostly inherited, so the class is asked, as a call does it.
        self._methods = {name: getattr(torch.Tensor, name) for name in _TENSOR}

    def broken(self) -> list[str]:
        """Return the names of replaced or rewritten objects, sorted."""
        found = []
        for (name, names, key, value, inner), code in zip(self._kept, self._codes, strict=True):
            same = names.get(key) is value
            if same and inner is not None:
                # Compared by their contents: code that was swapped for its equal is no change.
                same = (inner.__code__, inner.__defaults__) == code
            if not same:
                found.append(name)
        methods = self._methods.items()
        found += [f"torch.Tensor.{name}" for name, was in methods if getattr(torch.Tensor, name) is not was]
        if sys.gettrace() is not None or sys.getprofile() is not None:
            found.append("a trace function is set")
        return sorted(found)


class Switches:
    """Settings of the whole process that change numerical results, as they were before the import."""

    def __init__(self) -> None:
        self._was = {name: _value(get) for name, (get, _) in _SWITCHES.items()}

    def restore(self) -> list[str]:
        """Put changed settings back. Return them in words."""
        found = []
        for name, (get, put) in _SWITCHES.items():
            was, now = self._was[name], _value(get)
            if was != now:
                found.append(f"{name}, from {was} to {now}")
                put(was)
        return found


def _value(get: Callable[[], object]) -> object:
    try:
        return get()
    except RuntimeError:  # torch refuses to say where its old and new settings were mixed
        return "a mixture of old and new settings"


def _flushes_denormals() -> bool:
    return float(torch.tensor([1e-40], dtype=torch.float32) * 1) == 0.0


def _attribute(owner: object, name: str) -> tuple[Callable[[], object], Callable]:
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


# Name -> how it is read, how it is set.
_SWITCHES: dict[str, tuple[Callable[[], object], Callable]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "float32 matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "cuda.matmul.allow_tf32": _attribute(torch.backends.cuda.matmul, "allow_tf32"),
    "cudnn.allow_tf32": _attribute(torch.backends.cudnn, "allow_tf32"),
    "deterministic algorithms": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    "gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
    "flush denormals": (_flushes_denormals, torch.set_flush_denormal),
}


def _watched() -> Iterator[tuple[str, Mapping, str, object]]:
    """Yield (name to report, the namespace that holds it, its key there, the object)."""
    for name, module in list(sys.modules.items()):
        if name == "harness" or name.startswith(("harness.", "problems.common.")):
            yield from _namespace(name, vars(module))
    for module in _MODULES:
        yield from _namespace(module.__name__, vars(module))
    for cls in _CLASSES:
        yield from _namespace(f"{cls.__module__}.{cls.__qualname__}", vars(cls))
    for prefix, module, names in (
        ("os", os, _OS),
        ("torch.cuda", torch.cuda, _CUDA),
        ("torch", torch, _TORCH),
        ("torch.testing", torch.testing, _TESTING),
    ):
        yield from ((f"{prefix}.{name}", vars(module), name, vars(module)[name]) for name in names)


def _namespace(prefix: str, names: Mapping) -> Iterator[tuple[str, Mapping, str, object]]:
    for name, value in list(names.items()):
        if isinstance(value, FunctionType | BuiltinFunctionType | MethodType | type | property | staticmethod):
            yield f"{prefix}.{name}", names, name, value
            if isinstance(value, type) and value.__module__.startswith(_PREFIXES):
                yield from (
                    (f"{prefix}.{name}.{inner}", vars(value), inner, member)
                    for inner, member in list(vars(value).items())
                    if isinstance(member, FunctionType | property | staticmethod | classmethod)
                )


def _inner(value: object) -> FunctionType | None:
    """Return the Python function in a method, property or the like; None if it is no Python code."""
    inner = getattr(value, "__func__", value)
    inner = inner.fget if isinstance(inner, property) else inner
    return inner if isinstance(inner, FunctionType) else None
