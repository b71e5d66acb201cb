import torch


def custom_kernel(data):
    return torch.sigmoid(data) * 1.01 * data
