"""Wrong: rotates halves of the trailing values (Llama's pairs) instead of neighbours."""

import torch

from problems.dsv4_forward import judged_call

TARGETS = ("cpu", "sm90", "sm100")


def rotate(x, cos, sin, out, inverse=False):
    r = 2 * cos.shape[-1]
    a, b = x[..., -r:].float().chunk(2, -1)
    c, s = (t.view(len(x), *[1] * (x.dim() - 2), -1) for t in (cos, -sin if inverse else sin))
    turned = torch.cat([a * c - b * s, a * s + b * c], -1)
    out[..., :-r] = x[..., :-r].clone()
    out[..., -r:] = turned


prepare = judged_call.with_functions(rotate=rotate)
custom_kernel = judged_call.run
compile_for = judged_call.compile_nothing
