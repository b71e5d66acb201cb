import torch


def custom_kernel(data):
    image, out = data
    torch.mul(image[..., 0], 0.2989, out=out)
    out.add_(image[..., 1], alpha=0.5870)
    return out.add_(image[..., 2], alpha=0.1140)
