"""What tests of kernels share."""

import pytest

from problems.common import load


@pytest.fixture(scope="module")
def ops(request):
    """The ops of the test module's `kernel`, for the GPU at hand."""
    return request.module.kernel.ops(load.device_target("cuda"))
