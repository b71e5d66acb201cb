"""Wrong: each group of wo_a is multiplied with its neighbour's heads."""

from problems.dsv4_forward import judged_call
from problems.dsv4_forward.torch_ops import linear

TARGETS = ("cpu", "sm90", "sm100")


def grouped_linear(x, w, out):
    linear.grouped_linear(x.roll(1, 1), w, out)


prepare = judged_call.with_functions(grouped_linear=grouped_linear)
custom_kernel = judged_call.run
