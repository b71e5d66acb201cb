"""Wrong: takes the blocks of every sequence to be the first ones."""

import torch

from problems.dsv4_forward import judged_call
from problems.dsv4_forward.torch_ops import indexer

TARGETS = ("cpu", "sm90", "sm100")


def locate(ids, table, per_page, out):
    indexer.locate(ids, torch.arange(table.shape[1], device=table.device).int().expand_as(table), per_page, out)


prepare = judged_call.with_functions(locate=locate)
custom_kernel = judged_call.run
compile_for = judged_call.compile_nothing
