"""Wrong: the indexer's queries are not rotated."""

import torch

from problems.dsv4_forward import judged_call
from problems.dsv4_forward.torch_ops import rows

TARGETS = ("cpu", "sm90", "sm100")


def layer_rows(queries, key, compressed, index):
    if index is not None:
        index = index | {"cos": torch.ones_like(index["cos"]), "sin": torch.zeros_like(index["sin"])}
    rows.layer_rows(queries, key, compressed, index)


prepare = judged_call.with_functions(layer_rows=layer_rows)
custom_kernel = judged_call.run
