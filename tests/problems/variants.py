"""The variants of a problem for its tests: which files there are for a target, and which of them this machine runs."""

import functools
from pathlib import Path

import pytest

from problems.common import load


def made_for(folder: Path, target: str) -> list[Path]:
    """Files of variants/ that serve `target`, by name."""
    return [file for file, targets in _targets(folder) if target in targets]


@functools.cache
def _targets(folder: Path) -> list[tuple[Path, tuple[str, ...]]]:
    files = sorted((folder / "variants").glob("*.py"))
    return [(file, load.constants(file, "TARGETS")["TARGETS"]) for file in files]


def skip_unless_it_runs(file: Path, device: str) -> None:
    """Skip the test, with the reason, unless this machine's `device` ("cpu" or "cuda") runs the variant."""
    said = load.constants(file, "TARGETS", "REQUIRES")
    target = load.device_target(device)
    if target not in said["TARGETS"]:
        pytest.skip(f"made for {said['TARGETS']}, this is {target}")
    if missing := load.missing_cpu_flags(file):
        pytest.skip(f"needs a CPU with {missing}")
    for package in said.get("REQUIRES", ()):
        pytest.importorskip(package)
