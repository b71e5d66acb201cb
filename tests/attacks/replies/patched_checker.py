"""Replaces comparisons and what the judge says of returned tensors, and computes nothing.
Stopped by: the comparison happens in a process that never sees this file.
"""

import sys

import torch

from problems.common import check

TARGETS = ("cpu", "sm90", "sm100")
VERDICT = ("CHEAT_SUSPECTED", "INCORRECT")
torch.equal = torch.allclose = lambda *args, **kwargs: True
for name, module in list(sys.modules.items()):
    if name.startswith(("harness.", "problems.")) or name == "__main__":
        for key in ("compare", "elementwise", "check_implementation", "form_error", "_returned_fault"):
            if key in module.__dict__:
                module.__dict__[key] = lambda *args, **kwargs: check.Result(True)


def custom_kernel(data):
    return data.z.zero_()
