"""What holds of every problem: the form of its calls, its generator, and what its check takes and refuses."""

import pytest
import torch

from tests.problems import cases
from tests.problems.cases import NAMES, made, rounded

each_problem = pytest.mark.parametrize("name", NAMES)

# Fields that sizes and the device are read from: where one of these is wrong, another one may be named.
MEASURED = {
    "fmha_decode": ("q",),
    "fmha_prefill": ("q", "first"),
    "indexer": ("q",),
    "linear_decode": ("codes", "x"),
    "mhc_site": ("y",),
    "moe_gemm": ("w13", "x", "topk_ids"),
    "nvfp4_gemv": ("a",),
}
# Axes that may have another length.
FREE = {
    "fmha_decode": {("window", 0), ("window_index", 2), ("compressed", 0), ("compressed_index", 2)},
    "fmha_prefill": {("window", 0), ("window_index", 1), ("compressed", 0), ("compressed_index", 1)},
    "indexer": {("keys", 0), ("table", 1), ("out", 2)},
    "nvfp4_gemv": {("a", "axes")},  # refused by Python, without the name
}


def in_other_forms(tensor: torch.Tensor) -> dict[object, torch.Tensor]:
    """Tensors of another dtype, device and layout, with an axis more, and shorter along each axis."""
    shape, dtype = tensor.shape, tensor.dtype
    found = {
        "dtype": torch.empty(shape, dtype=torch.int16),
        "device": tensor.to("meta"),
        "axes": tensor.unsqueeze(0),
        **{i: torch.empty(*shape[:i], n - 1, *shape[i + 1 :], dtype=dtype) for i, n in enumerate(shape) if n},
    }
    if tensor.numel() > 1:
        found["layout"] = torch.empty_strided(shape, [2 * stride for stride in tensor.stride()], dtype=dtype)
    return found


@each_problem
def test_unpack_names_the_tensor_that_is_wrong(name):
    data = made(name)
    for place, tensor in cases.leaves(data):
        field = place.rpartition(".")[2]
        for what, wrong in in_other_forms(tensor).items():
            if (field, what) not in FREE.get(name, ()):
                said = " must " if field in MEASURED[name] else rf"\b{field}\b"
                with pytest.raises(ValueError, match=said):
                    cases.task(name).unpack(cases.changed(data, place, lambda _, wrong=wrong: wrong))


@pytest.mark.parametrize(
    ("name", "place", "change", "said"),
    [
        ("fmha_decode", "window", lambda t: t[:, :1000].contiguous(), "window"),
        ("fmha_decode", "window_index", lambda t: t[..., :0], "window_index"),
        ("fmha_prefill", "window", lambda t: t[:, :1000].contiguous(), "window"),
        ("fmha_prefill", "window_index", lambda t: t[:, :127].contiguous(), "window_index"),
        ("fmha_prefill", "out", lambda t: t.contiguous(), "out"),
        ("indexer", "q", lambda t: t[:, :, :8], "H"),
        ("mhc_site", "y", lambda t: t.half(), "y"),
        ("mhc_site", "y", lambda t: t.float(), "y"),
        ("mhc_site", "y", lambda t: t[:, :32].contiguous(), "y"),
        ("mhc_site", "second", lambda t: t.half(), "second"),
        ("mhc_site", "second", lambda t: t.new_zeros(1, 64), "second"),
        ("moe_gemm", "weights.activation", lambda _: "int8", "activation"),
        ("moe_gemm", "weights.w13", lambda t: t[:, :100].contiguous(), "w13"),
        ("moe_gemm", "inputs.topk_ids", lambda t: t[:, :0], "topk_ids"),
        ("moe_gemm", "inputs", lambda i: i._make((i[0], *(t.repeat(1, 3) for t in i[1:]))), "topk_ids"),
        ("linear_decode", "weights.format", lambda _: "fp4", "format"),
        ("linear_decode", "weights.links.1.0.scales", lambda _: None, "scales"),
        ("linear_decode", "weights.links.1.0.quantise", lambda _: 1, "quantise"),
        ("linear_decode", "weights.links.0.1.quantise", lambda _: False, "agree in quantise"),
        ("linear_decode", "weights.links.1.0.factor", lambda _: torch.ones(1), "factor"),
        ("linear_decode", "weights.links.1.0.input_scale", lambda _: torch.ones(1), "input_scale"),
        ("linear_decode", "weights.links.1.0.codes", lambda t: t[:, :32].contiguous(), "n and k"),
        ("linear_decode", "inputs.x", lambda t: t.repeat(5000, 1), "x"),
        ("nvfp4_gemv", "a", lambda t: t[:, :16], "k must be a multiple of 64 .* got 32"),
    ],
)
def test_unpack_names_the_value_that_is_wrong(name, place, change, said):
    with pytest.raises(ValueError, match=rf"\b{said}\b"):
        cases.task(name).unpack(cases.changed(made(name), place, change))


OUT_OF_BOUNDS = {
    "fmha_prefill": ({"tokens": 0}, {"position": -1}, {"ratio": 0}, {"lists": "some"}, {"content": "other"}),
    "linear_decode": ({"format": "fp4"}, {"content": "other"}, {"tokens": 0}, {"tokens": 8193}),
    "mhc_site": ({"tokens": 0}, {"hidden": 96}, {"content": "other"}, {"addends": "fp8"}),
    "moe_gemm": (
        *({"activation": "int8"}, {"router": "random"}, {"content": "other"}, {"hidden": 96}, {"inner": 0}),
        *({"tokens": 0}, {"topk": 5}, {"topk": 0}),
    ),
    "nvfp4_gemv": ({"k": 96}, {"k": 0}, {"m": 0}, {"l": 0}),  # refused by the generator
}


@pytest.mark.parametrize(("name", "change"), [(name, one) for name, rows in OUT_OF_BOUNDS.items() for one in rows])
def test_cases_out_of_bounds_are_refused(name, change):
    with pytest.raises(ValueError, match=rf"\b{next(iter(change))}\b"):
        made(name, **vars(cases.task(name).Case(**{**vars(cases.SMALL[name]), **change})))


DRAWN = [
    (name, {"content": content, **fmt} if content else {})
    for name in NAMES
    for content in getattr(cases.task(name), "CONTENTS", (None,))
    for fmt in ([{"format": kind} for kind in cases.task(name).KINDS] if name == "linear_decode" else [{}])
]
# What another seed leaves as it was, in a case this small.
ALIKE = {"window_index", "window_length", "compressed_index", "compressed_length", "visible", "sink", "second"}
ALIKE |= {"scales", "input_scale", "starts", "first"}


@pytest.mark.parametrize(("name", "change"), DRAWN, ids=str)
def test_the_generator_is_a_function_of_its_seed(name, change):
    first, again, other = (made(name, **change, seed=seed) for seed in (5, 5, 6))
    for (place, one), (_, two), (_, three) in zip(*map(cases.leaves, (first, again, other)), strict=True):
        field = place.rpartition(".")[2]
        if field not in cases.task(name).OUTPUTS:
            one, two, three = (tensor.view(torch.uint8) for tensor in (one, two, three))
            assert torch.equal(one, two), field
            assert field in ALIKE or not torch.equal(one, three), field


@pytest.mark.parametrize(
    ("name", "constant", "change"),
    [
        ("fmha_decode", "TILE", {"content": "ragged"}),
        ("fmha_prefill", "TILE", {"content": "ragged"}),
        ("indexer", "TILE", {"content": "ragged"}),
        ("mhc_site", "TILE", {}),
        ("nvfp4_gemv", "ROWS", {}),
    ],
)
def test_the_reference_does_not_depend_on_its_tiles(name, constant, change, monkeypatch):
    data = made(name, **change)
    want = cases.reference(name).ref_kernel(data)
    monkeypatch.setattr(cases.reference(name), constant, {"cpu": 1})
    torch.testing.assert_close(cases.reference(name).ref_kernel(data), want, rtol=1e-13, atol=1e-11)


def with_output(answer: object, i: int, output: object) -> object:
    """An answer with another output at place i."""
    return (*answer[:i], output, *answer[i + 1 :]) if isinstance(answer, tuple) else output


def each_output(answer: object) -> list[tuple[int, torch.Tensor]]:
    return list(enumerate(answer)) if isinstance(answer, tuple) else [(0, answer)]


@each_problem
def test_the_check_refuses_an_output_that_has_nothing_to_do_with_the_inputs(name):
    data, other = made(name), made(name, seed=77)
    want, wrong = (cases.reference(name).ref_kernel(one) for one in (data, other))
    right, wrong = rounded(name, data, want), rounded(name, other, wrong)
    assert cases.reference(name).check_implementation(data, right) == (True, "")
    for (i, output), (_, previous) in zip(each_output(right), each_output(wrong), strict=True):
        for value in (torch.zeros_like(output), torch.ones_like(output), previous):
            for peer in (False, True):
                bad = with_output(right, i, value)
                result = cases.reference(name).compare(data, want, bad, peer)
                assert not result.ok and "mismatch found! " in result.message
            assert cases.reference(name).check_implementation(data, bad)[0] is False


class Tensor(torch.Tensor):
    pass


@pytest.mark.parametrize("peer", [False, True])
@each_problem
def test_the_check_refuses_other_forms(name, peer):
    data = made(name)
    want = cases.reference(name).ref_kernel(data)
    right = rounded(name, data, want)
    bad = [[output for _, output in each_output(right)], right[:-1]]
    for i, output in each_output(right):
        others = [output.double(), output.float() if output.dtype != torch.float32 else output.half(), output[..., :-1]]
        others += [output.unsqueeze(0), output.flatten()[:-1], output.as_subclass(Tensor), output.tolist(), None]
        bad += [with_output(right, i, other) for other in others]
    for output in bad:
        result = cases.reference(name).compare(data, want, output, peer)
        assert not result.ok and result.message.startswith("mismatch found! want ")
        assert result.rel != result.rel


@pytest.mark.parametrize("peer", [False, True])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@each_problem
def test_the_check_refuses_one_element_that_is_not_finite(name, value, peer):
    data = made(name)
    want = cases.reference(name).ref_kernel(data)
    for i, output in each_output(rounded(name, data, want)):
        if output.is_floating_point():
            output[tuple(n - 1 for n in output.shape)] = value
            bad = with_output(rounded(name, data, want), i, output)
            assert not cases.reference(name).compare(data, want, bad, peer).ok


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "change"), DRAWN, ids=str)
def test_the_reference_on_a_gpu_and_on_a_cpu_agree(name, change):
    data = made(name, "cuda", **change)
    here = data
    for place, _ in cases.leaves(data):
        here = cases.changed(here, place, torch.Tensor.cpu)
    want, on_cpu = (cases.reference(name).ref_kernel(one) for one in (data, here))
    torch.testing.assert_close(want, on_cpu, rtol=1e-10, atol=1e-10, check_device=False)
