"""moe_gemm's sm90_grouped with NVFP4 activations, in the model of the GPU: a row's bits depend on its token only."""

import json
import shutil

import pytest

from tests.problems.test_in_model import moe
from tests.support import forked

MULTIPROCESSORS = 2
# Every call in one process: the variant is compiled once.
CODE = """
import json, sys
import torch
from problems.common import load
from ptx_model import driver

driver.MULTIPROCESSORS["sm90"] = {multiprocessors}
model = driver.install("sm90")
folder = load.PROBLEMS / "moe_gemm"
task, reference = load.module(folder, "task"), load.module(folder, "reference")
module = load.variant("moe_gemm", "sm90_grouped")
for case in json.loads(sys.argv[1]):
    size = case["experts"]  # of the routed ones; the shared one is one more
    every = reference.generate_weights(**{**case, "experts": size + 1}, device="cpu")
    inputs, outputs = reference.generate_input(**case, device="cpu")
    routed, shared = (
        task.Weights(*(one[part].contiguous() if isinstance(one, torch.Tensor) else one for one in every))
        for part in (slice(0, size), slice(size, None))
    )
    alone, both = module.prepare_with_shared(routed, shared)
    last = torch.full_like(inputs.topk_ids[:, :1], size), torch.ones_like(inputs.topk_weights[:, :1])
    named = [torch.cat(pair, 1) for pair in zip(inputs[1:], last)]

    def called(function, state, inputs, first=0, count=case["tokens"]):
        some = task.Inputs(*(tensor[first : first + count].clone() for tensor in inputs))
        out = task.Outputs(torch.full_like(outputs.out[:count], torch.nan))
        function(task.Data(state, some, out))
        model.check()
        return out.out.view(torch.int16)

    for function, state in ((module.custom_kernel, alone), (module.with_shared, both)):
        whole = called(function, state, inputs)
        same = [
            count for count in {counts} if count < case["tokens"]
            and called(function, state, inputs, 1, count).equal(whole[1 : 1 + count])
        ]
        print(json.dumps([same, called(function, state, inputs).equal(whole)]), flush=True)
    print(json.dumps(called(module.custom_kernel, both, [inputs[0], *named]).equal(whole)), flush=True)
"""
COUNTS = [1, 2, 3, 5]


@pytest.mark.slow
def test_a_rows_bits_are_those_it_has_in_any_batch():
    """By itself, which no launch quantises ahead, and among 2, 3, 5 and up to 9 tokens, in one tile and in two. So are
    those of a second call, and those with the shared expert, whether ids name it or not, or no other.
    """
    if not shutil.which("nvcc"):
        pytest.skip("needs nvcc")
    cases = [
        moe(9, 3, 1, 320, 192, "nvfp4", "plain", "one"),
        moe(8, 3, 1, 192, 576, "nvfp4", "magnitudes", "one"),
        moe(7, 3, 2, 1088, 64, "nvfp4", "zeros", "uniform"),
        moe(12, 3, 2, 192, 64, "nvfp4", "plain", "part"),  # with the shared expert more than 32 slots
    ]
    code = CODE.replace("{multiprocessors}", str(MULTIPROCESSORS)).replace("{counts}", str(COUNTS))
    ran = forked.run(["-c", code, json.dumps(cases)], timeout=1500)
    found = [json.loads(line) for line in ran.stdout.splitlines()]
    assert found == [[COUNTS, True], [COUNTS, True], True] * 4, (found, ran.stderr[-2000:])
