"""Compile and call the C++ source of a CPU variant."""

import ctypes
import functools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from problems.common import build

# What the statuses of cpu_threads.h mean, behind 0.
REASONS = {1: "the system refused a thread", 2: "the system refused memory", 3: "an index is outside the pages"}
BAD_INDEX = 3
POINTERS, NUMBERS = ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_int64)


class BadIndex(RuntimeError):
    """An index among the inputs names nothing."""


@dataclass(frozen=True)
class Launcher:
    """Call `launch` of a C++ file: int launch(void* const* tensors, const int64_t* numbers), a Status of cpu_threads.h.

    flags: the variant's CPU_FLAGS. The whole file is compiled for CPUs that have these instructions.
    """

    source: Path
    flags: tuple[str, ...] = ()

    def compile_for(self, target: str) -> list[build.Artefact]:
        """Compile for `target`, "cpu". build.BuildError: there is no g++, or it refused the source."""
        # Without the first, g++ joins a product and a sum wherever the instructions allow it.
        return [build.cpp(self.source, ("-ffp-contract=off", *(f"-m{flag.replace('_', '')}" for flag in self.flags)))]

    @functools.cached_property
    def _function(self) -> Any:
        """The compiled function. It is kept, because to find it again costs 50 us a call."""
        if lacking := set(self.flags) - set(Path("/proc/cpuinfo").read_text().split()):
            raise RuntimeError(f"{self.source.stem}: this CPU lacks {', '.join(sorted(lacking))}")
        (artefact,) = self.compile_for("cpu")
        return artefact.function("launch", POINTERS, NUMBERS)

    def __call__(self, tensors: Iterable[Any], numbers: Iterable[int]) -> None:
        """Pass on the addresses of the tensors, which must be on the CPU (None: a null pointer), and the numbers.

        RuntimeError: what the CPU lacks, or the system refused. BadIndex: an index is out of bounds.
        """
        pointers = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        values = tuple(numbers)
        status = self._function((ctypes.c_void_p * len(pointers))(*pointers), (ctypes.c_int64 * len(values))(*values))
        if status:
            kind = BadIndex if status == BAD_INDEX else RuntimeError
            raise kind(f"{self.source.stem}: {REASONS[status]}")
