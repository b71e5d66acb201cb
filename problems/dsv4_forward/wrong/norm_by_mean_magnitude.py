"""Wrong: RMSNorm divides by the mean of magnitudes instead of the root of the mean square."""


def rms_norm(x, weight, eps, out):
    scaled = x.float() / (x.float().abs().mean(-1, keepdim=True) + eps)
    out.copy_(scaled if weight is None else scaled * weight.float())
