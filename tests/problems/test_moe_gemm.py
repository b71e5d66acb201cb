"""moe_gemm: the oracle against bytes and loops, the generator's contents, what its check admits."""

import dataclasses
import functools
import math

import pytest
import torch

from problems.common import load, nvfp4
from tests.problems import cases
from tests.problems.cases import named
from tests.problems.exact import FP8, dot, nvfp4_row, quantised
from tests.support.formats import MXFP4, NVFP4
from tests.support.marks import first

NAME = "moe_gemm"
task, reference = cases.task(NAME), cases.reference(NAME)
made, solved, poisoned = (functools.partial(function, NAME) for function in (cases.made, cases.solved, cases.poisoned))
baseline = load.variant(NAME, "torch_grouped")
ALL = ("uniform", "zipf", "one")  # routers that leave no token without an expert
SMALL = cases.SMALL[NAME]
QUICKEST_FIRST = sorted(task.TESTS, key=lambda case: case.flops())
each_case = pytest.mark.parametrize("case", first(QUICKEST_FIRST, len(task.TESTS) * 2 // 3), ids=named)


def of_content(content: str, activation: str = "bf16", tokens: int = 1) -> object:
    found = (c for c in task.TESTS if (c.content, c.activation) == (content, activation) and c.tokens >= tokens)
    return next(c for c in found if c.router in ALL)


def test_validate_refuses_repeated_experts_and_ids_out_of_range():
    inputs = made().inputs
    task.validate(inputs, 4)
    task.validate(inputs._replace(topk_ids=torch.full_like(inputs.topk_ids, -1)), 4)
    for row, message in (([1, 1], r"1 twice in row 1"), ([0, 4], r"got 4 at \(1, 1\)"), ([-2, 2], r"got -2 at \(1, 0")):
        ids = inputs.topk_ids.clone()
        ids[1] = torch.tensor(row)
        with pytest.raises(ValueError, match=message):
            task.validate(inputs._replace(topk_ids=ids), 4)


def test_tests_have_the_sizes_that_kernels_fail_at():
    assert {case.router for case in task.TESTS} == set(task.ROUTERS)
    for some in (task.TESTS, task.tests(1), task.tests(2)):
        assert all(case.hidden != case.inner for case in some)
        assert all(sum(getattr(case, name) % 128 == 64 for case in some) > 9 for name in ("hidden", "inner"))
        assert all(case.topk * case.inner >= 448 for case in some if case.activation != "bf16")


def test_cases_say_what_they_move_and_compute():
    one = task.BENCHMARKS[0]
    assert one.flops() == 2 * dataclasses.replace(one, activation="fp8").flops() == 6 * 6 * 4096 * 2048
    assert one.bytes_moved() == 6 * 3 * 4096 * 2048 * 9 // 16 + 4 * 4096 + 48
    assert dataclasses.replace(one, activation="fp8").bytes_moved() == 6 * 3 * 4096 * 2048 * 17 // 32 + 4 * 4096 + 48
    assert dataclasses.replace(SMALL, router="one", tokens=50).experts_hit() == 2
    assert dataclasses.replace(SMALL, topk=4).experts_hit() == 4


def test_what_given_routing_moves_goes_by_the_experts_it_hits():
    case = dataclasses.replace(SMALL, experts=8, topk=2, tokens=3)
    ids = torch.tensor([[0, 5], [5, -1], [7, 5]], dtype=torch.int32)
    for some, hit in ((ids, 3), (ids[:2], 2)):
        moved = case.bytes_of(task.Inputs(torch.empty(3, case.hidden), some, torch.empty(3, 2)))
        assert moved == hit * 3 * case.hidden * case.inner * 9 // 16 + 3 * (4 * case.hidden + 16)


@pytest.mark.parametrize("router", ["uniform", "zipf", "part"])
@pytest.mark.parametrize(("tokens", "topk"), [(1, 6), (8, 6), (64, 6), (64, 1), (300, 2)])
def test_as_many_experts_are_hit_as_expected(router, tokens, topk):
    gen = torch.Generator().manual_seed(1)
    routed = [reference._routed(tokens, 256, topk, router, gen) for _ in range(400 if tokens < 64 else 100)]
    hit = [len(ids[ids >= 0].unique()) for ids in routed]
    case = dataclasses.replace(SMALL, experts=256, tokens=tokens, topk=topk, router=router)
    assert math.isclose(sum(hit) / len(hit), case.experts_hit(), rel_tol=0.04)


@pytest.mark.parametrize("activation", task.ACTIVATIONS)
@pytest.mark.parametrize("content", ["plain", "magnitudes", "zeros"])
def test_reference_is_the_sum_over_the_bytes_in_memory(activation, content):
    data = made(tokens=2, activation=activation, content=content)
    data.inputs.topk_ids[1, 0] = -1
    out = reference.ref_kernel(data)
    w, (x, ids, routing), _ = data
    w13, s13, w2, s2 = (t.view(torch.uint8).tolist() for t in (w.w13, w.s13, w.w2, w.s2))
    if activation == "fp8":  # then they mean nothing
        w.in_scale13.fill_(1), w.in_scale2.fill_(1)
    form, rows = {"bf16": None, "nvfp4": NVFP4, "fp8": FP8}[activation], MXFP4 if activation == "fp8" else NVFP4
    for t in range(2):
        want = [0.0] * 64
        for j in range(2):
            if (e := int(ids[t, j])) < 0:
                continue
            taken = x[t].tolist()
            if form:
                taken = quantised(taken, form, float(w.in_scale13[e]))
            both = [dot(nvfp4_row(w13[e][i], s13[e][i], float(w.g13[e]), rows), taken) for i in range(256)]
            v = []
            for gate, up in zip(both[:128], both[128:], strict=True):
                gate, up = min(gate, 10.0), max(-10.0, min(up, 10.0))
                v.append(gate / (1 + math.exp(-gate)) * up * float(routing[t, j]))
            v = torch.tensor(v, dtype=torch.float64).bfloat16().tolist()
            if form:
                v = quantised(v, form, float(w.in_scale2[e]))
            parts = [dot(nvfp4_row(w2[e][h], s2[e][h], float(w.g2[e]), rows), v) for h in range(64)]
            want = [sum_ + part for sum_, part in zip(want, parts, strict=True)]
        torch.testing.assert_close(out[t], torch.tensor(want, dtype=torch.float64), rtol=1e-10, atol=1e-10)


@each_case
def test_generated_data_is_what_the_task_says(case):
    data, want = solved(case)
    task.validate(data.inputs, case.experts)
    assert bool(torch.isfinite(want).all()) and float(want.abs().max()) < 1e30
    w = data.weights
    for packed, scales in ((w.w13, w.s13), (w.w2, w.s2)):
        assert len((packed & 15).unique()) == len((packed >> 4).unique()) == 16
        if case.activation == "fp8":
            assert int(scales.flatten(1).amax(1).sub(scales.flatten(1).amin(1)).max()) <= task.SPAN
        else:
            nvfp4.check_scales(scales)
    for tensor in (data.inputs.x.float(), data.inputs.topk_weights, w.g13, w.g2, w.in_scale13, w.in_scale2):
        assert bool(torch.isfinite(tensor).all())
    assert bool((w.in_scale13 > 0).all()) and bool((w.in_scale2 > 0).all())


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
        crowded = case.experts > 1 and case.topk == 1 and int(counts.max()) == case.tokens > 128
        kinds = {"none": (counts == 0).any(), "one token": (counts == 1).any(), "all": crowded}
        seen |= {kind for kind, there in kinds.items() if there}
        if case.router == "one":
            assert int((counts > 0).sum()) == case.topk and int(counts.max()) == case.tokens
    assert seen == {"none", "one token", "all"}


def emulated(data: object, v_rounded: bool = True, sums_rounded: bool = False, off: float = 0.0) -> torch.Tensor:
    """What honest kernels compute: v left in fp32; gate, up and experts' outputs rounded to bf16; sums that are off."""
    w, (x, ids, routing), _ = data
    gen = torch.Generator().manual_seed(3)
    total = torch.zeros(x.shape)
    for e in ids[ids >= 0].unique().tolist():
        rows, slots = (ids == e).nonzero(as_tuple=True)
        y = x[rows].float()
        y = baseline.taken(w.activation, y[None], w.in_scale13[e : e + 1])[0]
        both = y @ baseline.decoded(w.w13[e], w.s13[e]).T * w.g13[e]
        both *= 1 + off * torch.randn(both.shape, generator=gen)
        gate, up = (both.bfloat16().float() if sums_rounded else both).chunk(2, 1)
        v = torch.nn.functional.silu(gate.clamp(max=10)) * up.clamp(-10, 10) * routing[rows, slots].unsqueeze(1)
        v = v.bfloat16().float() if v_rounded else v
        v = baseline.taken(w.activation, v[None], w.in_scale2[e : e + 1])[0]
        part = v @ baseline.decoded(w.w2[e], w.s2[e]).T * w.g2[e]
        total.index_add_(0, rows, part.bfloat16().float() if sums_rounded else part)
    return total.bfloat16()


@each_case
def test_honest_rounding_passes_with_room(case):
    data, want = solved(case)
    off = {"bf16": 0, "nvfp4": 1e-6, "fp8": 2.0**-12}[case.activation]  # of sums, fp8's by tensor cores
    most, room = {"bf16": (3e-3, 0.5), "nvfp4": (5e-3, 0.7), "fp8": (0.01, 0.7)}[case.activation]
    for how in ({"off": 0.0}, {"off": off}) if off else ({"v_rounded": True}, {"v_rounded": False}):
        result = reference.compare(data, want, emulated(data, **how))
        assert result.ok and result.rel < most and result.worst_abs <= room * result.worst_tol, result
    if not off:
        result = reference.compare(data, want, emulated(data, sums_rounded=True), peer=True)
        assert result.ok and result.rel < 5e-3, result


def test_a_row_beyond_its_bound_is_refused_and_one_within_is_not():
    bounds = ("bf16", task.ROW_RTOL), ("nvfp4", task.NVFP4_ROW_RTOL), ("fp8", task.FP8_ROW_RTOL)
    for activation, bound in bounds:
        data, want = solved(of_content("plain", activation, tokens=64))
        noise = torch.randn(want.shape[1], generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        for share, ok in ((0.9, True), (1.2, False)):
            output = want.clone()
            output[7] += noise / noise.norm() * share * bound * want[7].norm()
            assert reference.compare(data, want, output.bfloat16()).ok is ok, (activation, share)


def test_a_row_of_zeros_must_be_zeros():
    data, want = solved(of_content("zeros", tokens=64))
    for value in (0, 1e-30):
        output = want.bfloat16()
        output[-1, 5] = value
        assert reference.compare(data, want, output).ok is (value == 0)


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


def test_many_rows_at_their_bound_are_refused_as_a_whole_and_a_peer_may_be_a_little_coarser():
    data, want = solved(of_content("plain", tokens=64))
    result = reference.compare(data, want, (want * (1 + 0.8 * task.ROW_RTOL)).bfloat16())
    assert not result.ok and "in all" in result.message
    output = (want * (1 + 0.8 * task.PEER_TOL)).bfloat16()
    assert reference.compare(data, want, output, peer=True).ok and not reference.compare(data, want, output).ok


def test_the_baseline_leaves_out_slots_whose_ids_are_no_experts():
    data = made(**vars(of_content("plain", tokens=7)))
    data.inputs.topk_ids[5, 0], data.inputs.topk_ids[5, 1] = -1, len(data.weights.g13)
    assert baseline.custom_kernel(poisoned(data)).any(1).tolist() == [True] * 5 + [False, True]
