"""Folders in GPU MODE's format, for the checker: their contents, and what their own check says of an answer."""

import json
import random
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy
import torch

from harness.checker import memory
from harness.runner import tree

REQUIRED = ("generate_input", "ref_kernel", "check_implementation")  # functions of reference.py
LARGE_SEED = 2**62
LEAST_VARIETY = 0.5  # share of distinct values with a large seed, of that with a case's own


def see_complete(reference: ModuleType) -> None:
    """Raise AttributeError if a function is missing."""
    if missing := [name for name in REQUIRED if not callable(getattr(reference, name, None))]:
        raise AttributeError(f"reference.py must define {', '.join(REQUIRED)}, found no {', '.join(missing)}")


def make(reference: ModuleType, case: dict) -> Any:
    """Return the data of a call. case: generate_input's arguments and the seed. All global generators are seeded too:
    what a folder draws from them, a disclosed seed gives again.
    """
    torch.manual_seed(case["seed"] % 2**63)
    numpy.random.seed(case["seed"] % 2**32)
    random.seed(case["seed"])
    return reference.generate_input(**case)


def is_narrow(reference: ModuleType, case: dict, seed: int) -> bool:
    """Return whether contents of a case lose variety, or cannot be made, with a seed of 63 bits. A folder that adds
    the seed to numbers of fp32 makes constants of them. seed: the case's own.
    """
    before = memory.variety(make(reference, {**case, "seed": seed}))
    try:
        data = make(reference, {**case, "seed": seed + LARGE_SEED})
    except Exception:  # whatever a folder's code raises that was not made for such seeds
        return True
    return any(b < LEAST_VARIETY * a for a, b in zip(before, memory.variety(data), strict=False))


def said_of(reference: ModuleType, data: Any, answer: object) -> tuple[bool, str]:
    """Return whether the folder's check finds an answer right, and its text. It returns a pair; or a text that is empty
    where all is right; or a bool, of which the reference's own answer shows the meaning.
    """
    said = reference.check_implementation(tree.clone(data), answer)
    if isinstance(said, tuple | list) and len(said) == 2:
        return bool(said[0]), str(said[1])
    if said is None or isinstance(said, str):
        return not said, str(said)
    right = reference.ref_kernel(tree.clone(data))
    good = bool(said) == bool(reference.check_implementation(tree.clone(data), right))
    return good, "check_implementation says of it what it does not say of the reference's answer"


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
            return dict(zip(claim["keys"], items, strict=False))
        return tuple(items) if claim["type"] == "tuple" else items
    return _plain(claim["value"]) if claim["type"] == "value" else next(tensors)


def _plain(said: str) -> object:
    """Return a plain value of its JSON, a text as it is where it is none."""
    try:
        return json.loads(said)
    except (ValueError, RecursionError):
        return said
