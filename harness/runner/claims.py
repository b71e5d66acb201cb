"""What a call returned, as a runner says it: a claim of each object, which the checker judges.

A claim is {"type": "Tensor", dtype, shape, stride, device, same}, {"type": name of another class}, or in a folder from
elsewhere also {"type": "tuple" | "list", value: name of its class, items}, {"type": "dict", keys as JSON, items} and
{"type": "value", value as JSON}. conj, neg: torch keeps the tensor's values conjugated or negated in memory.
"""

import json
from collections.abc import Callable
from typing import TypeGuard

import torch

from harness.runner import gate, tree
from harness.runner.buffers import MappedBuffer, Page

CLAIMS = 64  # returned objects in a reply


def noting(kernel: Callable, page: Page) -> Callable:
    """Return `kernel` with a note for the judge: where the returned tensors are, and what they are."""

    def noted(*arguments: object) -> object:
        result = kernel(*arguments)
        places = [
            (item.data_ptr(), tree.extent(item) * item.element_size()) if _is_plain(item) else (0, 0)
            for item in tree.parts(result)[: gate.RETURNED]
        ]
        said = json.dumps([structure(result)]).encode()
        gate.bindings().note_returned(page.address, places, said)
        return result

    return noted


def forms(result: object, outputs: list[torch.Tensor]) -> list[dict]:
    """Return the claim of each object that a call returned which received its outputs."""
    returned = list(result) if isinstance(result, tuple | list) else [result]
    return [form(item, outputs[i] if i < len(outputs) else None) for i, item in enumerate(returned[:CLAIMS])]


def capture_any(result: object, captures: list[dict], buffer: MappedBuffer) -> list[dict]:
    """Copy whatever tensors came back, where they have a form that is judged; say what came."""
    for item, spec in zip(tree.parts(result), captures, strict=False):
        if _is_plain(item) and str(item.dtype).removeprefix("torch.") in spec["dtypes"]:
            form = {"dtype": str(item.dtype).removeprefix("torch."), "nbytes": item.numel() * item.element_size()}
            if list(item.shape) == spec["shape"]:
                copy = tree.tensor({**spec, **form}, buffer.memory[spec["space"]])
                # A transposed copy would take much longer than a plain one, and more than a clock allows for.
                tree.in_memory_order(copy, tree.memory_order(item.shape, item.stride())).copy_(item)
    return [structure(result)]


def structure(value: object, left: list[int] | None = None) -> dict:
    """What a call returned: of a tuple, a list or a dict what is in it, of a plain value the value, else its form.

    left: how many more objects are told of.
    """
    left = [CLAIMS] if left is None else left
    left[0] -= 1
    if isinstance(value, tuple | list):
        kind = "tuple" if isinstance(value, tuple) else "list"
        items = [structure(item, left) for item in value if left[0] > 0]
        return {"type": kind, "value": type(value).__name__, "items": items}
    if isinstance(value, dict):
        keys = sorted(value, key=str)[: max(0, left[0])]
        said = [json.dumps(key) if isinstance(key, tree.PLAIN) else str(key) for key in keys]
        return {"type": "dict", "keys": said, "items": [structure(value[key], left) for key in keys]}
    if value is None or isinstance(value, int | float | str):
        return {"type": "value", "value": json.dumps(value)}
    return form(value)


def _is_plain(item: object) -> TypeGuard[torch.Tensor]:
    """Return whether it is a dense tensor, and no object that only behaves like one; torch.compile's notes are fine."""
    if type(item) is not torch.Tensor or item.layout is not torch.strided:
        return False
    return all(isinstance(name, str) and name.startswith("_dynamo_") for name in vars(item))


def form(item: object, own: torch.Tensor | None = None) -> dict:
    """Return the claim of one returned object; `same`: it is the tensor that the judge handed out."""
    if not _is_plain(item):
        return {"type": f"{type(item).__name__}{' that is no plain one' if type(item) is torch.Tensor else ''}"}
    same = (
        own is not None
        and (item is own or item.data_ptr() == own.data_ptr())
        and (item.dtype, item.shape, item.stride()) == (own.dtype, own.shape, own.stride())
    )
    return {
        "type": "Tensor", "dtype": str(item.dtype).removeprefix("torch."), "shape": list(item.shape),
        "stride": list(item.stride()), "device": item.device.type, "same": same, "conj": item.is_conj(),
        "neg": item.is_neg(),
    }  # fmt: skip
