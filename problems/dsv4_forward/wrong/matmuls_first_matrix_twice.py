"""Wrong: the first rows of every output are those of the first matrix."""

from problems.dsv4_forward import judged_call
from problems.dsv4_forward.torch_ops import linear

TARGETS = ("cpu", "sm90", "sm100")


def matmuls(x, weights, outs):
    for weight, out in zip(weights, outs, strict=True):
        linear.matmul(x, weight, out)
        rows = min(len(weight), len(weights[0])) // 2
        linear.matmul(x, weights[0][rows : 2 * rows], out[:, :rows])


prepare = judged_call.with_functions(matmuls=matmuls)
custom_kernel = judged_call.run
