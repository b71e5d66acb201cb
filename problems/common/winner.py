"""What a problem's submission.py does: call the variant that wins on the device of what it gets."""

import functools
from pathlib import Path
from types import ModuleType
from typing import Any

from problems.common import load


class Winner:
    """The functions of the submission.py at `file`, which says in its literal WINNERS which variants win.

    Nothing replaces a missing winner: ValueError for a device without one, or for data that the variant refuses.
    """

    def __init__(self, file: str) -> None:
        self.folder = Path(file).parent
        self.name = functools.cache(functools.partial(load.winner, self.folder))  # by target

    def custom_kernel(self, data: Any) -> Any:
        """Return what the winner's custom_kernel does: it writes the outputs in data, task.Data of the problem."""
        return self._variant(getattr(data, "inputs", data)).custom_kernel(data)

    def prepare(self, weights: Any) -> Any:
        """What the winner makes of the weights, task.Weights; they themselves if it prepares nothing."""
        variant = self._variant(weights)
        return variant.prepare(weights) if hasattr(variant, "prepare") else weights

    def _variant(self, tensors: Any) -> ModuleType:
        return load.variant(self.folder.name, self.name(load.device_target(_device(tensors))))


def _device(value: Any) -> Any:
    """The device of the first tensor in tuples of tuples, None if there is none."""
    if isinstance(value, tuple):
        return next(filter(None, map(_device, value)), None)
    return getattr(value, "device", None)
