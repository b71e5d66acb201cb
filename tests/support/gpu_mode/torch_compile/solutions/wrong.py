import torch


@torch.compile
def gelu(x):
    return 0.5 * x * (1 + torch.erf(x / 2**0.5))


def custom_kernel(data):
    return gelu(data)
