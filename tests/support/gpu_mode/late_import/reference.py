import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def generate_input(size: int, seed: int):
    from task import input_t  # noqa: F401

    gen = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(size, generator=gen, device=DEVICE)


def ref_kernel(data):
    return data * data


def check_implementation(data, output):
    from task import TestSpec

    assert TestSpec.__name__ == "TestSpec"
    bad = int((output != ref_kernel(data)).sum())
    return bad == 0, f"{bad} elements differ"
