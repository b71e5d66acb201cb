"""Wrong: the last 16 columns of a matrix are never added."""

import torch

from problems.dsv4_forward import linear as reference


def linear(x, w, out):
    values = reference.input_values(x, w).float()
    out.copy_(torch.matmul(values[:, :-16], w.dequantise()[:, :-16].T))
