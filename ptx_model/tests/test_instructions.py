"""Instructions that CUDA C++ makes of intrinsics and of functions: the model against numpy."""

import math
import shutil
import subprocess
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

import ptx_model
from ptx_model import formats
from ptx_model.tests import kernels

pytestmark = pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
SOURCE = Path(__file__).with_name("instructions.cu")
WORDS = np.random.default_rng(3).integers(0, 2**32, 192, np.uint32)
FLOATS = (np.random.default_rng(4).normal(size=192) * 2.0 ** (np.arange(192) % 30 - 20)).astype(np.float32)
T = np.arange(64)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    out = tmp_path_factory.mktemp("ptx") / "instructions.ptx"
    subprocess.run(["nvcc", "-ptx", "-arch=sm_90a", "-O3", str(SOURCE), "-o", str(out)], check=True)
    return out.read_text()


def run(text, name, a=WORDS, threads=64, words=512):
    out = np.zeros(words, np.uint32)
    ptx_model.run(text, name, 1, threads, (out, a.view(np.uint32)), policy="random:3")
    return out


def same(found, wanted):
    assert found.tolist() == [int(w) % 2**32 for w in wanted]


def test_functions_are_called_also_by_threads_that_part(text):
    a = [int(w) for w in WORDS]
    wanted = [a[t % 20] + (0 if t & 1 else t * (t % 20)) + sum(a[t : t + t % 5]) + sum(a[:3]) for t in range(64)]
    same(run(text, "calls")[:64], wanted)


def test_printf_changes_nothing(text):
    same(run(text, "says")[:64], range(64))


def test_a_jump_by_a_table(text):
    same(run(text, "jumps")[:64], 10 + 10 * (T % 3))


def test_the_block_counts_predicates(text):
    a = WORDS[:64].copy()
    odd = int((a & 1).sum())
    same(run(text, "counts", a)[:64], [odd] * 64)
    a = a % 1000
    a[5] = 1
    same(run(text, "counts", a)[:64], [int((a & 1).sum()) + 1100] * 64)


def test_masks_of_lanes(text):
    lane = [1 << t % 32 for t in range(64)]
    every = 2**32 - 1
    sums = [(b - 1) + 3 * (2 * b - 1) + 5 * b + 7 * (every & ~(b - 1)) + 11 * (every & ~(2 * b - 1)) for b in lane]
    same(run(text, "masks")[:64], [s % 2**32 ^ every ^ 1 for s in sums])


def test_one_instruction_reads_two_spaces(text):
    table = [3, 1, 4, 1]
    same(run(text, "spaces")[:64], [int(WORDS[t]) + (1 if t & 1 else 2) + table[t % 4] for t in range(64)])


def test_a_counter_that_goes_down_and_around(text):
    value = 0
    for _ in range(64):
        value = 40 if value == 0 or value > 40 else value - 1
    assert run(text, "downwards")[:2].tolist() == [value, 1]


def test_integers(text):
    def bytes_of(x, signed):
        return [b - 256 if signed and b > 127 else b for b in x.to_bytes(4, "little")]

    def halves(x, signed):
        return [h - 65536 if signed and h > 32767 else h for h in (x & 65535, x >> 16)]

    wanted = []
    for x, y in zip(WORDS[:64].tolist(), WORDS[64:128].tolist(), strict=True):
        v = sum(h * b for h, b in zip(halves(x, True), bytes_of(y, True)[:2], strict=True)) + 5
        v += sum(h * b for h, b in zip(halves(x, False), bytes_of(y, False)[2:], strict=True)) + 1
        signed = [n - 2**32 if n >= 2**31 else n for n in (x, y)]
        v += abs(signed[0] - signed[1]) + 7
        apart = [abs(p - q) for p, q in zip(bytes_of(x, False), bytes_of(y, False), strict=True)]
        v += int.from_bytes(bytes(apart), "little") + (x % 2**24) * (y % 2**24)
        v += 64 - (x << 7).bit_length() + ((y << 20) & -(y << 20) % 2**64).bit_length() + int(f"{x:032b}"[::-1], 2)
        wide = ((x << 32 | y) * (y << 32 | x) - x) % 2**128
        wanted.append(v + (wide >> 96) + (wide >> 64) + wide)
    same(run(text, "bytes")[:64], wanted)


def towards(exact, mode):
    """The float32 next to a fraction. mode: down, up, or to zero."""
    near = np.float32(float(exact))
    mode = {"rz": "rm" if exact > 0 else "rp"}.get(mode, mode)
    while mode == "rm" and Fraction(float(near)) > exact:
        near = np.nextafter(near, np.float32(-np.inf))
    while mode == "rp" and Fraction(float(near)) < exact:
        near = np.nextafter(near, np.float32(np.inf))
    return near


def test_quotients_roots_and_conversions_with_a_direction(text):
    a = (np.random.default_rng(5).normal(size=128) * 100).astype(np.float32)
    found = run(text, "rounded", a).view(np.float32)[:384].reshape(6, 64)
    for t in range(64):
        x, y = (Fraction(float(v)) for v in (a[t], a[t + 64]))
        whole = int(a.view(np.uint32)[t]) << 20 | 1
        wanted = [towards(x / y, "rz"), towards(1 / y, "rp")]
        assert found[:2, t].tolist() == wanted
        assert Fraction(float(found[2, t])) ** 2 <= abs(x) < Fraction(float(np.nextafter(found[2, t], np.inf))) ** 2
        assert found[3, t] == towards(Fraction(whole), "rz")
        assert found[4, t] == towards(Fraction(float(a[t]) + 1e-12 * float(a[t + 64])), "rp")
        assert found[5, t] == (0 if a[t] > 0 else math.ulp(math.nextafter(float(a[t]), 0)))


def test_narrow_floats(text):
    found = run(text, "narrow", FLOATS)[:64]
    for t in range(64):
        pair = FLOATS[[t, t + 64]]
        e5 = formats.nearest(np.abs(pair), formats.E5M2[:124]) | np.where(np.signbit(pair), 128, 0)
        e4 = formats.to_e4m3(pair.astype(np.float16).astype(np.float32))
        assert found[t] == (int(e5[0]) | int(e5[1]) << 8) << 16 | int(e4[0]) | int(e4[1]) << 8


def matrices(raw, unit, decode):
    """The registers of a product as A (16, k) and B (k, 8), by the tables of the PTX manual."""
    a, b = (decode(np.ascontiguousarray(part.T).view(unit)) for part in (raw[:4], raw[4:6]))  # (thread, elements)
    each = a.shape[1] // 4
    left, right = np.zeros((16, 8 * each)), np.zeros((8 * each, 8))
    for lane in range(32):
        group, thread = divmod(lane, 4)
        for i in range(4 * each):
            register, element = divmod(i, each)
            k = thread * each + element + (4 * each if register >= 2 else 0)
            left[group + 8 * (register % 2), k] = a[lane, i]
        for i in range(2 * each):
            register, element = divmod(i, each)
            right[thread * each + element + 4 * each * register, group] = b[lane, i]
    return left, right


@pytest.mark.parametrize(
    ("name", "unit", "left", "right"),
    [
        ("product_s8", np.uint8, lambda v: v.view(np.int8), lambda v: v),
        ("product_e4m3", np.uint8, lambda v: formats.E4M3[v], lambda v: formats.E5M2[v]),
        ("product_tf32", np.uint32, lambda v: (v & np.uint32(0xFFFFE000)).view(np.float32), None),
    ],
)
def test_products_of_bytes_and_words(text, name, unit, left, right):
    raw = np.random.default_rng(6).integers(0, 48 if "e4m3" in name else 256, (6, 128), np.uint8).view(np.uint32)
    if name == "product_tf32":
        raw = (np.random.default_rng(7).integers(-64, 64, (6, 32)) + 2.0**-16).astype(np.float32).view(np.uint32)
    a, b = matrices(raw, unit, left)[0], matrices(raw, unit, right or left)[1]
    found = run(text, name, raw.reshape(-1), 32)[:128].view(np.int32 if name == "product_s8" else np.float32)
    sums = a @ b
    for lane in range(32):
        group, thread = divmod(lane, 4)
        wanted = [sums[group + 8 * (i // 2), 2 * thread + i % 2] + i + 1 for i in range(4)]
        assert found[4 * lane : 4 * lane + 4].tolist() == np.array(wanted).astype(found.dtype).tolist()


def test_a_product_with_sums_in_fp16(text):
    halves = np.random.default_rng(8).integers(-8, 9, (6, 64)).astype(np.float16)
    raw = halves.view(np.uint32)
    a, b = matrices(raw, np.uint16, lambda v: v.view(np.float16).astype(np.float32))
    found = run(text, "product_f16", raw.reshape(-1), 32)[:64].view(np.float16)
    sums = a[:, :8] @ b[:8]
    for lane in range(32):
        group, thread = divmod(lane, 4)
        assert found[4 * lane : 4 * lane + 4].tolist() == [
            sums[group + 8 * (i // 2), 2 * thread + i % 2] for i in range(4)
        ]


def test_what_is_called_without_a_body_is_an_error_only_where_it_is_executed():
    call = "@%p1 call.uni elsewhere, (); mov.u32 %r1, 5; ld.param.u64 %rd1, [p0]; st.global.u32 [%rd1], %r1;"
    out = np.zeros(1, np.uint32)
    ptx_model.run(kernels.entry("u64", "setp.eq.u32 %p1, 0, 1;" + call), "k", 1, 1, (out,))
    assert out[0] == 5
    with pytest.raises(ptx_model.Fault, match=r"not modelled: the function elsewhere"):
        ptx_model.run(kernels.entry("u64", "setp.eq.u32 %p1, 0, 0;" + call), "k", 1, 1, (out,))


def test_a_call_with_a_predicate():
    text = kernels.entry(
        "u64",
        "setp.eq.u32 %p1, 0, 1; { .param .b64 q; @%p1 call.uni once, (q); } ld.param.u64 %rd1, [p0];"
        "{ .param .b64 q; st.param.b64 [q], %rd1; @!%p1 call.uni once, (q); }",
    )
    once = ".func once(.param .b64 to)\n{\n.reg .b64 %rd1; ld.param.b64 %rd1, [to]; st.global.u32 [%rd1], 7;\nret;\n}\n"
    out = np.zeros(1, np.uint32)
    ptx_model.run(text.replace(".visible .entry", once + ".visible .entry"), "k", 1, 1, (out,))
    assert out[0] == 7


def test_a_function_that_calls_itself_is_refused():
    text = kernels.entry("u64", "call.uni again, ();").replace(
        ".visible .entry", ".func again()\n{\ncall.uni again, ();\nret;\n}\n.visible .entry"
    )
    with pytest.raises(ptx_model.Fault, match="the function again, which calls itself"):
        ptx_model.run(text, "k", 1, 1, (np.zeros(1, np.uint32),))
