"""Wrong: takes the newest visible entries instead of the best."""

import torch

from problems.dsv4_forward import judged_call
from problems.dsv4_forward.torch_ops import indexer

TARGETS = ("cpu", "sm90", "sm100")


def choose(q, weights, scale, keys, table, visible, entries, out):
    ids = visible.unsqueeze(-1) - 1 - torch.arange(out.shape[-1], dtype=torch.int32, device=q.device)
    indexer.locate(ids.clamp(min=-1), table, keys.per_page, out)


prepare = judged_call.with_functions(choose=choose)
custom_kernel = judged_call.run
