"""Wrong: all sequences take the places of the first."""

from problems.dsv4_forward import judged_call
from problems.dsv4_forward.torch_ops import indexer

TARGETS = ("cpu", "sm90", "sm100")


def select_places(scores, visible, table, per_page, out, places):
    indexer.select(scores, visible, out)
    indexer.locate(out, table[:1].expand_as(table), per_page, places)


def compile_for(target):
    return []


def prepare(weights):
    return judged_call.prepare(weights, "reference", select_places=select_places)


custom_kernel = judged_call.run
