"""Wrong: only the first hc copy gets the embedding."""

from problems.dsv4_forward import judged_call
from problems.dsv4_forward.torch_ops import start as right

TARGETS = ("cpu", "sm90", "sm100")


def embed(tokens, weight, position, freqs, copies, cos, sin):
    right.embed(tokens, weight, position, freqs, copies, cos, sin)
    copies[:, 1:].zero_()


def start(given, numbers, lists, tokens, weight, freqs, copies, cos, sin):
    right.start(given, numbers, lists, tokens, weight, freqs, copies, cos, sin)
    copies[:, 1:].zero_()


prepare = judged_call.with_functions(embed=embed, start=start)
custom_kernel = judged_call.run
