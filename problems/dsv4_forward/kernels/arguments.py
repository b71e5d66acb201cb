"""Check the tensors that kernels get, whose launchers see addresses only."""

import torch


def expect(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Raise ValueError, which names the tensor, unless it has this dtype and shape and is contiguous."""
    if tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous():
        came = f"{tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}"
        raise ValueError(f"{name} must be {dtype} {shape}, contiguous, got {came}")
