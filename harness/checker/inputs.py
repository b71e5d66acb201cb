"""Inputs of a call, from the problem's own generator, and its outputs against the problem's own reference."""

import dataclasses
import inspect
import random
from types import ModuleType
from typing import Any

import numpy
import torch

from harness.runner.failure import RefusedError
from problems.common import check


def make(reference: ModuleType, task: Any, case: dict, device: str, ours: bool, weights: Any = None) -> Any:
    """Return the data of a call. case: generate_input's arguments. weights: None makes those of this case."""
    if not ours:
        return of_folder(reference, case)
    if not hasattr(reference, "generate_weights"):
        return reference.generate_input(**case, device=device)
    weights = reference.generate_weights(**case, device=device) if weights is None else weights
    inputs, outputs = reference.generate_input(**case, device=device)
    return task.Data(weights, inputs, outputs)


def of_folder(reference: ModuleType, case: dict) -> Any:
    """Return the data of a call to a GPU MODE folder. All global generators are seeded: a seed gives the data again."""
    torch.manual_seed(case["seed"] % 2**63)
    numpy.random.seed(case["seed"] % 2**32)
    random.seed(case["seed"])
    signature = inspect.signature(reference.generate_input)
    if not any(each.name == "seed" or each.kind is each.VAR_KEYWORD for each in signature.parameters.values()):
        case = {name: value for name, value in case.items() if name != "seed"}
    try:
        signature.bind(**case)
    except TypeError as error:
        wanted, got = f"what generate_input takes, {signature}", ", ".join(f"{name}={case[name]!r}" for name in case)
        raise RefusedError(f"task.yml: a case must name {wanted}, got {got}: {error}") from None
    return reference.generate_input(**case)


def compared(reference: ModuleType, data: Any, want: Any, output: Any, baseline: bool) -> check.Result:
    """Return what the reference says of an output. RefusedError: it is no check.Result."""
    result = reference.compare(data, want, output, baseline)
    if not all(hasattr(result, field.name) for field in dataclasses.fields(check.Result)):
        kind = type(result).__name__
        raise RefusedError(f"reference.py: compare() must return a problems.common.check.Result, got {kind}")
    return result
