"""operators.py: winners as operators of torch, which compute what their problems say and pass torch's checks."""

from types import SimpleNamespace

import pytest
import torch

from dsv4_kernels import operators
from problems.dsv4_forward import ops
from tests.problems import cases
from tests.problems.cases import NAMES
from tests.support.marks import first

HELD = {"moe_gemm": operators.hold_moe_gemm, "linear_decode": operators.hold_linear_decode}


@pytest.fixture
def call():
    """Data of a small case of a problem, and the operator's arguments. Weights are held as "test"."""

    def make(name: str, device: str = "cpu") -> tuple[object, list]:
        data = cases.made(name, device, **({"addends": "bf16+bf16"} if name == "mhc_site" else {}))
        if name in HELD:
            HELD[name]("test", data.weights)
            return data, ["test", *data.inputs, *data.outputs]
        if name == "nvfp4_gemv":  # torch's checks cannot compare fp4 and fp8
            return data, [*(tensor.view(torch.uint8) for tensor in data[:-1]), data.c]
        return data, list(data)

    yield make
    for hold in HELD.values():
        hold("test", None)


def test_winners_that_fill_ops_are_operators():
    exported = {name for name in vars(operators) if isinstance(vars(operators)[name], torch.library.CustomOpDef)}
    assert {problem for op in ops.NAMES for problem in ops.problems_of(op)} == exported == set(NAMES)


@pytest.mark.parametrize("more", first([[], ["test_autograd_registration", "test_aot_dispatch_dynamic"]]), ids=len)
@pytest.mark.parametrize("name", NAMES)
def test_the_operator_is_the_winner_and_passes_torchs_own_checks(call, name, more):
    data, arguments = call(name)
    getattr(torch.ops.dsv4, name)(*arguments)
    written = cases.outputs(name, data)
    answer = tuple(written) if len(written) > 1 else written[0]
    assert cases.reference(name).check_implementation(data, answer) == (True, "")
    checks = ["test_schema", "test_faketensor", *more]
    torch.library.opcheck(getattr(operators, name), tuple(arguments), test_utils=checks)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_operators_are_right_on_a_gpu_compiled_in_any_stream_and_in_a_graph(call, name):
    data, arguments = call(name, "cuda")
    operator, written = getattr(torch.ops.dsv4, name), cases.outputs(name, data)

    def check() -> None:
        torch.cuda.synchronize()
        answer = tuple(written) if len(written) > 1 else written[0]
        assert cases.reference(name).check_implementation(data, answer) == (True, "")
        cases.poison(written)

    torch.library.opcheck(getattr(operators, name), tuple(arguments), test_utils=["test_schema", "test_faketensor"])
    torch.compile(lambda *given: operator(*given), fullgraph=True)(*arguments)
    check()
    long = torch.ones(2**28, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):  # it is busy, and poisons behind the call too
        long.cumsum_(0)
        cases.poison(written)
        operator(*arguments)
        kept = [output.clone() for output in written]
        cases.poison(written)
    torch.cuda.synchronize()
    for output, copy in zip(written, kept, strict=True):
        output.copy_(copy)
    check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        operator(*arguments)
    graph.replay()
    check()


@pytest.mark.parametrize(
    ("name", "at", "change", "said"),
    [
        ("nvfp4_gemv", 3, lambda t: t[:1], "sfb must be"),
        ("linear_decode", 1, lambda t: t[:, 1:], "x must be"),
        ("moe_gemm", 3, lambda t: t[:, :1], "topk_weights must be"),
    ],
)
def test_tracing_refuses_what_the_winner_would_refuse(call, name, at, change, said):
    operator, (_, arguments) = getattr(operators, name), call(name)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = [mode.from_tensor(part) if isinstance(part, torch.Tensor) else part for part in arguments]
        operator(*fake)
        with pytest.raises(ValueError, match=said):
            operator(*fake[:at], change(fake[at]), *fake[at + 1 :])


def test_codes_are_given_as_bytes(call):
    first, *rest = call("nvfp4_gemv")[1]
    with pytest.raises(ValueError, match=r"a must be uint8, .*got torch\.float4_e2m1fn_x2"):
        operators.nvfp4_gemv(first.view(torch.float4_e2m1fn_x2), *rest)


@pytest.mark.parametrize("name", HELD)
def test_weights_are_held_as_the_winner_prepares_them(call, name, monkeypatch):
    def custom_kernel(data):
        assert data.weights == "laid out"
        return data.outputs.out.fill_(3)

    only = SimpleNamespace(prepare=lambda weights: "laid out", custom_kernel=custom_kernel)
    monkeypatch.setattr(operators, "winner", lambda problem, device: only)
    data, arguments = call(name)
    operator = getattr(torch.ops.dsv4, name)
    operator(*arguments)
    assert bool((data.outputs.out == 3).all())
    with pytest.raises(ValueError, match=r"name must be one of \['test'\].*'other'"):
        operator("other", *arguments[1:])
    with pytest.raises(ValueError, match="must be"):
        HELD[name]("test", data.weights._replace(**{data.weights._fields[0]: torch.zeros(3)}))
    HELD[name]("test", None)
    with pytest.raises(ValueError, match=r"name must be one of \[\]"):
        operator(*arguments)
