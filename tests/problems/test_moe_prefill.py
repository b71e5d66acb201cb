"""moe_gemm's sm90_grouped with quantised activations, in the model of the GPU and on one: with many tokens, where what
takes calls of over 256 tokens with 12 and more an expert takes all of over 4 here; a row's bits; how FP8 is rounded.
"""

import re
import shutil
import subprocess
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import ptx_model
from problems.common import fp8, load
from ptx_model.tools.check import Order
from tests.dsv4 import in_model
from tests.problems import cases
from tests.problems.test_in_model import moe

task, reference = cases.task("moe_gemm"), cases.reference("moe_gemm")
DEVICE = "cuda"  # in_model.call says another
# Tokens, experts, experts of a token, hidden, inner, router, content, and what in_scales are divided by. Experts of up
# to Few::BLOCK_N slots, which are one item, and of more, in items of up to Many::BLOCK_N; last tiles that are not full;
# experts without tokens beside each other; values far beyond the largest, and blocks of zeros.
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
# Of weights in MXFP4. Items of up to 64 and of up to 112, and several of an expert; last groups of 64; neighbours
# without tokens; scales over 2^14.
MXFP4_CASES = [
    (9, 3, 2, 64, 128, "uniform", "plain"),
    (31, 7, 2, 192, 320, "zipf", "zeros"),
    (120, 3, 1, 320, 64, "one", "clamped"),
    (110, 2, 1, 576, 448, "one", "magnitudes"),
    (70, 9, 2, 128, 192, "one", "extreme"),
]


def edit(name: str, ptx: str) -> str:
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


def check_mxfp4(case: tuple) -> None:
    data = made((*case, 1), "fp8")
    want = reference.ref_kernel(data)
    first = called(data, "prepare").clone()
    result = reference.compare(data, want, first)
    assert result.ok and result.rel < 0.01, result  # a GPU cuts sums
    assert torch.equal(called(data, "prepare").view(torch.int16), first.view(torch.int16))


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
MXFP4 = [("check_mxfp4", case) for case in MXFP4_CASES]
SMALL, LARGE = (52, 3, 2, 64, 192, "one", "clamped"), (700, 17, 3, 1088, 576, "zipf", "plain")
BOTH = [("check_nvfp4", (*SMALL, 1)), ("check_fp8", (*SMALL, False))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policies", "checks"),
    [(("eager",), NVFP4), (("eager",), FP8), (("eager",), MXFP4), (("lazy", "random:1"), BOTH)],
    ids=["nvfp4", "fp8", "mxfp4", "orders"],
)
def test_it_is_right_in_the_model_of_the_gpu(policies, checks):
    calls = [(check, {"case": case}) for check, case in checks]
    in_model.run(__name__, calls, orders=[Order(policy, 0xFF, 2) for policy in policies])


ON_GPU = [("check_nvfp4", (*LARGE, 1)), ("check_fp8", (*LARGE, False)), ("check_mxfp4", LARGE)]
ON_GPU += [*NVFP4, *FP8, *MXFP4, ("check_mxfp4", (300, 3, 1, 4096, 2048, "one", "plain"))]


@pytest.mark.gpu
@pytest.mark.parametrize(("check", "case"), ON_GPU, ids=str)
def test_it_is_right_on_the_gpu(check, case):
    globals()[check](case)


def check_rows(case: dict) -> None:
    """Among 1, 2, 3, 5 and all of the tokens, once more, with the shared expert, named or not, and without it, whether
    it was prepared or not.
    """
    module = load.variant("moe_gemm", "sm90_grouped")
    tokens, size = case["tokens"], case["experts"]  # of the routed ones; the shared one is one more
    every = reference.generate_weights(**{**case, "experts": size + 1}, device=DEVICE)
    inputs, outputs = reference.generate_input(**case, device=DEVICE)
    routed, shared = (
        task.Weights(*(one[part].contiguous() if isinstance(one, torch.Tensor) else one for one in every))
        for part in (slice(0, size), slice(size, None))
    )
    alone, both = module.prepare_with_shared(routed, shared)

    def called(function, state, inputs, first=0, count=tokens):
        some = task.Inputs(*(tensor[first : first + count].clone() for tensor in inputs))
        out = task.Outputs(torch.full_like(outputs.out[:count], torch.nan))
        function(task.Data(state, some, out))
        return out.out.view(torch.int16)

    for function, state in ((module.with_shared, both), (module.custom_kernel, alone)):
        whole = called(function, state, inputs)
        for count in (count for count in (1, 2, 3, 5) if count < tokens):
            assert called(function, state, inputs, 1, count).equal(whole[1 : 1 + count]), count
        assert called(function, state, inputs).equal(whole)
    assert called(module.custom_kernel, module.prepare(routed), inputs).equal(whole)
    last = torch.full_like(inputs.topk_ids[:, :1], size), torch.ones_like(inputs.topk_weights[:, :1])
    named = [torch.cat(pair, 1) for pair in zip(inputs[1:], last, strict=True)]
    assert called(module.custom_kernel, both, [inputs[0], *named]).equal(called(module.with_shared, both, inputs))


ROWS = [
    moe(9, 3, 1, 320, 192, "nvfp4", "plain", "one"),
    moe(8, 3, 1, 192, 576, "nvfp4", "magnitudes", "one"),
    moe(7, 3, 2, 1088, 64, "nvfp4", "zeros", "uniform"),
    moe(12, 3, 2, 192, 64, "nvfp4", "plain", "part"),  # with the shared expert more than 32 slots
]
ON_A_GPU = [
    moe(*sizes, activation)
    for sizes in ((1, 8, 6, 128, 64), (5, 4, 2, 64, 192), (32, 256, 6, 512, 128))
    for activation in ("bf16", "nvfp4")
]


@pytest.mark.slow
def test_a_rows_bits_are_those_it_has_in_any_batch():
    """By itself, which no launch quantises ahead, and among up to 9 tokens, in one tile and in two."""
    in_model.run(__name__, [("check_rows", {"case": case}) for case in ROWS], processors=2)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", [*ROWS, *ON_A_GPU, moe(32, 256, 6, 512, 128, "nvfp4"), moe(32, 256, 6, 512, 128)], ids=str
)
def test_a_rows_bits_on_the_gpu(case):
    check_rows(case)


ROUNDING = """
#include "sm90_decode_fp8.cuh"

extern "C" __global__ void k(const uint32_t *groups, uint32_t *out) {
    const uint32_t *mine = groups + 64 * threadIdx.x;
    uint32_t most = mine[0];
    for (int i = 1; i < 64; ++i) most = decode::larger(most, mine[i]);
    const uint32_t least = decode::least_normal(decode::larger(most, most >> 16));
    for (int i = 0; i < 64; ++i) out[64 * threadIdx.x + i] = decode::nearest_e4m3(mine[i], least);
}
"""
GROUPS = 96


def groups() -> torch.Tensor:
    """bf16 (GROUPS, 128): every mantissa at the largest value, ties, values far below it, zeros, and the ends."""
    gen = torch.Generator().manual_seed(3)
    x = torch.randn(GROUPS, 128, generator=gen) * torch.exp2(torch.randint(-20, 20, (GROUPS, 1), generator=gen))
    x[:, 64:] *= torch.exp2(-torch.randint(0, 24, (GROUPS, 64), generator=gen))
    x[:64, 0] = (1 + torch.arange(64) / 128) * x[:64].abs().amax(1).log2().ceil().exp2()
    x[32:64, 0] += x[32:64, 0].log2().floor().exp2() / 2  # 1.5 and more: 1.75, the largest code, lies between
    x[64:72, 1:100] = torch.arange(-99, 0) * 2.0**-12 * x[64:72, :1].abs()
    x[72:80] = torch.randint(-8, 9, (8, 128), generator=gen) * 2.0**-133  # subnormal
    x[80], x[81], x[82] = 0, -0.0, 1e-4
    x[83, 0], x[84, 0], x[85] = 2.0**123, -1.99 * 2.0**123, 2.0**-24
    return x.bfloat16()


def test_values_are_rounded_as_fp8_holds_them(tmp_path):
    if not shutil.which("nvcc"):
        pytest.skip("needs nvcc")
    (tmp_path / "k.cu").write_text(ROUNDING)
    folders = load.PROBLEMS / "common", load.PROBLEMS / "moe_gemm" / "variants"
    command = ["nvcc", "-std=c++17", "-ptx", "-arch=sm_90a", *(f"-I{folder}" for folder in folders), "k.cu"]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)
    x = groups()
    out = np.zeros((GROUPS, 64), np.uint32)
    given = np.ascontiguousarray(x.view(torch.int32).numpy().view(np.uint32))
    ptx_model.run((tmp_path / "k.ptx").read_text(), "k", 1, GROUPS, (given, out))
    got = torch.from_numpy(out.view(np.int32)).view(torch.bfloat16).view(GROUPS, 128)
    want = fp8.round_trip(x, 128)
    assert torch.equal(got, want), (got - want).nonzero()[:5]
    scales = fp8.quantise_groups(x, 128)[1]
    assert len(scales.unique()) > 20 and float((want != x).float().mean()) > 0.3
