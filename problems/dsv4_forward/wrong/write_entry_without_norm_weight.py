"""Wrong: the weight of the norm of compressed entries is left out."""

import torch

from problems.dsv4_forward import judged_call
from problems.dsv4_forward.torch_ops import rows

TARGETS = ("cpu", "sm90", "sm100")


def layer_rows(queries, key, compressed, index):
    plain = [one | {"norm_weight": torch.ones_like(one["norm_weight"])} for one in compressed]
    rows.layer_rows(queries, key, plain, index)


prepare = judged_call.with_functions(layer_rows=layer_rows)
custom_kernel = judged_call.run
