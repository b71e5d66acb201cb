"""Wrong: mixes the copies with M instead of its transpose."""

from problems.dsv4_forward import judged_call
from problems.dsv4_forward.torch_ops import mhc

TARGETS = ("cpu", "sm90", "sm100")


def mhc_post(y, copies, post, comb, out, second=None):
    mhc.post(y, copies, post, comb.transpose(1, 2).contiguous(), out, second)


prepare = judged_call.with_functions(mhc_post=mhc_post)
custom_kernel = judged_call.run
