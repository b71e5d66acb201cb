"""What a runner says that a call returned: its faults, and the answer put together again."""

import dataclasses
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from harness.results import text
from harness.runner import tree

_HOLDING = ("tuple", "list", "dict", "dataclass")
_SHOWN = 8  # items of an answer in a message


def returned_fault(claims: list[dict], wanted: list[dict], own: bool) -> str:
    """Return what is wrong with the forms of the returned tensors, "" if nothing. wanted: specifications of tensors
    (harness/runner/tree.py); own: the problem is ours, and a call returns the tensors that it was given.
    """
    if len(claims) != len(wanted):
        many = text.counted(len(wanted), "tensor")
        return f"custom_kernel must return {many}, got {len(claims) or 'none'}"
    for claim, want in zip(claims, wanted, strict=True):
        form, device = f"{want['dtype']} {tuple(want['shape'])}", {"device": "cuda", "host": "cpu"}[want["space"]]
        if claim["type"] != "Tensor":
            return f"custom_kernel must return a torch.Tensor, {form}, got {claim['type']}"
        came = f"{claim['dtype']} {tuple(claim['shape'])} on {claim['device']}"
        admitted = [f"{dtype} {tuple(want['shape'])} on {device}" for dtype in want.get("dtypes", [want["dtype"]])]
        if came not in admitted:
            return f"custom_kernel must return {form} on {device}, got {came}"
        if own and not claim["same"]:
            return f"custom_kernel must return the output tensor it was given ({form}), got another one"
    return ""


def tensors_of(claim: dict) -> list[dict]:
    """Return the forms of the tensors within what a runner says that came back, in the order of tree.parts."""
    if claim["type"] in _HOLDING:
        return [form for item in claim["items"] for form in tensors_of(item)]
    return [] if claim["type"] == "value" else [claim]


def unlike(claim: dict, wanted: dict) -> str:
    """Return how what came back is put together otherwise than the reference's answer, "" if it is not."""
    outlines = _outline(wanted), _outline(claim)
    return "" if outlines[0] == outlines[1] else "custom_kernel must return {}, got {}".format(*outlines)


def _outline(claim: dict) -> str:
    """Return classes, keys and fields of an answer: "Pair(sum: Tensor, many: int)"."""
    if claim["type"] == "value" and claim.get("value") is not None:
        return type(_plain(claim["value"])).__name__
    if claim["type"] not in _HOLDING:
        return "ndarray" if claim.get("value") == "ndarray" else claim["type"]
    keys = [f"{_key(key)}: " for key in claim.get("keys", ())]
    shown = [
        f"{key}{_outline(item)}" for key, item in zip(keys or [""] * _SHOWN, claim["items"][:_SHOWN], strict=False)
    ]
    more = [f"{len(claim['items']) - _SHOWN} more"] if len(claim["items"]) > _SHOWN else []
    return f"{claim['value']}({', '.join(shown + more)})"


def classes_of(answer: object) -> dict[str, type]:
    """Return the classes of the tuples, sizes and dataclasses within the reference's answer, by name."""
    inner = tree.within_answer(answer)
    if inner is None:
        return {}
    found = {name: kind for item in inner[1] for name, kind in classes_of(item).items()}
    return found if type(answer) in (tuple, list, dict) else {type(answer).__name__: type(answer), **found}


def answer(claim: dict, tensors: Iterator[torch.Tensor], classes: dict[str, type]) -> Any:
    """Return what came back as the runner says that it was put together, of the tensors that were taken. A NamedTuple,
    structseq or dataclass is of the class of that name among `classes`, else a tuple or a bare object.
    """
    kind = claim["type"]
    if kind not in _HOLDING:
        if kind == "value":
            return _plain(claim["value"])
        return next(tensors).numpy() if claim.get("value") == "ndarray" else next(tensors)
    items = [answer(item, tensors, classes) for item in claim["items"]]
    keyed = dict(zip(map(_key, claim["keys"]), items, strict=False)) if kind in ("dict", "dataclass") else {}
    known = classes.get(claim["value"])
    if kind == "dict":
        return keyed
    if kind == "dataclass":
        if not dataclasses.is_dataclass(known):
            return SimpleNamespace(**{str(name): item for name, item in keyed.items()})
        made = object.__new__(known)
        for one in dataclasses.fields(known):
            if one.name in keyed:
                object.__setattr__(made, one.name, keyed[one.name])
        return made
    if kind == "list":
        return items
    if known is torch.Size and all(type(item) is int and 0 <= item < 2**63 for item in items):
        return torch.Size(items)
    if known is not None and issubclass(known, tuple) and len(items) == _length(known):
        return tuple.__new__(known, items) if hasattr(known, "_fields") else known(items)
    return tuple(items)


def _length(kind: type) -> int:
    """Return how many items a NamedTuple or a structseq has, -1 for another class."""
    return len(getattr(kind, "_fields", ())) or getattr(kind, "n_fields", -1)


def _key(said: str) -> object:
    """Return a key of its JSON, the text where that is nothing that a dict takes."""
    key = _plain(said)
    return said if isinstance(key, list | dict) else key


def _plain(said: str) -> object:
    """Return a plain value of its JSON, a text as it is where it is none."""
    try:
        return json.loads(said)
    except (ValueError, RecursionError):
        return said
