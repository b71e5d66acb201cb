"""moe_gemm's CPU variants from within: the quantisers bit by bit, threads, bad ids, errors with room."""

import functools
import shutil
from ctypes import c_int64, c_void_p
from pathlib import Path

import pytest
import torch

from problems.common import build, cpu, load, nvfp4
from tests.problems import cases

FOLDER = load.PROBLEMS / "moe_gemm"
task, reference = cases.task("moe_gemm"), cases.reference("moe_gemm")

VARIANTS = ("cpu_avx512", "cpu_avx2", "cpu_portable")
UNIT = 2.0  # of a variant's values and units: their product is half of what they stand for
# What a variant does inside: x as it is taken in, and a call on as many threads as wanted.
INSIDE = """
#include "cpu_cores.h"

extern "C" int take(void* const* tensors, const int64_t* sizes, int16_t* values, float* units) {
    const moe::Problem p(tensors, sizes);
    moe::Routing r;
    if (!r.fill(p, moe::kTokens, 1)) return 1;
    for (const moe::Panel& panel : r.panels) moe::Expert::take_x(p, r, panel, {values, units, p.w13.blocks()});
    return 0;
}

extern "C" int on_threads(void* const* tensors, const int64_t* sizes, int64_t threads) {
    return moe::on_all_cores(moe::Problem(tensors, sizes), threads);
}
"""


@pytest.fixture(params=VARIANTS)
def name(request) -> str:
    if missing := load.missing_cpu_flags(FOLDER / "variants" / f"{request.param}.py"):
        pytest.skip(f"needs a CPU with {missing}")
    return request.param


@functools.cache
def inside(name: str, folder: Path) -> build.Artefact:
    # Copied beside it: a build's key holds the headers of the source's folder, not those of another one.
    for path in build.closure(FOLDER / "variants" / f"{name}.cpp"):
        if build.COMMON not in path.parents:
            shutil.copy(path, folder)
    source = folder / f"{name}_inside.cpp"
    source.write_text(INSIDE)
    assert folder / "cpu_experts.h" in build.closure(source)
    flags = load.constants(FOLDER / "variants" / f"{name}.py", "CPU_FLAGS").get("CPU_FLAGS", ())
    (artefact,) = cpu.Launcher(source, flags).compile_for("cpu")
    return artefact


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("moe_inside")


def case(tokens: int, experts: int, topk: int, activation: str = "bf16", content: str = "plain") -> object:
    return task.Case(tokens, experts, topk, 192, 320, activation, "uniform", content, 3)


def made(case: object) -> object:
    return cases.made("moe_gemm", **vars(case))


def called(name: str, folder: Path, function: str, data: object, *more: object) -> None:
    """Call a function of INSIDE with the arguments of a launcher, and more: c_void_p or c_int64."""
    prepared = load.module(FOLDER, f"variants/{name}").prepare(data.weights)
    tensors = (*prepared[:8], *data.inputs, *data.outputs)
    (experts, hidden, inner), (tokens, topk) = prepared.sizes, data.inputs.topk_ids.shape
    numbers = (c_int64 * 6)(tokens, experts, topk, hidden, inner, data.weights.activation == "nvfp4")
    pointers = (c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
    run = inside(name, folder).function(function, type(pointers), type(numbers), *map(type, more))
    assert run(pointers, numbers, *more) == 0


def taken(name: str, folder: Path, x: torch.Tensor, in_scale: float, activation: str) -> tuple[torch.Tensor, ...]:
    """x: bf16 (T, H), T at most a panel's -> values fp32 (T, H / 16, 16) in order, units fp32 (T, H / 16)."""
    tokens, hidden = x.shape
    data = made(task.Case(tokens, 1, 1, hidden, 64, activation, "uniform", "plain", 1))
    data.weights.in_scale13.fill_(in_scale)
    data.inputs.x.copy_(x)
    values = torch.zeros(hidden // 16, tokens, 2, 4, 2, dtype=torch.int16)
    units = torch.zeros(hidden // 16, tokens)
    called(name, folder, "take", data, c_void_p(values.data_ptr()), c_void_p(units.data_ptr()))
    return values.mT.reshape(hidden // 16, tokens, 16).transpose(0, 1).float(), units.T


def awkward(in_scale: float) -> torch.Tensor:
    """bf16 (8, 512): blocks over many binades, of ties between codes, of values that saturate, of zeros."""
    gen = torch.Generator().manual_seed(4)
    x = torch.randn(8, 32, 16, generator=gen) * torch.rand(8, 32, 1, generator=gen).mul_(40).sub_(20).exp2_()
    x[1] = torch.randint(-24, 25, (32, 16), generator=gen) / 4.0  # multiples of 1/4: the ties, under a scale of 1
    x[1, :, 0] = 6
    x[2] = x[1] * torch.arange(-12, 20).sub_(4).float().exp2()[:, None]  # the same under scales of 2^-16 and on
    x[3] *= 2.0**20
    x[4, :, 1:] = 0
    x[5] = 0
    x[6] = -x[6].abs() * 2.0**-12
    return (x * in_scale).flatten(1).bfloat16()


@pytest.mark.parametrize("in_scale", [1.0, 2.0**-9, 0.0123, 3.7e4, 2.0**40 / 700])
def test_the_quantiser_makes_the_same_codes_and_scales_as_nvfp4_encode(name, folder, in_scale):
    x = awkward(in_scale)
    values, units = taken(name, folder, x, in_scale, "nvfp4")
    codes, scales = nvfp4.encode(x.float(), torch.full((len(x),), in_scale))
    assert torch.equal(values / 2, nvfp4.decode(codes).unflatten(1, (-1, 16)))
    assert torch.equal(units * UNIT * 2, scales.float())
    assert len(codes.unique()) > 100 and len(scales.view(torch.uint8).unique()) > 20


@pytest.mark.parametrize("size", [1.0, 2.0**-80, 2.0**80])
def test_a_bf16_loses_at_most_a_32768th_of_its_blocks_largest(name, folder, size):
    x = awkward(1.0).double().mul_(size).bfloat16()
    values, units = taken(name, folder, x, 1.0, "bf16")
    found = values.double() * units.double().unsqueeze(2) * UNIT
    wanted = x.double().unflatten(1, (-1, 16))
    largest = wanted.abs().amax(2, keepdim=True)
    assert bool(((found - wanted).abs() <= largest / 32768).all())
    clear = wanted.abs() >= largest / 128
    assert torch.equal(found[clear], wanted[clear]) and float(values.abs().max()) < 32768


@pytest.mark.parametrize("activation", ["bf16", "nvfp4"])
def test_results_do_not_depend_on_the_number_of_threads(name, folder, activation):
    data = made(case(300, 5, 3, activation))
    seen = []
    for threads in (1, 2, 3, 7):
        data.outputs.out.fill_(torch.nan)
        called(name, folder, "on_threads", data, c_int64(threads))
        seen.append(data.outputs.out.clone())
    assert not bool(seen[0].isnan().any()) and all(torch.equal(out, seen[0]) for out in seen)


@pytest.mark.parametrize("bad", [-2, 8, 2**31 - 1, -(2**31)])
def test_ids_that_are_no_experts_are_refused_before_anything_is_written(name, bad):
    data = made(case(5, 8, 2))
    data.inputs.topk_ids[3, 1] = bad
    module = load.module(FOLDER, f"variants/{name}")
    with pytest.raises(ValueError, match=rf"topk_ids must be -1 to 7, got {bad} at \(3, 1\)"):
        module.custom_kernel(data._replace(weights=module.prepare(data.weights)))
    assert bool(data.outputs.out.isnan().all())


@pytest.mark.parametrize("content", task.CONTENTS)
def test_errors_leave_room_to_the_tolerance_and_what_prepare_keeps_is_as_large_as_the_weights(name, content):
    """Rounding v and out alone costs 1.65e-3 each on average, rows to 2.5e-3, and more where few values count."""
    module = load.module(FOLDER, f"variants/{name}")
    data = made(case(64, 8, 2, content=content))
    prepared = module.prepare(data.weights)
    before, after = (sum(tensor.nbytes for tensor in kept[:8]) for kept in (data.weights, prepared))
    assert before == after
    result = reference.compare(data, reference.ref_kernel(data), module.custom_kernel(data._replace(weights=prepared)))
    assert result.ok and result.rel < 2e-3 and result.worst_abs < 0.4 * result.worst_tol, result
