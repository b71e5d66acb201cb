"""tests/support/code_sections.py: names and comments do not count, and one other constant does."""

import shutil

import pytest

from problems.common import build
from tests.support import code_sections

TEXTS = {
    "sm90": """
// {comment}
__global__ void {name}(float* {tensor}) {{ {tensor}[threadIdx.x] = {value}.f * {tensor}[threadIdx.x]; }}
""",
    "cpu": 'extern "C" int launch(int {tensor}) {{ return {value} * {tensor}; }}  // {comment} {name}\n',
    "triton": '''
"""A variant."""
FACTOR = tl.constexpr({value}.0)

@triton.jit
def {name}({tensor}, N: tl.constexpr):
    """{comment}"""
    tl.store({tensor}, FACTOR * tl.load({tensor}, mask=N > 1, other=0.0))
''',
}
PLAIN = {"comment": "one", "name": "scale", "tensor": "x", "value": 3}
RENAMED = {"comment": "two", "name": "multiply_all_of_it", "tensor": "operand", "value": 3}
OTHER = {**PLAIN, "name": "scale_by_five", "value": 5}


@pytest.fixture(autouse=True)
def builds(tmp_path, monkeypatch):
    monkeypatch.setenv("KERNEL_BUILD_DIR", str(tmp_path / "builds"))
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-no-compress")


@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
def test_a_cubin_has_a_section_a_kernel_whatever_its_name(tmp_path):
    file = tmp_path / "kernel.cu"
    file.write_text("".join(TEXTS["sm90"].format(**text) for text in (PLAIN, RENAMED, OTHER)))
    found = list(code_sections.code_sections(build.cuda(file, "sm90").path.read_bytes(), "sm90"))
    assert len(found) == 3 and len(set(found)) == 2


@pytest.mark.parametrize("kind", ["cpu", "triton"])
def test_names_do_not_count_and_constants_do(kind, tmp_path):
    def digests(text: dict) -> list[str]:
        folder = tmp_path / text["name"]
        folder.mkdir()
        file = folder / ("kernel.cpp" if kind == "cpu" else "variant.py")
        file.write_text(TEXTS[kind].format(**text))
        if kind == "triton":
            return code_sections.triton_kernels(file)
        return list(code_sections.code_sections(build.cpp(file).path.read_bytes(), kind))

    plain = digests(PLAIN)
    assert len(plain) == (2 if kind == "triton" else 1)
    assert digests(RENAMED) == plain != digests(OTHER)


def test_every_variant_of_our_own_is_compared():
    found = set(code_sections.jobs(code_sections.ROOT))
    sm100 = {("moe_gemm/sm90_grouped", "sm100"), ("nvfp4_gemv/sm100_cute", "sm100")}
    sm90 = {("dsv4_forward/fused", "sm90"), ("moe_gemm/sm90_triton", "sm90")}
    assert sm100 | sm90 | {("fmha_decode/cpu_avx2", "cpu")} < found
    assert not any("peer_" in name or "torch_" in name or "composed" in name for name, _ in found)
