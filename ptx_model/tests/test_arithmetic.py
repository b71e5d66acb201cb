"""The model's arithmetic against exact fractions and numpy: directed rounding, halves, fp64, local memory."""

import math
import shutil
import subprocess
from fractions import Fraction

import numpy as np
import pytest

import ptx_model
from ptx_model import formats
from ptx_model.tests import kernels

FLOAT = np.float32


def numbers(count):
    """float32 of all sizes; many sums of two lie between two neighbours, some on a tie."""
    rng = np.random.default_rng(11)
    values = rng.normal(size=count) * 2.0 ** rng.integers(-30, 30, count)
    values[::5] = rng.integers(-4, 5, len(values[::5]))
    values[1::7] = 1 + 2.0**-23 * rng.integers(0, 3, len(values[1::7]))
    values[2::7] = 2.0**-24 * rng.choice([-3, -1, 1, 3], len(values[2::7]))
    return values.astype(FLOAT)


def rounded(exact, mode):
    """The float32 that a fraction is rounded to. mode: "rn", "rz", "rm", "rp"."""
    near = FLOAT(float(exact))
    around = {near, np.nextafter(near, FLOAT(np.inf)), np.nextafter(near, FLOAT(-np.inf))}
    around |= {FLOAT(np.nextafter(v, FLOAT(s * np.inf))) for v in around for s in (1, -1)}
    fractions = {Fraction(float(v)): v for v in around}
    below, above = max(f for f in fractions if f <= exact), min(f for f in fractions if f >= exact)
    if mode == "rn":
        if exact - below != above - exact:
            return fractions[below if exact - below < above - exact else above]
        return next(fractions[f] for f in (below, above) if below == above or not fractions[f].view(np.uint32) & 1)
    return fractions[{"rm": below, "rp": above, "rz": below if exact > 0 else above}[mode]]


LOADS = "".join(
    f"ld.param.u64 %rd{i + 1}, [p{i}]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd9, %r1, 4; "
    f"add.u64 %rd{i + 1}, %rd{i + 1}, %rd9; ld.global.f32 %f{i + 1}, [%rd{i + 1}];\n"
    for i in range(3)
)


def execute(instruction, a, b, c):
    """What a thread's `instruction`, from %f1, %f2, %f3 to %f1, makes of each element."""
    out = a.copy()
    text = kernels.entry("u64 u64 u64", LOADS + f"{instruction}; st.global.f32 [%rd1], %f1;")
    ptx_model.run(text, "k", 1, len(a), (out, b, c))
    return out


def test_the_larger_magnitude_has_the_product_of_the_signs():
    a, b = numbers(512), numbers(700)[188:]
    got = execute("max.xorsign.abs.f32 %f1, %f1, %f2", a, b, b)
    assert np.array_equal(got, np.maximum(np.abs(a), np.abs(b)) * np.where(np.signbit(a) ^ np.signbit(b), -1, 1))


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_sums_products_and_fma_are_rounded_once_in_every_mode(mode):
    a, b, c = numbers(512), numbers(600)[88:], numbers(700)[188:]
    fractions = [[Fraction(float(v)) for v in values] for values in (a, b, c)]
    exact = {
        f"add.{mode}.f32 %f1, %f1, %f2": [x + y for x, y, _ in zip(*fractions, strict=True)],
        f"sub.{mode}.f32 %f1, %f1, %f2": [x - y for x, y, _ in zip(*fractions, strict=True)],
        f"mul.{mode}.f32 %f1, %f1, %f2": [x * y for x, y, _ in zip(*fractions, strict=True)],
        f"fma.{mode}.f32 %f1, %f1, %f2, %f3": [x * y + z for x, y, z in zip(*fractions, strict=True)],
    }
    for instruction, wanted in exact.items():
        assert np.array_equal(execute(instruction, a, b, c), [rounded(w, mode) for w in wanted]), instruction


def test_a_sum_of_opposite_numbers_is_minus_zero_where_it_is_rounded_down():
    a, zero = np.full(32, 3, FLOAT), np.zeros(32, FLOAT)
    assert np.signbit(execute("add.rm.f32 %f1, %f1, %f2", a, -a, zero)).all()
    assert not np.signbit(execute("add.rz.f32 %f1, %f1, %f2", a, -a, zero)).any()


def test_what_just_exceeds_a_tie_of_bf16_is_rounded_up():
    value = np.array([1 + 2.0**-8, 1 + 2.0**-8 + 2.0**-40, 1 + 2.0**-8 - 2.0**-40])
    assert formats.to_bf16(value).tolist() == [0x3F80, 0x3F81, 0x3F80]


def test_fp64_fma_is_rounded_once():
    body = """
ld.param.u64 %rd1, [p0]; .reg .f64 %d<4>; ld.global.f64 %d1, [%rd1]; ld.global.f64 %d2, [%rd1+8];
fma.rn.f64 %d3, %d1, %d1, %d2; sqrt.rn.f64 %d2, %d1; st.global.f64 [%rd1], %d3; st.global.f64 [%rd1+8], %d2;"""
    x = 1 + 2.0**-30
    out = np.array([x, -(x * x)])
    ptx_model.run(kernels.entry("u64", body), "k", 1, 1, (out,))
    assert out[0] == float(Fraction(x) ** 2 - Fraction(x * x)) != 0 and out[1] == math.sqrt(x)


LOCAL = """
.local .align 16 .b8 mine[64]; ld.param.u64 %rd1, [p0]; mov.u32 %r1, %tid.x; mov.u64 %rd2, mine;
cvta.local.u64 %rd3, %rd2; and.b32 %r2, %r1, 15; mul.wide.u32 %rd4, %r2, 4;
mov.u32 %r3, 0;
FILL: mul.wide.u32 %rd5, %r3, 4; add.u64 %rd6, %rd2, %rd5; mul.lo.u32 %r4, %r3, %r1; st.local.u32 [%rd6], %r4;
add.u32 %r3, %r3, 1; setp.lt.u32 %p1, %r3, 16; @%p1 bra FILL;
add.u64 %rd7, %rd3, %rd4; ld.u32 %r5, [%rd7+BEHIND]; mul.wide.u32 %rd8, %r1, 4; add.u64 %rd1, %rd1, %rd8;
st.global.u32 [%rd1], %r5;"""


def test_each_thread_has_its_own_local_memory():
    out = np.zeros(64, np.uint32)
    ptx_model.run(kernels.entry("u64", LOCAL.replace("+BEHIND", "")), "k", 1, 64, (out,), policy="random")
    assert np.array_equal(out, np.arange(64) * (np.arange(64) & 15))
    with pytest.raises(ptx_model.Fault, match="bounds: an access of 4 bytes to local memory"):
        ptx_model.run(kernels.entry("u64", LOCAL.replace("BEHIND", "4")), "k", 1, 64, (out,))


SOURCE = """
extern "C" __global__ void k(int *out, float *x, double *y) {
    const int t = threadIdx.x;
    int a[16];
    for (int i = 0; i < 16; ++i) a[i] = i * t + out[t + i];
    int sum = 0;
#pragma unroll 1
    for (int i = 0; i < 16; ++i) a[(i * 7 + out[t]) & 15] += i, sum += a[(out[i] + t) & 15];
    const float v = x[t];
    x[t] = expf(v) + __expf(v) + logf(v + 9.f) + tanhf(v) + sinf(v) + powf(fabsf(v), 1.7f) + rsqrtf(v + 9.f);
    y[t] = sqrt(fma(y[t], y[t], 2.0)) + exp(y[t]) + 1.0 / y[t];
    out[t + 64] = sum;
}
"""


@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
def test_functions_of_cuda_have_their_values(tmp_path):
    (tmp_path / "k.cu").write_text(SOURCE)
    command = ["nvcc", "-ptx", "-arch=sm_90a", str(tmp_path / "k.cu"), "-o", str(tmp_path / "k.ptx")]
    subprocess.run(command, check=True, capture_output=True)
    rng = np.random.default_rng(12)
    out, x, y = rng.integers(0, 50, 96).astype(np.int32), rng.uniform(-4, 4, 32).astype(FLOAT), rng.uniform(0.1, 2, 32)
    before, v, w = out.tolist(), x.astype(np.float64), y.copy()
    ptx_model.run((tmp_path / "k.ptx").read_text(), "k", 1, 32, (out, x, y))
    want = 2 * np.exp(v) + np.log(v + 9) + np.tanh(v) + np.sin(v) + np.abs(v) ** 1.7 + 1 / np.sqrt(v + 9)
    assert np.allclose(x, want, rtol=2e-6, atol=2e-6)
    assert np.allclose(y, np.sqrt(w * w + 2) + np.exp(w) + 1 / w, rtol=1e-15)
    for t in range(32):
        a, total = [i * t + before[t + i] for i in range(16)], 0
        for i in range(16):
            a[(i * 7 + before[t]) & 15] += i
            total += a[(before[i] + t) & 15]
        assert out[t + 64] == total
