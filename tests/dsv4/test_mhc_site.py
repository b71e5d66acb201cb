"""The op mhc_site: its reference, the problem's variants in it, what the model carries from layer to layer."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from problems.common import load
from problems.dsv4_forward import model as forward
from problems.dsv4_forward import ops, trace
from problems.dsv4_forward.cache.state import State
from problems.dsv4_forward.model import Model
from problems.dsv4_forward.weights import config, tree
from tests.dsv4.models import Seen

FOLDER = load.PROBLEMS / "mhc_site"
task, reference, in_model = (load.module(FOLDER, name) for name in ("task", "reference", "in_model"))
CFG = dataclasses.replace(config.TINY, hidden_size=192)
OP_NAMES = ("y", "second", "copies", "post", "comb", "fn", "base", "scale", "norm")


def call(op: object, data: object, dtype: torch.dtype = torch.bfloat16) -> tuple:
    """What the op makes of the problem's inputs, activations in `dtype`."""
    given = [getattr(data, name) for name in OP_NAMES]
    given = [t.to(dtype) if t.dtype == torch.bfloat16 else t for t in given]
    outputs = tuple(torch.full_like(getattr(data, name), torch.nan) for name in task.OUTPUTS)
    outputs = tuple(t.to(dtype) if t.dtype == torch.bfloat16 else t for t in outputs)
    if op(given[0], given[1] if len(given[1]) else None, *given[2:], CFG, *outputs) is NotImplemented:
        assert all(bool(t.isnan().all()) for t in outputs)
        return ()
    return outputs


def winner() -> object:
    module = load.variant("mhc_site", load.winner(FOLDER, "cpu"))
    weights = SimpleNamespace(format="bf16", config=CFG)
    return in_model.fit(module, weights, ("mhc_site",)).functions["mhc_site"]


@pytest.mark.parametrize("addends", task.ADDENDS)
@pytest.mark.parametrize("content", ["alike", "magnitudes", "zeros"])
def test_the_winner_and_the_reference_are_right(content, addends):
    data = reference.generate_input(5, 192, addends, content, 3, "cpu")
    for op in (winner(), ops.REFERENCE.mhc_site):
        assert reference.check_implementation(data, call(op, data)) == (True, "")
    assert call(winner(), data, torch.float32) == (), "activations in fp32 are left"


def test_tensors_that_lie_elsewhere_are_copied():
    data = reference.generate_input(5, 192, "bf16", "alike", 3, "cpu")
    wide = torch.zeros(5, 4, 200, dtype=torch.bfloat16)
    copies = wide[:, :, 4:196].copy_(data.copies)
    outputs = [torch.full_like(getattr(data, name), torch.nan) for name in task.OUTPUTS]
    outputs[0] = torch.empty_like(wide)[:, :, 4:196]
    winner()(data.y, None, copies, data.post, data.comb, data.fn, data.base, data.scale, data.norm, CFG, *outputs)
    for got, want in zip(outputs, call(winner(), data), strict=True):
        assert torch.equal(got, want)
    empty = data._replace(**{name: getattr(data, name)[:0] for name in ("y", "copies", "post", "comb", *task.OUTPUTS)})
    assert all(not len(t) for t in call(winner(), empty))


def test_only_models_of_the_problems_numbers_are_served():
    assert in_model.unserved(CFG) == ""
    for change, said in (
        ({"hc_mult": 2}, "hc_mult must be 4, is 2"),
        ({"hc_eps": 1e-5}, "hc_eps must be 1e-06, is 1e-05"),
        ({"hc_sinkhorn_iters": 19}, "hc_sinkhorn_iters must be 20, is 19"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps must be 1e-06, is 1e-05"),
        ({"hidden_size": 200}, "hidden_size must be a multiple of 64, is 200"),
    ):
        assert in_model.unserved(SimpleNamespace(**{**vars(CFG), **change})) == said


def test_the_winner_fills_the_op_where_activations_are_bf16():
    for fmt in ("bf16", "fp32"):
        chosen = ops.choose("winners", "cpu", tree.random(config.TINY, fmt, seed=1))
        filled = f"mhc_site/{load.winner(FOLDER, 'cpu')}"
        assert chosen.names["mhc_site"] == (filled if fmt == "bf16" else "reference")
    mine = ops.choose("mhc_site=reference,rms_norm=reference", "cpu", tree.random(config.TINY, "bf16", seed=1))
    assert mine.ops.mhc_site is ops.REFERENCE.mhc_site


def logits_of(weights: object, table: object, probe: object) -> torch.Tensor:
    state = State(weights.config, weights.format, sequences=1, blocks=2, device="cpu")
    sequence = state.open()[0]
    return forward.feed(Model(weights, table, probe=probe), state, {sequence: [3, 1, 4, 1, 5]})


def test_what_is_carried_from_layer_to_layer_is_what_a_probe_sees_written():
    """A site within a layer, and one across two, give the same bits as writing and reading by themselves."""
    weights = tree.random(config.TINY, "bf16", seed=2)
    probe, calls = Seen(), []

    def counted(**given: object) -> None:
        calls.append(None)
        ops.REFERENCE.mhc_site(**given)

    table = dataclasses.replace(ops.REFERENCE, mhc_site=counted)
    carried = logits_of(weights, table, None)
    assert len(calls) == 2 * config.TINY.num_hidden_layers, "two of a layer, but one of the first, and the head's"
    assert torch.equal(carried, logits_of(weights, table, probe))
    assert len(calls) == 4 * config.TINY.num_hidden_layers, "with a probe as without one"
    assert len(probe.copies) == config.TINY.num_hidden_layers + 1 and "mhc_site" in trace.CHECKS
