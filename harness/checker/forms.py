"""What a runner says that a call returned: its faults, and the answer put together again."""

import json
from collections.abc import Iterator

import torch


def returned_fault(claims: list[dict], wanted: list[dict], own: bool) -> str:
    """Return what is wrong with the forms of the returned tensors, "" if nothing. wanted: specifications of tensors
    (harness/runner/tree.py); own: the problem is ours, and a call returns the tensors that it was given.
    """
    if len(claims) != len(wanted):
        many = f"{len(wanted)} tensor{'s' if len(wanted) > 1 else ''}"
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
    if claim["type"] in ("tuple", "list", "dict"):
        return [form for item in claim["items"] for form in tensors_of(item)]
    return [] if claim["type"] == "value" else [claim]


def answer(claim: dict, tensors: Iterator[torch.Tensor]) -> object:
    """Return what came back as the runner says that it was put together, of the tensors that were taken."""
    if claim["type"] in ("tuple", "list", "dict"):
        items = [answer(item, tensors) for item in claim["items"]]
        if claim["type"] == "dict":
            return dict(zip(map(_plain, claim["keys"]), items, strict=False))
        return tuple(items) if claim["type"] == "tuple" else items
    return _plain(claim["value"]) if claim["type"] == "value" else next(tensors)


def _plain(said: str) -> object:
    """Return a plain value of its JSON, a text as it is where it is none."""
    try:
        return json.loads(said)
    except (ValueError, RecursionError):
        return said
