"""Settings of torch that hold for a whole process and change numerical results: a library may set them on import."""

from collections.abc import Callable

import torch


class Switches:
    """Settings of the whole process that change numerical results, as they were before the import."""

    def __init__(self) -> None:
        self._was = {name: _value(get) for name, (get, _) in _SWITCHES.items()}

    def restore(self) -> list[str]:
        """Put changed settings back. Return them in words."""
        found = []
        for name, (get, put) in _SWITCHES.items():
            was, now = self._was[name], _value(get)
            if was != now:
                found.append(f"{name}, from {was} to {now}")
                put(was)
        return found


def _value(get: Callable[[], object]) -> object:
    try:
        return get()
    except RuntimeError:  # torch refuses to say where its old and new settings were mixed
        return "a mixture of old and new settings"


def _flushes_denormals() -> bool:
    return float(torch.tensor([1e-40], dtype=torch.float32) * 1) == 0.0


def _attribute(owner: object, name: str) -> tuple[Callable[[], object], Callable]:
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


# Name -> how it is read, how it is set.
_SWITCHES: dict[str, tuple[Callable[[], object], Callable]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "float32 matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "cuda.matmul.allow_tf32": _attribute(torch.backends.cuda.matmul, "allow_tf32"),
    "cudnn.allow_tf32": _attribute(torch.backends.cudnn, "allow_tf32"),
    "deterministic algorithms": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    "gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
    "flush denormals": (_flushes_denormals, torch.set_flush_denormal),
}
