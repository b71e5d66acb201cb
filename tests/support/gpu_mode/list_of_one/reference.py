import torch
from task import input_t, output_t

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def generate_input(size: int, seed: int) -> input_t:
    gen = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(size, generator=gen, device=DEVICE)


def ref_kernel(data: input_t) -> output_t:
    return [-data]


def check_implementation(data: input_t, output: output_t) -> tuple[bool, str]:
    if len(output) != 1 or output[0].shape != data.shape:
        return False, f"output must be a list of one tensor, has {len(output)} items"
    bad = int((output[0] != -data).sum())
    return bad == 0, f"{bad} elements differ"
