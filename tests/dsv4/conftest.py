"""What tests of kernels share."""

import pytest

from problems.common import load
from problems.dsv4_forward.ops import REFERENCE
from tests.dsv4 import in_model


@pytest.fixture(scope="module")
def ops(request):
    """The ops of the test module's `kernel`, for the GPU at hand."""
    return request.module.kernel.ops(load.device_target("cuda"))


@pytest.fixture
def on_a_cpu(request, monkeypatch):
    """The test module's tensors are a CPU's."""
    for module in (request.module, in_model):
        monkeypatch.setattr(module, "DEVICE", "cpu")


@pytest.fixture(params=["reference", pytest.param("kernel", marks=pytest.mark.gpu)])
def either(request):
    """The reference's ops, on tensors of the CPU; and those of the test module's `kernel`, for the GPU at hand."""
    if request.param == "kernel":
        return request.module.kernel.ops(load.device_target("cuda"))
    request.getfixturevalue("on_a_cpu")
    return vars(REFERENCE)
