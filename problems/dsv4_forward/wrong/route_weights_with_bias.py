"""Wrong: routing weights are taken from the scores with the bias that is for selection only."""

from problems.dsv4_forward import judged_call
from problems.dsv4_forward.torch_ops import router

TARGETS = ("cpu", "sm90", "sm100")


def route(u, weight, bias, table, tokens, cfg, out_ids, out_weights):
    score = router.scores(u, weight)
    router.route(u, weight, bias, table, tokens, cfg, out_ids, out_weights)
    shifted = score + (0.1 if bias is None else bias)
    gates = shifted.gather(1, out_ids.long())
    out_weights.copy_(gates / gates.sum(1, keepdim=True) * cfg.routed_scaling_factor)


prepare = judged_call.with_functions(route=route)
custom_kernel = judged_call.run
