"""moe_gemm in the ops experts, shared and all_experts: equal to the reference, what it leaves, refuses and says."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch

from problems.dsv4_forward import layers, ops, prepared
from problems.dsv4_forward.torch_ops import experts
from problems.dsv4_forward.weights import tree
from problems.dsv4_forward.weights.config import CONFIGS
from problems.dsv4_forward.weights.linear import Linear
from tests.dsv4.experts import GROUPED, MOE, SMALL, TASK, Raises, apart, call, calls, close, inputs, left, run
from tests.dsv4.linears import moved, published


@pytest.fixture(scope="module")
def model():
    return tree.random(SMALL, "nvfp4", seed=3)


@pytest.mark.parametrize("activation", ["bf16", "nvfp4"])
@pytest.mark.parametrize(("name", "tokens"), [(min(CONFIGS), 1), *((name, 37) for name in sorted(CONFIGS))])
def test_experts_are_the_references(name, tokens, activation):
    """As many experts as each model has, as many a token; and tokens that no tile divides."""
    cfg = CONFIGS[name]
    arguments = call(tokens, cfg.n_routed_experts, cfg.num_experts_per_tok, 64, 256, activation)
    want = run(experts.experts, arguments, torch.float32)
    close(run(calls(arguments[3:5]).experts, arguments), want, activation)


@pytest.mark.parametrize("tokens", [1, 70, MOE.ROOM + 3])
def test_shared_is_the_references_with_one_expert(tokens):
    x, _, _, *rest = call(tokens, 1, 1, 64, 64, "bf16")
    want = run(experts.shared, (x, *rest), torch.float32)
    close(run(calls(rest[:2]).shared, (x, *rest)), want, "bf16")


def test_what_it_does_not_serve_is_left():
    """fp32 activations, other kinds of weights; on the last call, who was called."""
    x, ids, gates, w13, w2, limit = call(5, 8, 2, 64, 64, "bf16")
    op = calls((w13, w2), module=Raises).experts
    plain = [Linear("plain", w.dequantise(), name=w.name) for w in (w13, w2)]
    assert left(op, (x.float(), ids, gates, w13, w2, limit)) and left(op, (x, ids, gates, *plain, limit))
    with pytest.raises(AssertionError, match="called"):
        run(op, (x, ids, gates, w13, w2, limit))
    assert run(op, (x[:0], ids[:0], gates[:0], w13, w2, limit)).shape == (0, 64)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda a, b: (dataclasses.replace(a, quantise_input=False), b), "the input of one of w13 and w2 is quantised"),
        (lambda a, b: (a, Linear("plain", b.dequantise(), name=b.name)), "its w2 is plain"),
        (lambda a, b: (published(128, 80, lead=(2,)), published(80, 64, lead=(2,))), "multiples of 64, are 80 and 64"),
        (lambda a, b: (dataclasses.replace(a, scale=a.scale.mT.contiguous().mT), b), "w13 are not contiguous"),
        (lambda a, b: (a, dataclasses.replace(b, weight=moved(b.weight, 16))), "w2 do not start at a multiple of 64"),
        (lambda a, b: (a, dataclasses.replace(b, scale=moved(b.scale, 16))), "w2 do not start at a multiple of 64"),
    ],
)
def test_weights_that_the_problem_has_not_are_left_and_named(change, reason, model):
    x, ids, gates, *pair, limit = call(3, 2, 2, 64, 64, "nvfp4")
    w13, w2 = change(*pair)
    made = calls((w13, w2), module=Raises)
    (held,) = made.layers.values()
    assert reason in held.reason
    line, other = prepared.report("what", "layers", [held], model)
    assert line == "what: 0 of 1 layers, 0.0 MiB kept beside the weights"
    assert other == f"{held.name}: not served ({held.reason})"
    assert left(made.experts, (inputs(3, w13.k), ids, gates, w13, w2, limit))


def test_a_table_that_repeats_an_expert_is_left():
    _, _, _, w13, w2, _ = call(1, 8, 2, 64, 64, "bf16")
    fine, twice = torch.tensor([[1, 2], [2, 1]]), torch.tensor([[1, 2], [3, 3]])
    reasons = [MOE.prepare(GROUPED, w13, w2, table).reason for table in (fine, twice)]
    assert reasons == ["", "its table names an expert twice for a token"]


@pytest.mark.parametrize(
    ("change", "variant", "message"),
    [
        (lambda a, b: a.scale.view(torch.uint8)[1].fill_(0x7F), GROUPED, r".w13: scale bytes must be .*0x7F at \(1, "),
        (lambda a, b: b.scale.view(torch.uint8)[0].fill_(0x80), GROUPED, r".w2: scale bytes must be .*0x80"),
        (lambda a, b: a.input_scale.fill_(0), GROUPED, r".w13: input_scale must be positive and finite, got 0\.0"),
        (lambda a, b: b.input_scale[1:].fill_(math.nan), GROUPED, r".w2: input_scale must .* got nan"),
        (lambda a, b: None, SimpleNamespace(prepare=lambda _: int("H is odd")), ": .*H is odd"),
        (lambda a, b: (a.select(torch.arange(3) % 2), b), GROUPED, r": w2 must be .*\(3, 64, 32\)"),
    ],
)
def test_bad_weights_are_errors_that_name_the_layer(change, variant, message):
    """Also what a variant refuses."""
    _, _, _, w13, w2, _ = call(1, 2, 2, 64, 64, "nvfp4")
    made = change(w13, w2)
    with pytest.raises(ValueError, match=r"layers\.0\.ffn\.experts" + message):
        MOE.prepare(variant, *(made if isinstance(made, tuple) else (w13, w2)))


def test_calls_that_are_none_are_errors():
    x, ids, gates, w13, w2, limit = call(3, 4, 2, 64, 64, "bf16")
    op = calls((w13, w2)).experts
    other = dataclasses.replace(w13, name="stranger")
    for arguments, message in (
        ((x, ids, gates, w13, w2, 7.0), r"limit must be 10\.0, got 7\.0"),
        ((x, ids, gates, other, w2, limit), r"stranger with .* must be of the weights that"),
        ((x, ids, gates, w13, dataclasses.replace(w2), limit), "must be of the weights that"),
        ((x[:, :32], ids, gates, w13, w2, limit), "x must be"),
        ((x, ids[:2], gates, w13, w2, limit), "x must be"),
        ((x, ids + 3, gates, w13, w2, limit), "topk_ids must be -1 to 3"),
        ((x, ids * 0, gates, w13, w2, limit), "topk_ids must be all different"),
    ):
        with pytest.raises(ValueError, match=message):
            run(op, arguments)


def test_slices_of_wider_tensors_go_in_and_out():
    """Of bf16; an fp32 output, as in the oracle, gets what the kernel rounds."""
    x, ids, gates, w13, w2, limit = call(3, 4, 2, 64, 64, "nvfp4")
    op = calls((w13, w2)).experts
    want = run(op, (x, ids, gates, w13, w2, limit))
    wide = torch.zeros(3, 90, dtype=torch.bfloat16)
    wide[:, 7:71] = x
    for dtype in (torch.bfloat16, torch.float32):
        out = torch.full((3, 90), math.nan, dtype=dtype)
        op(wide[:, 7:71], ids, gates, w13, w2, limit, out[:, 3:67])
        assert torch.equal(out[:, 3:67], want.to(dtype))
        assert bool(out[:, :3].isnan().all()) and bool(out[:, 67:].isnan().all())


def test_weights_are_prepared_once_and_what_is_kept_is_told(model):
    seen = []

    class Copies:
        __name__ = "problems.moe_gemm.variants.copies"

        @staticmethod
        def prepare(given):
            room = torch.empty(1000)  # written in each call
            assert not room.is_inference()
            seen.append(given.w13.data_ptr())
            return {"codes": [given.w13.clone(), given.w2], "room": room}

        @staticmethod
        def custom_kernel(data):
            return data.outputs.out.copy_(data.inputs.x + data.weights["room"].fill_(1)[0])

    with torch.inference_mode():
        found = MOE.fit(Copies(), model, ("experts",))
    blocks = [*model.layers, model.mtp.block]
    assert seen == [block.ffn.w13.weight.data_ptr() for block in blocks]
    size = len(blocks) * (blocks[0].ffn.w13.weight.nbytes + 4000) / 2**20
    said = f"moe_gemm/copies: 4 of 4 layers of routed experts, {size:.1f} MiB kept beside the weights"
    assert found.report == (said,)
    ffn, x = model.layers[1].ffn, inputs(2, SMALL.hidden_size)
    ids, gates = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32), torch.ones(2, 2)
    assert torch.equal(run(found.functions["experts"], (x, ids, gates, ffn.w13, ffn.w2, TASK.LIMIT)), x + 1)


def test_the_models_weights_are_taken_where_they_are(model):
    found = MOE.fit(GROUPED, model, ("experts",))
    said = "moe_gemm/torch_grouped: 4 of 4 layers of routed experts, 0.0 MiB kept beside the weights"
    assert found.report == (said,)
    state, _ = found.functions["experts"].__self__.layers[id(model.layers[0].ffn.w13)].state
    own = {tensor.data_ptr() for tensor in model.tensors.values()}
    assert isinstance(state, TASK.Weights) and all(tensor.data_ptr() in own for tensor in state[:-1])


@pytest.mark.parametrize(
    ("fmt", "change", "experts_", "shared"),
    [
        ("nvfp4", {"swiglu_limit": 7.0}, "swiglu_limit must be 10, is 7", "swiglu_limit must be 10, is 7"),
        ("nvfp4_experts", {}, "", "no NVFP4 linears in nvfp4_experts"),
        ("released", {}, "it has no prepare_fp8", "no NVFP4 linears in released"),
        ("bf16", {}, "no FP4 experts in bf16", "no NVFP4 linears in bf16"),
        ("nvfp4", {}, "", ""),
    ],
)
def test_it_says_what_it_does_not_serve(fmt, change, experts_, shared):
    cfg = dataclasses.replace(SMALL, **change)
    found = MOE.fit(GROUPED, tree.random(cfg, fmt, seed=3), ("experts", "shared"))
    wanted = {"experts": experts_, "shared": shared}
    assert found.refused == {op: reason for op, reason in wanted.items() if reason}
    assert set(found.functions) == {op for op, reason in wanted.items() if not reason}


class Together:
    """A variant that has routed experts and the shared one in one call of up to 4 tokens."""

    __name__ = "problems.moe_gemm.variants.together"
    MOST_WITH_SHARED = 4
    custom_kernel = staticmethod(GROUPED.custom_kernel)

    @staticmethod
    def prepare_with_shared(weights, shared):
        pairs = zip(weights, shared, strict=True)
        both = [torch.cat(pair) if isinstance(pair[0], torch.Tensor) else pair[0] for pair in pairs]
        return weights, type(weights)(*both)

    @staticmethod
    def with_shared(data):
        weights, (x, ids, routing), outputs = data
        last = ids.new_full((len(ids), 1), len(weights.w13) - 1)
        inputs = type(data.inputs)(x, torch.cat([ids, last], 1), torch.cat([routing, torch.ones(len(ids), 1)], 1))
        return GROUPED.custom_kernel(type(data)(weights, inputs, outputs))


@pytest.mark.parametrize("activation", ["bf16", "nvfp4"])
def test_a_kernel_may_have_routed_experts_and_the_shared_one(activation):
    x, ids, gates, w13, w2, limit = call(4, 8, 2, 64, 128, activation)
    _, _, _, *shared, _ = call(9, 1, 1, 64, 128, activation)
    both = MOE.make_calls(Together, [MOE.prepare(Together, w13, w2, None, tuple(shared))])
    arguments = x, ids, gates, w13, w2, *shared, limit
    found = run(both.all_experts, arguments)
    want = run(experts.all_experts, arguments, torch.float32)
    close(found, want, activation)
    assert left(both.all_experts, (x.float(), *arguments[1:]))
    assert left(both.all_experts, (torch.cat([x, x]), *arguments[1:]))
    alone = torch.empty_like(found)
    experts.experts(x, ids, gates, w13, w2, limit, alone)
    assert float(apart(alone, want).min()) > 0.1, "the shared expert must count"
    other = dataclasses.replace(shared[0], quantise_input=not w13.quantise_input)
    for unlike in ((other, shared[1]), call(9, 1, 1, 64, 64, activation)[3:5]):
        assert MOE.prepare(Together, w13, w2, None, unlike).state[1] is None


def test_a_model_asks_for_one_output_where_a_kernel_has_it(model):
    found = MOE.fit(Together(), model, ("experts", "shared", "all_experts"))
    assert found.report[-1] == "moe_gemm/together, up to 4 tokens with the shared expert: 4 of 4 layers"

    def route(out_ids, out_weights, **rest):
        out_ids.copy_(torch.arange(out_ids.shape[1])), out_weights.fill_(0.5)

    context = SimpleNamespace(
        config=SMALL,
        ops=dataclasses.replace(ops.REFERENCE, **found.functions, route=route),
        batch=SimpleNamespace(tokens=None),
        empty=lambda *shape, dtype=torch.bfloat16: torch.zeros(shape, dtype=dtype),
    )
    for tokens in (4, 5):
        first, second = layers.moe(inputs(tokens, SMALL.hidden_size), next(model.blocks()).ffn, context)
        assert (second is None) == (tokens == 4) and first.dtype == torch.bfloat16
