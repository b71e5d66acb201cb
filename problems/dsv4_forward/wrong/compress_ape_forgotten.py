"""Wrong: the position bias of the gate is left out."""

import torch

from problems.dsv4_forward import judged_call
from problems.dsv4_forward.torch_ops import rows

TARGETS = ("cpu", "sm90", "sm100")


def layer_rows(queries, key, compressed, index):
    forgotten = [one | {"ape": torch.zeros_like(one["ape"])} for one in compressed]
    rows.layer_rows(queries, key, forgotten, index)


prepare = judged_call.with_functions(layer_rows=layer_rows)
custom_kernel = judged_call.run
