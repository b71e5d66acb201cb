"""A submission as GPU MODE's service reads it, written from its published rules: directives, limits, and its data.

The first lines that begin with # or // are searched for "#!POPCORN NAME WORD..." (or //!POPCORN): `leaderboard` with
one name and `gpu` (or `gpus`) with names; each at most once, and no other name. The first other line ends the search. A
file has at most 1,000,000 bytes, is UTF-8, does not hold the word of rule 1 in any spelling of capitals, and is named
.py, .cu, .cuh or .cpp. GPUs have the names below.
"""

import itertools
from dataclasses import dataclass
from pathlib import Path

import torch

LIMIT = 1_000_000
ENDINGS = (".py", ".cu", ".cuh", ".cpp")
GPUS = {"nvidia", "b200_nebius", "mi300", "mi250", "mi300x8", "mi355x", "t4", "l4", "a100", "h100", "b200", "l4x4"}


@dataclass(frozen=True)
class Request:
    leaderboard: str
    gpus: tuple[str, ...]


def read(file: Path) -> Request:
    """What the service takes from a file. AssertionError: it would not take it."""
    content = file.read_bytes()
    assert file.name.endswith(ENDINGS) and 0 < len(content) <= LIMIT
    text = content.decode("utf-8")
    assert "stream" not in text.lower()
    said: dict[str, list[str]] = {}
    for line in itertools.takewhile(lambda line: line.startswith(("#", "//")), text.splitlines()):
        first, *words = line.split()
        if first in ("#!POPCORN", "//!POPCORN"):
            name = {"gpu": "gpus"}.get(words[0].lower(), words[0].lower())
            assert name in ("leaderboard", "gpus") and name not in said and words[1:], line
            said[name] = words[1:]
    (leaderboard,) = said["leaderboard"]
    gpus = tuple(said.get("gpus", ()))
    assert {gpu.lower() for gpu in gpus} <= GPUS
    return Request(leaderboard, gpus)


def copied(data: object) -> object:
    """A copy of data as its eval.py makes it: tuples lose their names."""
    if isinstance(data, tuple):
        return tuple(map(copied, data))
    return data.clone() if isinstance(data, torch.Tensor) else data
