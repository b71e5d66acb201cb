"""moe_gemm: the oracle against bytes and loops, the generator's contents, the checker and right variants."""

import functools
import math
from pathlib import Path

import pytest
import torch

from problems.common import load, nvfp4
from problems.wrong import load_kernel
from tests.problems.variants import made_for, skip_unless_it_runs

FOLDER = load.PROBLEMS / "moe_gemm"
task = load.module(FOLDER, "task")
reference = load.module(FOLDER, "reference")
baseline = load.module(FOLDER, "variants/torch_grouped")

QUICK = sorted((case for case in task.TESTS if case.experts < 100), key=lambda c: c.flops())[:6]
ALL = ("uniform", "zipf", "one")  # routers that leave no token without an expert
TINY = vars(task.Case(3, 4, 2, 64, 128, "bf16", "uniform", "plain", 5))


def named(case: object) -> str:
    sizes = f"{case.tokens}x{case.topk}of{case.experts}-{case.hidden}x{case.inner}"
    return f"{sizes}-{case.activation}-{case.router}-{case.content}"


def made(case: dict, device: str = "cpu", weights_seed: int | None = None) -> object:
    """Data of a case, its inputs from a seed of their own."""
    weights = reference.generate_weights(
        **{**case, "seed": case["seed"] if weights_seed is None else weights_seed}, device=device
    )
    return task.Data(weights, *reference.generate_input(**case, device=device))


def poisoned(data: object) -> object:
    return data._replace(outputs=task.Outputs(torch.full_like(data.outputs.out, torch.nan)))


@functools.cache
def solved(case: object, device: str = "cpu") -> tuple[object, torch.Tensor]:
    """Data and answer of a test case. Whoever writes to outputs takes poisoned(data) first."""
    data = made(vars(case), device, case.seed + 500)
    return data, reference.ref_kernel(data)


def of_content(content: str, activation: str = "bf16", tokens: int = 1) -> object:
    found = (c for c in task.TESTS if (c.content, c.activation) == (content, activation) and c.tokens >= tokens)
    return next(c for c in found if c.router in ALL)


# ---------------------------------------------------------------- task


def test_unpack_says_the_sizes():
    data = made(TINY)
    assert task.unpack(data) == (3, 4, 2, 64, 128, "bf16")
    assert task.unpack_weights(data.weights) == (4, 64, 128, "bf16")
    assert task.unpack_call(data.inputs, data.outputs, 64) == (3, 2)


@pytest.mark.parametrize(
    ("part", "name", "change"),
    [
        ("weights", "w13", lambda t: t.char()),
        ("weights", "w13", lambda t: t[0]),
        ("weights", "w13", lambda t: t[:, :100]),
        ("weights", "w13", lambda t: t[..., :16]),
        ("weights", "s13", lambda t: t.view(torch.uint8)),
        ("weights", "s13", lambda t: t.mT),
        ("weights", "g13", lambda t: t[:1]),
        ("weights", "g13", lambda t: t.double()),
        ("weights", "w2", lambda t: t.mT),
        ("weights", "w2", lambda t: t[1:]),
        ("weights", "s2", lambda t: t[..., ::2]),
        ("weights", "g2", lambda t: t.view(2, 2)),
        ("weights", "in_scale13", lambda t: t.half()),
        ("weights", "in_scale2", lambda t: t.to("meta")),
        ("weights", "activation", lambda _: "fp8"),
        ("inputs", "x", lambda t: t.float()),
        ("inputs", "x", lambda t: t[:, :32]),
        ("inputs", "x", lambda t: t[0]),
        ("inputs", "topk_ids", lambda t: t.long()),
        ("inputs", "topk_ids", lambda t: t[:, :0]),
        ("inputs", "topk_ids", lambda t: t.repeat(1, 3)),
        ("inputs", "topk_weights", lambda t: t[:, :1]),
        ("inputs", "topk_weights", lambda t: t.bfloat16()),
        ("outputs", "out", lambda t: t.half()),
        ("outputs", "out", lambda t: t[:2]),
    ],
)
def test_unpack_names_the_tensor_that_is_wrong(part, name, change):
    data = made(TINY)
    old = getattr(data, part)
    new = {name: change(getattr(old, name))}
    if name == "topk_ids" and new[name].shape[1] > 4:
        new["topk_weights"] = change(old.topk_weights)
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        task.unpack(data._replace(**{part: old._replace(**new)}))


def test_validate_refuses_repeated_experts_and_ids_out_of_range():
    inputs = made(TINY).inputs
    task.validate(inputs, 4)
    task.validate(inputs._replace(topk_ids=torch.full_like(inputs.topk_ids, -1)), 4)
    for row, message in (([1, 1], r"1 twice in row 1"), ([0, 4], r"got 4 at \(1, 1\)"), ([-2, 2], r"got -2 at \(1, 0")):
        ids = inputs.topk_ids.clone()
        ids[1] = torch.tensor(row)
        with pytest.raises(ValueError, match=message):
            task.validate(inputs._replace(topk_ids=ids), 4)


@pytest.mark.parametrize(
    "change",
    [
        {"activation": "fp8"},
        {"router": "random"},
        {"content": "other"},
        {"hidden": 96},
        {"inner": 0},
        {"tokens": 0},
        {"topk": 5},
        {"topk": 0},
    ],
)
def test_cases_out_of_bounds_are_refused(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        task.Case(**{**TINY, **change})


def test_tests_have_the_sizes_that_kernels_fail_at():
    assert {case.router for case in task.TESTS} == set(task.ROUTERS)
    for cases in (task.TESTS, task.tests(1), task.tests(2)):
        assert all(case.hidden != case.inner for case in cases)
        assert all(sum(getattr(case, name) % 128 == 64 for case in cases) > 9 for name in ("hidden", "inner"))
        assert all(case.topk * case.inner >= 448 for case in cases if case.activation == "nvfp4")


def test_benchmarks_are_the_shapes_of_the_models():
    flash = [c for c in task.BENCHMARKS if (c.experts, c.topk, c.hidden, c.inner) == (256, 6, 4096, 2048)]
    assert [c.tokens for c in flash if c.router == "uniform"] == [1, 8, 64, 256, 1024, 4096]
    assert [c.tokens for c in flash if c.router == "zipf"] == [64, 4096]
    assert [(c.tokens, c.topk) for c in task.BENCHMARKS if c.experts == 1] == [(1, 1), (64, 1)]
    assert [(c.tokens, c.hidden, c.inner) for c in task.BENCHMARKS if c.experts == 384] == [
        (1, 7168, 3072),
        (64, 7168, 3072),
    ]
    assert [c.tokens for c in task.BENCHMARKS_CPU] == [1, 8, 64, 256]


def test_cases_say_what_they_move_and_compute():
    one = task.BENCHMARKS[0]
    assert one.flops() == 6 * 6 * 4096 * 2048
    assert one.bytes_moved() == 6 * 3 * 4096 * 2048 * 9 // 16 + 4 * 4096 + 48
    assert task.Case(**{**TINY, "router": "one", "tokens": 50}).experts_hit() == 2
    assert task.Case(**{**TINY, "topk": 4}).experts_hit() == 4


def test_what_given_routing_moves_goes_by_the_experts_it_hits():
    case = task.Case(**{**TINY, "experts": 8, "topk": 2, "tokens": 3})
    ids = torch.tensor([[0, 5], [5, -1], [7, 5]], dtype=torch.int32)
    weights = 3 * case.hidden * case.inner * 9 // 16
    assert case.bytes_of(task.Inputs(torch.empty(3, case.hidden), ids, torch.empty(3, 2))) == (
        3 * weights + 3 * (4 * case.hidden + 16)
    )
    assert case.bytes_of(task.Inputs(torch.empty(3, case.hidden), ids[:2], torch.empty(3, 2))) == (
        2 * weights + 3 * (4 * case.hidden + 16)
    )


@pytest.mark.parametrize("router", ["uniform", "zipf", "part"])
@pytest.mark.parametrize(("tokens", "topk"), [(1, 6), (8, 6), (64, 6), (64, 1), (300, 2)])
def test_as_many_experts_are_hit_as_expected(router, tokens, topk):
    gen = torch.Generator().manual_seed(1)
    routed = [reference._routed(tokens, 256, topk, router, gen) for _ in range(400)]
    hit = [len(ids[ids >= 0].unique()) for ids in routed]
    case = task.Case(**{**TINY, "experts": 256, "tokens": tokens, "topk": topk, "router": router})
    assert math.isclose(sum(hit) / len(hit), case.experts_hit(), rel_tol=0.04)


# ---------------------------------------------------------------- oracle


def e4m3(byte: int) -> float:
    """Value of an e4m3 byte from its definition: bias 7, 3 mantissa bits, subnormals in steps of 2^-9."""
    exponent, mantissa = byte >> 3 & 15, byte & 7
    size = mantissa / 512 if exponent == 0 else (8 + mantissa) / 8 * 2.0 ** (exponent - 7)
    return -size if byte & 128 else size


def nearest(x: float, values: list[float]) -> float:
    """The nearest of the ascending values, 0 the first; of two alike the one with the even index."""
    return min(enumerate(values), key=lambda item: (abs(abs(x) - item[1]), item[0] % 2))[1] * (-1 if x < 0 else 1)


def fp32(x: float) -> float:
    return float(torch.tensor(x, dtype=torch.float32))


def quantised(x: list[float], in_scale: float) -> list[float]:
    """What nvfp4 makes of x; divisions in fp32, as the format is defined."""
    found = []
    for start in range(0, len(x), 16):
        block = [fp32(v / in_scale) for v in x[start : start + 16]]
        scale = nearest(fp32(max(map(abs, block)) / 6), [e4m3(byte) for byte in range(0x7F)])
        codes = [nearest(fp32(v / scale), list(nvfp4.E2M1[:8])) if scale else 0.0 for v in block]
        found += [code * scale * in_scale for code in codes]
    return found


def row(packed: list[int], scales: list[int], g: float) -> list[float]:
    codes = [code for byte in packed for code in (byte & 15, byte >> 4)]
    return [nvfp4.E2M1[code] * e4m3(scales[i // 16]) * g for i, code in enumerate(codes)]


def dot(x: list[float], y: list[float]) -> float:
    return math.fsum(a * b for a, b in zip(x, y, strict=True))


@pytest.mark.parametrize("activation", ["bf16", "nvfp4"])
@pytest.mark.parametrize("content", ["plain", "magnitudes", "zeros"])
def test_reference_is_the_sum_over_the_bytes_in_memory(activation, content):
    data = made({**TINY, "tokens": 2, "activation": activation, "content": content}, weights_seed=9)
    data.inputs.topk_ids[1, 0] = -1
    out = reference.ref_kernel(data)
    w, (x, ids, routing), _ = data
    w13, s13, w2, s2 = (t.view(torch.uint8).tolist() for t in (w.w13, w.s13, w.w2, w.s2))
    for t in range(2):
        want = [0.0] * 64
        for j in range(2):
            if (e := int(ids[t, j])) < 0:
                continue
            taken = x[t].tolist()
            if activation == "nvfp4":
                taken = quantised(taken, float(w.in_scale13[e]))
            both = [dot(row(w13[e][i], s13[e][i], float(w.g13[e])), taken) for i in range(256)]
            v = []
            for gate, up in zip(both[:128], both[128:], strict=True):
                gate, up = min(gate, 10.0), max(-10.0, min(up, 10.0))
                v.append(gate / (1 + math.exp(-gate)) * up * float(routing[t, j]))
            v = torch.tensor(v, dtype=torch.float64).bfloat16().tolist()
            if activation == "nvfp4":
                v = quantised(v, float(w.in_scale2[e]))
            want = [sum_ + dot(row(w2[e][h], s2[e][h], float(w.g2[e])), v) for h, sum_ in enumerate(want)]
        torch.testing.assert_close(out[t], torch.tensor(want, dtype=torch.float64), rtol=1e-10, atol=1e-10)


# ---------------------------------------------------------------- generator


@pytest.mark.parametrize("case", task.TESTS, ids=named)
def test_generated_data_is_what_the_task_says(case):
    data, want = solved(case)
    assert task.unpack(data) == (case.tokens, case.experts, case.topk, case.hidden, case.inner, case.activation)
    task.validate(data.inputs, case.experts)
    assert bool(data.outputs.out.isnan().all())
    assert bool(torch.isfinite(want).all()) and float(want.abs().max()) < 1e30
    w = data.weights
    for packed, scales in ((w.w13, w.s13), (w.w2, w.s2)):
        assert len((packed & 15).unique()) == len((packed >> 4).unique()) == 16
        nvfp4.check_scales(scales)
    for tensor in (data.inputs.x.float(), data.inputs.topk_weights, w.g13, w.g2, w.in_scale13, w.in_scale2):
        assert bool(torch.isfinite(tensor).all())
    assert bool((w.in_scale13 > 0).all()) and bool((w.in_scale2 > 0).all())


@pytest.mark.parametrize("case", [c for c in task.TESTS if c.content == "clamped" and c.router in ALL], ids=named)
def test_the_clamp_matters_in_every_case(case):
    data, want = solved(case)
    for name in ("no_clamp", "up_clamped_above_only"):
        output = load_kernel(FOLDER, name)(poisoned(data))
        assert not reference.compare(data, want, output).ok, name


def test_contents_hold_what_they_promise():
    scales = {c: solved(of_content(c))[0].weights.s13.float() for c in task.CONTENTS}
    assert float(scales["magnitudes"].max() / scales["magnitudes"][scales["magnitudes"] > 0].min()) >= 2**14
    assert int(solved(of_content("subnormal"))[0].weights.s2.view(torch.uint8).max()) == 7
    assert 1 / 10 < float((scales["extreme"] == 448).float().mean()) < 1 / 6
    assert 1 / 10 < float((scales["zeros"] == 0).float().mean()) < 1 / 6
    data, want = solved(of_content("extreme"))
    assert float(data.inputs.x.abs().max()) > 65504 and float(want.abs().max()) > 65504
    x, _, routing = solved(of_content("magnitudes", tokens=1000))[0].inputs
    norms = x.float().norm(dim=1)
    assert float(norms.max() / norms.min()) > 2**8 and bool((routing < 0).any() and (routing > 0).any())
    data, want = solved(of_content("zeros", tokens=64))
    assert not bool(data.inputs.x[:2].any()) and not bool(data.inputs.topk_weights[-1].any())
    assert not bool(want[:2].any() or want[-1].any()) and bool(want[2:-1].any(1).sum() > 20)
    assert not bool(data.weights.g2[-1]) and bool(data.weights.g2[:-1].all())
    assert any(bool((solved(c)[0].inputs.topk_ids == c.experts - 1).any()) for c in task.TESTS if c.content == "zeros")


def test_routers_leave_experts_out_and_crowd_others():
    seen = set()
    for case in task.TESTS:
        ids = solved(case)[0].inputs.topk_ids
        counts = torch.bincount(ids[ids >= 0], minlength=case.experts)
        absent = (ids < 0).float().mean(1)
        if case.router != "part":
            assert bool((absent == (case.router == "none")).all())
        elif case.tokens > 7:
            assert absent[1::4].min() == absent[2::4].min() == 1 > absent[::4].min()
        seen |= {"none"} if bool((counts == 0).any()) else set()
        seen |= {"one token"} if bool((counts == 1).any()) else set()
        seen |= {"all"} if case.experts > 1 and case.topk == 1 and int(counts.max()) == case.tokens > 128 else set()
        if case.router == "one":
            assert int((counts > 0).sum()) == case.topk and int(counts.max()) == case.tokens
    assert seen == {"none", "one token", "all"}


@pytest.mark.parametrize("content", task.CONTENTS)
def test_generator_is_a_function_of_its_seed(content):
    first, again, other = (made({**TINY, "content": content, "seed": seed}) for seed in (5, 5, 6))
    for part in ("weights", "inputs"):
        for name, x, y, z in zip(
            getattr(first, part)._fields, getattr(first, part), getattr(again, part), getattr(other, part), strict=True
        ):
            if name != "activation":
                assert torch.equal(x.view(torch.uint8), y.view(torch.uint8)), name
                assert not torch.equal(x.view(torch.uint8), z.view(torch.uint8)), name


# ---------------------------------------------------------------- checker


def emulated(data: object, v_rounded: bool = True, sums_rounded: bool = False, off: float = 0.0) -> torch.Tensor:
    """What honest kernels compute: v left in fp32; gate, up and experts' outputs rounded to bf16; sums that are off."""
    w, (x, ids, routing), _ = data
    gen = torch.Generator().manual_seed(3)
    total = torch.zeros(x.shape)
    for e in ids[ids >= 0].unique().tolist():
        rows, slots = (ids == e).nonzero(as_tuple=True)
        y = x[rows].float()
        if w.activation == "nvfp4":
            y = nvfp4.round_trip(y, w.in_scale13[e].expand(len(y)))
        both = y @ baseline.decoded(w.w13[e], w.s13[e]).T * w.g13[e]
        both *= 1 + off * torch.randn(both.shape, generator=gen)
        gate, up = (both.bfloat16().float() if sums_rounded else both).chunk(2, 1)
        v = torch.nn.functional.silu(gate.clamp(max=10)) * up.clamp(-10, 10) * routing[rows, slots].unsqueeze(1)
        v = v.bfloat16().float() if v_rounded else v
        if w.activation == "nvfp4":
            v = nvfp4.round_trip(v, w.in_scale2[e].expand(len(v)))
        part = v @ baseline.decoded(w.w2[e], w.s2[e]).T * w.g2[e]
        total.index_add_(0, rows, part.bfloat16().float() if sums_rounded else part)
    return total.bfloat16()


@pytest.mark.parametrize("case", task.TESTS, ids=named)
def test_honest_rounding_passes_with_room(case):
    data, want = solved(case)
    if case.activation == "nvfp4":
        for off in (0.0, 1e-6):
            result = reference.compare(data, want, emulated(data, off=off))
            assert result.ok and result.rel < 5e-3 and result.worst_abs <= 0.7 * result.worst_tol, result
        return
    for v_rounded in (True, False):
        result = reference.compare(data, want, emulated(data, v_rounded))
        assert result.ok and result.rel < 3e-3 and result.worst_abs <= 0.5 * result.worst_tol, result
    result = reference.compare(data, want, emulated(data, sums_rounded=True), peer=True)
    assert result.ok and result.rel < 5e-3, result


def test_a_row_beyond_its_bound_is_refused_and_one_within_is_not():
    for activation, bound in (("bf16", task.ROW_RTOL), ("nvfp4", task.NVFP4_ROW_RTOL)):
        data, want = solved(of_content("plain", activation, tokens=64))
        noise = torch.randn(want.shape[1], generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        for share, ok in ((0.9, True), (1.2, False)):
            output = want.clone()
            output[7] += noise / noise.norm() * share * bound * want[7].norm()
            assert reference.compare(data, want, output.bfloat16()).ok is ok, (activation, share)


def test_many_rows_at_their_bound_are_refused_as_a_whole():
    data, want = solved(of_content("plain", tokens=64))
    result = reference.compare(data, want, (want * (1 + 0.8 * task.ROW_RTOL)).bfloat16())
    assert not result.ok and "in all" in result.message


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("peer", [False, True])
def test_one_element_that_is_not_finite_is_refused(value, peer):
    for content in ("plain", "zeros"):
        data, want = solved(of_content(content, tokens=64))
        output = want.bfloat16()
        output[-1, 5] = value
        assert not reference.compare(data, want, output, peer).ok


def test_a_row_of_zeros_must_be_zeros():
    data, want = solved(of_content("zeros", tokens=64))
    output = want.bfloat16()
    assert reference.compare(data, want, output).ok
    output[-1, 5] = 1e-30
    assert not reference.compare(data, want, output).ok


def test_other_forms_are_refused():
    data, want = solved(of_content("plain"))
    out = want.bfloat16()
    for output in (out.float(), out.half(), out[:, :-1], out.unsqueeze(0), (out,), out.tolist(), None):
        for peer in (False, True):
            result = reference.compare(data, want, output, peer)
            assert not result.ok and "want" in result.message


def test_the_report_says_where():
    data, want = solved(of_content("plain", tokens=64))
    output = want.bfloat16()
    output[3:7, 5] = 1e4
    message = reference.compare(data, want, output).message
    assert f"Number of mismatched rows: 4 of {len(want)}" in message
    assert "ERROR AT (3, 5): 9984 " in message and f"experts {data.inputs.topk_ids[3].tolist()}" in message
    assert message.count("ERROR AT") == 4
    assert reference.check_implementation(data, output) == (False, message)
    assert reference.check_implementation(data, want.bfloat16()) == (True, "")


def test_a_peer_may_be_a_little_coarser():
    data, want = solved(of_content("plain", tokens=64))
    output = (want * (1 + 0.8 * task.PEER_TOL)).bfloat16()
    assert reference.compare(data, want, output, peer=True).ok
    assert not reference.compare(data, want, output).ok
    assert not reference.compare(data, want, torch.zeros_like(output), peer=True).ok


# ---------------------------------------------------------------- variants


def called(module: object, data: object) -> object:
    """-> a function that calls a variant on `data`, with its weights prepared."""
    peer = hasattr(module, "setup")
    if hasattr(module, "prepare"):
        data = data._replace(weights=module.prepare(data.weights))
    extra = (module.setup(data),) if peer else ()
    return lambda: module.custom_kernel(data, *extra)


def run(file: Path, case: object, device: str = "cpu") -> object:
    """The checker's result for one variant; a peer gets its own preparation and tolerance."""
    data, want = solved(case, device)
    data = poisoned(data)
    output = called(load.module(FOLDER, f"variants/{file.stem}"), data)()
    assert output is data.outputs.out
    return reference.compare(data, want, output, file.stem.startswith("peer_"))


@pytest.mark.parametrize("file", made_for(FOLDER, "cpu"), ids=lambda file: file.stem)
def test_every_cpu_variant_follows_other_weights(file):
    skip_unless_it_runs(file, "cpu")
    module = load.module(FOLDER, f"variants/{file.stem}")
    for seed in (1, 2):
        data = made(TINY, weights_seed=seed)
        result = reference.compare(data, reference.ref_kernel(data), called(module, data)())
        assert result.ok, result.message


def test_the_baseline_leaves_out_slots_whose_ids_are_no_experts():
    data = made(vars(of_content("plain", tokens=7)))
    data.inputs.topk_ids[5, 0], data.inputs.topk_ids[5, 1] = -1, len(data.weights.g13)
    assert baseline.custom_kernel(poisoned(data)).any(1).tolist() == [True] * 5 + [False, True]


# ---------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("file", made_for(FOLDER, "sm90"), ids=lambda file: file.stem)
def test_every_gpu_variant_is_right_in_every_case(file):
    skip_unless_it_runs(file, "cuda")
    only = load.constants(file, "ONLY").get("ONLY", {})  # of a peer
    for case in task.TESTS:
        if case.activation != only.get("activation", case.activation):
            continue
        result = run(file, case, "cuda")
        assert result.ok, f"{named(case)}: {result.message}"


@pytest.mark.gpu
@pytest.mark.parametrize("file", made_for(FOLDER, "sm90"), ids=lambda file: file.stem)
def test_every_gpu_variant_repeats_itself_bit_by_bit(file):
    skip_unless_it_runs(file, "cuda")
    if file.stem.startswith("peer_"):
        pytest.skip("a public kernel need not")
    module = load.module(FOLDER, f"variants/{file.stem}")
    for case in (of_content("plain"), of_content("plain", tokens=64), of_content("magnitudes", tokens=1000)):
        data = poisoned(solved(case, "cuda")[0])
        call = called(module, data)
        first = call().clone()
        for _ in range(20):
            data.outputs.out.fill_(torch.nan)
            assert torch.equal(call(), first), named(case)


@pytest.mark.gpu
def test_the_oracle_on_a_gpu_and_on_a_cpu_agree():
    for case in QUICK:
        data, want = solved(case, "cuda")
        here = task.Data(
            task.Weights(*(t.cpu() for t in data.weights[:-1]), data.weights.activation),
            task.Inputs(*(t.cpu() for t in data.inputs)),
            task.Outputs(data.outputs.out.cpu()),
        )
        torch.testing.assert_close(want.cpu(), reference.ref_kernel(here), rtol=1e-10, atol=1e-10)
