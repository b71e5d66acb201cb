"""nvfp4.py and nvfp4.cuh of problems/common, bit for bit. What every format does is in test_formats.py."""

import ctypes
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from problems.common import build, nvfp4
from tests.support import formats

SOURCE = Path(__file__).with_name("nvfp4_host.cpp")
KINDS = {"float": "f4", "uint32_t": "u4", "uint16_t": "u2", "uint8_t": "u1", "int8_t": "i1"}
TABLES = np.dtype(
    [
        (name, KINDS[kind], tuple(map(int, re.findall(r"\d+", sizes))))
        for kind, fields in re.findall(r"^    (\w+) (\w+\[.*?);", SOURCE.read_text().partition("};")[0], re.MULTILINE)
        for name, sizes in re.findall(r"(\w+)((?:\[\d+\])+)", fields)
    ]
)
E2M1 = np.float32([sign * float(value) for sign in (1, -1) for value in formats.E2M1])
E4M3 = np.float32([sign * value for sign in (1, -1) for value in (*map(float, formats.E4M3), np.nan)])
SCALED = np.outer(E2M1, E4M3)  # exact


def same(got: np.ndarray, want: np.ndarray) -> None:
    """Bits equal, any NaN taken for any other; the signs of zeros count."""
    assert got.dtype == want.dtype and got.shape == want.shape and np.array_equal(got != got, want != want)
    bits = f"u{got.dtype.itemsize}"
    number = want == want
    assert np.array_equal(got[number].view(bits), want[number].view(bits))


def scales_of(*raw: int) -> torch.Tensor:
    return torch.tensor(raw, dtype=torch.uint8).view(torch.float8_e4m3fn)


@pytest.fixture(scope="module")
def host() -> build.Artefact:
    return build.cpp(SOURCE)


@pytest.fixture(scope="module")
def tables(host: build.Artefact) -> np.ndarray:
    out = np.zeros((), TABLES)
    assert host.function("fill_tables", ctypes.c_void_p)(out.ctypes.data) == 0
    return out


def test_every_table(tables: np.ndarray) -> None:
    """All codes, scales, halves and selectors of byte_perm."""
    byte, pair = np.arange(256, dtype=np.uint8), np.arange(65536)
    half, scale_half = E2M1.astype(np.float16), E4M3.astype(np.float16)
    nibble = pair[:, None] >> np.array([0, 4, 8, 12]) & 7  # byte i of the source is 0x11 * i
    for name, want in {
        "e2m1": E2M1,
        "e4m3": E4M3,
        "e2m1_doubled": (2 * E2M1).astype(np.int8),
        "low_code": byte % 16,
        "high_code": byte // 16,
        "e2m1_half": half.view(np.uint16),
        "e2m1x2_half2": np.stack([half[byte % 16], half[byte // 16]], 1).view(np.uint32)[:, 0],
        "byte_perm": (0x11 * nibble).astype(np.uint8).view(np.uint32)[:, 0],
    }.items():
        same(tables[name], want)
    halves = tables["e4m3x2_half2"].view(np.float16).reshape(-1, 2)
    same(halves.copy(), np.stack([scale_half[pair % 256], scale_half[pair // 256]], 1))


def test_eight_codes_at_once(tables: np.ndarray) -> None:
    low = np.arange(65536, dtype=np.uint64)
    words = (low | (low * 0x9E37 & 0xFFFF) << 16).astype(np.uint32)
    assert len(np.unique(words >> 16)) == 65536  # every pattern occurs in the upper half too
    codes = (words[:, None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15).astype(int)
    placed = tables["placed8"].view(np.float16).reshape(-1, 4, 2)  # pair i: elements i, i + 4; value * 2^-14
    same(placed.astype(np.float32) * np.float32(2**14), E2M1[codes.reshape(-1, 2, 4).transpose(0, 2, 1)])


def half_cases() -> np.ndarray:
    """Every finite fp16, its midpoints with the next, their fp32 neighbours; fp32 specials; random bits."""
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middles = (halves[1:] + halves[:-1]) / 2
    ends = np.array([65519.996, 65520, 65536, 1e30, np.inf, np.nan, 1e-45, 2**-25, 2**-26], np.float32)
    random = np.random.default_rng(5).integers(0, 2**32, 200_000, dtype=np.uint32).view(np.float32)
    positive = np.concatenate([halves, middles, np.nextafter(middles, np.float32(0)), ends])
    return np.concatenate([positive, np.nextafter(middles, np.float32(np.inf)), -positive, random])


def to_half(artefact: build.Artefact, values: int, halves: int, n: int) -> None:
    function = artefact.function("to_half", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
    assert function(values, halves, n) == 0


def test_float_to_half(host: build.Artefact) -> None:
    values = half_cases()
    got = np.zeros(len(values), np.uint16)
    to_half(host, values.ctypes.data, got.ctypes.data, len(values))
    with np.errstate(over="ignore", invalid="ignore"):
        same(got.view(np.float16), values.astype(np.float16))


@pytest.mark.parametrize("rows, blocks", [(1, 4), (129, 20), (300, 7)])
def test_permuted_scale_offset(host: build.Artefact, rows: int, blocks: int) -> None:
    offsets = np.zeros((rows, blocks), np.int64)
    function = host.function("scale_offsets", ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
    assert function(offsets.ctypes.data, rows, blocks) == 0
    raw = torch.randint(1, 127, (1, rows, blocks), dtype=torch.uint8).permute(1, 2, 0)
    permuted = nvfp4.permute_scales(raw.view(torch.float8_e4m3fn)).view(torch.uint8)
    memory = permuted.permute(5, 2, 4, 0, 1, 3).flatten()
    assert torch.equal(memory[torch.from_numpy(offsets)], raw[..., 0])


@pytest.mark.parametrize("target", ["sm90", "sm100"])
def test_header_compiles_for(target: str) -> None:
    if not shutil.which("nvcc"):
        pytest.skip("nvcc is not on PATH")
    kernels = build.cuda(SOURCE, target, ("-x", "cu")).kernels()
    assert len(kernels) == 2 and all(kernel.spill_bytes == kernel.stack_bytes == 0 for kernel in kernels)


@pytest.mark.gpu
def test_device_equals_host(host: build.Artefact, tables: np.ndarray) -> None:
    """The same bits everywhere; only those of a NaN may differ."""
    target = {9: "sm90", 10: "sm100"}[torch.cuda.get_device_capability()[0]]
    device = build.cuda(SOURCE, target, ("-x", "cu"))
    raw = torch.zeros(TABLES.itemsize, dtype=torch.uint8, device="cuda")
    assert device.function("fill_tables", ctypes.c_void_p)(raw.data_ptr()) == 0
    got = raw.cpu().numpy().view(TABLES)[0]
    for name in TABLES.names:
        if got[name].dtype.kind == "f":
            same(got[name], tables[name])
        elif name == "e4m3x2_half2":
            same(got[name].view(np.float16), tables[name].view(np.float16))
        else:
            assert np.array_equal(got[name], tables[name]), name
    values = half_cases()
    want = np.zeros(len(values), np.uint16)
    to_half(host, values.ctypes.data, want.ctypes.data, len(values))
    on_device = torch.from_numpy(values).cuda()
    halves = torch.zeros(len(values), dtype=torch.uint16, device="cuda")
    to_half(device, on_device.data_ptr(), halves.data_ptr(), len(values))
    same(halves.cpu().numpy().view(np.float16), want.view(np.float16))


def test_any_byte_is_read_as_a_scale() -> None:
    """NaN makes NaN, a negative one flips the sign."""
    packed = nvfp4.pack(torch.arange(16, dtype=torch.uint8).repeat(256)).view(torch.float4_e2m1fn_x2)
    values = nvfp4.dequantise(packed, scales_of(*range(256)), torch.float64)
    same(values.numpy().reshape(256, 16).T.copy(), SCALED.astype(np.float64))


@pytest.mark.parametrize(
    ("function", "arguments", "said"),
    [
        (nvfp4.dequantise, (torch.zeros(8).byte(), torch.ones(1)), "float8_e4m3fn"),
        (nvfp4.dequantise, (torch.zeros(8).byte(), scales_of(1, 1)), "16 values a row, scales cover 32"),
        *((nvfp4.pack, (x,), "codes") for x in (torch.zeros(3).byte(), torch.zeros(2), torch.tensor([1, 16]).byte())),
        (nvfp4.round_e2m1, (torch.tensor([0.0, torch.nan]),), "NaN"),
        *((nvfp4.quantise, (x,), "fp32 or fp64") for x in (torch.ones(16).half(), torch.ones(24))),
        *((nvfp4.quantise, (torch.tensor([[1.0] * 31 + [x]]),), "finite") for x in (torch.nan, torch.inf, -torch.inf)),
        (nvfp4.quantise, (torch.tensor([[1.0] * 31 + [torch.nan]]).double(),), "finite"),
        (nvfp4.encode, (torch.ones(24), torch.tensor(1.0)), "fp32"),
        (nvfp4.encode, (torch.ones(16).bfloat16(), torch.tensor(1.0)), "fp32"),
        (nvfp4.encode, (torch.ones(16), torch.tensor(1.0).double()), "fp32"),
    ],
)
def test_other_forms_and_values_are_refused(function, arguments, said) -> None:
    with pytest.raises(ValueError, match=said):
        function(*arguments)


def quantised(*blocks: list[float], dtype: torch.dtype = torch.float64) -> list[tuple[list[int], int]]:
    packed, scales = nvfp4.quantise(torch.tensor(blocks, dtype=dtype))
    return list(zip(nvfp4.unpack(packed).tolist(), scales.view(torch.uint8)[:, 0].tolist(), strict=True))


def test_quantise_the_largest_values() -> None:
    largest = 6.0 * 448
    assert quantised([largest] * 8 + [-largest] * 8) == [([7] * 8 + [15] * 8, 0x7E)]
    assert quantised([6.0 * 464] + [0.0] * 15) == [([7] + [0] * 15, 0x7E)]  # the tie with the step above 448
    above = float(np.nextafter(6.0 * 464, np.inf)) + 1e-9
    with pytest.raises(ValueError, match="the largest is 448"):
        nvfp4.quantise(torch.tensor([above] + [0.0] * 15, dtype=torch.float64))


def test_quantise_rounds_the_scale_once() -> None:
    """amax / 6 just above a tie of e4m3 must not become the tie on its way through fp32."""
    for amax, byte in ((6 * (1.0625 + 2.0**-40), 0x39), (6 * (1.1875 - 2.0**-40), 0x39), (6 * 1.0625, 0x38)):
        block = [amax] + [0.0] * 15
        assert formats.NVFP4.wanted(torch.tensor([block], dtype=torch.float64))[0][1] == byte
        assert quantised(block) == [([7] + [0] * 15, byte)]


def test_check_scales() -> None:
    nvfp4.check_scales(scales_of(*range(0x7F)))
    for byte in range(0x7F, 0x100):
        with pytest.raises(ValueError, match=rf"got 0x{byte:02X} at \(2,\)"):
            nvfp4.check_scales(scales_of(0, 0x7E, byte, 0xFF))


def test_decode_every_byte() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    wanted = np.stack([E2M1[np.arange(256) % 16], E2M1[np.arange(256) // 16]], axis=1)
    same(nvfp4.decode(every.view(256, 1)).numpy(), wanted)
    same(nvfp4.decode(every.view(4, 2, 32)).numpy(), wanted.reshape(4, 2, 64))
    same(nvfp4.decode(every.view(16, 16).T).numpy(), wanted.reshape(16, 16, 2).transpose(1, 0, 2).reshape(16, 32))
    same(nvfp4.decode(every.view(torch.float4_e2m1fn_x2)[:0]).numpy(), wanted[:0].reshape(0))


@pytest.mark.parametrize("input_scale", [2.0**-9, 0.0123, 3.7, [0.01, 7.0]])
def test_an_input_scale_divides_and_multiplies(input_scale: float | list[float]) -> None:
    """One for all, and one for each of two tokens. What is made of the quotient is in test_formats.py."""
    x, scale = torch.randn(40, 2, 80, generator=torch.Generator().manual_seed(1)), torch.tensor(input_scale)
    packed, scales = nvfp4.encode(x, scale)
    wanted, want_scales = nvfp4.quantise(x / scale.unsqueeze(-1))
    assert torch.equal(packed, wanted) and torch.equal(scales.view(torch.uint8), want_scales.view(torch.uint8))
    values = nvfp4.dequantise(packed, scales) * scale.unsqueeze(-1)
    same(nvfp4.round_trip(x, scale).numpy(), values.numpy())


def test_encode_saturates() -> None:
    """Past the largest scale: 448 and 6, with signs, also for infinity; quantise refuses these."""
    one = torch.tensor(1.0)
    for top in (6 * 449.0, 6 * 464.0, 6 * 480.0, 1e5, float("inf")):
        x = torch.tensor([[top, -top, 6 * 448.0, 448.0] + [0.0] * 12])
        packed, scales = nvfp4.encode(x, one)
        assert nvfp4.unpack(packed)[0, :5].tolist() == [7, 15, 7, 2, 0] and scales.view(torch.uint8).item() == 0x7E
        same(nvfp4.round_trip(x, one).numpy(), nvfp4.dequantise(packed, scales).numpy())
    packed, scales = nvfp4.encode(torch.full((1, 16), 1e36), torch.tensor(1e-3))  # the quotient overflows
    assert packed.tolist() == [[0x77] * 8] and scales.view(torch.uint8).item() == 0x7E
