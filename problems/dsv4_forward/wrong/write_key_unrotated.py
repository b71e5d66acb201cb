"""Wrong: keys of the window are not rotated."""

import torch

from problems.dsv4_forward import judged_call
from problems.dsv4_forward.torch_ops import rows

TARGETS = ("cpu", "sm90", "sm100")


def layer_rows(queries, key, compressed, index):
    still = {"cos": torch.ones_like(key["cos"]), "sin": torch.zeros_like(key["sin"])}
    rows.layer_rows(queries, key | still, compressed, index)


prepare = judged_call.with_functions(layer_rows=layer_rows)
custom_kernel = judged_call.run
