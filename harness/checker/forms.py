"""What a runner says that a call returned: its faults, and the answer put together again."""

import json
from collections.abc import Iterable
from typing import Any

import torch

from harness.results import text
from harness.runner import objects, tree

_SHOWN = 8  # items of an answer in a message


def returned_fault(claims: list[dict], wanted: list[dict], ours: bool) -> str:
    """The fault of returned tensors' forms, or "". wanted: specifications; ours: they must be those given."""
    if len(claims) != len(wanted):
        return f"custom_kernel must return {text.counted(len(wanted), 'tensor')}, got {len(claims) or 'none'}"
    for claim, want in zip(claims, wanted, strict=True):
        form, device = f"{want['dtype']} {tuple(want['shape'])}", want["device"]
        if claim["type"] != "Tensor":
            return f"custom_kernel must return a torch.Tensor, {form}, got {claim['type']}"
        came = f"{claim['dtype']} {tuple(claim['shape'])} on {claim['device']}"
        admitted = [f"{dtype} {tuple(want['shape'])} on {device}" for dtype in want.get("dtypes", [want["dtype"]])]
        if came not in admitted:
            return f"custom_kernel must return {form} on {device}, got {came}"
        if ours and not claim["same"]:
            return f"custom_kernel must return the output tensor it was given ({form}), got another one"
    return ""


def unlike(claim: dict, wanted: dict) -> str:
    """Return how what came back is put together otherwise than the reference's answer, "" if it is not."""
    outlines = _outline(wanted), _outline(claim)
    return "" if outlines[0] == outlines[1] else "custom_kernel must return {}, got {}".format(*outlines)


def _outline(claim: dict) -> str:
    """Return classes, keys and fields of an answer: "Pair(sum: Tensor, many: int)"."""
    if claim["type"] == "value":
        return type(_plain(claim["value"])).__name__
    if claim["type"] not in tree.CONTAINERS:
        return claim.get("value") or claim["type"]
    keys = [f"{key}: " for key in claim["keys"]] or [""] * len(claim["items"])
    shown = [f"{key}{_outline(item)}" for key, item in zip(keys, claim["items"], strict=False)]
    more = [f"{len(shown) - _SHOWN} more"] if len(shown) > _SHOWN else []
    return f"{_bare(claim['value'])}({', '.join(shown[:_SHOWN] + more)})"


def classes_of(claim: dict) -> dict[str, type]:
    """Return the classes of the named tuples and dataclasses in the reference's answer, by name."""
    named = [node["value"] for node in tree.nodes(claim) if node["type"] in ("named", "object")]
    return {_bare(name): objects.find(name) for name in named}


def answer(claim: dict, tensors: Iterable[torch.Tensor], classes: dict[str, type]) -> Any:
    """Return what came back, of taken tensors. Objects are of the class of their name in `classes`. It may raise."""
    rest = iter(tensors)
    return tree.made(
        claim,
        lambda leaf: _plain(leaf["value"]) if leaf["type"] == "value" else next(rest),
        lambda name: classes.get(_bare(name)),
    )


def _bare(name: str) -> str:
    """Return the name of a class without its module."""
    return name.rpartition(":")[2]


def _plain(encoded: str) -> object:
    """Return a plain value of its JSON, a text as it is where it is none."""
    try:
        return json.loads(encoded)
    except (ValueError, RecursionError):
        return encoded
