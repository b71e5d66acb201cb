"""traffic.py: bytes and operations of a call, counted by hand."""

import dataclasses
import math

import pytest

from problems.dsv4_forward import traffic
from problems.dsv4_forward.weights.config import TINY, TINY_K


def linear_bytes(kind: str, n: int, k: int) -> int:
    if kind == "fp8":
        return n * k + math.ceil(n / 128) * math.ceil(k / 128)
    return {"fp32": 4 * n * k, "bf16": 2 * n * k, "nvfp4": n * k // 2 + n * k // 16 + 8}[kind]


def test_bytes_of_a_decode_step_by_hand():
    """tiny in nvfp4, two sequences of 300 and 299 tokens."""
    got = traffic.Step(TINY, "nvfp4", (300, 299), 1).bytes_moved()
    want = 0
    hit = 1 - (1 - 2 / 8) ** 2  # of the experts
    for layer, ratio in enumerate((0, 128, 4, 128, 4, 0)):
        want += linear_bytes("nvfp4", 128, 256) + linear_bytes("nvfp4", 4 * 128, 128)  # wq_a, wq_b
        want += linear_bytes("nvfp4", 128, 256) + 2 * linear_bytes("nvfp4", 128, 256)  # wkv, wo_a
        want += linear_bytes("nvfp4", 256, 256)  # wo_b
        want += 2 * (256 + 256 + 128 + 128) + 4 * 4  # norms, sinks
        want += 2 * 4 * (24 * 1024 + 24 + 3)  # mHC
        want += 2 * 8 * 256 + (2 * 2 * 8 if layer < 2 else 4 * 8)  # router; rows of its table, or bias
        want += 8 * hit * (linear_bytes("nvfp4", 256, 256) + linear_bytes("nvfp4", 256, 128))
        want += linear_bytes("nvfp4", 256, 256) + linear_bytes("nvfp4", 256, 128)  # shared
        entry_bytes = 64 + 2 * 64 + 8
        want += 2 * (127 + 1) * entry_bytes  # window
        if ratio == 128:
            want += 2 * 2 * 128 * 256 + 4 * 128 * 128 + 2 * 128
            want += 2 * 2 * entry_bytes + 2 * 128 * 2 * 4  # two entries each, a new row each
        if ratio == 4:
            want += 2 * 2 * 256 * 256 + 4 * 4 * 256 + 2 * 128  # compressor
            want += linear_bytes("nvfp4", 32 * 128, 128) + 2 * 32 * 256
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
