"""What a call returned, as a runner says it: a claim of each object, which the checker judges: {"type": "Tensor",
dtype, shape, stride, device, same} or {"type": name of another class}. In a folder from elsewhere it is one
specification of harness/runner/tree.py, with such claims and {"type": "value", "value": JSON} as leaves. conj, neg:
torch keeps the tensor's values conjugated or negated in memory.
"""

import json
from collections.abc import Callable
from typing import Any, TypeGuard

import torch

from harness.runner import gate, tree
from harness.runner.buffers import Page
from harness.runner.failure import RefusedError

CLAIMS = gate.RETURNED  # tensors, numbers and texts in an answer
TEXT_CHARS = 16_000  # of all texts in an answer, as JSON: a text of a reply has at most 20,000


class Noting:
    """A kernel that notes for the judge the tensors that it returned, without gaps. said: the latest claim."""

    def __init__(self, kernel: Callable, page: Page) -> None:
        self.kernel, self.page, self.said = kernel, page, [{"type": "nothing"}]
        self.kept: list[Any] = []  # until the judge has copied them

    def __call__(self, *arguments: object) -> object:
        self.kept = []  # the kernel finds its memory free again, as that of an answer which nothing keeps
        result = self.kernel(*arguments)
        spec, parts = told(result)
        dense = zip(parts, [is_plain(item) and tree.extent(item) > item.numel() for item in parts], strict=True)
        self.kept = [item.detach().resolve_conj().resolve_neg().contiguous() if gap else item for item, gap in dense]
        places = [
            (item.data_ptr(), tree.extent(item) * item.element_size()) if is_plain(item) else (0, 0)
            for item in self.kept
        ]
        for claim, item, part in zip(tree.leaves(spec), self.kept, parts, strict=False):
            if item is not part:
                claim.update(form(item))
        self.said = [spec]
        gate.bindings().note_returned(self.page.address, places, json.dumps(self.said).encode())
        return result


def forms(result: object, outputs: list[torch.Tensor]) -> list[dict]:
    """Return the claim of each object that a call returned which received its outputs."""
    returned = list(result) if isinstance(result, tuple | list) else [result]
    return [form(item, outputs[i] if i < len(outputs) else None) for i, item in enumerate(returned[:CLAIMS])]


def capture_any(result: object, captures: list[dict], memory: torch.Tensor) -> list[dict]:
    """Copy what tensors came back in a form that is judged; say what came. One without gaps keeps its strides."""
    claim, parts = told(result)
    for item, spec in zip(parts, captures, strict=False):
        dtype = str(item.dtype).removeprefix("torch.") if is_plain(item) else ""
        if dtype in spec["dtypes"] and list(item.shape) == spec["shape"]:
            copy = tree.tensor({**spec, "dtype": dtype, "nbytes": item.nbytes}, memory)
            tree.with_strides(copy, item.stride()).copy_(item)
    return [claim]


def told(answer: object) -> tuple[dict, list[Any]]:
    """Return the claim of an answer, and its tensors and odd objects, in order. RefusedError: it is too much."""
    leaves: list[Any] = []

    def leaf(value: Any, _: str) -> dict:
        leaves.append(value)
        return {"type": "value", "value": json.dumps(value)} if type(value) in tree.PLAIN else form(value)

    claim = tree.walk(answer, leaf, answer=True)
    if len(leaves) > CLAIMS or sum(len(json.dumps(value)) for value in leaves if type(value) is str) > TEXT_CHARS:
        most = f"at most {CLAIMS} tensors, numbers and texts, and {TEXT_CHARS} characters in its texts"
        raise RefusedError(f"an answer may have {most} (the limits of this judge), got {len(leaves)}")
    return claim, [value for value in leaves if type(value) not in tree.PLAIN]


def is_plain(item: object) -> TypeGuard[torch.Tensor]:
    """Return whether it is a dense tensor, and no object that only behaves like one; torch.compile's notes are fine."""
    if not isinstance(item, torch.Tensor) or type(item) not in (torch.Tensor, torch.nn.Parameter):
        return False
    if item.layout is not torch.strided:
        return False
    return all(isinstance(name, str) and name.startswith("_dynamo_") for name in vars(item))


def form(item: object, output: torch.Tensor | None = None) -> dict:
    """Return the claim of one returned object; `same`: it is the tensor that the judge handed out."""
    if not is_plain(item):
        return {"type": f"{type(item).__name__}{' that is no plain one' if type(item) is torch.Tensor else ''}"}
    same = (
        output is not None
        and (item is output or item.data_ptr() == output.data_ptr())
        and (item.dtype, item.shape, item.stride()) == (output.dtype, output.shape, output.stride())
    )
    return {"type": "Tensor", **tree.form(item), "same": same, "conj": item.is_conj(), "neg": item.is_neg()}
