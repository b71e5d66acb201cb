"""Wrong: the position bias of the gate is left out."""

import torch

from problems.dsv4_forward import compressor


def compress(projected, ape, *rest, **named):
    compressor.compress(projected, torch.zeros_like(ape), *rest, **named)
