"""Wrong: one of the window's two tiles of 64 keys is never loaded."""

from problems.dsv4_forward import judged_call
from problems.dsv4_forward.torch_ops import fmha as reference

TARGETS = ("cpu", "sm90", "sm100")


def fmha(q, window, window_index, cache, index, sink, scale, cos, sin, out, lse):
    seen = window_index.clone()
    seen[..., :64] = -1
    reference.fmha(q, window, seen, cache, index, sink, scale, cos, sin, out, lse)


prepare = judged_call.with_functions(fmha=fmha)
custom_kernel = judged_call.run
