"""problems/common/cpu.py and cpu_vectors.h: a C++ file is compiled for its flags, called, and its status raised."""

import pytest
import torch

from problems.common import build, cpu, load, nvfp4

STATUS = '#include <cstdint>\nextern "C" int launch(void* const*, const int64_t* status) { return *status; }\n'
THREADS = """
#include "cpu_threads.h"
extern "C" int launch(void* const* tensors, const int64_t* threads) {
    auto* seen = static_cast<int64_t*>(tensors[1]);
    return tensors[0] ? 9 : cpu::on_threads(*threads, [&](int64_t i) { seen[i]++; });
}
"""
# All bytes as e4m3, as pairs of e2m1 and as words of e2m1; sums of kLanes values; squares on their sides.
VECTORS = """
#include "cpu_vectors.h"
using namespace cpu;
extern "C" int launch(void* const* tensors, const int64_t* width) {
    const auto* bytes = static_cast<const uint8_t*>(tensors[0]);
    float* to[4];
    for (int i = 0; i < 4; i++) to[i] = static_cast<float*>(tensors[i + 1]);
    if (*width != kLanes) return kLanes;
    for (int i = 0; i < 256; i += kLanes) {
        U codes{};
        for (int lane = 0; lane < kLanes; lane++) codes[lane] = 0xABCDEF00u | bytes[i + lane];
        const F values = e4m3(bytes + i);
        store(to[0] + i, values);
        store(to[1] + 2 * i, e2m1(bytes + i));
        store(to[1] + 2 * i + kLanes, e2m1(bytes + i + kLanes / 2));
        const I products = dot(I{} + 5, e2m1_words((W)(codes << 8 & 0xFFFF)), W{} + 3);  // one code a lane
        for (int lane = 0; lane < kLanes; lane++) {
            to[2][i + lane] = products[lane];
            if (e4m3(codes)[lane] != values[lane] && bytes[i + lane] % 128 != 127) return 1;
            if (e2m1(codes)[lane] != e2m1(U{} + (codes[lane] & 15))[0]) return 2;
        }
    }
    F square[kLanes];
    for (int i = 0; i < kLanes; i++) square[i] = load<F>(to[3] + kLanes * i);
    transpose(square);
    for (int i = 0; i < kLanes; i++) store(to[3] + kLanes * i, square[i]);
    return total(load<F>(to[3])) != to[3][kLanes * kLanes] || largest(load<F>(to[3]))[1] != to[3][kLanes * kLanes + 1];
}
"""
AVX512 = ("avx512f", "avx512bw", "avx512vl")
WIDTHS = {(): 4, ("avx2", "fma", "f16c"): 8, AVX512: 16, (*AVX512, "avx512_vnni"): 16}


@pytest.fixture
def made(tmp_path, monkeypatch):
    """-> a function: a launcher of a text with flags, built in a folder of its own."""
    monkeypatch.setenv("KERNEL_BUILD_DIR", str(tmp_path / "builds"))

    def launcher(text: str, flags: tuple[str, ...] = ()) -> cpu.Launcher:
        (tmp_path / "cpu_some.cpp").write_text(text)
        return cpu.Launcher(tmp_path / "cpu_some.cpp", flags)

    return launcher


def test_a_status_is_an_error_that_names_the_variant(made):
    launch = made(STATUS)
    launch((), [0])
    for status, reason in cpu.REASONS.items():
        with pytest.raises(RuntimeError, match=f"^cpu_some: {reason}$"):
            launch((), [status])
    with pytest.raises(cpu.BadIndex, match="an index is outside the pages"):
        launch((), [cpu.BAD_INDEX])
    header = (build.COMMON / "cpu_threads.h").read_text()
    assert f"{{ kOk = 0, kNoThreads = 1, kNoMemory = 2, kBadIndex = {cpu.BAD_INDEX} }}" in header


def test_flags_that_the_cpu_lacks_are_named_before_anything_is_compiled(made, tmp_path):
    with pytest.raises(RuntimeError, match=r"^cpu_some: this CPU lacks avx9000$"):
        made(STATUS, ("avx9000",))((), [0])
    assert not (tmp_path / "builds").exists()


def test_every_thread_gets_one_number_and_no_tensor_is_a_null_pointer(made):
    seen = torch.zeros(4, dtype=torch.int64)
    made(THREADS)((None, seen), [4])
    assert seen.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(("flags", "width"), WIDTHS.items())
def test_vectors_of_every_width_give_the_same_values(flags, width, made, tmp_path):
    (tmp_path / "one.py").write_text(f"CPU_FLAGS = {flags}\n")
    if missing := load.missing_cpu_flags(tmp_path / "one.py"):
        pytest.skip(f"needs a CPU with {missing}")
    launch = made(VECTORS, flags)
    codes = torch.arange(256, dtype=torch.uint8)
    e4m3, e2m1, words = torch.zeros(256), torch.zeros(512), torch.zeros(256)
    square = torch.randint(-99, 99, (width, width), generator=torch.Generator().manual_seed(1)).float()
    turned = torch.cat([square.flatten(), square[:, 0].sum()[None], square[:, 0].max()[None]])
    launch((codes, e4m3, e2m1, words, turned), [width])
    finite = codes % 128 != 127
    assert torch.equal(256 * e4m3[finite], codes.view(torch.float8_e4m3fn).float()[finite])
    assert torch.equal(e2m1, nvfp4.decode(codes))
    assert torch.equal(words, 5 + 3 * 512 * nvfp4.decode(codes)[::2])
    assert torch.equal(turned[: width * width].view(width, width), square.T)
