import torch


def custom_kernel(data):
    low, high = torch.aminmax(data)
    return low, high
