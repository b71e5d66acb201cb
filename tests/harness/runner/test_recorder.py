"""What is recorded of code: the variables of an image with their bytes."""

from types import SimpleNamespace

import pytest

from harness.runner import recorder, wire
from problems.common import build, cubins
from tests.support.marks import needs_nvcc

SOURCE = """
__device__ unsigned count;
namespace state { __device__ double table[7] = {1}; }
__constant__ short factors[5];
__global__ void use(float* x) { __shared__ float s[8]; *x = s[++count] * state::table[count] * factors[count]; }
"""


@needs_nvcc
@pytest.mark.parametrize("target", ["sm90", "sm100"])
def test_variables_of_an_image_are_known_by_name_and_size(tmp_path, target):
    (tmp_path / "variables.cu").write_text(SOURCE)
    (found,) = cubins.images(build.cuda(tmp_path / "variables.cu", target).path.read_bytes())
    image = bytes(found[0])
    assert sorted(cubins.variables(image)) == [("_ZN5state5tableE", 56), ("count", 4), ("factors", 10)]
    for broken in (b"", image[:100], image[:-1000], b"\x7fELF" + bytes(200), image[1:]):
        assert set(cubins.variables(broken)) <= set(cubins.variables(image))


def test_a_variable_that_is_too_large_is_named(monkeypatch):
    limit = wire.VARIABLE_BYTES
    monkeypatch.setattr(recorder, "_image", lambda _: (-1, [("fits", limit), ("table", limit + 1)]))
    monkeypatch.setattr(recorder, "_library", lambda: SimpleNamespace(capture_variable=lambda *_: 0))
    with pytest.raises(recorder.NotRecordedError, match=rf"variable table has {limit + 1} bytes.*use torch.empty"):
        recorder._variables(0, 0)
