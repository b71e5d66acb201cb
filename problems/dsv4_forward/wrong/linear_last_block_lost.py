"""Wrong: the last 16 columns of a matrix are never added."""

import torch

from problems.dsv4_forward import judged_call
from problems.dsv4_forward.torch_ops import linear as reference

TARGETS = ("cpu", "sm90", "sm100")


def linear(x, w, out):
    values = reference.input_values(x, w).float()
    out.copy_(torch.matmul(values[:, :-16], w.dequantise()[:, :-16].T))


prepare = judged_call.with_functions(linear=linear)
custom_kernel = judged_call.run
