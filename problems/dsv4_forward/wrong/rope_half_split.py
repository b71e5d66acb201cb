"""Wrong: rotates halves of the queries' trailing values (Llama's pairs) instead of neighbours."""

import torch

from problems.dsv4_forward import judged_call
from problems.dsv4_forward.torch_ops import norm, rows

TARGETS = ("cpu", "sm90", "sm100")


def layer_rows(queries, key, compressed, index):
    rows.layer_rows(queries, key, compressed, index)
    x, r = queries["out"], 2 * queries["cos"].shape[-1]
    norm.rms_norm(queries["x"], queries["weight"], queries["eps"], x)
    a, b = x[..., -r:].float().chunk(2, -1)
    c, s = (queries[name].unsqueeze(1) for name in ("cos", "sin"))
    x[..., -r:] = torch.cat([a * c - b * s, a * s + b * c], -1)


prepare = judged_call.with_functions(layer_rows=layer_rows)
custom_kernel = judged_call.run
