import torch


def custom_kernel(data):
    return torch.linalg.cholesky_ex(data, check_errors=False).L
