"""Formats from their definitions, in Python's numbers, for oracles that share no arithmetic with the project."""

import math
import struct

import torch

from tests.support.formats import ALL, NVFP4, Format, minifloat

FP8 = ALL[-1]  # in groups of 128


def e4m3(byte: int) -> float:
    return float(minifloat(byte, 4, 3))


def bf16(x: float) -> float:
    """x, rounded once."""
    return float(torch.tensor(x, dtype=torch.float64).bfloat16())


def nvfp4_row(packed: list[int], scales: list[int], factor: float = 1.0, form: Format = NVFP4) -> list[float]:
    """Values of packed e2m1 codes with e4m3 scales, or another format's, times a factor."""
    codes = [code for byte in packed for code in (byte & 15, byte >> 4)]
    return [form.value(code, scales[i // form.group]) * factor for i, code in enumerate(codes)]


def quantised(x: list[float], form: Format, input_scale: float = 1.0) -> list[float]:
    """What a format makes of x / input_scale, divided in fp32, and back."""
    taken = torch.tensor(x) / torch.tensor(input_scale)
    return [form.value(code, byte) * input_scale for codes, byte in form.wanted(taken) for code in codes]


def dot(x: list[float], y: list[float]) -> float:
    return math.fsum(a * b for a, b in zip(x, y, strict=True))


def cut(terms: torch.Tensor) -> torch.Tensor:
    """fp64, without the bits that FP8 tensor cores of Hopper do not add of terms along the last axis."""
    unit = torch.exp2(torch.frexp(terms.abs().amax(-1, keepdim=True)).exponent - 14.0)
    return (terms / unit).trunc() * unit


def check_attended(out: torch.Tensor, lse: torch.Tensor, q: list[float], entries: list, sink: float) -> None:
    """Of one head: out (512,) and lse are what attention to these entries gives."""
    scores = [dot(q, entry) / math.sqrt(512) for entry in entries]
    total = math.fsum(map(math.exp, scores))
    assert math.isclose(float(lse), math.log(total) if scores else math.inf, rel_tol=1e-12, abs_tol=1e-12)
    weights = [math.exp(score) / (total + math.exp(sink)) for score in scores]
    for d in (0, 63, 64, 300, 447, 448, 511):
        want = dot(weights, [entry[d] for entry in entries])
        assert math.isclose(float(out[d]), want, rel_tol=1e-11, abs_tol=1e-13), d
    assert entries or not out.any()


def kv_entry(page: bytes, per_page: int, slot: int, nope: int = 448, rope: int = 64) -> list[float]:
    """One entry of a page as problems/common/kv_pages.py lays it out, from its offsets."""
    payload = nope + 2 * rope
    data, scales = page[slot * payload : (slot + 1) * payload], page[per_page * payload + 8 * slot :]
    head = [e4m3(data[i]) * 2.0 ** (scales[i // 64] - 127) for i in range(nope)]
    return head + [struct.unpack("<f", b"\0\0" + data[i : i + 2])[0] for i in range(nope, payload, 2)]
