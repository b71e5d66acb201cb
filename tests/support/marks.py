"""Which values of a parameter are in every run of the tests, and which only in the slow ones."""

import shutil
from collections.abc import Iterable

import pytest

needs_nvcc = pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")


def first(values: Iterable[object], count: int = 1) -> list[object]:
    """The first `count` values of a parameter as they are, the others marked slow. A tuple is that of several names."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow if i >= count else ())
        for i, value in enumerate(values)
    ]
