"""moe_gemm's sm90_grouped with many tokens and quantised activations, in the model of the GPU and on one.

What takes calls of over 256 tokens with 12 and more an expert takes all of over 4 here.
"""

import json
import re
import shutil
from typing import Any
from unittest import mock

import pytest
import torch

from problems.common import fp8, load
from tests.problems import cases
from tests.support import forked

task, reference = cases.task("moe_gemm"), cases.reference("moe_gemm")
DEVICE = "cuda"  # in_model.call says another
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
# The same but for the last, which is whether what counts is small beside the rest of its group. Last groups of 64.
FP8_CASES = [
    (9, 3, 2, 64, 128, "uniform", "plain", False),
    (59, 3, 2, 192, 320, "uniform", "clamped", False),
    (75, 4, 2, 320, 192, "one", "zeros", False),
    (131, 2, 1, 576, 64, "one", "magnitudes", False),
    (55, 2, 1, 256, 320, "one", "plain", True),
    (21, 3, 2, 128, 448, "uniform", "plain", True),
]


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


def made(case: tuple, activation: str) -> Any:
    """Data of a case; some ids are no experts."""
    tokens, experts, topk, hidden, inner, router, content, _ = case
    sizes = task.Case(tokens, experts, topk, hidden, inner, activation, router, content, 7)
    data = cases.made("moe_gemm", DEVICE, **vars(sizes))
    for i, bad in enumerate((-1, experts, 2**31 - 1)):
        data.inputs.topk_ids[7 + i :: 40, i % topk] = bad
    data.inputs.topk_ids[3:5] = -1
    return data


def called(data: Any, prepare: str) -> torch.Tensor:
    module = load.variant("moe_gemm", "sm90_grouped")
    with mock.patch.multiple(module, MOST_TOKENS=4, MANY=0):
        return module.custom_kernel(data._replace(weights=getattr(module, prepare)(data.weights)))


def check_nvfp4(case: tuple) -> None:
    """Sums in another order change few codes; the rest of the error is the rounding of the output."""
    data = made(case, "nvfp4")
    data.weights.in_scale13.div_(case[7])
    data.weights.in_scale2.div_(case[7])
    result = reference.compare(data, reference.ref_kernel(data), called(data, "prepare"))
    assert result.ok and result.rel < 3e-3, result


def check_fp8(case: tuple) -> None:
    data = made(case, "bf16")
    if case[7]:
        _let_small_values_count(data)
    result = reference.compare(data, fp8_reference(data), called(data, "prepare_fp8"))
    assert result.ok and result.rel < 3e-3, result
    if case[7]:
        assert not reference.compare(data, fp8_reference(data, 64), data.outputs.out).ok


def _let_small_values_count(data: Any) -> None:
    """Of each group of 128 the first half is large, and meets weights of zero; the second is lost in part."""
    w, x = data.weights, data.inputs.x
    x[:, torch.arange(x.shape[1]) // 64 % 2 == 1] *= 2.0**-15
    w.g13.mul_(2.0**11)
    inner = w.w2.shape[2] * 2
    small = torch.arange(2 * inner) % inner // 64 % 2 == 1
    for rows, factor in ((small, 2.0**-3), (~small, 2.0**5)):
        w.s13[:, rows] = (w.s13[:, rows].float() * factor).to(w.s13.dtype)
    for packed in (w.w13, w.w2):
        packed[..., torch.arange(packed.shape[2]) // 32 % 2 == 0] = 0


def fp8_reference(data: Any, group: int = 128) -> torch.Tensor:
    """fp64 (T, H), as reference.ref_kernel."""
    w, (x, ids, routing), _ = data
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for e in range(len(w.w13)):
        rows, slots = (ids == e).nonzero(as_tuple=True)
        taken = fp8.round_trip(x[rows], group).double()
        gate, up = (taken @ reference.values(w.w13[e], w.s13[e]).T * w.g13[e].double()).chunk(2, 1)
        v = torch.nn.functional.silu(gate.clamp(max=task.LIMIT)) * up.clamp(-task.LIMIT, task.LIMIT)
        v = fp8.round_trip((v * routing[rows, slots].double().unsqueeze(1)).bfloat16(), group).double()
        out.index_add_(0, rows, v @ reference.values(w.w2[e], w.s2[e]).T * w.g2[e].double())
    return out


@pytest.mark.parametrize(
    ("target", "activation", "tokens", "kernel"),
    [
        ("sm90", "nvfp4", 256, "decode"),
        ("sm90", "nvfp4", 257, "prefill"),
        ("sm90", "fp8", 257, "prefill"),
        ("sm90", "bf16", 257, "decode"),  # below 12 an expert
        ("sm90", "bf16", 384, "prefill"),
        ("sm100", "nvfp4", 257, "decode"),
    ],
)
def test_the_kernel_for_few_takes_what_it_can_in_one_part(target, activation, tokens, kernel, monkeypatch):
    module = load.variant("moe_gemm", "sm90_grouped")
    taken = []
    monkeypatch.setattr(module, "_run", lambda name, *_: taken.append(name))
    monkeypatch.setattr(module, "_decode", lambda *_, **__: taken.append("decode"))
    monkeypatch.setattr(load, "device_target", lambda _: target)
    w13, w2 = torch.empty(64, 4, 1, 0), torch.empty(64, 2, 1, 0)  # 64 experts, H and I 64
    state = module.State(*[None] * 11)._replace(w13=w13, w2=w2, activation=activation)
    ids, routing = torch.zeros(tokens, 2, dtype=torch.int32), torch.zeros(tokens, 2)
    x, out = torch.zeros(2, tokens, 64, dtype=torch.bfloat16)
    module.custom_kernel(task.Data(state, task.Inputs(x, ids, routing), task.Outputs(out)))
    assert taken == [kernel]


NVFP4 = [("check_nvfp4", case) for case in NVFP4_CASES]
FP8 = [("check_fp8", case) for case in FP8_CASES]
SMALL = 52, 3, 2, 64, 192, "one", "clamped"
BOTH = [("check_nvfp4", (*SMALL, 1)), ("check_fp8", (*SMALL, False))]
LARGE = 700, 17, 3, 1088, 576, "zipf", "plain"


@pytest.mark.slow
@pytest.mark.parametrize(("order", "checks"), [("eager", NVFP4), ("eager", FP8), ("lazy", BOTH), ("random:1", BOTH)])
def test_it_is_right_in_the_model_of_the_gpu(order, checks):
    if not shutil.which("nvcc"):
        pytest.skip("needs nvcc")
    calls = json.dumps([(check, {"case": case}) for check, case in checks])
    ran = forked.run(["-c", CODE, order, calls], timeout=1500)
    assert ran.returncode == 0, ran.stderr[-3000:]


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*NVFP4_CASES, (*LARGE, 1)], ids=str)
def test_nvfp4_is_right_on_the_gpu(case):
    check_nvfp4(case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*FP8_CASES, (*LARGE, False)], ids=str)
def test_fp8_is_right_on_the_gpu(case):
    check_fp8(case)
