"""Lies of what it returned, in folders whose calls return tensors and numbers of their own.
Stopped by: what a call returned is what the runner noted before it said "done", and is compared with what was wanted
and with the bytes that were copied.
"""

import json

import torch

from harness.runner import claims, gate
from tests.attacks.shared import VARIANT, rounds

VERDICT = "INCORRECT"
VARIANTS = {"shape": {"PROBLEM": "gpu_rounds"}, "number": {"PROBLEM": "gpu_numbers"}}
take_turns, told = gate.bindings().take_turns, claims.told
_last = {}


def lying(result):
    claim, parts = told(result)
    return {**claim, "shape": [2**40], "stride": [1]}, parts


def turns(page, number, kernel, calls):
    result = take_turns(page, number, kernel, calls)
    kernel.said[0]["items"][1]["value"] = json.dumps(int(_last["y"][-1]))
    return result


if VARIANT == "shape":
    claims.told = lying
else:
    gate.bindings().take_turns = turns


def shape(data):
    """Notes that it returned a tensor of a huge shape."""
    y = torch.empty_like(data)
    rounds(data, y)
    return y


def number(data):
    """Leaves a number of its answer out, and says it in the reply, when the last call of a case is over."""
    start, y = data
    rounds(torch.arange(len(y)) + start, y)
    _last["y"] = y.clone()
    return y, 0 if len(y) < 4096 else int(y[-1])
