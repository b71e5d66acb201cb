"""The decode steps that are timed: they can be repeated, they are what the model computes; their traffic, by hand."""

import dataclasses
import math

import pytest
import torch

from problems.dsv4_forward import timed_steps, traffic
from problems.dsv4_forward.cache import random_state
from problems.dsv4_forward.cache.state import OutOfBlocks, State
from problems.dsv4_forward.model import Model, feed
from problems.dsv4_forward.weights import config, tree
from problems.dsv4_forward.weights.config import TINY, TINY_K
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
    assert torch.equal(again.logits, first) and decode.bytes > 0 and set(chosen.names) == set(vars(chosen.ops))


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


def nvfp4(n: int, k: int) -> int:
    """Bytes of a matrix."""
    return n * k // 2 + n * k // 16 + 8


def test_bytes_of_a_decode_step_by_hand():
    """tiny in nvfp4, two sequences of 300 and 299 tokens."""
    got = traffic.Step(TINY, "nvfp4", (300, 299), 1).bytes_moved()
    want = 0
    hit = 1 - (1 - 2 / 8) ** 2  # of the experts
    for layer, ratio in enumerate((0, 128, 4, 128, 4, 0)):
        want += nvfp4(128, 256) + nvfp4(4 * 128, 128)  # wq_a, wq_b
        want += nvfp4(128, 256) + 2 * nvfp4(128, 256) + nvfp4(256, 256)  # wkv, wo_a, wo_b
        want += 2 * (256 + 256 + 128 + 128) + 4 * 4  # norms, sinks
        want += 2 * 4 * (24 * 1024 + 24 + 3)  # mHC
        want += 2 * 8 * 256 + (2 * 2 * 8 if layer < 2 else 4 * 8)  # router; rows of its table, or bias
        want += (8 * hit + 1) * (nvfp4(256, 256) + nvfp4(256, 128))  # routed experts, the shared one
        entry_bytes = 64 + 2 * 64 + 8
        want += 2 * (127 + 1) * entry_bytes  # window
        if ratio == 128:
            want += 2 * 2 * 128 * 256 + 4 * 128 * 128 + 2 * 128
            want += 2 * 2 * entry_bytes + 2 * 128 * 2 * 4  # two entries each, a new row each
        if ratio == 4:
            want += 2 * 2 * 256 * 256 + 4 * 4 * 256 + 2 * 128  # compressor
            want += nvfp4(32 * 128, 128) + 2 * 32 * 256
            want += 2 * 2 * 256 * 256 + 4 * 4 * 256 + 2 * 128  # the indexer's
            want += 2 * 16 * entry_bytes + (75 + 74) * 68 + 2 * 2 * (128 + 128) * 2 * 4
            want += entry_bytes + 68 + 7 * (128 + 128) * 2 * 4  # token 299 ends entry 74 of the second, of 7 old rows
    want += 4 * (4 * 1024 + 4 + 1) + 2 * 256 + 2 * 512 * 256 + 2 * 2 * 256  # head, rows of the embedding
    want += 2 * 8 + 2 * (4 * 512 + 8)
    assert got == math.ceil(want)


def test_bytes_of_a_prefill_by_hand():
    """The caches of 37 tokens after 130 in bf16, as what they add to those of no tokens before."""
    step = traffic.Step(TINY, "bf16", (130,), 37)
    row = 128 * 2
    window = (127 + 37) * row
    hca = 1 * row + (37 + 0) * 128 * 2 * 4  # one entry at token 127, none ends within
    old, new = 32, 41 - 32  # entries of four tokens
    pooled = (130 - 124) + (130 - 128)  # old rows of entries 32 and 33
    csa = (16 + new) * row + (old + new) * 128 * 2 + (37 * 2 + pooled) * (128 + 128) * 2 * 4
    caches = [step._cache_bytes(ratio, 130) for ratio in (0, 128, 4)]
    assert caches == [window, window + hca, window + csa]


def test_operations_by_hand():
    """tiny, 5 tokens after 127: linears and routers for all of them, the head for the last alone."""
    per_token = 0
    for ratio in (0, 128, 4, 128, 4, 0):
        per_token += 256 * 128 + 128 * 512 + 256 * 128 + 2 * 128 * 256 + 256 * 256 + 2 * 24 * 1024 + 8 * 256
        per_token += (2 + 1) * 3 * 128 * 256
        per_token += {0: 0, 128: 2 * 128 * 256, 4: 4 * 128 * 256 + 4 * 128 * 256 + 128 * 4096 + 32 * 256}[ratio]
    want = 2 * 5 * per_token + 2 * (512 * 256 + 4 * 1024)
    for seen in range(128, 133):
        entries = [128] * 6
        entries[1] += seen // 128
        entries[3] += seen // 128
        entries[2] += 16
        entries[4] += 16
        want += sum(4 * 4 * 128 * n for n in entries) + 2 * 2 * 32 * 128 * (seen // 4)
    assert traffic.Step(TINY, "bf16", (127,), 5).flops() == want


def test_a_prediction_layer_and_cold_experts_count_nothing():
    layers = dataclasses.replace(TINY_K, compress_ratios=TINY_K.compress_ratios[:-1], num_nextn_predict_layers=0)
    for fmt in ("bf16", "nvfp4"):
        with_mtp, without = (traffic.Step(cfg, fmt, (130,), 1) for cfg in (TINY_K, layers))
        assert (with_mtp.bytes_moved(), with_mtp.flops()) == (without.bytes_moved(), without.flops())
    few, many = (traffic.Step(TINY_K, "bf16", (500,), new).hit_share for new in (1, 12))
    assert few == pytest.approx(6 / 16) and 0.99 < many < 1
