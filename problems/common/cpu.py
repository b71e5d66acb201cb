"""Call the compiled launcher of a CPU variant, and turn its status into an error."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from problems.common import build

BAD_INDEX = 4  # kBadIndex of cpu_threads.h


@dataclass(frozen=True)
class Launcher:
    """The function `launch` of a C++ file, which returns a Status of cpu_threads.h."""

    source: Path
    argtypes: tuple[type, ...]
    needs: str = ""  # instructions that not every CPU has

    @functools.cached_property
    def function(self) -> Any:
        """The compiled function. It is kept, because to find it again costs 50 us a call."""
        return build.cpp(self.source).function("launch", *self.argtypes)

    def check(self, status: int) -> None:
        """RuntimeError, which says what is missing or wrong, unless `status` is 0."""
        if status:
            reasons = {
                1: f"this CPU lacks {self.needs}",
                2: "the system refused a thread",
                3: "the system refused memory",
                BAD_INDEX: "an index is outside the pages",
            }
            raise RuntimeError(f"{self.source.stem}: {reasons[status]}")
