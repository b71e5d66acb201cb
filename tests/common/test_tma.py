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
BASE = but(dtype="uint8", dims=(512, 8, 2), strides=(768, 8192), box=(128, 8, 1), element_strides=(1, 1, 1))
BASE |= but(interleave="none", swizzle="128B", address=ADDRESS)
FLAT = but(dims=(512, 8), strides=(768,), box=(128, 8), element_strides=(1, 1))
FP4 = but(dtype="16u4_align8b", target="sm100")
IN_32 = but(interleave="32B", swizzle="32B")
LEGAL = [
    {},
    but(dims=(2**32,), strides=(), box=(256,), element_strides=(1,), swizzle="none"),
    but(strides=(512, 2**40 - 16)),
    but(dims=(512, 1, 2), strides=(0, 512)),  # an extent of 1 never steps
    but(dims=(64, 8, 2)),  # a box wider than the tensor
    but(box=(256, 256, 3), swizzle="none"),
    but(dtype="float16", dims=(256, 8, 2), box=(64, 8, 1), oob_fill="nan"),
    but(swizzle="32B", box=(32, 8, 1)),
    but(swizzle="64B", box=(64, 8, 1)),
    but(swizzle="128B_atom_64B", target="sm100"),
    but(interleave="16B", box=(256, 8, 1)),  # no limit by the span
    but(interleave="32B", swizzle="32B"),
    but(element_strides=(8, 8, 8), box=(128, 64, 1)),
    but(dtype="16u4_align8b", target="sm100", dims=(1024, 8, 2), box=(256, 8, 1)),
    but(address=None),
    but(FLAT, dims=(512, 512), strides=(512,), storage=512 * 512),  # outermost first, which nothing tells here
    but(storage=8192 + 7 * 768 + 512),
    but(dims=(16,) * 5, strides=(16, 256, 4096, 65536), box=(16, 16, 16, 16, 2), element_strides=(1,) * 5),
]

# What each rule says, and changes that break it.
RULES = [
    # the lessons: rank entries, outermost first, a box of the whole tensor
    ("got 3: (1, 768, 8192) (leave out the innermost one)", but(strides=(1, 768, 8192))),
    ("are they outermost first?", but(FLAT, dims=(4096, 1024), strides=(1024,))),
    # names
    *((f"{name} must be one of ", but(**{name: "sm80"})) for name in ("dtype", "swizzle", "l2_promotion", "target")),
    ("interleave must be one of none, 16B, 32B, got '64B'", but(interleave="64B")),
    ("oob_fill must be one of zero, nan", but(oob_fill="one")),
    ("swizzle 128B_atom_64B needs target sm100, got sm90", but(swizzle="128B_atom_64B")),
    ("dtype 16u4_align8b needs target sm100, got sm90", but(dtype="16u4_align8b")),
    ("oob_fill nan needs a floating-point dtype, got uint8", but(oob_fill="nan")),
    ("swizzle must be 32B with interleave 32B, got 128B", but(interleave="32B")),
    # rank and dims
    ("rank must be 1 to 5 with", but(dims=(), strides=(), box=(), element_strides=())),
    ("rank must be 1 to 5", but(dims=(16,) * 6, strides=(16,) * 5, box=(16,) * 6, element_strides=(1,) * 6)),
    ("rank must be 3 to 5 with interleave 16B, got 2", but(FLAT, interleave="16B")),
    ("dims[1] must be an integer from 1 to 4294967296, got 0", but(dims=(512, 0, 2))),
    ("dims[0] must be an integer from 1 to 4294967296, got 512.0", but(dims=(512.0, 8, 2))),
    ("dims[0] must be a multiple of 2 for 16u4_align8b, got 511", but(FP4, dims=(511, 8, 2))),
    # strides
    ("strides[0] must be a multiple of 16 bytes, got 776", but(strides=(776, 8192))),
    ("strides[1] must be a multiple of 32 bytes, got 8208", but(IN_32, strides=(768, 8192 + 16))),
    ("strides[0] must be an integer from 0", but(strides=(-768, 8192))),
    ("strides[0] must be at least the bytes of one step along dims[1]", but(strides=(496, 8192)), but(dtype="uint16")),
    ("strides[1] must be at least the bytes of one step along dims[2]", but(strides=(768, 6128))),
    # box
    ("box must have rank = 3 entries, got 2", but(box=(128, 8))),
    ("box[1] must be an integer from 1 to 256", but(box=(128, 0, 1)), but(box=(128, 257, 1))),
    ("box[0] must be a multiple of 16 bytes", but(box=(120, 8, 1)), but(box=(5, 8, 1), interleave="16B")),
    ("box[0] must be a multiple of 16 bytes, got 16 of 16u4_align8b", but(FP4, box=(16, 8, 1))),
    ("box[0] must be at most 128 bytes with swizzle 128B, got 144 of uint8 = 144 bytes", but(box=(144, 8, 1))),
    ("box[0] must be at most 64 bytes with swizzle 64B", but(swizzle="64B")),
    ("box[0] must be at most 32 bytes with swizzle 32B", but(swizzle="32B")),
    ("must fit 232448 bytes of shared memory, got 262144", but(box=(128, 256, 8))),
    ("must fit 1023 bytes of shared memory, got 1024", but(shared_limit=1023)),
    ("element_strides must have rank = 3 entries, got 2", but(element_strides=(1, 1))),
    ("element_strides[1] must be an integer", but(element_strides=(1, 0, 1)), but(element_strides=(1, 9, 1))),
    # memory
    ("address must be nonzero and a multiple of 16, got 1048584", but(address=ADDRESS + 8)),
    ("address must be nonzero and a multiple of 32", but(IN_32, address=ADDRESS + 16)),
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
    """And refuses on sm_90 what the check says is sm_100's."""
    made = tma.check(**{**BASE, **change})
    served = made.target in ("sm90", load.device_target("cuda"))
    assert encode(made.at(made.address or ADDRESS)) == (SUCCESS if served else INVALID_VALUE)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "change",
    [
        *(but(strides=strides) for strides in ((776, 8192), (768, 2**40))),
        *(but(box=box) for box in ((120, 8, 1), (128, 257, 1), (144, 8, 1))),
        but(box=(5, 8, 1), interleave="16B"),
        *(but(element_strides=(1, 9, 1)), but(dims=(512, 0, 2)), but(address=ADDRESS + 8)),
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
    as_pointer = [ctypes.c_void_p(ctypes.addressof(array)) for array in (f.dims, f.strides, f.box, f.element_strides)]
    return driver.cuTensorMapEncodeTiled(
        *(ctypes.c_void_p(aligned), f.dtype, f.rank, ctypes.c_uint64(f.address)),
        *(*as_pointer, f.interleave, f.swizzle, f.l2_promotion, f.oob_fill),
    )


def test_a_descriptor_cannot_be_made_broken():
    for place, message in (((ADDRESS + 1,), "multiple of 16, got 1048577"), ((ADDRESS, 100), "storage must hold")):
        with pytest.raises(ValueError, match=message):
            tma.check(**BASE).at(*place)
    with pytest.raises(ValueError, match="address must be set"):
        tma.check(**{**BASE, "address": None}).fields()


@pytest.mark.parametrize(
    ("change", "size"),
    [
        ({}, 1024),
        (but(dtype="float16", dims=(256, 8, 2), box=(64, 8, 1)), 1024),
        (but(dims=(64, 1, 1)), 1024),  # mostly outside the tensor: filled, and counted all the same
        (but(element_strides=(8, 3, 1)), 128 * 3),  # ceil(8 / 3) rows; the innermost step is ignored
        (but(element_strides=(8, 3, 1), interleave="16B"), 16 * 3),
        (but(dtype="16u4_align8b", target="sm100", dims=(1024, 8, 2), box=(256, 8, 1)), 1024),
    ],
    ids=str,
)
def test_transaction_bytes(change, size):
    assert tma.check(**{**BASE, **change}).transaction_bytes == size


def test_shared_alignment_is_the_period_of_the_swizzle():
    for swizzle, period in {"none": 128, "32B": 256, "64B": 512, "128B": 1024}.items():
        assert tma.check(**{**BASE, "box": (16, 8, 1), "swizzle": swizzle}).shared_alignment == period


def test_fields_carry_the_checked_values():
    fields = tma.check(**{**BASE, "l2_promotion": "256B"}).fields()
    assert (fields.address, list(fields.dims), list(fields.strides)) == (ADDRESS, [512, 8, 2, 0, 0], [768, 8192, 0, 0])
    assert (list(fields.box), list(fields.element_strides)) == ([128, 8, 1, 0, 0], [1, 1, 1, 0, 0])
    tail = (fields.dtype, fields.rank, fields.interleave, fields.swizzle, fields.l2_promotion, fields.oob_fill)
    assert tail == (0, 3, 0, 3, 3, 0)
    assert bytes(fields)[0:8] == ADDRESS.to_bytes(8, "little") and len(bytes(fields)) == 144


@pytest.mark.parametrize(("m", "k", "l"), SHAPES)
def test_classic_descriptors_of_every_case(m, k, l):
    """Legal, of the rank that the kernel loads with, within the tensors, and of the bytes that it expects."""
    rest_m, rest_k = -(-m // 128), k // 64
    sizes = (l * m * k // 2, l * 64 * k, l * rest_m * rest_k * 512, l * rest_k * 512)
    maps = [d.at(ADDRESS, size) for d, size in zip(classic.descriptors(m, k, l), sizes, strict=True)]
    assert [d.rank for d in maps] == [2 if l == 1 else 3] * 4
    assert [d.extent_bytes for d in maps] == [l * m * k // 2, l * 64 * k, *sizes[2:]]
    assert [d.transaction_bytes for d in maps] == [4096, 512, 2048, 256]
    source = classic.SOURCE.with_name("sm90_classic_tma_config.cuh").read_text()
    # The kernel expects 4 boxes of a and one of sfa a stage; one each of b and sfb
    sizes = ("BOX_A_BYTES = ROWS * BLOCK_K / 2;", "SFA_BYTES = STEP_BLOCKS * 128;", "SFB_BYTES = STEP_BLOCKS * 16;")
    steps = ("BLOCK_K = 1024;", "ROWS = 8;", "STEP_BLOCKS = BLOCK_K / 64;", "B_BYTES = BLOCK_K / 2;")
    assert all(line in source for line in (*steps, *sizes))
