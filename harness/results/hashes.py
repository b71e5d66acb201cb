"""Hashes of files, by which records say what they are of."""

import functools
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path


def content_hash(contents: Iterable[tuple[str, bytes]]) -> str:
    """Hash of (name, content) in this order."""
    digest = hashlib.sha256()
    for name, content in contents:
        digest.update(os.fsencode(name) + b"\0" + hashlib.sha256(content).digest())
    return digest.hexdigest()[:16]


def source_hash(files: Iterable[Path]) -> str:
    """Hash of sources: names and contents."""
    return content_hash((file.name, file.read_bytes()) for file in sorted(files))


@functools.cache
def harness_hash() -> str:
    """Hash of the judge, of what problems share, and of the model of a GPU with what runs variants in it."""
    root = Path(__file__).resolve().parents[2]
    files = [path for part in ("harness", "problems/common") for path in (root / part).rglob("*.[pc]*")]
    files += [*(root / "ptx_model").glob("*.[pc]*"), root / "ptx_model" / "tools" / "check.py"]
    return source_hash(path for path in files if path.is_file() and path.parent.name != "__pycache__")
