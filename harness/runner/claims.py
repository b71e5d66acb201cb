"""What a call returned, as a runner says it: a claim of each object, which the checker judges.

A claim is {"type": "Tensor", dtype, shape, stride, device, same}, {"type": name of another class}, or in a folder from
elsewhere also {"type": "tuple" | "list" | "dict" | "dataclass", value: name of its class, items; of the last two also
keys as JSON} and {"type": "value", value as JSON}. A numpy array is the tensor over its memory, with the value
"ndarray". conj, neg: torch keeps the tensor's values conjugated or negated in memory.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any, TypeGuard

import torch

from harness.runner import gate, objects, tree
from harness.runner.buffers import MappedBuffer, Page
from harness.runner.failure import RefusedError

CLAIMS = gate.RETURNED  # returned objects in a reply, besides the tuples, lists, dicts and dataclasses around them
TEXT_CHARS = 2**17  # of all texts in a returned object: a reply takes a few MiB
# What a tensor that came back may span, gaps between its elements included: times its elements, and bytes more. Of
# more, most of what the judge copies and watches would be gaps.
STRIDED_FACTOR, STRIDED_BYTES = 4, 4096


class Noting:
    """A kernel that notes for the judge where the tensors are that it returned, and what they are. One that is mostly
    gaps, such as a column, is copied to memory without any, within the call. said: the claim of the latest answer.
    """

    def __init__(self, kernel: Callable, page: Page) -> None:
        self.kernel, self.page, self.said = kernel, page, [{"type": "nothing"}]
        self.kept: list[Any] = []  # until the judge has copied them

    def __call__(self, *arguments: object) -> object:
        self.kept = []  # the kernel finds its memory free again, as that of an answer which nothing keeps
        result = self.kernel(*arguments)
        parts = tree.parts(result)[: gate.RETURNED]
        self.kept = [_near(item) if _is_plain(item) else item for item in parts]
        places = [
            (item.data_ptr(), tree.extent(item) * item.element_size()) if _is_plain(item) else (0, 0)
            for item in self.kept
        ]
        said = structure(result)
        for claim, item, part in zip(_tensors_in(said), self.kept, parts, strict=False):
            if item is not part:
                claim.update(form(item))
        self.said = [said]
        gate.bindings().note_returned(self.page.address, places, json.dumps(self.said).encode())
        return result


def _near(item: torch.Tensor) -> torch.Tensor:
    """`item`, or a contiguous copy where it spans too much."""
    if tree.extent(item) * item.element_size() <= STRIDED_FACTOR * item.nbytes + STRIDED_BYTES:
        return item
    return item.detach().resolve_conj().resolve_neg().contiguous()


def _tensors_in(claim: dict) -> Iterator[dict]:
    """The claims of what tree.parts finds, in its order."""
    if "items" in claim:
        for item in claim["items"]:
            yield from _tensors_in(item)
    elif claim["type"] != "value":
        yield claim


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


def structure(value: Any, left: list[int] | None = None) -> dict:
    """What a call returned: of a tuple, a list or a dict what is in it, of a plain value the value, else its form.

    left: how many more objects, and characters of texts, are told of. RefusedError: there are more characters.
    """
    left = [CLAIMS, TEXT_CHARS] if left is None else left
    inner = tree.within_answer(value)
    left[0] -= not (inner and inner[1])  # an empty one is an object too, so that there is an end
    if inner is not None:
        keys, items = inner
        kind = next((kind.__name__ for kind in (tuple, list, dict) if isinstance(value, kind)), "dataclass")
        keys_told = keys[: max(0, left[0])]
        said = [_json(key, left) if type(key) in tree.PLAIN else type(key).__name__ for key in keys_told]
        items = [structure(item, left) for item in items if left[0] > 0]
        return {"type": kind, "value": type(value).__name__, **({"keys": said} if keys else {}), "items": items}
    if value is None or isinstance(value, int | float | str):
        return {"type": "value", "value": _json(value, left)}
    if type(value) in tree.NUMBERS:
        return {"type": "value", "value": json.dumps(value.item())}
    if (array := objects.array_of(value)) is not None:
        return {**form(tree.shared(array)), "value": "ndarray"}
    return form(value)


def _json(value: float | str | None, left: list[int]) -> str:
    """Return JSON of a plain value. left: as of `structure`, which receives what remains."""
    left[1] -= len(value) if isinstance(value, str) else 0
    if left[1] < 0:
        raise RefusedError(
            f"an answer's texts may have at most {TEXT_CHARS} characters in all, the limit of this judge"
        )
    return json.dumps(value)


def _is_plain(item: object) -> TypeGuard[torch.Tensor]:
    """Return whether it is a dense tensor, and no object that only behaves like one; torch.compile's notes are fine."""
    if not isinstance(item, torch.Tensor) or type(item) not in (torch.Tensor, torch.nn.Parameter):
        return False
    if item.layout is not torch.strided:
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
        "type": "Tensor",
        "dtype": str(item.dtype).removeprefix("torch."),
        "shape": list(item.shape),
        "stride": list(item.stride()),
        "device": item.device.type,
        "same": same,
        "conj": item.is_conj(),
        "neg": item.is_neg(),
    }
