"""A hash of GPU machine code: equal for equal code, whatever its kernels and files are called.

problems/common/cubins.py finds the code.
"""

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path

from problems.common import build
from problems.common.cubins import FILE_LIMIT, images

SUFFIXES = (".so", ".cubin")


def any_built() -> bool:
    """Whether a compile step of a run has left anything on this machine."""
    return (build.directory() / "closures").is_dir()


def hash_of(folder: Path) -> str | None:
    """Hash of all machine code in the builds below `folder`; None where there is no cubin."""
    found = set()
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            if path.suffix in SUFFIXES and path.is_file() and path.stat().st_size <= FILE_LIMIT:
                found.update(cubins(path.read_bytes()))
    return hashlib.sha256("".join(sorted(found)).encode()).hexdigest()[:16] if found else None


def cubins(data: bytes) -> Iterator[str]:
    """The hash of each cubin in the file `data`: of the contents that it loads onto the GPU, sorted, without names."""
    for _, loaded in images(data):
        contents = sorted(hashlib.sha256(section).hexdigest() for section in loaded)
        yield hashlib.sha256("".join(contents).encode()).hexdigest()
