"""Wrong: a token's key goes to the place of the next token."""

import torch

from problems.dsv4_forward import judged_call
from problems.dsv4_forward.torch_ops import start as right

TARGETS = ("cpu", "sm90", "sm100")


def start(given, numbers, lists, *rest, **named):
    right.start(given, numbers, lists, *rest, **named)
    out = given.views(numbers, lists)
    torch.add((out.position + 1) % given.ring, given.sequence, alpha=given.ring, out=out.window_target)


prepare = judged_call.with_functions(start=start)
custom_kernel = judged_call.run
