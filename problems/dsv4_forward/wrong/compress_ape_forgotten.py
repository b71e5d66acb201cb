"""Wrong: the position bias of the gate is left out."""

import torch

from problems.dsv4_forward import judged_call
from problems.dsv4_forward.torch_ops import compressor

TARGETS = ("cpu", "sm90", "sm100")


def compress(projected, ape, *rest, **named):
    compressor.compress(projected, torch.zeros_like(ape), *rest, **named)


prepare = judged_call.with_functions(compress=compress)
custom_kernel = judged_call.run
compile_for = judged_call.compile_nothing
