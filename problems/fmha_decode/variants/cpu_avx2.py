"""cpu_avx2: tiles of entries as fp32 in the cache, both products as blocks of AVX2 registers, all cores."""

from ctypes import c_int64, c_void_p
from pathlib import Path

from task import input_t, output_t, unpack

from problems.common import build, cpu

TARGETS = ("cpu",)
CPU_FLAGS = ("avx2", "fma", "f16c")  # as /proc/cpuinfo spells them
SOURCE = Path(__file__).with_suffix(".cpp")
Pointers, Numbers = c_void_p * 10, c_int64 * 9  # of the tensors; of the sizes and of the pages of both caches
LAUNCHER = cpu.Launcher(SOURCE, (Pointers, Numbers), needs="AVX2, FMA or F16C")


def compile_for(target: str) -> list[build.Artefact]:
    """Compile for `target`, "cpu"."""
    return [build.cpp(SOURCE)]


def custom_kernel(data: input_t) -> output_t:
    """Write data.out, bf16 (B, S, H, 512), and data.lse, fp32 (B, S, H), and return them.

    ValueError as unpack says; RuntimeError: this CPU cannot run it, a thread cannot start, memory is short, or an index
    that counts is neither -1 nor an entry.
    """
    numbers = Numbers(*unpack(data), data.window.shape[0], data.compressed.shape[0])
    LAUNCHER.check(LAUNCHER.function(Pointers(*[tensor.data_ptr() for tensor in data]), numbers))
    return data.out, data.lse
