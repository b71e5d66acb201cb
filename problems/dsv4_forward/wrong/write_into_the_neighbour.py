"""Wrong: each key is written to the row beside its place."""

from problems.dsv4_forward import judged_call
from problems.dsv4_forward.torch_ops import rows

TARGETS = ("cpu", "sm90", "sm100")


def layer_rows(queries, key, compressed, index):
    rows.layer_rows(queries, key | {"index": key["index"] ^ 1}, compressed, index)


prepare = judged_call.with_functions(layer_rows=layer_rows)
custom_kernel = judged_call.run
