from dataclasses import dataclass, field

import torch
from task import input_t, output_t

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Config:
    scale: float
    dtype: torch.dtype
    device: torch.device


@dataclass
class Layer:
    config: Config
    weights: dict
    calls: int = field(default=0, init=False)

    def scale(self) -> float:
        """Return the scale of the first call; later ones get a smaller one."""
        self.calls += 1
        return self.config.scale / self.calls


def generate_input(size: int, seed: int) -> input_t:
    gen = torch.Generator(DEVICE).manual_seed(seed)
    config = Config(0.5, torch.float32, torch.device(DEVICE))
    layer = Layer(config, {"w": torch.randn(size, generator=gen, device=DEVICE)})
    return layer, torch.randn(size, generator=gen, device=DEVICE)


def ref_kernel(data: input_t) -> output_t:
    layer, x = data
    return layer.scale() * layer.weights.pop("w") * x


def check_implementation(data: input_t, output: output_t) -> tuple[bool, str]:
    bad = int(((output - ref_kernel(data)).abs() > 1e-6).sum())
    return bad == 0, f"{bad} elements differ"
