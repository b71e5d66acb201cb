"""Wrong: each row is written to the one beside its place."""

from problems.dsv4_forward import judged_call
from problems.dsv4_forward.torch_ops import writes

TARGETS = ("cpu", "sm90", "sm100")


def write(rows, pages, index, hadamard=False):
    writes.write(rows, pages, index ^ 1, hadamard)


prepare = judged_call.with_functions(write=write)
custom_kernel = judged_call.run
compile_for = judged_call.compile_nothing
