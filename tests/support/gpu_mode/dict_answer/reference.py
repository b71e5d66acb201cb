import torch
from task import input_t, output_t

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def generate_input(size: int, seed: int) -> input_t:
    gen = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(size, generator=gen, device=DEVICE)


def ref_kernel(data: input_t) -> output_t:
    return {"sum": data.double().sum(), "mean": data.double().mean()}


def check_implementation(data: input_t, output: output_t) -> tuple[bool, str]:
    if set(output) != {"sum", "mean"}:
        return False, f"output must have sum and mean, has {sorted(output)}"
    want = ref_kernel(data)
    bad = [name for name in want if abs(float(output[name] - want[name])) > 1e-9 * data.numel()]
    return not bad, f"wrong: {', '.join(bad)}"
