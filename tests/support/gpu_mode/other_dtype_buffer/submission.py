import torch


def custom_kernel(data):
    x, out = data
    torch.cumsum(x, 0, out=out)
    return out
