"""operators.py, hub.py: winners as operators of torch, which compute what problems say and pass torch's checks."""

import sys
from types import SimpleNamespace

import hub  # packaging/hub.py
import pytest
import torch

from dsv4_kernels import operators
from tests.problems import cases
from tests.support.marks import first

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
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


def moved(tensor: torch.Tensor, by: int) -> torch.Tensor:
    """A copy that begins `by` bytes behind what torch allocates."""
    room = tensor.new_empty(64 + tensor.untyped_storage().nbytes() // tensor.element_size())
    return room[by // tensor.element_size() :].as_strided(tensor.shape, tensor.stride()).copy_(tensor)


def check(name: str, data: object) -> None:
    """The outputs of the data are right."""
    answer = tuple(cases.outputs(name, data))
    assert cases.reference(name).check_implementation(data, answer if answer[1:] else answer[0]) == (True, "")


@pytest.mark.parametrize("more", first([[], ["test_autograd_registration", "test_aot_dispatch_dynamic"]]), ids=len)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", cases.NAMES)
def test_the_operator_is_the_winner_and_passes_torchs_own_checks(call, name, device, more):
    data, arguments = call(name, device)
    getattr(torch.ops.dsv4, name)(*(arguments if name in HELD else data))
    check(name, data)
    checks = ["test_schema", "test_faketensor", *more]
    torch.library.opcheck(getattr(operators, name), tuple(arguments), test_utils=checks)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", cases.NAMES)
def test_tensors_begin_at_multiples_of_16_bytes(call, name, device):
    data, arguments = call(name, device)
    operator, held = getattr(torch.ops.dsv4, name), arguments[: name in HELD]
    near = [moved(tensor, operators.ALIGNED) for tensor in arguments[len(held) :]]
    operator(*held, *near)
    for output, copy in zip(reversed(cases.outputs(name, data)), reversed(near), strict=False):
        output.copy_(copy)
    check(name, data)
    for i, argument in enumerate(operator.default._schema.arguments[len(held) :]):
        with pytest.raises(ValueError, match=f"^{argument.name} must begin at a multiple of 16 bytes"):
            operator(*held, *near[:i], moved(near[i], near[i].element_size()), *near[i + 1 :])


@pytest.mark.gpu
@pytest.mark.parametrize("name", cases.NAMES)
def test_operators_are_right_on_a_gpu_compiled_in_any_stream_and_in_a_graph(call, name):
    data, arguments = call(name, "cuda")
    operator, written = getattr(torch.ops.dsv4, name), cases.outputs(name, data)
    torch.compile(lambda *given: operator(*given), fullgraph=True)(*arguments)
    check(name, data)
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
    check(name, data)
    cases.poison(written)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        operator(*arguments)
    graph.replay()
    check(name, data)


@pytest.mark.parametrize("name", cases.NAMES)
def test_tracing_refuses_what_the_winner_would_refuse(call, name):
    operator, (_, arguments) = getattr(operators, name), call(name)
    with torch._subclasses.FakeTensorMode() as mode:
        *fake, last = [mode.from_tensor(part) if isinstance(part, torch.Tensor) else part for part in arguments]
        operator(*fake, last)
        for wrong in (last[1:], None):
            with pytest.raises(ValueError, match=f"{operators.task(name).OUTPUTS[-1]} must be"):
                operator(*fake, wrong)


@pytest.mark.parametrize("name", HELD)
def test_weights_are_held_as_the_winner_prepares_them(call, name, monkeypatch):
    only = SimpleNamespace(prepare=lambda weights: 3, custom_kernel=lambda data: data.outputs.out.fill_(data.weights))
    monkeypatch.setattr(operators, "winner", lambda problem, device: only)
    operator, (data, arguments) = getattr(torch.ops.dsv4, name), call(name)
    operator(*arguments)
    assert bool((data.outputs.out == 3).all())
    with pytest.raises(ValueError, match=r"name must be one of \['test'\].*'other'"):
        operator("other", *arguments[1:])
    place, _ = next(cases.leaves(data.weights))
    for change, said in ((torch.Tensor.double, "be "), (lambda t: moved(t, t.element_size()), "begin at")):
        with pytest.raises(ValueError, match=rf"(w13|codes)\S* must {said}"):
            HELD[name]("test", cases.changed(data.weights, place, change))
        operator(*arguments)  # those before are held
    HELD[name]("test", None)
    with pytest.raises(ValueError, match=r"name must be one of \[\]"):
        operator(*arguments)


@pytest.mark.parametrize("linked", [False, True])  # as get_kernel has it: links into the Hub's cache
def test_hugging_faces_kernels_loads_the_build_and_its_layers(linked, tmp_path):
    kernels = pytest.importorskip("kernels", reason="needs Hugging Face's package kernels")
    hub.write(tmp_path, ["cpu"])
    for number, file in enumerate([file for file in tmp_path.rglob("*") if linked and file.is_file()]):
        file.symlink_to(file.rename(tmp_path / str(number)))
    for name in [name for name in sys.modules if name.startswith("_dsv4_kernels")]:
        del sys.modules[name]
    kernel = kernels.get_local_kernel(tmp_path, backend="cpu")
    for operator in (kernel.fmha_decode, kernel.layers.FmhaDecode()):
        operator(*(data := cases.made("fmha_decode", "cpu")))
        check("fmha_decode", data)
