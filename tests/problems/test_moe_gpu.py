"""moe_gemm's kernels on a GPU beyond the cases: ids that are no experts, long calls in parts, dense linears."""

import shutil
import subprocess
import sys

import pytest
import torch

from problems.common import load, nvfp4

FOLDER = load.PROBLEMS / "moe_gemm"
task = load.module(FOLDER, "task")
reference = load.module(FOLDER, "reference")
OURS = [
    file.stem
    for file in sorted((FOLDER / "variants").glob("sm90_*.py"))
    if "sm90" in load.constants(file, "TARGETS")["TARGETS"]
]
SIZES = {"experts": 17, "topk": 3, "hidden": 320, "inner": 192, "router": "uniform", "content": "plain", "seed": 3}
pytestmark = pytest.mark.gpu


def made(tokens: int, activation: str, **other: object) -> object:
    case = {**SIZES, "tokens": tokens, "activation": activation, **other}
    return task.Data(
        reference.generate_weights(**case, device="cuda"), *reference.generate_input(**case, device="cuda")
    )


def variant(name: str) -> object:
    file = FOLDER / "variants" / f"{name}.py"
    for package in load.constants(file, "REQUIRES").get("REQUIRES", ()):
        pytest.importorskip(package)
    return load.variant("moe_gemm", name)


def call(name: str, data: object) -> torch.Tensor:
    module = variant(name)
    if hasattr(module, "prepare"):
        data = data._replace(weights=module.prepare(data.weights))
    return module.custom_kernel(data)


def with_bad_ids(tokens: int, activation: str) -> object:
    data = made(tokens, activation)
    ids = data.inputs.topk_ids
    for i, bad in enumerate((-1, SIZES["experts"], 2**31 - 1, -(2**31))):
        ids[i::7, i % SIZES["topk"]] = bad
    return data


@pytest.mark.parametrize("activation", task.ACTIVATIONS)
@pytest.mark.parametrize("tokens", [5, 40, 700])
@pytest.mark.parametrize("name", OURS)
def test_ids_that_are_no_experts_leave_the_other_tokens_right(name, tokens, activation):
    data = with_bad_ids(tokens, activation)
    out = call(name, data)
    ids = data.inputs.topk_ids
    good = ((ids >= 0) & (ids < SIZES["experts"])).all(1)
    assert good.any() and not good.all()
    some = task.Data(data.weights, task.Inputs(*(t[good] for t in data.inputs)), task.Outputs(out[good]))
    result = reference.compare(some, reference.ref_kernel(some), out[good])
    assert result.ok, result.message


@pytest.mark.slow
@pytest.mark.parametrize("name", OURS)
def test_ids_that_are_no_experts_are_no_access_out_of_bounds(name):
    variant(name)
    tool = shutil.which("compute-sanitizer")
    if not tool:
        pytest.skip("needs compute-sanitizer")
    code = "from tests.problems import test_moe_gpu as t\n" + "".join(
        f"t.call({name!r}, t.with_bad_ids({tokens}, {activation!r}))\n"
        for tokens in (5, 40, 700)
        for activation in task.ACTIVATIONS
    )
    done = subprocess.run(
        [tool, "--tool", "memcheck", "--error-exitcode", "66", sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=load.PROBLEMS.parent,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.parametrize("activation", task.ACTIVATIONS)
@pytest.mark.parametrize(("tokens", "hidden", "inner"), [(300, 64, 448), (513, 1088, 576), (2050, 192, 64)])
def test_calls_longer_than_a_launch_are_right(tokens, hidden, inner, activation):
    data = made(tokens, activation, hidden=hidden, inner=inner)
    result = reference.compare(data, reference.ref_kernel(data), call("sm90_grouped", data))
    assert result.ok, result.message


@pytest.mark.parametrize(("tokens", "topk", "experts"), [(40, 1, 1), (64, 1, 1), (129, 1, 1), (257, 1, 1), (200, 2, 2)])
@pytest.mark.parametrize(("hidden", "inner"), [(576, 704), (4096, 2048)])
def test_few_experts_with_many_tokens_are_right(tokens, topk, experts, hidden, inner):
    data = made(tokens, "bf16", topk=topk, experts=experts, hidden=hidden, inner=inner)
    result = reference.compare(data, reference.ref_kernel(data), call("sm90_grouped", data))
    assert result.ok, result.message


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize(("tokens", "n", "k"), [(1, 64, 64), (17, 192, 448), (64, 4096, 1088), (300, 448, 7168)])
def test_linear_is_the_product(tokens, n, k, quantised):
    module = variant("sm90_grouped")
    gen = torch.Generator("cuda").manual_seed(tokens)
    packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=gen, device="cuda")
    scales = torch.rand(n, k // 16, generator=gen, device="cuda").mul_(6).sub_(4).exp2_().to(torch.float8_e4m3fn)
    x = torch.randn(tokens, k, generator=gen, device="cuda").bfloat16()
    g = torch.tensor(0.7, device="cuda")
    in_scale = torch.tensor(4 / (6 * 448), device="cuda") if quantised else None
    out = torch.full((tokens, n), torch.nan, dtype=torch.bfloat16, device="cuda")
    module.linear(module.prepare_linear(packed, scales, g, in_scale), x, out)
    taken = reference.quantised_as(x.float(), in_scale) if quantised else x.double()
    want = taken @ nvfp4.dequantise(packed, scales, torch.float64).T * 0.7
    assert (out.double() - want).norm() <= 2e-3 * want.norm()
