"""moe_gemm's sm90_grouped with many tokens and quantised activations, in the model of the GPU and on one.

What takes calls of over 256 tokens with 12 and more an expert takes all of over 4 here.
"""

import json
import re
import shutil
import subprocess
import sys
from unittest import mock

import pytest

from problems.common import load
from tests.dsv4 import test_moe_mxfp4
from tests.support import ROOT

FOLDER = load.PROBLEMS / "moe_gemm"
task = load.module(FOLDER, "task")
reference = load.module(FOLDER, "reference")
DEVICE = "cuda"  # in_model.call says another
LOWERED = {"MOST_TOKENS": 4, "MANY": 0}
CODE = """
import json, sys
from tests.dsv4 import in_model
from tests.problems import test_moe_prefill as tests

model = in_model.installed()
model.edit = tests.latched
model.set_order(sys.argv[1], 0xFF, 2)
in_model.call(tests, json.loads(sys.argv[2]), model)
"""
# Tokens, experts, experts of a token, hidden, inner, router, content, and what in_scales are divided by. Experts of up
# to 48 slots, which are one item, and of more, in items of up to 128; last tiles that are not full; experts without
# tokens beside each other; values far beyond the largest, and blocks of zeros.
NVFP4_CASES = [
    (9, 3, 1, 192, 320, "uniform", "plain", 1),
    (59, 5, 2, 192, 320, "one", "clamped", 1),
    (131, 4, 1, 576, 64, "one", "magnitudes", 1),
    (60, 9, 2, 320, 192, "zipf", "extreme", 1),
    (75, 3, 2, 128, 448, "uniform", "zeros", 1),
    (53, 4, 2, 64, 192, "zipf", "plain", 16),
]
# Tokens, experts, experts of a token, hidden, inner: as test_moe_mxfp4 has them. A last group of 64 channels.
FP8_CASES = [(9, 3, 2, 64, 128), (59, 2, 1, 192, 320), (75, 3, 2, 320, 192), (131, 1, 1, 576, 64), (21, 3, 2, 128, 448)]


def latched(name: str, ptx: str) -> str:
    """Where lanes part the model goes on with those first in the text, and one that still stores would be left behind.
    So all jumps to a loop's head, if there are several, go by one place at the kernel's end.
    """
    before, entry, rest = ptx.partition(f".entry {name}(")
    kernel, close, behind = rest.partition("\tret;\n\n}")
    for label in re.findall(r"\n(\$L__BB\w+):", kernel):
        jump = f"\t{label};"
        if jump in kernel.partition(f"\n{label}:")[2] and kernel.count(jump) > 1:
            kernel = kernel.replace(jump, f"\t{label}_back;")
            kernel = kernel.replace(f"\n{label}:", f"\n\tbra.uni \t{label}_back;\n{label}:")
            close = close.replace("}", f"{label}_back:\n\tbra.uni \t{label};\n}}")
    return before + entry + kernel + close + behind


def check_nvfp4(case: tuple) -> None:
    """Against the reference, some ids no experts. Sums in another order put few codes on the other side of a rounding:
    what is left is that of the output.
    """
    names = ("tokens", "experts", "topk", "hidden", "inner", "router", "content")
    sizes = {**dict(zip(names, case, strict=False)), "activation": "nvfp4", "seed": 7}
    weights = reference.generate_weights(**sizes, device=DEVICE)
    weights.in_scale13.div_(case[7])
    weights.in_scale2.div_(case[7])
    data = task.Data(weights, *reference.generate_input(**sizes, device=DEVICE))
    for i, bad in enumerate((-1, sizes["experts"], 2**31 - 1)):
        data.inputs.topk_ids[7 + i :: 40, i % sizes["topk"]] = bad
    module = load.variant("moe_gemm", "sm90_grouped")
    with mock.patch.multiple(module, **LOWERED):
        out = module.custom_kernel(data._replace(weights=module.prepare(weights)))
    result = reference.compare(data, reference.ref_kernel(data), out)
    assert result.ok and result.rel < 3e-3, result


def check_fp8(sizes: tuple) -> None:
    module = load.variant("moe_gemm", "sm90_grouped")
    with mock.patch.multiple(module, **LOWERED):
        test_moe_mxfp4.right(test_moe_mxfp4.compare(module, tuple(sizes), DEVICE, ()))


def in_the_model(order: str, calls: list[tuple[str, dict]]) -> None:
    if not shutil.which("nvcc"):
        pytest.skip("needs nvcc")
    command = [sys.executable, "-c", CODE, order, json.dumps(calls)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500)
    assert ran.returncode == 0, ran.stderr[-3000:]


@pytest.mark.slow
def test_nvfp4_is_right_in_the_model_of_the_gpu():
    in_the_model("eager", [("check_nvfp4", {"case": case}) for case in NVFP4_CASES])


@pytest.mark.slow
def test_fp8_is_right_in_the_model_of_the_gpu():
    in_the_model("eager", [("check_fp8", {"sizes": sizes}) for sizes in FP8_CASES])


@pytest.mark.slow
@pytest.mark.parametrize("order", ["lazy", "random:1"])
def test_other_orders_in_the_model_change_nothing(order):
    nvfp4, fp8 = (52, 3, 2, 64, 192, "one", "clamped", 1), (52, 1, 1, 64, 192)
    in_the_model(order, [("check_nvfp4", {"case": nvfp4}), ("check_fp8", {"sizes": fp8})])


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*NVFP4_CASES, (700, 17, 3, 1088, 576, "zipf", "plain", 1)], ids=str)
def test_nvfp4_is_right_on_the_gpu(case):
    check_nvfp4(case)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [*FP8_CASES, (700, 17, 3, 1088, 576), (2048, 8, 6, 4096, 2048)], ids=str)
def test_fp8_is_right_on_the_gpu(sizes):
    check_fp8(sizes)
