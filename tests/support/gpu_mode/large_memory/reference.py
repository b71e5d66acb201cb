import torch
from task import input_t, output_t

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def generate_input(batch: int, size: int, seed: int) -> input_t:
    n = size if DEVICE == "cuda" else -(-size // 32)
    gen = torch.Generator(DEVICE).manual_seed(seed)
    data = torch.rand(batch, n, n, generator=gen, device=DEVICE)
    data += data.transpose(1, 2).clone()
    data.diagonal(dim1=1, dim2=2).add_(2 * n)
    return data


def ref_kernel(data: input_t) -> output_t:
    return torch.linalg.cholesky(data)


def check_implementation(data: input_t, output: output_t) -> tuple[bool, str]:
    probe = torch.ones(data.shape[0], data.shape[1], 1, device=data.device)
    want, got = data @ probe, output.tril() @ (output.tril().transpose(1, 2) @ probe)
    worst = float(((got - want).abs() / want.abs()).max())
    return worst < 1e-4 and not bool(output.triu(1).any()), f"relative residual {worst:.1e}"
