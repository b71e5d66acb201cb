"""How far a run is."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """What a run is doing. n of total parts of the phase are done; said: the present part, in words."""

    phase: str
    n: int
    total: int
    said: str


Progress = Callable[[Step], None]
