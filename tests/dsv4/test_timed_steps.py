"""The decode steps that are timed: they can be repeated, and they are what the model computes."""

import dataclasses

import pytest
import torch

from problems.dsv4_forward import timed_steps, traffic
from problems.dsv4_forward.cache import random_state
from problems.dsv4_forward.cache.state import OutOfBlocks, State
from problems.dsv4_forward.model import Model, feed
from problems.dsv4_forward.weights import config, tree
from problems.dsv4_forward.weights.config import TINY
from tests.dsv4.states import check_counts


@torch.inference_mode()
def test_a_step_repeats_bit_for_bit_after_a_reset():
    decode = timed_steps.Decode({"config": "tiny", "format": "bf16", "batch": 2, "context": 130}, 2, "cpu")
    chosen = decode.choose()
    step = decode.step(chosen)
    step()
    first, tokens = step.logits.clone(), decode.tokens.clone()
    assert torch.equal(tokens, first.argmax(-1)) and torch.isfinite(first).all()
    step()
    assert not torch.equal(step.logits, first)
    decode.reset()
    again = decode.step(chosen)
    again()
    assert torch.equal(again.logits, first)
    assert decode.bytes > 0 and set(chosen.names) == set(vars(chosen.ops))


@torch.inference_mode()
def test_ops_can_be_left_to_the_reference():
    decode = timed_steps.Decode({"config": "tiny", "format": "bf16", "batch": 1, "context": 8}, 1, "cpu")
    chosen = decode.choose()
    filled = [op for op, name in chosen.names.items() if name != "reference"]
    step = decode.step(chosen, filled)
    plain = vars(timed_steps.ops.REFERENCE) | dict.fromkeys(timed_steps.ops.FUSED, timed_steps.ops.apart)
    assert filled and all(vars(step.model.ops)[op] is plain[op] for op in filled)


@torch.inference_mode()
def test_the_least_traffic_is_that_of_the_experts_which_a_step_goes_to():
    decode = timed_steps.Decode({"config": "tiny", "format": "nvfp4", "batch": 3, "context": 20}, 1, "cpu")
    cfg = config.find("tiny")
    assert len(decode.hits) == cfg.num_hidden_layers and all(2 <= hit <= 6 for hit in decode.hits)
    seen = []
    chosen = decode.choose()

    def experts(**given):
        seen.append(len(given["ids"].unique()))
        timed_steps.ops.REFERENCE.experts(**given)

    plain = dataclasses.replace(timed_steps.ops.REFERENCE, experts=experts, all_experts=timed_steps.ops.apart)
    decode.step(dataclasses.replace(chosen, ops=plain))()
    assert tuple(seen) == decode.hits
    lengths = (20, 20, 20)
    every, none = (
        traffic.Step(cfg, "nvfp4", lengths, 1, (count,) * cfg.num_hidden_layers).bytes_moved() for count in (8, 0)
    )
    one = (every - none) / (8 * cfg.num_hidden_layers)
    assert decode.bytes == pytest.approx(none + one * sum(decode.hits), abs=2)
    expected = traffic.Step(cfg, "nvfp4", lengths, 1)
    assert expected.bytes_moved() == pytest.approx(
        none + one * 8 * cfg.num_hidden_layers * expected.hit_share, rel=1e-3
    )


# What a step reads without a prefill.


@pytest.mark.parametrize("fmt", ["fp32", "bf16", "nvfp4"])
@torch.inference_mode()
def test_a_state_of_random_contents_goes_on_as_any_other(fmt):
    cfg = dataclasses.replace(TINY, num_nextn_predict_layers=1, compress_ratios=(*TINY.ratios, 0))
    model, lengths = Model(tree.quick(cfg, fmt, 3)), [700, 5, 0, 128]
    made = []
    for seed in (1, 1, 2):
        state = State(cfg, fmt, sequences=5, blocks=12)
        state.buffer[state.layers[0].window.data.data_ptr() - state.buffer.data_ptr() :] = 255  # NaN
        sequences = random_state.fill(state, lengths, seed)
        assert sequences == (0, 1, 2, 3) and state.lengths == [*lengths, 0]
        check_counts(state)
        rows = state.layers[2].cache.read(torch.arange(32 * 12))
        assert float(rows.square().mean().sqrt()) == pytest.approx(random_state.RMS, rel=0.1)
        first = feed(model, state, {sequence: [7] for sequence in sequences})
        assert torch.isfinite(first).all() and float(first.std()) == pytest.approx(1, abs=0.3)
        assert state.open() == (4, 0)
        made.append(torch.cat([first, feed(model, state, {0: [3] * 150, 4: [1]})]))
        assert torch.isfinite(made[-1]).all() and state.lengths == [851, 6, 1, 129, 1]
    assert torch.equal(made[0], made[1]) and not torch.equal(made[0], made[2])


def test_lengths_that_do_not_fit_are_refused():
    for lengths, error in (([2000], OutOfBlocks), ([5000], ValueError), ([-1], ValueError), ([1] * 3, RuntimeError)):
        with pytest.raises(error):
            random_state.fill(State(TINY, "fp32", sequences=2, blocks=4), lengths, 1)
