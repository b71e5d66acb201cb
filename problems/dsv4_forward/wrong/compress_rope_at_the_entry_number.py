"""Wrong: entry i is rotated as token i, not as token i * ratio, the first of its window."""

from problems.dsv4_forward import judged_call
from problems.dsv4_forward.torch_ops import rows

TARGETS = ("cpu", "sm90", "sm100")


def layer_rows(queries, key, compressed, index):
    early = [one | {"freqs": one["freqs"] / one["ratio"]} for one in compressed]
    rows.layer_rows(queries, key, early, index)


prepare = judged_call.with_functions(layer_rows=layer_rows)
custom_kernel = judged_call.run
