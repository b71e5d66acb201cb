"""Wrong: keys of the window are not rotated."""

import torch

from problems.dsv4_forward import judged_call
from problems.dsv4_forward.torch_ops import norm, writes

TARGETS = ("cpu", "sm90", "sm100")


def write_key(x, weight, eps, cos, sin, pages, index):
    key = torch.empty_like(x)
    norm.rms_norm(x, weight, eps, key)
    writes.write(key, pages, index)


prepare = judged_call.with_functions(write_key=write_key)
custom_kernel = judged_call.run
compile_for = judged_call.compile_nothing
