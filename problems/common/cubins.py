"""Cubins, and what is in their machine code: the instructions of tensor cores, copies, barriers and spills.

A cubin is an ELF file for NVIDIA's machine. A shared object that nvcc made holds its cubins whole, unless they are
compressed (build.py says --no-compress). Files may come from a submission, so no offset is believed.

The instructions need nvdisasm: of a CUDA toolkit, or of the package nvidia-cuda-nvdisasm. nvcc does without it.
"""

import collections
import functools
import importlib.util
import os
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

_MAGIC = b"\x7fELF\x02\x01"  # 64 bits, little endian
_CUDA = 190  # e_machine
_PROGBITS, _ALLOC, _NOBITS = 1, 2, 8  # a section that has contents; one that is loaded onto the GPU; one without any
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_SYMBOLS, _OBJECT = 2, 1  # a section of symbols; a symbol that is a variable
FILE_LIMIT = 256 * 2**20  # bytes of a file that is read
DISASSEMBLE_S = 120
MISSING = (
    "nvdisasm is not installed, so no machine instructions are listed: install the package nvidia-cuda-nvdisasm into "
    ".venv, or a CUDA toolkit with nvdisasm on PATH"
)

# Instructions that are listed, by the word in front of their modifiers: products, copies into shared and tensor memory,
# tensor memory itself, barriers, and local memory, which is where spills go.
_LISTED = re.compile(
    r"U?T?C?[A-Z]*MMA|UTM\w+|UBLK\w+|LDGSTS|UTC\w+|LDTM|STTM|SYNCS|BAR|UCGABAR\w*|ARRIVES|LDGDEPBAR|LDL|STL"
)
_INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)(\.[\w.]+)?[^;]*;")


def images(data: bytes) -> Iterator[tuple[memoryview, list[memoryview]]]:
    """-> (the file, the contents of the sections that are loaded onto the GPU) for each cubin in `data`."""
    view, start = memoryview(data), data.find(_MAGIC)
    while start >= 0:
        contents, end = _contents(view[start:])
        if contents:
            yield view[start : start + _length(view[start:])], contents
        start = data.find(_MAGIC, start + max(end, 1))  # cubins do not overlap: each byte is looked at once


def _contents(elf: memoryview) -> tuple[list[memoryview], int]:
    """(the sections with code or constants, where the file ends). ([], 1) for a file that is no cubin."""
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
            found.append(elf[offset : offset + length])
    return found, end


def variables(image: bytes) -> list[tuple[str, int]]:
    """Return (name, bytes) of each variable of a cubin, in memory's order: of `__device__` and `__constant__`."""
    view, found = memoryview(image), []
    if not _contents(view)[0]:
        return []
    _, _, _, _, _, _, table, _, _, _, _, size, number, _ = _HEADER.unpack_from(view)
    sections = [_SECTION.unpack_from(view, table + index * size) for index in range(number)]
    for _, kind, _, _, offset, length, names, _, _, _ in sections:
        if kind != _SYMBOLS or names >= number:
            continue
        texts = image[sections[names][4] : sections[names][4] + sections[names][5]]
        for at in range(offset, min(offset + length, len(image) - _SYMBOL.size + 1), _SYMBOL.size):
            name, info, _, section, place, nbytes = _SYMBOL.unpack_from(view, at)
            if info & 15 == _OBJECT and nbytes and texts[name : name + 1] not in (b".", b"$"):  # the compiler's own
                word = texts[name : texts.find(b"\0", name)].decode(errors="replace")
                found.append((section, place, word, nbytes))
    return [(name, nbytes) for _, _, name, nbytes in sorted(found)]


def _length(elf: memoryview) -> int:
    """Where the last table or section of a cubin ends; no more than there is."""
    _, _, _, _, _, programs, table, _, _, each, count, size, number, _ = _HEADER.unpack_from(elf)
    ends = [table + number * size, programs + count * each]
    for index in range(number):
        _, kind, _, _, offset, length, *_ = _SECTION.unpack_from(elf, table + index * size)
        ends += [offset + length] if kind != _NOBITS else []
    return min(max(ends), len(elf))


@functools.cache
def disassembler() -> str | None:
    """The path of nvdisasm; None where there is none. MISSING says what to do."""
    if found := shutil.which("nvdisasm"):
        return found
    package = importlib.util.find_spec("nvidia")  # of all of NVIDIA's wheels
    folders = (package.submodule_search_locations or ()) if package else ()
    files = (file for folder in folders for file in sorted(Path(folder).glob("*/bin/nvdisasm")))
    return next((str(file) for file in files if os.access(file, os.X_OK)), None)


def instructions(path: Path) -> dict[str, dict]:
    """Return {"sass": {instruction with its modifiers: how many}} for each kernel, by its mangled name, in the file
    `path`, a cubin or a shared object. {} without nvdisasm. RuntimeError: nvdisasm fails.
    """
    tool = disassembler()
    if tool is None or path.stat().st_size > FILE_LIMIT:
        return {}
    found: dict[str, dict] = {}
    for image, _ in images(path.read_bytes()):
        with tempfile.TemporaryDirectory() as scratch:
            file = Path(scratch, "cubin")
            file.write_bytes(image)
            ran = subprocess.run([tool, "-c", str(file)], capture_output=True, text=True, timeout=DISASSEMBLE_S)
        if ran.returncode:
            raise RuntimeError(f"nvdisasm: {(ran.stderr.strip() or 'it failed').splitlines()[0]}")
        for name, text in _functions(ran.stdout):
            found[name] = {"sass": _listed(text)}
    return found


def named(found: dict[str, dict], kernel: str) -> dict:
    """What `instructions` found of the kernel that a compiler's report calls so. A kernel of CuTe DSL is called
    STEM-NAME there, and kernel_cutlass_NAME_... in its cubin (cute_dsl.py).
    """
    if kernel in found:
        return found[kernel]
    name = f"kernel_cutlass_{kernel.rpartition('-')[2]}_"
    return next((one for mangled, one in found.items() if mangled.startswith(name)), {})


def _functions(text: str) -> Iterator[tuple[str, str]]:
    parts = re.split(r"^\s*\.section\s+\.text\.([^,\s]+),.*$", text, flags=re.M)
    return zip(parts[1::2], parts[2::2], strict=True)


def _listed(text: str) -> dict[str, int]:
    counts: collections.Counter[str] = collections.Counter()
    for word, modifiers in _INSTRUCTION.findall(text):
        if _LISTED.fullmatch(word):
            counts[word + modifiers] += 1
    return dict(sorted(counts.items()))
