"""Wrong: the head averages the copies instead of weighing them."""

from problems.dsv4_forward import judged_call

TARGETS = ("cpu", "sm90", "sm100")


def mhc_head(copies, fn, base, scale, cfg, out):
    out.copy_(copies.float().mean(1))


def compile_for(target):
    return []


def prepare(weights):
    return judged_call.prepare(weights, "reference", mhc_head=mhc_head)


custom_kernel = judged_call.run
