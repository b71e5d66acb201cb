"""What is read from machine code, where nvcc and nvdisasm are installed, and what is said where nvdisasm is not."""

import shutil
import subprocess

import pytest

from problems.common import cubins

SOURCE = """
#include <cstdint>
#include <cuda_bf16.h>
__device__ uint32_t at(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }
extern "C" __global__ void both(int* out) {
    __shared__ uint32_t slot;
    __shared__ uint64_t barrier;
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(at(&barrier)) : "memory");
    if (threadIdx.x < 32)
        asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], 32;" ::"r"(at(&slot)) : "memory");
    __syncthreads();
    uint32_t value;
    asm volatile("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%0}, [%1]; tcgen05.wait::ld.sync.aligned;"
                 : "=r"(value) : "r"(slot));
    out[threadIdx.x] = value;
    if (threadIdx.x < 32)
        asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, 32;" ::"r"(slot));
}
"""


def test_the_instructions_are_found(tmp_path):
    if not shutil.which("nvcc") or not cubins.disassembler():
        pytest.skip("needs nvcc and nvdisasm")
    (tmp_path / "k.cu").write_text(SOURCE)
    command = ["nvcc", "-cubin", "-gencode=arch=compute_100a,code=sm_100a", "k.cu", "-o", "k.cubin"]
    subprocess.run(command, cwd=tmp_path, check=True)
    (found,) = cubins.instructions(tmp_path / "k.cubin").values()
    assert {"LDTM", "UTCATOMSWS.FIND_AND_SET.ALIGN", "SYNCS.EXCH.64"} <= set(found["sass"])
    assert not {"LDL", "STL", "FADD"} & set(found["sass"])


def test_kernels_of_the_dsl_are_found_by_their_function():
    found = {"kernel_cutlass_gemm_ptri32gmem": {"sass": {"HMMA": 1}}, "_Z4gemv": {"sass": {}}}
    assert cubins.named(found, "sm90_cute-sm100-n8u1-begin-gemm") == {"sass": {"HMMA": 1}}
    assert cubins.named(found, "_Z4gemv") == {"sass": {}} and cubins.named(found, "sm90_cute-sm100-n8u1-route") == {}


def test_without_nvdisasm_nothing_is_said_of_the_instructions(monkeypatch, tmp_path):
    monkeypatch.setattr(cubins, "disassembler", lambda: None)
    (tmp_path / "k.cubin").write_bytes(b"")
    assert cubins.instructions(tmp_path / "k.cubin") == {} and "nvidia-cuda-nvdisasm" in cubins.MISSING
