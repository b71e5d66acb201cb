"""tests/support/code_sections.py: names and comments do not count, and one other constant does."""

import shutil

import pytest

from problems.common import build
from tests.support import code_sections

KERNEL = """
// {comment}
__global__ void {name}(float* {tensor}) {{ {tensor}[threadIdx.x] = {value}.f * {tensor}[threadIdx.x]; }}
extern "C" int launch() {{ return 0; }}
"""
HOST = 'extern "C" int launch(int {tensor}) {{ return {value} * {tensor}; }}  // {comment} {name}\n'
TRITON = '''
"""A variant."""
FACTOR = tl.constexpr({value}.0)

@triton.jit
def {name}({tensor}, N: tl.constexpr):
    """{comment}"""
    tl.store({tensor}, FACTOR * tl.load({tensor}, mask=N > 1, other=0.0))
'''
PLAIN = {"comment": "one", "name": "scale", "tensor": "x", "value": 3}
RENAMED = {"comment": "two", "name": "multiply_all_of_it", "tensor": "operand", "value": 3}
OTHER = {**PLAIN, "value": 5}


@pytest.mark.parametrize("kind", [pytest.param("sm90", marks=pytest.mark.skipif(
    not shutil.which("nvcc"), reason="needs nvcc")), "cpu", "triton"])  # fmt: skip
def test_names_do_not_count_and_instructions_do(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("KERNEL_BUILD_DIR", str(tmp_path / "builds"))
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-no-compress")

    def digests(text: dict) -> list[str]:
        if kind == "triton":
            file = tmp_path / "variant.py"
            file.write_text(TRITON.format(**text))
            return code_sections.triton_kernels(file)
        file = tmp_path / ("kernel.cpp" if kind == "cpu" else "kernel.cu")
        file.write_text((HOST if kind == "cpu" else KERNEL).format(**text))
        build._build.cache_clear()
        made = build.cpp(file) if kind == "cpu" else build.cuda(file, kind)
        return sorted(code_sections.code_sections(made.path.read_bytes(), kind))

    plain = digests(PLAIN)
    assert len(plain) == (2 if kind == "triton" else 1)
    assert digests(RENAMED) == plain and digests(OTHER) != plain


def test_every_variant_of_our_own_is_compared():
    found = set(code_sections.jobs(code_sections.ROOT))
    assert {
        ("moe_gemm/sm90_grouped", "sm100"),
        ("nvfp4_gemv/sm100_cute", "sm100"),
        ("fmha_decode/cpu_avx2", "cpu"),
    } < found
    assert {("dsv4_forward/fused", "sm90"), ("moe_gemm/sm90_triton", "sm90")} < found
    assert not any("peer_" in name or "torch_" in name or "composed" in name for name, _ in found)
