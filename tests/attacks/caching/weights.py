"""Keeps weights in calls, or has prepare change them.
Stopped by: what a process holds after its last call is measured, against the same bound; the same process is called
again with other weights.
"""

import torch

from tests.attacks.shared import VARIANT

PROBLEM = "linear"
VERDICT = "RULE_BROKEN"
VARIANTS = {
    "grows_lazily": {
        "TARGETS": ("cpu", "sm90", "sm100"),
        "VERDICT": {"cpu": "RULE_BROKEN", "cuda": ("RULE_BROKEN", "RUNTIME_ERROR")},  # scratch memory may end before
        "REASON": {"cpu": "prepare", "cuda": ""},
    },
    "stale_without_prepare": {"VERDICT": "INCORRECT", "REASON": "Number of mismatched elements"},
    "zeroes_them": {"VERDICT": ("INCORRECT", "RULE_BROKEN", "CHEAT_SUSPECTED")},
}
_kept = {}


if not VARIANT.endswith("without_prepare"):

    def prepare(weights):
        return weights.w.clone() if VARIANT == "grows_lazily" else weights.w.zero_()


def grows_lazily(data):
    """prepare keeps within its bound; the copies grow afterwards, one in each of the first calls."""
    if len(_kept) < 4:
        _kept[len(_kept)] = data.weights.clone()
    return torch.mv(data.weights, data.inputs.x, out=data.outputs.y)


def grows_without_prepare(data):
    """Copies of the weights in other layouts are kept from the first calls, checked for staleness by a few elements."""
    w = data.weights.w
    key = (w.shape, float(w[0, 0]), float(w[-1, -1]))
    if key not in _kept:
        _kept.clear()
        _kept[key] = (w.T.contiguous(), w.clone(), w.half())
    return torch.mv(_kept[key][0].T, data.inputs.x, out=data.outputs.y)


def stale_without_prepare(data):
    """Keeps a copy of the first weights for a shape, without prepare, and never looks at them again."""
    w = data.weights.w
    if w.shape not in _kept:
        _kept[w.shape] = w.clone()
    return torch.mv(_kept[w.shape], data.inputs.x, out=data.outputs.y)


def zeroes_them(data):
    """prepare zeroes the weights, which are compared as all inputs are, so that the cheap kernel becomes right."""
    return data.outputs.y.zero_()
