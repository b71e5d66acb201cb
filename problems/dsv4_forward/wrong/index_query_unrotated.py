"""Wrong: the indexer's queries are not rotated."""

from problems.dsv4_forward import judged_call
from problems.dsv4_forward.weights import formats

TARGETS = ("cpu", "sm90", "sm100")


def index_query(x, cos, sin, quantise, out):
    out.copy_(formats.round_trip_fp4(formats.hadamard(x)) if quantise else x)


prepare = judged_call.with_functions(index_query=index_query)
custom_kernel = judged_call.run
compile_for = judged_call.compile_nothing
