"""The loop without the judge's code makes the data of its calls as the judge does."""

import pytest
import torch

from harness.problem import folders
from problems.common import load
from tests.attacks import bare_loop


@pytest.mark.slow
def test_calls_share_prepared_weights_and_have_inputs_of_their_own():
    variant = load.variant("moe_gemm", "torch_grouped")
    case = next(case for case in folders.find("moe_gemm").timed("cpu") if case.params["tokens"] == 1)
    data = bare_loop.contents("moe_gemm", variant, case, "cpu")
    assert len(data) == bare_loop.BUFFERS
    assert data[0].weights is data[1].weights
    assert not torch.equal(data[0].inputs.x, data[1].inputs.x)
    variant.custom_kernel(data[1])
    assert data[1].outputs.out.isfinite().all() and data[0].outputs.out.isnan().all()


def test_contents_of_a_problem_without_weights_are_its_own():
    case = folders.find("nvfp4_gemv").timed("cpu")[0]
    data = bare_loop.contents("nvfp4_gemv", load.variant("nvfp4_gemv", "torch_dequant"), case, "cpu")
    assert not torch.equal(data[0][0].view(torch.uint8), data[1][0].view(torch.uint8))
