"""Wrong: what attention returns is rotated by the query's position once more, not back."""

from problems.dsv4_forward import judged_call
from problems.dsv4_forward.torch_ops import fmha as reference

TARGETS = ("cpu", "sm90", "sm100")


def fmha(q, window, window_index, cache, index, sink, scale, cos, sin, out, lse):
    reference.fmha(q, window, window_index, cache, index, sink, scale, cos, -sin, out, lse)


prepare = judged_call.with_functions(fmha=fmha)
custom_kernel = judged_call.run
