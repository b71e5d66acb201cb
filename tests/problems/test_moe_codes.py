"""moe_gemm's sm90_grouped with NVFP4 activations, in the model of the GPU: rows do not depend on the other tokens."""

import json
import shutil
import subprocess
import sys

import pytest

from tests.support import ROOT

MULTIPROCESSORS = 2
# Every call in one process: the variant is compiled once.
CODE = """
import json, sys
import torch
from problems.common import load
from problems.common.ptx_model import driver

driver.MULTIPROCESSORS["sm90"] = {multiprocessors}
model = driver.install("sm90")
folder = load.PROBLEMS / "moe_gemm"
task, reference = load.module(folder, "task"), load.module(folder, "reference")
module = load.variant("moe_gemm", "sm90_grouped")
for case in json.loads(sys.argv[1]):
    weights = reference.generate_weights(**case, device="cpu")
    inputs, outputs = reference.generate_input(**case, device="cpu")
    state = module.prepare(weights)

    def called(first, count):
        some = task.Inputs(*(tensor[first : first + count].clone() for tensor in inputs))
        out = task.Outputs(outputs.out[:count].clone())
        module.custom_kernel(task.Data(state, some, out))
        model.check()
        return out.out

    whole = called(0, case["tokens"])
    same = [
        count for count in (1, 2, 3, 5) if count < case["tokens"]
        and called(1, count).view(torch.int16).equal(whole[1 : 1 + count].view(torch.int16))
    ]
    print(json.dumps(same), flush=True)
"""


def case(tokens: int, hidden: int, inner: int, content: str, router: str = "one", topk: int = 1) -> dict:
    return {
        "tokens": tokens, "experts": 3, "topk": topk, "hidden": hidden, "inner": inner, "activation": "nvfp4",
        "router": router, "content": content, "seed": 7,
    }  # fmt: skip


@pytest.mark.slow
def test_a_rows_bits_are_those_it_has_in_any_batch():
    """Alone, and among 2, 3, 5, 8 and 9 tokens of its expert, all of which are multiplied differently."""
    if not shutil.which("nvcc"):
        pytest.skip("needs nvcc")
    cases = [case(9, 320, 192, "plain"), case(8, 192, 576, "magnitudes"), case(7, 1088, 64, "zeros", "uniform", 2)]
    code = CODE.replace("{multiprocessors}", str(MULTIPROCESSORS))
    ran = subprocess.run(
        [sys.executable, "-c", code, json.dumps(cases)], cwd=ROOT, capture_output=True, text=True, timeout=1500
    )
    assert [json.loads(line) for line in ran.stdout.splitlines()] == [[1, 2, 3, 5]] * 3, ran.stderr[-2000:]
