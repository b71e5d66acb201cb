import torch


def custom_kernel(data):
    layer, x = data
    config = layer.config
    scale = torch.full((), config.scale, dtype=config.dtype, device=config.device)
    return x * layer.weights["w"] * scale
