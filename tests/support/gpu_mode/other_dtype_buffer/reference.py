import torch
from task import input_t, output_t

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def generate_input(size: int, seed: int) -> input_t:
    gen = torch.Generator(DEVICE).manual_seed(seed)
    x = torch.randn(size, generator=gen, device=DEVICE)
    return x, torch.empty_like(x)


def ref_kernel(data: input_t) -> output_t:
    x, _ = data
    return x.double().cumsum(0)


def check_implementation(data: input_t, output: output_t) -> tuple[bool, str]:
    want = ref_kernel(data)
    if output.shape != want.shape:
        return False, f"shape must be {tuple(want.shape)}, got {tuple(output.shape)}"
    apart = float((output.double() - want).abs().max())
    return apart < 1e-2, f"off by {apart:.2g}"
