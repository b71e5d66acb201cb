"""Wrong: both outputs are those of the first matrix."""

import torch

from problems.dsv4_forward import judged_call
from problems.dsv4_forward.torch_ops import linear

TARGETS = ("cpu", "sm90", "sm100")


def two_linears(x, first, second, first_out, second_out):
    linear.linear(x, first, first_out)
    row = torch.arange(second_out.shape[1], device=x.device) % first_out.shape[1]
    second_out.copy_(first_out[:, row])


prepare = judged_call.with_functions(two_linears=two_linears)
custom_kernel = judged_call.run
