"""moe_gemm's kernels on a GPU beyond the cases: ids that are no experts, long calls in parts."""

import shutil
import subprocess
import sys

import pytest
import torch

from problems.common import load

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
    ids[3:5] = -1
    return data


@pytest.mark.parametrize("activation", task.ACTIVATIONS)
@pytest.mark.parametrize("tokens", [5, 40, 700])
@pytest.mark.parametrize("name", OURS)
def test_ids_that_are_no_experts_leave_the_other_tokens_right(name, tokens, activation):
    data = with_bad_ids(tokens, activation)
    out = call(name, data)
    ids = data.inputs.topk_ids
    good = ((ids >= -1) & (ids < SIZES["experts"])).all(1)
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
