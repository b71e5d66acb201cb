import torch
from task import input_t, output_t

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def generate_input(size: int, masked: str, seed: int) -> input_t:
    if not isinstance(masked, str):
        raise TypeError(f"masked must be text, as the judge of this format gives it, got {masked!r}")
    gen = torch.Generator(DEVICE).manual_seed(seed)
    x = torch.randn(size, generator=gen, device=DEVICE)
    return x, (x > 0) if masked == "True" else torch.ones_like(x, dtype=torch.bool)


def ref_kernel(data: input_t) -> output_t:
    x, mask = data
    return torch.where(mask, x + 1, x)


def check_implementation(data: input_t, output: output_t) -> tuple[bool, str]:
    bad = int((output != ref_kernel(data)).sum())
    return bad == 0, f"{bad} elements differ"
