"""Wrong: queries are not rotated; keys and compressed are right."""

from problems.dsv4_forward import judged_call
from problems.dsv4_forward.ops import REFERENCE

TARGETS = ("cpu", "sm90", "sm100")


def layer_rows(queries, key, compressed, index=None):
    REFERENCE.layer_rows(queries, key, compressed, index)
    REFERENCE.rms_norm(queries["x"], queries["weight"], queries["eps"], queries["out"])


prepare = judged_call.with_functions(layer_rows=layer_rows)
custom_kernel = judged_call.run
compile_for = judged_call.compile_nothing
