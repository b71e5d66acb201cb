"""Wrong: angles are those of the next position."""

from problems.dsv4_forward import judged_call
from problems.dsv4_forward.torch_ops import start as right

TARGETS = ("cpu", "sm90", "sm100")


def start(given, numbers, lists, tokens, weight, freqs, copies, cos, sin):
    right.plan(given, numbers, lists)
    right.embed(tokens, weight, given.views(numbers, lists).position + 1, freqs, copies, cos, sin)


prepare = judged_call.with_functions(start=start)
custom_kernel = judged_call.run
