"""The descriptor check names each broken rule, and the boxes of the classic TMA kernel hold what it reads."""

import ctypes
import re

import numpy as np
import pytest
import torch

from problems.common import load, nvfp4, tma

GEMV = load.PROBLEMS / "nvfp4_gemv"
task = load.module(GEMV, "task")
reference = load.module(GEMV, "reference")
classic = load.variant("nvfp4_gemv", "sm90_classic_tma")
SHAPES = sorted({(case.m, case.k, case.l) for case in task.TESTS + task.BENCHMARKS})
ADDRESS = 1 << 20
SUCCESS, INVALID_VALUE = 0, 1  # CUresult


def but(**changes: object) -> dict[str, object]:
    return changes


# A legal map to break: (8, 512) bytes in rows of 768, two of them.
BASE = but(
    dtype="uint8",
    dims=(512, 8, 2),
    strides=(768, 8192),
    box=(128, 8, 1),
    element_strides=(1, 1, 1),
    interleave="none",
    swizzle="128B",
    address=ADDRESS,
)

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
    but(storage=8192 + 7 * 768 + 512),
    but(dims=(16,) * 5, strides=(16, 256, 4096, 65536), box=(16, 16, 16, 16, 2), element_strides=(1,) * 5),
]

BROKEN = [
    # the lessons: rank entries, outermost first, a box of the whole tensor
    (
        but(strides=(1, 768, 8192)),
        "strides must have rank - 1 = 2 entries, the innermost (1 bytes) is implied, got 3: "
        "(1, 768, 8192) (leave out the innermost one)",
    ),
    (but(strides=(768,)), "strides must have rank - 1 = 2 entries"),
    (
        but(dims=(4096, 1024), strides=(1024,), box=(128, 8), element_strides=(1, 1)),
        "strides (1024,) for dims (4096, 1024) of 1 bytes; are they outermost first?",
    ),
    (but(dims=(2, 8, 512), strides=(8192, 768)), "are they outermost first?"),
    (but(dims=(512, 8, 2), strides=(8192, 768)), "strides[1] must be at least the bytes of one step along dims[2]"),
    (
        but(dims=(128, 8192), strides=(8192,), box=(128, 8), element_strides=(1, 1), storage=128 * 8192),
        "storage must hold the whole map, 67100800 bytes",
    ),
    (
        but(dims=(8192, 128), strides=(8192,), box=(8192, 128), element_strides=(1, 1)),
        "box[0] must be an integer from 1 to 256, got 8192",
    ),
    # names
    (but(dtype="uint4"), "dtype must be one of uint8, "),
    (but(interleave="64B"), "interleave must be one of none, 16B, 32B, got '64B'"),
    (but(swizzle="256B"), "swizzle must be one of none, "),
    (but(l2_promotion="512B"), "l2_promotion must be one of none, "),
    (but(oob_fill="one"), "oob_fill must be one of zero, nan"),
    (but(target="sm80"), "target must be one of sm90, sm100, got 'sm80'"),
    (but(swizzle="128B_atom_64B"), "swizzle 128B_atom_64B needs target sm100, got sm90"),
    (but(dtype="16u4_align8b"), "dtype 16u4_align8b needs target sm100, got sm90"),
    (but(oob_fill="nan"), "oob_fill nan needs a floating-point dtype, got uint8"),
    (but(interleave="32B"), "swizzle must be 32B with interleave 32B, got 128B"),
    # rank and dims
    (but(dims=(), strides=(), box=(), element_strides=()), "rank must be 1 to 5 with interleave none, got 0"),
    (but(dims=(16,) * 6, strides=(16,) * 5, box=(16,) * 6, element_strides=(1,) * 6), "rank must be 1 to 5"),
    (
        but(dims=(512, 8), strides=(768,), box=(128, 8), element_strides=(1, 1), interleave="16B"),
        "rank must be 3 to 5 with interleave 16B, got 2",
    ),
    (but(dims=(512, 0, 2)), "dims[1] must be an integer from 1 to 4294967296, got 0"),
    (but(dims=(512, 8, 2**32 + 1)), "dims[2] must be an integer from 1 to 4294967296, got 4294967297"),
    (but(dims=(512.0, 8, 2)), "dims[0] must be an integer from 1 to 4294967296, got 512.0"),
    (
        but(dtype="16u4_align8b", target="sm100", dims=(511, 8, 2)),
        "dims[0] must be a multiple of 2 for 16u4_align8b, got 511",
    ),
    # strides
    (but(strides=(776, 8192)), "strides[0] must be a multiple of 16 bytes, got 776"),
    (
        but(strides=(768, 8192 + 16), interleave="32B", swizzle="32B"),
        "strides[1] must be a multiple of 32 bytes, got 8208",
    ),
    (but(strides=(768, 2**40)), "strides[1] must be an integer from 0 to 1099511627775, got 1099511627776"),
    (but(strides=(-768, 8192)), "strides[0] must be an integer from 0"),
    (but(strides=(496, 8192)), "strides[0] must be at least the bytes of one step along dims[1], or neighbours"),
    (but(strides=(768, 6128)), "strides[1] must be at least the bytes of one step along dims[2]"),
    (but(dtype="uint16"), "strides[0] must be at least the bytes of one step along dims[1]"),
    # box
    (but(box=(128, 8)), "box must have rank = 3 entries, got 2"),
    (but(box=(128, 0, 1)), "box[1] must be an integer from 1 to 256, got 0"),
    (but(box=(128, 257, 1)), "box[1] must be an integer from 1 to 256, got 257"),
    (but(box=(120, 8, 1)), "box[0] must be a multiple of 16 bytes, got 120 of uint8 = 120 bytes"),
    (but(box=(5, 8, 1), interleave="16B"), "box[0] must be a multiple of 16 bytes, got 5 of uint8 = 5 bytes"),
    (
        but(dtype="16u4_align8b", target="sm100", box=(16, 8, 1)),
        "box[0] must be a multiple of 16 bytes, got 16 of 16u4_align8b",
    ),
    (but(box=(144, 8, 1)), "box[0] must be at most 128 bytes with swizzle 128B, got 144 of uint8 = 144 bytes"),
    (but(swizzle="64B"), "box[0] must be at most 64 bytes with swizzle 64B, got 128 of uint8 = 128 bytes"),
    (but(swizzle="32B"), "box[0] must be at most 32 bytes with swizzle 32B"),
    (but(box=(128, 256, 8)), "box (128, 256, 8) of uint8 must fit 232448 bytes of shared memory, got 262144"),
    (but(shared_limit=1023), "box (128, 8, 1) of uint8 must fit 1023 bytes of shared memory, got 1024"),
    (but(element_strides=(1, 1)), "element_strides must have rank = 3 entries, got 2"),
    (but(element_strides=(1, 0, 1)), "element_strides[1] must be an integer from 1 to 8, got 0"),
    (but(element_strides=(1, 9, 1)), "element_strides[1] must be an integer from 1 to 8, got 9"),
    # memory
    (but(address=ADDRESS + 8), "address must be nonzero and a multiple of 16, got 1048584"),
    (but(address=ADDRESS + 16, interleave="32B", swizzle="32B"), "address must be nonzero and a multiple of 32"),
    (but(address=0), "address must be nonzero"),
    (but(storage=8192 + 7 * 768 + 511), "storage must hold the whole map, 14080 bytes"),
]


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
        but(strides=(776, 8192)),
        but(strides=(768, 2**40)),
        but(box=(120, 8, 1)),
        but(box=(5, 8, 1), interleave="16B"),
        but(box=(128, 257, 1)),
        but(box=(144, 8, 1)),
        but(element_strides=(1, 9, 1)),
        but(dims=(512, 0, 2)),
        but(address=ADDRESS + 8),
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
        ctypes.c_void_p(aligned),
        f.dtype,
        f.rank,
        ctypes.c_uint64(f.address),
        *as_pointer,
        f.interleave,
        f.swizzle,
        f.l2_promotion,
        f.oob_fill,
    )


def test_a_square_tensor_outermost_first_is_legal():
    """The limit of the check: nothing tells these rows from columns."""
    tma.check("uint8", (512, 512), (512,), (128, 8), address=ADDRESS, storage=512 * 512)


def test_a_descriptor_cannot_be_made_broken():
    good = tma.check(**BASE)
    with pytest.raises(ValueError, match="multiple of 16, got 1048577"):
        good.at(ADDRESS + 1)
    with pytest.raises(ValueError, match="storage must hold"):
        good.at(ADDRESS, storage=100)
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


@pytest.mark.parametrize("k", range(64, 1089, 64))
def test_scale_rows_are_a_legal_map_only_for_k_in_256s(k):
    """A row of k / 16 scale bytes is a stride of a tensor map only where it is a multiple of 16 bytes."""
    rows = ("uint8", (k // 16, 128), (k // 16,), (16, 8))
    if k % 256 == 0:
        tma.check(*rows)
    else:
        with pytest.raises(ValueError, match=rf"strides\[0\] must be a multiple of 16 bytes, got {k // 16}$"):
            tma.check(*rows)


@pytest.mark.parametrize(("m", "k", "l"), SHAPES)
def test_classic_descriptors_of_every_case(m, k, l):
    """Legal, of the rank that the kernel loads with, within the tensors, and of the bytes that it expects."""
    rest_m, rest_k = -(-m // 128), k // 64
    sizes = (l * m * k // 2, l * 64 * k, l * rest_m * rest_k * 512, l * rest_k * 512)
    maps = [d.at(ADDRESS, size) for d, size in zip(classic.descriptors(m, k, l), sizes, strict=True)]
    assert [d.rank for d in maps] == [2 if l == 1 else 3] * 4
    assert [d.extent_bytes for d in maps] == [l * m * k // 2, l * 64 * k, *sizes[2:]]
    assert [d.transaction_bytes for d in maps] == [4096, 512, 2048, 256]
    source = classic.SOURCE.read_text()  # the kernel expects 4 boxes of a and one of sfa a stage; one each of b and sfb
    for line in (
        "BLOCK_K = 1024;",
        "BOX_A_BYTES = 8 * BLOCK_K / 2;",
        "SFA_BYTES = BLOCK_K / 64 * 128;",
        "B_BYTES = BLOCK_K / 2;",
        "SFB_BYTES = BLOCK_K / 64 * 16;",
    ):
        assert line in source


@pytest.mark.parametrize(("m", "k", "l"), [(129, 320, 3), (33, 1088, 2), (7, 64, 1), (130, 2112, 1)])
def test_classic_walk_over_the_boxes_gives_the_product(m, k, l):
    """The kernel's coordinates and its addresses in a stage, on a model of a box load. m, k and l differ."""
    data = reference.generate_input(m=m, k=k, l=l, seed=3, device="cpu")
    maps = classic.descriptors(m, k, l)
    memory = [_memory(t) for t in (data.a, data.b, data.sfa_permuted, data.sfb_permuted)]
    got = np.zeros((m, 1, l))
    for batch in range(l):
        z = (batch,) if l > 1 else ()
        for tile in range(-(-m // 128) * 4 + 1):  # and one past the end, as an uneven cluster has
            block, row = tile // 4, tile % 4 * 8
            for step in range(-(-k // 1024)):
                x = _values(_load(memory[1], maps[1], (step * 128, 0, *z)))  # (1024,)
                xs = _scales(_load(memory[3], maps[3], (0, step * 16, *z)).reshape(16, 16)[:, :4]).reshape(64)
                chunks = _load(memory[2], maps[2], (row * 16, block * (k // 64) + step * 16, *z)).reshape(16, 8, 4, 4)
                for quarter in range(4):
                    first = block * 128 + quarter * 32 + row
                    a = _values(_load(memory[0], maps[0], (step * 128, first, *z))).reshape(8, 1024)
                    for r in range(8):
                        scales = _scales(np.stack([chunks[q, r ^ (q % 8), quarter] for q in range(16)])).reshape(64)
                        part = ((a[r] * x).reshape(64, 16).sum(1) * scales * xs).sum()
                        if first + r < m:
                            got[first + r, 0, batch] += part
                        else:
                            assert part == 0
    want = reference.ref_kernel(data).numpy()
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-9)


def _memory(tensor: torch.Tensor) -> np.ndarray:
    """The bytes of a tensor in the order of memory."""
    flat = torch.empty(0, dtype=torch.uint8).set_(tensor.view(torch.uint8).untyped_storage())
    return flat.numpy()[tensor.storage_offset() :]


def _load(memory: np.ndarray, d: tma.Descriptor, corner: tuple[int, ...]) -> np.ndarray:
    """Bytes that a box load at `corner` leaves in shared memory: zeros outside, rows in order, swizzled."""
    width = d.element_bits // 8
    inner = np.arange(d.box[0] * width) + corner[0] * width
    inside, offsets = inner < d.dims[0] * width, inner
    for extent, stride, size, first in zip(d.box[1:], d.strides, d.dims[1:], corner[1:], strict=True):
        at = np.arange(extent) + first
        offsets = (at * stride)[:, None] + offsets.reshape(1, -1)
        inside = (at < size)[:, None] & inside.reshape(1, -1)
    box = np.where(inside, memory[np.where(inside, offsets, 0)], 0).astype(np.uint8).reshape(-1, d.box[0] * width)
    if d.swizzle == "128B":
        assert box.shape[1] == 128, "the model knows rows of one whole span"
        chunks = box.reshape(-1, 8, 16)
        turned = np.empty_like(chunks)
        for i in range(len(chunks)):
            for chunk in range(8):
                turned[i, chunk ^ (i % 8)] = chunks[i, chunk]
        box = turned
    return box.reshape(-1)


def _values(packed: np.ndarray) -> np.ndarray:
    """Packed e2m1 bytes to values, fp64."""
    codes = nvfp4.unpack(torch.from_numpy(packed)).long()
    return torch.tensor(nvfp4.E2M1, dtype=torch.float64)[codes].numpy()


def _scales(raw: np.ndarray) -> np.ndarray:
    """e4m3 bytes to values, fp64."""
    return torch.from_numpy(np.ascontiguousarray(raw)).view(torch.float8_e4m3fn).double().numpy()
