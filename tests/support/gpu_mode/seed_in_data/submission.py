import torch


def custom_kernel(data):
    return torch.sort(data, stable=False).values
