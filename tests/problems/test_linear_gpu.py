"""linear_decode's kernels on a GPU beyond the cases: rows alone and in a batch, repeats, large chains, graphs."""

import pytest
import torch

from problems.common import load
from tests.problems import test_linear_decode as cases
from tests.problems.variants import made_for, skip_unless_it_runs

task, reference, FOLDER = cases.task, cases.reference, cases.FOLDER
OURS = [file for file in made_for(FOLDER, "sm90") if file.stem.startswith("sm90_")]
pytestmark = pytest.mark.gpu


def prepared(name: str, data: object) -> tuple[object, object]:
    module = load.variant("linear_decode", name)
    weights = module.prepare(data.weights) if hasattr(module, "prepare") else data.weights
    return module, data._replace(weights=weights)


@pytest.mark.parametrize(
    "shape", [task.FLASH["wq_a+wkv"], task.FLASH["wo_b"], "3x192x576", "64x2112_128x64", "2x192x8256"]
)
@pytest.mark.parametrize("fmt", task.KINDS)
def test_a_row_has_the_same_bits_alone_and_with_any_others(fmt, shape):
    data = cases.made({**cases.TINY, "format": fmt, "shape": shape, "tokens": 32}, "cuda")
    module, given = prepared("sm90_mma", data)
    sizes = task.unpack(data)
    every = task.parts(module.custom_kernel(given), sizes)
    for tokens in (1, 7, 8, 9, 16, 17, 24, 31):
        x = data.inputs.x[-tokens:].clone()
        out = x.new_full((data.outputs.out.numel() // 32 * tokens,), torch.nan)
        module.custom_kernel(given._replace(inputs=task.Inputs(x), outputs=task.Outputs(out)))
        some = task.parts(out, sizes._replace(tokens=tokens))
        for link, mine in zip(every, some, strict=True):
            assert all(torch.equal(a[-tokens:], b) for a, b in zip(link, mine, strict=True)), tokens


@pytest.mark.parametrize("tokens", [1, 8, 32])
@pytest.mark.parametrize("fmt", task.KINDS)
@pytest.mark.parametrize("file", OURS, ids=lambda file: file.stem)
def test_the_models_chain_is_right_and_repeats(file, fmt, tokens):
    skip_unless_it_runs(file, "cuda")
    data = cases.made({**cases.TINY, "format": fmt, "shape": task.CHAIN, "tokens": tokens}, "cuda")
    module, given = prepared(file.stem, data)
    first = module.custom_kernel(given).clone()
    result = reference.compare(data, reference.ref_kernel(data), first)
    assert result.ok, result.message
    for _ in range(200):
        data.outputs.out.fill_(torch.nan)
        assert torch.equal(module.custom_kernel(given), first)


@pytest.mark.parametrize("tokens", [1, 2, 8, 16, 32])
@pytest.mark.parametrize("shape", [*task.PRO.values(), "128x16384", "129280x256"])
def test_the_larger_model_is_right(shape, tokens):
    data = cases.made({**cases.TINY, "shape": shape, "tokens": tokens}, "cuda")
    module, given = prepared("sm90_mma", data)
    result = reference.compare(data, reference.ref_kernel(data), module.custom_kernel(given))
    assert result.ok, result.message


@pytest.mark.parametrize("tokens", [1, 3, 8, 9, 32])
@pytest.mark.parametrize("fmt", task.KINDS)
def test_an_expert_is_both_products(fmt, tokens):
    """SwiGLU in the first launch's epilogue; the sizes of Flash's shared expert."""
    case = {**cases.TINY, "format": fmt, "tokens": tokens}
    first, second = (cases.made({**case, "shape": shape}, "cuda") for shape in ("4096x4096", "4096x2048"))
    mma = load.variant("linear_decode", "sm90_mma")
    x, out = first.inputs.x, torch.full((tokens, 4096), torch.nan, dtype=torch.bfloat16, device="cuda")
    state = mma.prepare_expert(first.weights, second.weights)
    mma.expert(state, 1.0, x, out)
    gate, up = reference.ref_kernel(first).view(tokens, -1).chunk(2, 1)
    v = torch.nn.functional.silu(gate.clamp(max=1.0)) * up.clamp(-1.0, 1.0)
    want, _ = reference.products(first.weights.format, second.weights.links[0][0], v.bfloat16())
    # Here and there a value between the two is on the other side of a rounding.
    assert float((out.double() - want).norm() / want.norm()) < 1e-2
    alone = torch.empty(1, 4096, dtype=torch.bfloat16, device="cuda")
    mma.expert(state, 1.0, x[-1:].clone(), alone)
    assert torch.equal(alone[0], out[-1])


@pytest.mark.parametrize(
    ("fmt", "shape", "tokens"),
    [
        ("fp8", task.CHAIN, 1),
        ("nvfp4", task.CHAIN, 1),
        ("fp8", task.CHAIN, 32),
        ("fp8", task.FLASH["wo_b"], 32),
        ("bf16", task.FLASH["wo_b"], 32),
        ("nvfp4", task.PRO["wo_b"], 9),
    ],
)
def test_calls_are_captured_and_replayed(fmt, shape, tokens):
    """1,000 replays of a graph: of cooperative launches, whose blocks meet or tell each other sums, and early ones."""
    data = cases.made({**cases.TINY, "format": fmt, "shape": shape, "tokens": tokens}, "cuda")
    module, given = prepared("sm90_mma", data)
    want = module.custom_kernel(given).clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.ExternalStream(2)):
        module.custom_kernel(given)
    for _ in range(1000):
        data.outputs.out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(data.outputs.out, want)
