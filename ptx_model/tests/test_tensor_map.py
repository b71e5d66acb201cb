"""Tensor maps: the model's own form and the one that CuTe DSL's host code writes."""

import struct

import pytest

from ptx_model import Fault, TensorMap

AT = 0x7F12_3456_7800


def native(flags, words):
    """The first words of a map, at AT, as CuTe DSL 4.8.1 wrote them; what follows them is left as it was."""
    return struct.pack("<QI13I", AT, flags, *words) + b"\xa5" * 64


# Written for tensors of 1000 x 300 x 77 x 5 x 6 elements, or as many of these axes as there are.
WRITTEN = [
    (
        0x244522,
        (0x80, 0x20000, 0, 0, 0, 0x3E7, 0x12B, 0x4C, 0, 0, 0x1F000000, 0x27, 0),
        TensorMap(AT, 16, (1000, 300, 77), (2048, 2**21), (32, 40, 1), 64),
    ),
    (
        0x246542,
        (0x80, 0x20000, 0x200000, 0xA00000, 0, 0x3E7, 0x12B, 0x4C, 4, 5, 0x3F000000, 0x20, 0),
        TensorMap(AT, 16, (1000, 300, 77, 5, 6), (2**11, 2**21, 2**25, 5 * 2**25), (64, 33, 1, 1, 1), 128),
    ),
    (
        0x246532,
        (0x80000000, 0, 0, 0, 0x810, 0x3E7, 0x12B, 0x4C, 4, 0, 0x3F000000, 0xFF, 0),
        TensorMap(AT, 16, (1000, 300, 77, 5), (2**35, 2**36, 2**39), (64, 256, 1, 1), 128),
    ),
    (
        0x246592,
        (0x20, 0, 0, 0, 0, 0x3E7, 0x12B, 0, 0, 0, 0xFF000000, 0xF, 0),
        TensorMap(AT, 4, (1000, 300), (512,), (256, 16), 128),
    ),
    (
        0x40012,
        (0x40, 0, 0, 0, 0, 0x3E7, 0x12B, 0, 0, 0, 0x7F000000, 0xF, 0),
        TensorMap(AT, 8, (1000, 300), (1024,), (128, 16)),
    ),
]


@pytest.mark.parametrize(("flags", "words", "wanted"), WRITTEN)
def test_a_map_that_cute_dsl_wrote_is_read(flags, words, wanted):
    assert TensorMap.decode(native(flags, words)) == wanted


@pytest.mark.parametrize("bit", [11, 15, 19, 22])
def test_flags_of_unknown_meaning_are_refused(bit):
    flags, words, _ = WRITTEN[0]
    with pytest.raises(Fault, match="none that the model reads"):
        TensorMap.decode(native(flags | 1 << bit, words))


@pytest.mark.parametrize("raw", [bytes(128), b"\xff" * 128, native(0x244523, WRITTEN[0][1])])
def test_what_is_no_map_is_refused(raw):
    with pytest.raises(Fault, match="where there is none"):
        TensorMap.decode(raw)


def test_the_models_own_form_survives():
    box = TensorMap(AT, 32, (100, 20), (416,), (32, 8), 128)
    assert TensorMap.decode(box.encode()) == box
