"""Wrong: SwiGLU's inputs are not clamped."""

from problems.dsv4_forward import judged_call
from problems.dsv4_forward.torch_ops import experts as reference

TARGETS = ("cpu", "sm90", "sm100")


def experts(x, ids, weights, w13, w2, limit, out):
    reference.experts(x, ids, weights, w13, w2, 1e30, out)


prepare = judged_call.with_functions(experts=experts)
custom_kernel = judged_call.run
