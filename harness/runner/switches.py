"""Settings of torch that hold for a whole process and change numerical results: a library may set them on import."""

import contextlib
from collections.abc import Callable

import torch


class Switches:
    """Settings of the whole process that change numerical results, as they were before the import."""

    def __init__(self) -> None:
        self._was = _values()

    def restore(self) -> list[str]:
        """Put changed settings back. Return them in words."""
        was, now = self._was, _values()
        changed = [name for name in was if was[name] != now[name]]
        for name in changed:
            _SWITCHES[name][1](was[name])
        return [f"{name}, from {was[name]} to {now[name]}" for name in changed]


def _values() -> dict[str, object]:
    values: dict[str, object] = dict.fromkeys(_SWITCHES, "a mixture of old and new settings")
    for name, (get, _) in _SWITCHES.items():
        with contextlib.suppress(RuntimeError):  # torch refuses to say where its old and new settings were mixed
            values[name] = get()
    return values


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
