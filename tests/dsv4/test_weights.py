"""Layout, tree and random weights: sizes as published, every tensor where it should be, nothing constant."""

import dataclasses
import functools
import math
from itertools import pairwise

import pytest
import torch

from problems.dsv4_forward.cache.state import State
from problems.dsv4_forward.model import Model
from problems.dsv4_forward.weights import layout, quick_weights, random_weights, tree
from problems.dsv4_forward.weights.config import FLASH, FORMATS, PRO, TINY, TINY_K, Config
from tests.dsv4 import models

SMALL = dataclasses.replace(models.SMALL, n_routed_experts=5, num_experts_per_tok=3, vocab_size=130)
RELATIVE = {"fp8": 0.04, "mxfp4": 0.16, "nvfp4": 0.12}  # rms error of normal values: 3 bits; 1 bit, steps of 2 or 1.1


@functools.cache
def made(fmt: str, seed: int = 3, cfg: Config = SMALL) -> tree.ModelWeights:
    return tree.random(cfg, fmt, seed)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes: FP8 has no comparisons of its own."""
    return tensor.contiguous().view(-1).view(torch.uint8)


@functools.cache
def quick(fmt: str, seed: int = 3, cfg: Config = SMALL) -> tree.ModelWeights:
    return tree.quick(cfg, fmt, seed)


@pytest.mark.parametrize(("cfg", "gibibytes"), [(FLASH, 148.66), (PRO, 805.33)])
def test_the_released_models_are_as_large_as_published(cfg, gibibytes):
    assert layout.nbytes(layout.layout(cfg, "released")) / 2**30 == pytest.approx(gibibytes, abs=0.02)


def test_views_are_aligned_disjoint_and_in_order():
    specs = layout.layout(SMALL, "nvfp4")
    buffer = torch.zeros(layout.nbytes(specs), dtype=torch.uint8)
    end = 0
    for name, view in layout.views(buffer, specs).items():
        start = view.data_ptr() - buffer.data_ptr()
        assert start % 256 == 0 and start >= end, name
        assert (tuple(view.shape), view.dtype) == (specs[name].shape, specs[name].dtype)
        end = start + view.numel() * view.element_size()
    assert end <= len(buffer) < end + 256


def test_a_buffer_that_does_not_fit_is_refused():
    specs = layout.layout(TINY, "released")
    good = torch.zeros(layout.nbytes(specs), dtype=torch.uint8)
    for wrong in (good[:-1], good.view(torch.int8), good.view(2, -1), good.repeat(2)[::2]):
        with pytest.raises(ValueError, match=f"buffer must be uint8 \\({len(good)},\\)"):
            layout.views(wrong, specs)


@pytest.mark.parametrize(
    ("change", "fmt", "message"),
    [
        ({"o_lora_rank": 64}, "released", r"attn.wo_a: rows of a part \(o_lora_rank\) must be a multiple of 128"),
        ({"moe_intermediate_size": 192}, "released", r"w13: .*\(moe_intermediate_size\) must be a multiple of 128"),
        ({"moe_intermediate_size": 144}, "nvfp4_experts", "must be a multiple of 128"),
        ({"hidden_size": 264}, "nvfp4", "k must be a multiple of 16 in nvfp4, got 264"),
        ({"hidden_size": 272}, "released", "k must be a multiple of 32 in mxfp4, got 272"),
        ({"head_dim": 640}, "released", "at most 512 and qk_rope_head_dim a multiple of 4 in released, got 576"),
        ({"head_dim": 66, "qk_rope_head_dim": 2}, "nvfp4", "a multiple of 4 in nvfp4, got 64 and 2"),
        ({}, "int4", "format must be one of"),
    ],
)
def test_sizes_that_a_format_cannot_hold_are_refused(change, fmt, message):
    with pytest.raises(ValueError, match=message):
        layout.layout(dataclasses.replace(SMALL, **change), fmt)
    if change:
        layout.layout(dataclasses.replace(SMALL, **change), "bf16")


# Of linear layers, experts, and a prediction layer's experts.
KINDS = {"fp32": ("plain",) * 3, "bf16": ("plain",) * 3, "released": ("fp8", "mxfp4", "mxfp4"), "nvfp4": ("nvfp4",) * 3}
KINDS["nvfp4_experts"] = "fp8", "nvfp4", "mxfp4"


@pytest.mark.parametrize("fmt", FORMATS)
def test_kinds_by_format(fmt):
    linear, experts, mtp_experts = KINDS[fmt]
    tree = made(fmt)
    attn, ffn, mtp = tree.layers[2].attn, tree.layers[2].ffn, tree.mtp
    whole = (attn.wq_a, attn.wq_b, attn.wkv, attn.wo_a, attn.wo_b, attn.indexer.wq_b, ffn.shared_w13, ffn.shared_w2)
    assert {w.kind for w in (*whole, mtp.e_proj, mtp.h_proj, mtp.block.ffn.shared_w13)} == {linear}
    assert (ffn.w13.kind, ffn.w2.kind) == (experts, experts)
    assert (mtp.block.ffn.w13.kind, mtp.block.ffn.w2.kind) == (mtp_experts, mtp_experts)
    assert attn.wo_a.quantise_input == (fmt not in ("released", "nvfp4_experts"))
    assert all(w.quantise_input for w in whole if w is not attn.wo_a)
    working = torch.float32 if fmt == "fp32" else torch.bfloat16
    compressor = attn.compressor
    assert {t.dtype for t in (tree.embed, tree.head, tree.norm, compressor.project, compressor.norm)} == {working}
    assert {t.dtype for t in (attn.sink, compressor.ape, tree.layers[2].hc_attn.fn)} == {torch.float32}


def test_the_tree_shares_the_tensors_memory():
    tree = made("released")
    assert tree.layers[1].ffn.w2.scale.data_ptr() == tree.tensors["layers.1.ffn.experts.w2.scale"].data_ptr()
    held = {t.untyped_storage().data_ptr() for t in tree.tensors.values()}
    apart = sum(".experts." in name for name in tree.tensors)
    assert len(held) == 1 + apart, "one buffer holds every tensor but those of routed experts"


def test_a_layer_without_weights_raises_and_every_fault_is_named():
    tensors = dict(made("released").tensors)
    for name in [name for name in tensors if name.startswith("layers.1.attn.wkv")]:
        del tensors[name]
    tensors["layers.4.attn.wkv.weight"] = torch.zeros(1)
    tensors["layers.2.attn.attn_sink"] = torch.zeros(7)
    tensors["norm.weight"] = tensors["norm.weight"].float()
    with pytest.raises(ValueError) as caught:
        tree.assemble(SMALL, "released", tensors)
    for fault in (
        "missing layers.1.attn.wkv.weight",
        "missing layers.1.attn.wkv.scale",
        "unknown layers.4.attn.wkv.weight",
        "layers.2.attn.attn_sink must be torch.float32 (6,), got torch.float32 (7,)",
        "norm.weight must be torch.bfloat16 (320,), got torch.float32 (320,)",
    ):
        assert fault in str(caught.value)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("form", [made, quick])
def test_every_value_is_written_and_finite_and_nothing_is_constant(form, fmt):
    specs = layout.layout(SMALL, fmt)
    buffer = torch.full((layout.nbytes(specs),), 0xFF, dtype=torch.uint8)  # NaN in every float, -1 in int64
    tensors = layout.views(buffer, specs)
    written = (tree.random if form is made else tree.quick)(SMALL, fmt, 3, tensors=tensors)
    assert all(written.tensors[name].data_ptr() == tensor.data_ptr() for name, tensor in tensors.items())
    assert all(models.same(one, form(fmt).tensors[name]) for name, one in tensors.items()), "same seed, same bits"
    for name, tensor in tensors.items():
        assert not tensor.is_floating_point() or bool(tensor.float().isfinite().all()), name
        held = raw(tensor).numpy().tobytes()
        assert tensor.numel() == 1 or held != held[: tensor.element_size()] * tensor.numel(), name
        if tensor.dim() > 1 and tensor[0].numel() > 8:
            rows = {row.tobytes() for row in raw(tensor).view(len(tensor), -1).numpy()}
            assert len(rows) == len(tensor), f"{name}: equal rows"


@pytest.mark.parametrize("form", [made, quick])
def test_another_seed_gives_another_model(form):
    one, other = form("nvfp4").tensors, form("nvfp4", seed=4).tensors
    assert not any(models.same(one[name], other[name]) for name in one)


@pytest.mark.parametrize("fmt", FORMATS[1:])
def test_formats_hold_the_same_matrices(fmt):
    exact, rounded = made("fp32"), made(fmt)
    for name, unit in layout.units(SMALL, fmt).items():
        if isinstance(unit, layout.Spec):
            assert torch.equal(rounded.tensors[name], exact.tensors[name].to(unit.dtype)), name
    pairs = [*zip(rounded.linears(), exact.linears(), strict=True)]
    for blocks in zip(rounded.blocks(), exact.blocks(), strict=True):
        pairs += [[getattr(block.ffn, f) for block in blocks] for f in ("w13", "w2", "shared_w13", "shared_w2")]
    for got, want in pairs:
        matrix = want.dequantise(torch.float64)
        error = (got.dequantise(torch.float64) - matrix).square().mean().sqrt() / matrix.square().mean().sqrt()
        assert error < RELATIVE.get(got.kind, 2**-8), got.name


def test_nvfp4_scales_are_calibrated_and_of_each_expert():
    """An expert's two share one second scale and use the whole range: gate and up together reach 2688."""
    tree, count = made("nvfp4"), SMALL.n_routed_experts
    w13, w2 = tree.layers[1].ffn.w13, tree.layers[1].ffn.w2
    assert len(w13.scale_2.unique()) == count and w13.scale.float().flatten(1).amax(1).tolist() == [448.0] * count
    normed, product = w13.input_scale * 6 * 448, w2.input_scale * 6 * 448
    assert len(normed.unique()) == count and bool(((normed >= 8) & (normed <= 9.6)).all())
    assert bool(((product >= 1.5) & (product <= 1.8)).all()), "at most limit^2 times a routing weight of up to 1.5"
    every = [t.view(-1) for name, t in tree.tensors.items() if name.endswith("input_scale")]
    assert len(torch.cat(every).unique()) == sum(len(t) for t in every)


@pytest.mark.parametrize(("form", "fmt"), [(made, "fp32"), (made, "nvfp4"), *((quick, fmt) for fmt in FORMATS)])
def test_a_random_model_has_logits_and_activations_near_one(form, fmt):
    probe = models.Seen()
    model, state = Model(form(fmt, cfg=TINY), probe=probe), State(TINY, fmt, sequences=1, blocks=2)
    sequence, _ = state.open()
    tokens = torch.randint(TINY.vocab_size, (120,), generator=torch.Generator().manual_seed(2))
    logits = model.forward(state.plan({sequence: tokens}), state, every=True).logits
    assert float(logits.std()) == pytest.approx(1, abs=0.15)
    assert len(logits.argmax(-1).unique()) > 40, "a model that says the same everywhere shows nothing"
    rms = [float(copies.square().mean().sqrt()) for copies in probe.copies]
    assert rms[0] == pytest.approx(1, abs=0.05) and max(rms) < 3
    assert all(1 < later / earlier < 1.6 for earlier, later in pairwise(rms))


def test_quick_nvfp4_scales_are_near_one_and_the_second_scale_makes_the_size():
    w13, gain = quick("nvfp4", cfg=TINY_K).layers[1].ffn.w13, random_weights.gain(TINY_K, "layers.1.ffn.experts.w13")
    scale, count = w13.scale.float(), TINY_K.n_routed_experts
    assert len(scale.unique()) == 16 and 0.4 < float(scale.min()) < float(scale.max()) < 2
    assert len(w13.weight.unique()) == 256, "codes are random bytes"
    off = w13.scale_2 / (gain / (math.sqrt(w13.k) * 2.93)) - 1
    assert bool((off.abs() < 0.08).all()) and len(w13.scale_2.unique()) == count
    normed = w13.input_scale * 6 * 448
    assert bool(((normed >= 8) & (normed <= 9.6)).all()) and len(normed.unique()) == count


@pytest.mark.parametrize("fmt", ["bf16", "nvfp4_experts"])
def test_a_table_that_is_shorter_than_the_model_is_repeated_at_other_places(monkeypatch, fmt):
    monkeypatch.setattr(quick_weights, "BYTES", 100_003)
    monkeypatch.setattr(quick_weights, "NORMALS", 50_021)
    again = tree.quick(SMALL, fmt, 3).layers[2]
    for unit in (again.ffn.w13, again.ffn.w2):
        rows = raw(unit.weight).view(-1, unit.weight.shape[-1] * unit.weight.element_size()).numpy()
        assert len({row.tobytes() for row in rows}) == len(rows), "no two rows alike"
        rms = float(unit.dequantise().square().mean().sqrt()) * math.sqrt(unit.k)
        assert rms == pytest.approx(random_weights.gain(SMALL, unit.name), rel=0.1), unit.name


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", FORMATS)
def test_quick_weights_are_the_same_bits_on_a_gpu(fmt):
    there = tree.quick(SMALL, fmt, 3, "cuda").tensors
    assert all(models.same(one.cpu(), quick(fmt).tensors[name]) for name, one in there.items())
