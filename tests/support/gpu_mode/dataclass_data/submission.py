import torch


def custom_kernel(data):
    layer, x = data
    config = layer.config
    scale = torch.full((), layer.scale(), dtype=config.dtype, device=config.device)
    return x * layer.weights.pop("w") * scale
