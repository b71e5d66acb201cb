import torch
from task import input_t, output_t

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def generate_input(size: int, seed: int) -> input_t:
    gen = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(2, size, size, generator=gen, device=DEVICE)


def ref_kernel(data: input_t) -> output_t:
    return torch.geqrf(data)


def check_implementation(data: input_t, output: output_t) -> tuple[bool, str]:
    if not isinstance(output, tuple) or len(output) != 2:
        return False, "output must be a tuple (h, tau)"
    h, tau = output
    if h.shape != data.shape or tau.shape != data.shape[:-1] or h.dtype != data.dtype:
        return False, "a part has another shape or dtype"
    q = torch.linalg.householder_product(h, tau).double()
    n = data.shape[-1]
    apart = (q @ h.triu().double() - data).abs().max() / data.abs().max()
    tilted = (q.mT @ q - torch.eye(n, dtype=q.dtype, device=q.device)).abs().max()
    good = float(max(apart, tilted)) < 100 * n * torch.finfo(torch.float32).eps
    return good, f"residual {float(apart):.2g}, orthogonality {float(tilted):.2g}"
