"""What tests share: where things are, problem folders, runners and machines that are made up."""

import json
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
SUPPORT = ROOT / "tests" / "support"
VECTOR_ADD = SUPPORT / "problems" / "vector_add"

# A right kernel of tests/support/problems/vector_add.
ADDS = '''"""adds."""
import torch

TARGETS = ("cpu",)

def custom_kernel(data):
    return torch.add(data.x, data.y, out=data.z)
'''


def write_files(folder: Path, files: Mapping[str, str]) -> Path:
    """Write files with these texts, by their places in `folder`, which is returned."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def copy_of(folder: Path, place: Path, files: Mapping[str, str] | None = None) -> Path:
    """Copy a folder to `place`, where these files are written over it."""
    shutil.copytree(folder, place, ignore=shutil.ignore_patterns("__pycache__"))
    return write_files(place, files or {})


def script(file: Path, text: str) -> Path:
    """An executable file that a shell runs."""
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return file


def json_lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def comes(condition: Callable[[], object], limit_s: float = 60) -> bool:
    """Whether a condition holds, or comes to hold within a time."""
    deadline = time.monotonic() + limit_s
    while not (held := condition()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(held)
