"""Wrong: queries are rotated by the negative angle."""

from problems.dsv4_forward import judged_call
from problems.dsv4_forward.torch_ops import norm, rope

TARGETS = ("cpu", "sm90", "sm100")


def norm_rotate(x, weight, eps, cos, sin, out):
    norm.rms_norm(x, weight, eps, out)
    rope.rotate(out, cos, sin, out, inverse=True)


def compile_for(target):
    return []


def prepare(weights):
    return judged_call.prepare(weights, "reference", norm_rotate=norm_rotate)


custom_kernel = judged_call.run
