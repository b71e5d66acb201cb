"""The hash of machine code: of what is loaded onto a GPU, whatever its names, and harmless on hostile files."""

import struct

import pytest

from harness.judge.session import hash_of
from problems.common import cubins

TEXT, CONSTANTS, DEBUG = (1, 6), (1, 2), (1, 0)  # (type, flags) of a section
INFO = (0x70000000, 0)


def cubin(*sections: tuple[tuple[int, int], bytes], machine: int = 190, names: bytes = b"k") -> bytes:
    """An ELF file of these sections; `names` stands for its symbols, which are no part of what is loaded."""
    body, table = names, b""
    for (kind, flags), content in sections:
        offset = cubins._HEADER.size + len(body)
        table += cubins._SECTION.pack(0, kind, flags, 0, offset, len(content), 0, 0, 0, 0)
        body += content
    where = cubins._HEADER.size + len(body)
    ident = cubins._MAGIC + bytes(10)
    header = cubins._HEADER.pack(ident, 2, machine, 1, 0, 0, where, 0, 64, 0, 0, 64, len(sections), 0)
    return header + body + table


ONE = cubin((TEXT, b"first kernel"), (CONSTANTS, b"table"))
OTHER = cubin((TEXT, b"second kernel"))


def hashed(tmp_path, **files: bytes) -> str | None:
    for old in tmp_path.iterdir():
        old.unlink()
    for name, content in files.items():
        (tmp_path / name.replace("_", ".")).write_bytes(content)
    return hash_of(tmp_path)


def test_the_hash_is_of_code_and_constants_whatever_they_are_called(tmp_path):
    one = hashed(tmp_path, a_cubin=ONE, b_cubin=OTHER)
    assert len(one) == 16
    assert hashed(tmp_path, a_cubin=OTHER, c_cubin=ONE) == one
    host = cubin((TEXT, b"host code"), machine=62)
    assert hashed(tmp_path, lib_so=host + ONE + b"padding" + OTHER) == one
    renamed = cubin((CONSTANTS, b"table"), (TEXT, b"first kernel"), (DEBUG, b"lines"), (INFO, b"x"), names=b"kernel_2")
    assert hashed(tmp_path, a_cubin=renamed, b_cubin=OTHER) == one
    one = hashed(tmp_path, a_cubin=ONE)
    assert hashed(tmp_path, a_cubin=cubin((TEXT, b"first kerneL"), (CONSTANTS, b"table"))) != one
    assert hashed(tmp_path, a_cubin=cubin((TEXT, b"first kernel"), (CONSTANTS, b"tablE"))) != one
    assert hashed(tmp_path, a_cubin=ONE, b_cubin=OTHER) != one


@pytest.mark.parametrize(
    "data",
    [
        b"",
        cubins._HEADER.pack(cubins._MAGIC, 2, 190, 1, 0, 0, 0, 0, 64, 0, 0, 64, 0, 0),
        cubins._MAGIC,
        ONE[:70],
        ONE[:-1],
        cubin(machine=190),
        cubin((TEXT, b"x"), machine=62),
        bytes(1000),
        ONE[:60] + struct.pack("<H", 65535) + ONE[62:],  # more sections than there are bytes
        ONE[:40] + struct.pack("<Q", 2**64 - 1) + ONE[48:],  # a table beyond the end
        cubins._MAGIC * 100_000,
        cubin(*[(TEXT, b"")] * 5000),
    ],
    ids=range(12),
)
def test_what_is_no_cubin_has_no_code(tmp_path, data):
    assert hashed(tmp_path, a_cubin=data) is None


def test_what_claims_the_same_bytes_again_or_is_no_such_file_has_no_code(tmp_path):
    """Or a small file would take hours to hash."""
    big = cubin((TEXT, bytes(10_000)))
    row = big[-64:]
    header = big[:60] + struct.pack("<H", 60_000) + big[62:64]
    assert hashed(tmp_path, a_cubin=header + big[64:-64] + row * 60_000) is None
    assert hashed(tmp_path, a_txt=ONE) is None
    (tmp_path / "b.cubin").mkdir()
    (tmp_path / "c.so").symlink_to("/dev/zero")
    assert hash_of(tmp_path) is None
