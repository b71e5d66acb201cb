"""Wrong: queries are not rotated; keys and compressed are right."""

from problems.dsv4_forward import judged_call
from problems.dsv4_forward.ops import REFERENCE

TARGETS = ("cpu", "sm90", "sm100")


def layer_rows(queries, key, compressed, index=None):
    REFERENCE.layer_rows(queries, key, compressed, index)
    x, weight, eps, _, _, out = queries
    REFERENCE.rms_norm(x, weight, eps, out)


def compile_for(target):
    return []


def prepare(weights):
    return judged_call.prepare(weights, "reference", layer_rows=layer_rows)


custom_kernel = judged_call.run
