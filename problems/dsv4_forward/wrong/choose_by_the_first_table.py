"""Wrong: all sequences take the places of the first."""

import torch

from problems.dsv4_forward import judged_call
from problems.dsv4_forward.torch_ops import indexer

TARGETS = ("cpu", "sm90", "sm100")


def choose(q, weights, scale, keys, table, visible, entries, out):
    scores = torch.empty(*out.shape[:2], entries, device=out.device)
    indexer.index_scores(q, weights, scale, keys, table, entries, scores)
    ids = torch.empty_like(out)
    indexer.select(scores, visible, ids)
    indexer.locate(ids, table[:1].expand_as(table), keys.per_page, out)


prepare = judged_call.with_functions(choose=choose)
custom_kernel = judged_call.run
