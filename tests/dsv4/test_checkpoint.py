"""Checkpoints: three layouts round-trip, conversions keep values, and every fault of a broken one is named at once."""

import dataclasses
import functools
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from problems.dsv4_forward.checkpoint import checkpoint, checkpoint_names, convert, values
from problems.dsv4_forward.checkpoint.checkpoint import CheckpointError, load, save
from problems.dsv4_forward.weights import tree
from problems.dsv4_forward.weights.config import FLASH, FORMATS, PRO
from tests.dsv4 import oracle
from tests.dsv4.models import SMALL, same

KIND = {"fp32": "plain", "bf16": "plain", "released": "released", "nvfp4_experts": "nvfp4", "nvfp4": "nvfp4"}


@functools.cache
def made(fmt: str) -> tree.ModelWeights:
    return tree.random(SMALL, fmt, 3)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder with the checkpoint of made(fmt), in one file; not to be changed."""

    @functools.cache
    def folder(fmt: str) -> Path:
        path = tmp_path_factory.mktemp("saved") / fmt
        save(made(fmt), path, KIND[fmt])
        return path

    return folder


def differing(one: tree.ModelWeights, other: tree.ModelWeights) -> list[str]:
    assert (one.config, one.format, one.tensors.keys()) == (other.config, other.format, other.tensors.keys())
    return [name for name in one.tensors if not same(one.tensors[name], other.tensors[name])]


def edited(source: Path, target: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """A copy of a one-file checkpoint after `edit` has changed its tensors in place."""
    target.mkdir()
    shutil.copy(source / "config.json", target)
    tensors = load_file(source / "model.safetensors")
    edit(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


def faults(path: Path, *args: object, **keywords: object) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as caught:
        load(path, *args, progress=False, **keywords)
    assert all(fault in str(caught.value) for fault in caught.value.faults[:200])
    return caught.value.faults


@pytest.mark.parametrize(("cfg", "count"), [(FLASH, 69187), (PRO, 145116)])
def test_the_released_models_have_as_many_tensors_as_published(cfg, count):
    assert len(checkpoint_names.pieces(cfg, "released")) == count


def test_released_names_shapes_and_dtypes(saved):
    wanted = {
        "embed.weight": ("BF16", (66, 320)),
        "hc_head_fn": ("F32", (4, 1280)),
        "layers.0.attn.wq_a.weight": ("F8_E4M3", (160, 320)),
        "layers.0.attn.wq_a.scale": ("F8_E8M0", (2, 3)),
        "layers.0.attn.wo_a.weight": ("F8_E4M3", (384, 256)),
        "layers.0.attn.wo_a.scale": ("F8_E8M0", (3, 2)),
        "layers.0.ffn.gate.tid2eid": ("I64", (66, 2)),
        "layers.1.ffn.gate.bias": ("F32", (3,)),
        "layers.1.attn.compressor.ape": ("F32", (128, 128)),
        "layers.1.attn.compressor.wgate.weight": ("BF16", (128, 320)),
        "layers.2.attn.indexer.compressor.wkv.weight": ("BF16", (256, 320)),
        "layers.2.ffn.experts.1.w1.weight": ("I8", (128, 160)),
        "layers.2.ffn.experts.1.w1.scale": ("F8_E8M0", (128, 10)),
        "layers.2.ffn.shared_experts.w3.scale": ("F8_E8M0", (1, 3)),
        "mtp.0.e_proj.scale": ("F8_E8M0", (3, 3)),
        "mtp.0.norm.weight": ("BF16", (320,)),
    }
    with safe_open(saved("released") / "model.safetensors", framework="pt") as file:
        found = {name: file.get_slice(name) for name in wanted}
    assert {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in found.items()} == wanted


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_saved_checkpoint_is_loaded_bit_for_bit(saved, fmt, capsys):
    again = load(saved(fmt))
    assert differing(again, made(fmt)) == []
    assert differing(load(saved(fmt) / "model.safetensors", progress=False), made(fmt)) == []
    assert capsys.readouterr().out == "", "the bar goes to standard error"


@pytest.mark.parametrize("fmt", ["released", "nvfp4_experts"])
def test_shards_and_their_index(tmp_path, fmt):
    save(made(fmt), tmp_path / "sharded", KIND[fmt], shard_bytes=300_000)
    files = sorted((tmp_path / "sharded").glob("*.safetensors"))
    index = json.loads((tmp_path / "sharded" / checkpoint.INDEX).read_text())
    assert len(files) > 3 and set(index["weight_map"].values()) == {file.name for file in files}
    found = [load_file(file) for file in files]
    size = sum(t.numel() * t.element_size() for tensors in found for t in tensors.values())
    assert index["metadata"]["total_size"] == size
    assert {name: file.name for file, tensors in zip(files, found, strict=True) for name in tensors} == (
        index["weight_map"]
    )
    assert differing(load(tmp_path / "sharded", progress=False), made(fmt)) == []


def test_saving_refuses_another_kind_and_to_overwrite(saved, tmp_path):
    with pytest.raises(ValueError, match="got 'released', 'bf16'"):
        save(made("bf16"), tmp_path, "released")
    with pytest.raises(ValueError, match="kind must be one of"):
        save(made("bf16"), tmp_path, "gguf")
    with pytest.raises(FileExistsError, match=r"model\.safetensors"):
        save(made("released"), saved("released"), "released")


@pytest.mark.parametrize("original", [True, False], ids=["default names", "own names"])
@pytest.mark.parametrize(("name", "fmt"), [("other", "fp32"), ("wide", "bf16")])
def test_what_transformers_saves_is_loaded_with_equal_values(tmp_path, name, fmt, original):
    model = oracle.hf_model.__wrapped__(name)  # a separate model: the shared one is not changed
    (model.bfloat16() if fmt == "bf16" else model).save_pretrained(tmp_path, save_original_format=original)
    again, want = load(tmp_path, progress=False), oracle.weights_of(name)
    assert again.format == fmt
    assert dataclasses.replace(again.config, name=name) == want.config, "as config.json describes it"
    for unit, tensor in want.tensors.items():
        tensor = tensor.bfloat16().float() if fmt == "bf16" and tensor.is_floating_point() else tensor
        assert torch.equal(again.tensors[unit].to(tensor.dtype), tensor), unit
    whole = load(tmp_path, oracle.CONFIGS[name], "fp32", progress=False)
    assert whole.tensors["layers.0.attn.wkv.weight"].dtype == torch.float32


def test_a_plain_checkpoint_of_mixed_precision_loses_nothing(saved, tmp_path):
    def upcast(tensors: dict[str, torch.Tensor]) -> None:
        tensors["layers.2.attn.compressor.wkv.weight"] = tensors["layers.2.attn.compressor.wkv.weight"].float() * 1.001

    path = edited(saved("bf16"), tmp_path / "mixed", upcast)
    again = load(path, progress=False)
    assert again.format == "fp32"
    wanted = made("bf16").layers[2].attn.compressor.project[:256].float() * 1.001
    assert torch.equal(again.layers[2].attn.compressor.project[:256], wanted)
    assert load(path, fmt="bf16", progress=False).format == "bf16", "rounding is for the asking"


@pytest.mark.parametrize("other", [False, True])
def test_a_prediction_layer_can_be_left_out(saved, tmp_path, other):
    """As is one that is not of the model's kind."""
    without = dataclasses.replace(SMALL, num_nextn_predict_layers=0, compress_ratios=SMALL.ratios)
    path = saved("released")
    if other:
        without, path = None, edited(path, tmp_path / "other", lambda held: held.update({"mtp.1.x": torch.ones(2)}))
    again = load(path, without, progress=False)
    assert again.mtp is None and again.config.num_nextn_predict_layers == 0
    assert same(again.layers[2].ffn.w13.weight, made("released").layers[2].ffn.w13.weight)


def test_copies_of_embedding_and_head_in_a_prediction_layer_are_skipped(saved, tmp_path):
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors |= {"mtp.0.emb.tok_emb.weight": torch.zeros(66, 320), "mtp.0.head.weight": torch.zeros(66, 320)}

    assert differing(load(edited(saved("released"), tmp_path / "more", add), progress=False), made("released")) == []


def test_the_released_checkpoint_is_exact_in_bf16_and_in_nvfp4(saved, tmp_path):
    tree, exact = (load(saved("released"), fmt=fmt, progress=False).tensors for fmt in ("bf16", "fp32"))
    for name in ("layers.0.attn.wq_b.weight", "layers.1.ffn.experts.w13.weight", "layers.2.attn.wo_b.weight"):
        assert tree[name].dtype == torch.bfloat16 and torch.equal(tree[name].float(), exact[name])
    cast = load(saved("released"), fmt="nvfp4_experts", progress=False)
    for got, want in zip(cast.blocks(), made("released").blocks(), strict=True):
        for part in ("w13", "w2"):
            one, other = getattr(got.ffn, part), getattr(want.ffn, part)
            assert torch.equal(one.dequantise(), other.dequantise()), one.name
            assert one.kind == ("mxfp4" if one.name.startswith("mtp") else "nvfp4")
    assert differing(cast, convert.convert(made("released"), "nvfp4_experts")) == []
    assert differing(convert.convert(made("fp32"), "released"), made("released")) == [], "as random ones are quantised"
    save(cast, tmp_path / "nvfp4", "nvfp4")
    assert differing(load(tmp_path / "nvfp4", progress=False), cast) == []
    ffn = cast.layers[1].ffn
    bound = float(cast.layers[1].ffn_norm.float().abs().max()) * SMALL.hidden_size**0.5
    assert float(ffn.w13.input_scale[2]) == pytest.approx(bound / 2688, rel=1e-6)
    assert float(ffn.w2.input_scale[0]) == pytest.approx(1.0**2 * 1.5 / 2688, rel=1e-6)


def test_an_expert_whose_scales_are_spread_too_far_is_named(saved, tmp_path):
    def spread(tensors: dict[str, torch.Tensor]) -> None:
        scale = tensors["layers.1.ffn.experts.2.w1.scale"].view(torch.uint8)
        scale[5, 3] = scale.max() - 40

    path = edited(saved("released"), tmp_path / "spread", spread)
    with pytest.raises(ValueError, match=r"layers\.1\.ffn\.experts\.w13.*5"):
        load(path, fmt="nvfp4_experts", progress=False)
    assert load(path, progress=False).format == "released"


@pytest.mark.parametrize(("source", "fmt"), [("nvfp4_experts", "released"), ("released", "nvfp4"), ("bf16", "nvfp4")])
def test_what_cannot_become_a_format_is_refused(saved, source, fmt):
    with pytest.raises(ValueError, match=f"for weights in {source}, got '{fmt}'"):
        load(saved(source), fmt=fmt, progress=False)
    with pytest.raises(ValueError, match=f"for weights in {source}, got '{fmt}'"):
        convert.convert(made(source), fmt)


def test_a_matrixs_scale_is_one_number_of_any_axes(saved, tmp_path):
    """As files have it where a quantiser saw wo_a as the one matrix that it is there, or keeps one-element tensors."""
    wo_a, expert = "layers.2.attn.wo_a", "layers.1.ffn.experts.1"

    def one(tensors: dict[str, torch.Tensor]) -> None:
        for field in ("weight_scale_2", "input_scale"):
            tensors[f"{wo_a}.{field}"] = tensors[f"{wo_a}.{field}"][0].clone()
            tensors[f"{expert}.w3.{field}"] = tensors[f"{expert}.w3.{field}"].view(1, 1)

    got = load(edited(saved("nvfp4"), tmp_path / "one", one), progress=False)
    want = made("nvfp4")
    mine, its = got.layers[2].attn.wo_a, want.layers[2].attn.wo_a
    assert torch.equal(mine.scale_2, its.scale_2[:1].expand(len(its.scale_2)))
    assert torch.equal(mine.input_scale, its.input_scale[:1].expand(len(its.scale_2)))
    assert {name.rpartition(".")[0] for name in differing(got, want)} <= {wo_a}

    def unlike(tensors: dict[str, torch.Tensor]) -> None:
        one(tensors)
        tensors[f"{expert}.w3.weight_scale_2"] *= 2
        tensors[f"{wo_a}.input_scale"] = torch.ones(2)

    found = faults(edited(saved("nvfp4"), tmp_path / "unlike", unlike))
    assert len(found) == 2 and f"{wo_a}.input_scale must have shape (3,), got (2,)" in found
    assert any(fault.startswith(f"{expert}.w3.weight_scale_2 must be {expert}.w1.weight_scale_2's") for fault in found)


def test_truncated_and_lost_files_are_named(saved, tmp_path):
    save(made("released"), tmp_path / "cut", "released", shard_bytes=300_000)
    files = sorted((tmp_path / "cut").glob("*.safetensors"))
    files[1].write_bytes(files[1].read_bytes()[:-1000])
    files[2].write_bytes(b"")
    files[-1].unlink()
    found = faults(tmp_path / "cut")
    assert len(found) == 3, "tensors of a file that cannot be read are not counted as missing"
    for file, fault in zip((*files[1:3], files[-1]), found, strict=True):
        assert f"{file.name} cannot be read" in fault
    for file in files[:-1]:
        file.write_bytes(b"")
    assert len(faults(tmp_path / "cut")) == len(files), "nothing is said of a format, of which nothing is known"


Change = Callable[[torch.Tensor | None], torch.Tensor]


def put(value: float | list[float], *place: object) -> Change:
    """Values at a place; for a type of one byte, bytes."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        held = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
        held[place] = torch.tensor(value, dtype=held.dtype)
        return tensor

    return change


def cast(dtype: torch.dtype) -> Change:
    return lambda tensor: tensor.float().to(dtype)


NAN, INF = math.nan, math.inf
TABLE, EXPERT = "layers.0.ffn.gate.tid2eid", "layers.2.ffn.experts.0"
# The format, a tensor, what becomes of it (None: it is lost), what is said. Values are read where all forms are right.
FORMS = [
    ("released", "layers.0.attn.attn_sink", None, "missing"),
    ("released", "vision.weight", lambda _: torch.zeros(3), "unknown vision.weight (F32 (3,)) in model.safetensors"),
    ("released", "norm.weight", lambda _: torch.zeros(321).bfloat16(), "must have shape (320,), got (321,)"),
    ("released", TABLE, put(3, 7, 1), "must be of 0..2, got 0..3"),
    ("released", "layers.2.attn.wkv.weight", cast(torch.bfloat16), "must be F8_E4M3, got BF16"),
    ("released", "layers.2.attn.wkv.scale", cast(torch.float32), "must be F8_E8M0, got F32"),
    ("released", "layers.2.ffn.gate.bias", cast(torch.bfloat16), "must be F32, got BF16"),
    ("nvfp4_experts", "mtp.0.hnorm.weight", None, "missing"),
    ("nvfp4_experts", "mtp.0.ffn.experts.0.w1.weight", cast(torch.uint8), "must be I8, got U8"),
    ("nvfp4_experts", f"{EXPERT}.w3.input_scale", lambda t: 2 * t, f"must be {EXPERT}.w1.input_scale's"),
    ("bf16", "layers.0.attn.wq_a.weight", cast(torch.float16), "must be BF16, got F16"),
    ("bf16", TABLE, put([[2, 2], [0, 0]], [7, 9]), "got [2, 2] in row 7, the first of 2 such rows"),
    ("fp32", TABLE, cast(torch.float32), "must be I64 or I32, got F32"),
]
VALUES = [
    ("released", "layers.1.attn.wkv.weight", put(0x7F, 5, 319), "got 127 at (5, 319)"),
    ("released", "layers.2.attn.wo_a.weight", put(0xFF, 383, 0), "got 255 at (383, 0)"),
    ("released", "layers.2.attn.indexer.wq_b.scale", put(255, 1, 1), "from 0 to 246"),
    ("released", "layers.0.ffn.shared_experts.w2.scale", put(247, 2, 0), "got 247 at (2, 0)"),
    ("released", "layers.1.ffn.experts.2.w3.scale", put(255, 127, 9), "from 0 to 252"),
    ("released", "mtp.0.ffn.experts.0.w2.scale", put(253, 0, 3), "got 253 at (0, 3)"),
    ("released", "layers.1.ffn.gate.bias", put(NAN, 2), "got nan at (2,)"),
    ("nvfp4_experts", "layers.1.ffn.experts.1.w1.weight_scale", put(0x7F, 3, 19), "from 0 to 126"),
    ("nvfp4_experts", "layers.1.ffn.experts.0.w2.weight_scale", put(0x80, 0, 0), "got 128 at (0, 0)"),
    ("nvfp4_experts", "layers.1.ffn.experts.1.w2.weight_scale_2", put(0.0), "positive and at most 1.27e+35, got 0.0"),
    ("nvfp4_experts", "layers.2.ffn.experts.1.w2.weight_scale_2", put(1e36), "got 9.99999"),
    ("nvfp4_experts", "layers.0.ffn.experts.0.w2.input_scale", put(-1e-3), "positive"),
    ("nvfp4", "layers.0.attn.wq_a.input_scale", put(NAN), "got nan"),
    ("bf16", "embed.weight", put(NAN, 65, 319), "finite, got nan at (65, 319)"),
    ("fp32", "hc_head_scale", put(INF, 0), "got inf at (0,)"),
]

SPOILT = [(fmt, [fault[1:] for fault in of if fault[0] == fmt]) for of in (FORMS, VALUES) for fmt in FORMATS]


@pytest.mark.parametrize(("fmt", "wrong"), [case for case in SPOILT if case[1]])
def test_all_faults_are_named_at_once(saved, tmp_path, fmt, wrong):
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        for name, change, _ in wrong:
            held = tensors.pop(name, None)
            if change:
                tensors[name] = change(held)

    path = edited(saved(fmt), tmp_path / "bad", spoil)
    found = faults(path)
    assert len(found) == len(wrong), found
    for name, _, said in wrong:
        assert any(name in fault and said in fault for fault in found), (name, found)
    if fmt == "released":  # whether or not they are converted
        assert faults(path, fmt="nvfp4_experts") == faults(path, fmt="bf16") == found


def test_values_at_the_bounds_are_right():
    for value, kind, field in (
        (torch.tensor([0x7E, 0x80, 0xFE], dtype=torch.uint8).view(torch.float8_e4m3fn), "fp8", "weight"),
        (torch.tensor([0, 0x7E], dtype=torch.uint8).view(torch.float8_e4m3fn), "nvfp4", "scale"),
        (torch.tensor([0, 246], dtype=torch.uint8).view(torch.float8_e8m0fnu), "fp8", "scale"),
        (torch.tensor([0, 252], dtype=torch.uint8).view(torch.float8_e8m0fnu), "mxfp4", "scale"),
        (torch.tensor(1.2e35), "nvfp4", "scale_2"),
        (torch.tensor(1e-38), "nvfp4", "input_scale"),
        (torch.full((9,), 3e38), "", ""),
        (torch.full((9,), -3e38).bfloat16(), "plain", "weight"),
        (torch.arange(256, dtype=torch.uint8), "nvfp4", "weight"),
        (torch.tensor([-5]), "", ""),
    ):
        assert values.fault("x", value, kind, field) == ""
    assert torch.isfinite(torch.tensor(6 * 448 * 1.26e35)), "the largest code under the largest scale"


def test_an_index_names_files_of_its_folder_only(tmp_path):
    folder, index = tmp_path / "sharded", tmp_path / "sharded" / checkpoint.INDEX
    save(made("released"), folder, "released", shard_bytes=300_000)
    text = index.read_text()
    first = json.loads(text)["weight_map"]["embed.weight"]
    shutil.copy(folder / first, tmp_path / first)
    for to in (f"../{first}", str(tmp_path / first), f"sub/../../{first}", f"..\\\\{first}", "", None, 3):
        shown = json.dumps(to)
        index.write_text(text.replace(f'"embed.weight": "{first}"', f'"embed.weight": {shown}'))
        (fault,) = faults(folder)
        assert fault.startswith("embed.weight must be in a file of the index's folder, got "), to
    twice = text.replace("{", '{"weight_map": {},', 1)
    for written in ('{"weight_map": {}}', '{"weight_map": ["a"]}', "{}", "[]", twice):
        index.write_text(written)
        assert "weight_map" in faults(folder)[0] or "must hold an object" in faults(folder)[0]
    where = json.loads(text)["weight_map"]["norm.weight"]
    for name, to in (("norm.weight", first), ("more.weight", where)):
        index.write_text(text.replace(f'"norm.weight": "{where}"', f'"{name}": "{to}"'))
        lacks, holds, *_ = faults(folder)
        assert f"{to} lacks {name}" in lacks and f"{where} holds norm.weight" in holds
    index.unlink()
    (fault,) = faults(folder)
    assert f"must hold {checkpoint.INDEX}" in fault
    index.write_text(text)
    (folder / "blobs").mkdir()
    (folder / first).rename(folder / "blobs" / "abc")
    (folder / first).symlink_to("blobs/abc")
    assert load(folder, progress=False).format == "released", "as the caches of model hubs are"
    (fault,) = faults(tmp_path / "nowhere")
    assert fault.startswith("is not there")


def test_one_tensor_under_two_names_is_a_fault(saved, tmp_path):
    path = edited(saved("fp32"), tmp_path / "bad", lambda t: t.update({"lm_head.weight": t["head.weight"].clone()}))
    (fault,) = faults(path)
    assert "lm_head.weight" in fault and "head.weight once more" in fault


def test_another_model_is_refused_with_a_message_of_bounded_length(saved):
    found = faults(saved("released"), FLASH)
    assert len(found) > 60_000
    lines = str(CheckpointError("it", found)).splitlines()
    assert lines[0] == f"it: {len(found)} faults" and len(lines) == 202 and f"and {len(found) - 200} more" in lines[-1]
    assert str(CheckpointError("it", found[:1])) == f"it: {found[0]}"


def test_unknown_quantisations_and_empty_folders_are_refused(saved, tmp_path):
    def fp8_experts(tensors: dict[str, torch.Tensor]) -> None:
        for name in tensors:
            if ".experts." in name and name.endswith("weight"):
                tensors[name] = tensors[name].float().to(torch.float8_e4m3fn)

    one = torch.ones(3)
    found = faults(edited(saved("released"), tmp_path / "base", fp8_experts))
    assert "attention + expert matrices must be" in found[0] and found[0].endswith("got F8_E4M3 + F8_E4M3")
    named = edited(saved("released"), tmp_path / "other", lambda tensors: tensors.clear() or tensors.update(x=one))
    assert "none of the 1 tensors is of a layer's attention or experts" in faults(named)[0]
    (tmp_path / "empty").mkdir()
    assert any("must hold" in fault for fault in faults(tmp_path / "empty", SMALL))
    (tmp_path / "empty" / checkpoint.INDEX).write_text("{")
    assert "cannot be read" in faults(tmp_path / "empty", SMALL)[0]
