"""Wrong: multiplies in bf16 where fp32 is asked for."""

import torch

from problems.dsv4_forward import judged_call

TARGETS = ("cpu", "sm90", "sm100")


def matmuls(x, weights, outs):
    for weight, out in zip(weights, outs, strict=True):
        out.copy_(torch.matmul(x.bfloat16(), weight.bfloat16().T))


prepare = judged_call.with_functions(matmuls=matmuls)
custom_kernel = judged_call.run
