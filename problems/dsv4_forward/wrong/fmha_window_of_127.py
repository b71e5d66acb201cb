"""Wrong: a query sees 127 tokens of the window, not 128."""

from problems.dsv4_forward import entry
from problems.dsv4_forward import fmha as reference

TARGETS = ("cpu", "sm90", "sm100")


def fmha(q, window, window_index, cache, index, sink, scale, out, lse):
    reference.fmha(q, window, window_index[..., 1:], cache, index, sink, scale, out, lse)


def compile_for(target):
    return []


def prepare(weights):
    return entry.prepare(weights, "reference", fmha=fmha)


custom_kernel = entry.run
