"""Wrong: scores are signed: the ReLU is left out."""

import torch

from problems.dsv4_forward import judged_call

TARGETS = ("cpu", "sm90", "sm100")


def index_scores(q, weights, scale, keys, table, entries, out):
    page = keys.per_page
    place = torch.arange(entries, device=q.device)
    rows = table[:, place // page] * page + place % page
    scores = torch.einsum("bshd,bed->bshe", q.float(), keys.read(rows))
    out.copy_(torch.einsum("bshe,bsh->bse", scores, scale * weights.float()))


prepare = judged_call.with_functions(index_scores=index_scores)
custom_kernel = judged_call.run
compile_for = judged_call.compile_nothing
