"""The decode steps that are timed: they can be repeated, and they are what the model computes."""

import torch

from problems.dsv4_forward import latency


@torch.inference_mode()
def test_a_step_repeats_bit_for_bit_after_a_reset():
    decode = latency.Decode({"config": "tiny", "format": "bf16", "batch": 2, "context": 130}, 2, "cpu")
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
    decode = latency.Decode({"config": "tiny", "format": "bf16", "batch": 1, "context": 8}, 1, "cpu")
    chosen = decode.choose()
    filled = [op for op, name in chosen.names.items() if name != "reference"]
    step = decode.step(chosen, filled)
    assert vars(step.model.ops) == vars(latency.ops.REFERENCE)
