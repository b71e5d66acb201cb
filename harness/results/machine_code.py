"""A hash of GPU machine code: equal for equal code, whatever its kernels and files are called.

A cubin is an ELF file for NVIDIA's machine. A shared object that nvcc made holds its cubins whole, unless they are
compressed (problems/common/build.py says --no-compress). Files may come from a submission, so no offset is believed.
"""

import contextlib
import hashlib
import struct
from collections.abc import Iterator
from pathlib import Path

SUFFIXES = (".so", ".cubin")
FILE_LIMIT = 256 * 2**20  # bytes of a file that is read
_MAGIC = b"\x7fELF\x02\x01"  # 64 bits, little endian
_CUDA = 190  # e_machine
_PROGBITS, _ALLOC = 1, 2  # a section that has contents; one that is loaded onto the GPU
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")


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
    view, start = memoryview(data), data.find(_MAGIC)
    while start >= 0:
        contents, end = _contents(view[start:])
        if contents:
            yield hashlib.sha256("".join(sorted(contents)).encode()).hexdigest()
        start = data.find(_MAGIC, start + end)  # cubins do not overlap, so each byte is hashed once


def _contents(elf: memoryview) -> tuple[list[str], int]:
    """(a hash of each section with code or constants, where the file ends). ([], 1) for a file that is no cubin."""
    if len(elf) < _HEADER.size:
        return [], 1
    _, _, machine, _, _, _, table, _, _, _, _, size, number, _ = _HEADER.unpack_from(elf)
    if machine != _CUDA:
        return [], 1
    end = table + number * size
    if size != _SECTION.size or end > len(elf):
        return [], len(elf)  # cut short: what follows is part of it
    found, total = [], 0
    for index in range(number):
        _, kind, flags, _, offset, length, *_ = _SECTION.unpack_from(elf, table + index * size)
        if kind == _PROGBITS and flags & _ALLOC and length:
            end, total = max(end, offset + length), total + length
            if end > len(elf) or total > len(elf):
                return [], len(elf)
            found.append(hashlib.sha256(elf[offset : offset + length]).hexdigest())
    return found, end
