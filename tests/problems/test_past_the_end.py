"""A read of the byte behind a tensor of each problem is found by the verb sanitize."""

import pytest

from harness.judge.verdict import Result
from harness.problem import folders
from harness.tools import modes

OURS = ("nvfp4_gemv", "fmha_decode", "moe_gemm", "linear_decode", "mhc_site", "indexer")
PAST = """__global__ void read(const char* from, size_t at, char* to) { *to = from[at]; }
extern "C" int past(const char* from, size_t at, char* to) {
    read<<<1, 1>>>(from, at, to);
    return cudaGetLastError();
}
"""
CALL = """from ctypes import c_size_t, c_void_p
from pathlib import Path
from problems.common import build
from harness.runner import tree
def custom_kernel(data):
    past = build.cuda(Path(__file__).with_suffix(".cu"), "sm90").function("past", c_void_p, c_size_t, c_void_p)
    *tensors, last = [tensor for tensor in tree.tensors(data) if tensor.numel()]
    build.check(past(tensors[{i}].data_ptr(), tree.raw(tensors[{i}]).numel() - {back}, last.data_ptr()), "past")
"""


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "i", "back"), [*((n, i, 0) for n in OURS for i in (0, -1)), ("indexer", 0, 1)])
def test_a_read_of_the_byte_behind_a_tensor_is_found(tmp_path, monkeypatch, name, i, back):
    monkeypatch.setattr(modes, "SANITIZE_TOOLS", ("memcheck",))
    found, file = folders.find(name), tmp_path / "mine.py"
    file.write_text(CALL.format(i=i, back=back))
    file.with_suffix(".cu").write_text(PAST)
    judged = [Result(folders.submission(found, file), "sm90")]
    smallest = min(found.tests, key=lambda case: case.bytes)
    faults = modes.sanitize(found, judged, [smallest], "sm90", lambda _: None)
    assert faults == ([] if back else ["mine memcheck: the tool found errors"])
