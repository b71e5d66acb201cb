"""Wrong: the shared expert counts with the weight of a token's first expert, not with 1."""

from problems.dsv4_forward import judged_call
from problems.dsv4_forward.ops import REFERENCE

TARGETS = ("cpu", "sm90", "sm100")


def all_experts(x, ids, weights, w13, w2, shared_w13, shared_w2, limit, out):
    shared = out.new_empty(out.shape)
    REFERENCE.experts(x, ids, weights, w13, w2, limit, out)
    REFERENCE.shared(x, shared_w13, shared_w2, limit, shared)
    out.add_(shared * weights[:, :1])


prepare = judged_call.with_functions(all_experts=all_experts)
custom_kernel = judged_call.run
