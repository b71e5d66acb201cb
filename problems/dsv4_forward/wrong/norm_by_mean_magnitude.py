"""Wrong: RMSNorm divides by the mean of magnitudes instead of the root of the mean square."""

from problems.dsv4_forward import judged_call

TARGETS = ("cpu", "sm90", "sm100")


def rms_norm(x, weight, eps, out):
    scaled = x.float() / (x.float().abs().mean(-1, keepdim=True) + eps)
    out.copy_(scaled if weight is None else scaled * weight.float())


prepare = judged_call.with_functions(rms_norm=rms_norm)
custom_kernel = judged_call.run
