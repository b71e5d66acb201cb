"""A submission as GPU MODE's service reads it, written from its published rules: directives, limits, and its data.

The first lines that begin with # or // are searched for "#!POPCORN NAME WORD..." (or //!POPCORN): `leaderboard` with
one name and `gpu` (or `gpus`) with names; each at most once, and no other name. The first other line ends the search. A
file has at most 1,000,000 bytes, is UTF-8, does not hold the word of rule 1 in any spelling of capitals, and is named
.py, .cu, .cuh or .cpp. GPUs have the names below.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

LIMIT = 1_000_000
ENDINGS = (".py", ".cu", ".cuh", ".cpp")
GPUS = {"nvidia", "b200_nebius", "mi300", "mi250", "mi300x8", "mi355x", "t4", "l4", "a100", "h100", "b200", "l4x4"}


class Refused(ValueError):
    """The service would refuse the file."""


@dataclass(frozen=True)
class Request:
    leaderboard: str
    gpus: tuple[str, ...]


def read(file: Path) -> Request:
    """What the service takes from a file. Refused: it would not take it."""
    content = file.read_bytes()
    if not file.name.endswith(ENDINGS) or not content or len(content) > LIMIT:
        raise Refused(f"name or size: {file.name}, {len(content)} bytes")
    text = content.decode("utf-8")
    if "stream" in text.lower():
        raise Refused("the word")
    said: dict[str, list[str]] = {}
    for line in text.splitlines():
        if not line.startswith(("#", "//")):
            break
        words = line.split()
        if words[0] not in ("#!POPCORN", "//!POPCORN"):
            continue
        if len(words) < 3:
            raise Refused(f"no value: {line}")
        name = {"gpu": "gpus"}.get(words[1].lower(), words[1].lower())
        if name not in ("leaderboard", "gpus") or name in said:
            raise Refused(f"unknown, or twice: {line}")
        said[name] = words[2:]
    if len(said.get("leaderboard", ())) != 1:
        raise Refused("no leaderboard")
    if unknown := {gpu.lower() for gpu in said.get("gpus", ())} - GPUS:
        raise Refused(f"no such GPU: {unknown}")
    return Request(said["leaderboard"][0], tuple(said.get("gpus", ())))


def copied(data: object) -> object:
    """A copy of data as its eval.py makes it: tuples lose their names."""
    if isinstance(data, tuple):
        return tuple(map(copied, data))
    return data.clone() if isinstance(data, torch.Tensor) else data
