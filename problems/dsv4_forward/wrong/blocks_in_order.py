"""Wrong: takes the blocks of a sequence to lie in order, whatever the table says."""

import torch

from problems.dsv4_forward import judged_call

TARGETS = ("cpu", "sm90", "sm100")


def prepare(weights):
    return judged_call.prepare(weights, "reference")


def custom_kernel(data):
    inputs = data.inputs
    table = judged_call.state_sizes(data.weights, inputs).views(inputs.state)["table"]
    count, width = inputs.blocks.shape
    table[:, :width] = torch.arange(count * width, dtype=table.dtype, device=table.device).view(count, width)
    return judged_call.run(data)
