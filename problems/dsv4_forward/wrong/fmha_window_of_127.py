"""Wrong: a query sees 127 tokens of the window, not 128."""

from problems.dsv4_forward import judged_call
from problems.dsv4_forward.torch_ops import fmha as reference

TARGETS = ("cpu", "sm90", "sm100")


def fmha(q, window, window_index, cache, index, sink, scale, cos, sin, out, lse):
    reference.fmha(q, window, window_index[..., 1:], cache, index, sink, scale, cos, sin, out, lse)


prepare = judged_call.with_functions(fmha=fmha)
custom_kernel = judged_call.run
