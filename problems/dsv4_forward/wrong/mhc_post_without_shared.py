"""Wrong: the shared expert is left out."""

from problems.dsv4_forward import judged_call
from problems.dsv4_forward.torch_ops import mhc

TARGETS = ("cpu", "sm90", "sm100")


def mhc_post(y, copies, post, comb, out, second=None):
    mhc.post(y, copies, post, comb, out)


prepare = judged_call.with_functions(mhc_post=mhc_post)
custom_kernel = judged_call.run
