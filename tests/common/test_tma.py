"""The descriptor check names each broken rule; the maps of the classic TMA kernel, which runs in test_in_model.py."""

import ctypes
import re

import pytest
import torch

from problems.common import load, tma

task = load.module(load.PROBLEMS / "nvfp4_gemv", "task")
classic = load.variant("nvfp4_gemv", "sm90_classic_tma")
SHAPES = sorted({(case.m, case.k, case.l) for case in task.TESTS + task.BENCHMARKS})
ADDRESS = 1 << 20
SUCCESS, INVALID_VALUE = 0, 1  # CUresult


def but(base: dict | None = None, **changes: object) -> dict[str, object]:
    return {**(base or {}), **changes}


# A legal map to break: (8, 512) bytes in rows of 768, two of them.
BASE = but(dtype="uint8", dims=(512, 8, 2), strides=(768, 8192), box=(128, 8, 1), swizzle="128B", address=ADDRESS)
FLAT = but(dims=(512, 8), strides=(768,), box=(128, 8))
LEGAL = [
    {},
    but(dims=(2**32,), strides=(), box=(256,), swizzle="none"),
    but(strides=(512, 2**40 - 16)),
    but(dims=(512, 1, 2), strides=(0, 512)),  # an extent of 1 never steps
    but(dims=(64, 8, 2)),  # a box wider than the tensor
    but(box=(256, 256, 3), swizzle="none"),
    but(dtype="float16", dims=(256, 8, 2), box=(64, 8, 1)),
    but(swizzle="32B", box=(32, 8, 1)),
    but(swizzle="64B", box=(64, 8, 1), l2_promotion="256B"),
    but(address=None),
    but(FLAT, dims=(512, 512), strides=(512,), storage=512 * 512),  # outermost first, which nothing tells here
    but(storage=8192 + 7 * 768 + 512),
    but(dims=(16,) * 5, strides=(16, 256, 4096, 65536), box=(16, 16, 16, 16, 2)),
]

# What each rule says, and changes that break it.
RULES = [
    ("got 3: (1, 768, 8192) (leave out the innermost one)", but(strides=(1, 768, 8192))),
    ("are they outermost first?", but(FLAT, dims=(4096, 1024), strides=(1024,))),
    *((f"{name} must be one of ", but(**{name: "sm80"})) for name in ("dtype", "swizzle", "l2_promotion")),
    ("rank must be 1 to 5", but(dims=(), strides=(), box=()), but(dims=(16,) * 6, strides=(16,) * 5, box=(16,) * 6)),
    ("dims[1] must be an integer from 1 to 4294967296, got 0", but(dims=(512, 0, 2))),
    ("dims[0] must be an integer from 1 to 4294967296, got 512.0", but(dims=(512.0, 8, 2))),
    ("strides[0] must be a multiple of 16 bytes, got 776", but(strides=(776, 8192))),
    ("strides[1] must be an integer from 0 to 1099511627775", but(strides=(768, 2**40))),
    ("strides[0] must be an integer from 0", but(strides=(-768, 8192))),
    ("strides[0] must be at least the bytes of one step along dims[1]", but(strides=(496, 8192)), but(dtype="uint16")),
    ("strides[1] must be at least the bytes of one step along dims[2]", but(strides=(768, 6128))),
    ("box must have rank = 3 entries, got 2", but(box=(128, 8))),
    ("box[1] must be an integer from 1 to 256", but(box=(128, 0, 1)), but(box=(128, 257, 1))),
    ("box[0] must be a multiple of 16 bytes", but(box=(120, 8, 1))),
    ("box[0] must be at most 128 bytes with swizzle 128B, got 144 of uint8 = 144 bytes", but(box=(144, 8, 1))),
    ("box[0] must be at most 64 bytes with swizzle 64B", but(swizzle="64B")),
    (
        "must fit 232448 bytes of shared memory, got 262144",
        but(box=(128, 256, 8), dims=(512, 256, 8), strides=(768, 2**18)),
    ),
    ("address must be nonzero and a multiple of 16, got 1048584", but(address=ADDRESS + 8)),
    ("storage must hold the whole map, 14080 bytes", but(storage=8192 + 7 * 768 + 511)),
]
BROKEN = [(change, message) for message, *changes in RULES for change in changes]


@pytest.mark.parametrize("change", LEGAL, ids=str)
def test_legal(change):
    tma.check(**{**BASE, **change})


@pytest.mark.parametrize(("change", "message"), BROKEN, ids=[str(change) for change, _ in BROKEN])
def test_broken_rule_is_named(change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        tma.check(**{**BASE, **change})


@pytest.mark.gpu
@pytest.mark.parametrize("change", LEGAL, ids=str)
def test_the_driver_takes_what_the_check_takes(change):
    made = tma.check(**{**BASE, **change})
    assert encode(made.at(made.address or ADDRESS)) == SUCCESS


@pytest.mark.gpu
@pytest.mark.parametrize(
    "change",
    [
        *(but(strides=strides) for strides in ((776, 8192), (768, 2**40))),
        *(but(box=box) for box in ((120, 8, 1), (128, 257, 1), (144, 8, 1))),
        *(but(dims=(512, 0, 2)), but(address=ADDRESS + 8)),
    ],
    ids=str,
)
def test_the_driver_refuses_what_the_check_refuses(change, monkeypatch):
    with pytest.raises(ValueError):
        tma.check(**{**BASE, **change})
    monkeypatch.setattr(tma.Descriptor, "__post_init__", lambda self: None)
    assert encode(tma.Descriptor(**{**BASE, **change})) == INVALID_VALUE


def encode(d: tma.Descriptor) -> int:
    """The driver's own verdict, a CUresult. Writes the map into memory that is thrown away."""
    torch.zeros(1, device="cuda")  # without a context every map is refused
    driver = ctypes.CDLL("libcuda.so.1")
    f = d.fields()
    memory = ctypes.create_string_buffer(192)
    aligned = -(-ctypes.addressof(memory) // 64) * 64
    steps = (ctypes.c_uint32 * tma.MAX_RANK)(*[1] * tma.MAX_RANK)
    as_pointer = [ctypes.c_void_p(ctypes.addressof(array)) for array in (f.dims, f.strides, f.box, steps)]
    return driver.cuTensorMapEncodeTiled(
        *(ctypes.c_void_p(aligned), f.dtype, f.rank, ctypes.c_uint64(f.address)),
        *(*as_pointer, 0, f.swizzle, f.l2_promotion, 0),
    )


def test_a_descriptor_cannot_be_made_broken():
    for place, message in (((ADDRESS + 1,), "multiple of 16, got 1048577"), ((ADDRESS, 100), "storage must hold")):
        with pytest.raises(ValueError, match=message):
            tma.check(**BASE).at(*place)
    with pytest.raises(ValueError, match="address must be set"):
        tma.check(**{**BASE, "address": None}).fields()


def test_fields_carry_the_checked_values():
    made = tma.check(**{**BASE, "dtype": "uint16", "box": (64, 8, 1), "dims": (256, 8, 2), "l2_promotion": "256B"})
    fields = made.fields()
    assert (fields.address, list(fields.dims), list(fields.strides)) == (ADDRESS, [256, 8, 2, 0, 0], [768, 8192, 0, 0])
    assert (list(fields.box), made.transaction_bytes) == ([64, 8, 1, 0, 0], 1024)
    assert (fields.dtype, fields.rank, fields.swizzle, fields.l2_promotion) == (1, 3, 3, 3)
    assert bytes(fields)[0:8] == ADDRESS.to_bytes(8, "little") and len(bytes(fields)) == 120


@pytest.mark.parametrize(("m", "k", "l"), SHAPES)
def test_classic_descriptors_of_every_case(m, k, l):
    """Legal, of the rank that the kernel loads with, within the tensors, and of the bytes that it expects."""
    rest_m, rest_k = -(-m // 128), k // 64
    sizes = (l * m * k // 2, l * 64 * k, l * rest_m * rest_k * 512, l * rest_k * 512)
    maps = [d.at(ADDRESS, size) for d, size in zip(classic.descriptors(m, k, l), sizes, strict=True)]
    assert [d.rank for d in maps] == [2 if l == 1 else 3] * 4
    assert [d.extent_bytes for d in maps] == [l * m * k // 2, l * 64 * k, *sizes[2:]]
    assert [d.transaction_bytes for d in maps] == [4096, 512, 2048, 256]
