"""Wrong: queries are rotated by the negative angle."""

from problems.dsv4_forward import judged_call
from problems.dsv4_forward.torch_ops import norm, rope

TARGETS = ("cpu", "sm90", "sm100")


def norm_rotate(x, weight, eps, cos, sin, out):
    norm.rms_norm(x, weight, eps, out)
    rope.rotate(out, cos, sin, out, inverse=True)


prepare = judged_call.with_functions(norm_rotate=norm_rotate)
custom_kernel = judged_call.run
compile_for = judged_call.compile_nothing
