"""What tests of kernels share."""

import pytest

from problems.common import load
from problems.dsv4_forward.ops import REFERENCE


@pytest.fixture(scope="module")
def ops(request):
    """The ops of the test module's `kernel`, for the GPU at hand."""
    return request.module.kernel.ops(load.device_target("cuda"))


@pytest.fixture(params=["reference", pytest.param("kernel", marks=pytest.mark.gpu)])
def either(request, monkeypatch):
    """The reference's ops, on tensors of the CPU; and those of the test module's `kernel`, for the GPU at hand."""
    if request.param == "kernel":
        return request.module.kernel.ops(load.device_target("cuda"))
    monkeypatch.setattr(request.module, "DEVICE", "cpu")
    return vars(REFERENCE)
