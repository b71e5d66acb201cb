"""config.json: what is written is read again, and every fault is named."""

import dataclasses
import json

import pytest

from problems.dsv4_forward.checkpoint import config_json
from problems.dsv4_forward.checkpoint.checkpoint import CheckpointError, config_from_json
from problems.dsv4_forward.weights.config import CONFIGS, CSA, FLASH, FORMATS, HCA, SWA, TINY

SMALL = dataclasses.replace(
    TINY, name="small", hidden_size=320, num_attention_heads=6, q_lora_rank=160, o_groups=3, n_routed_experts=3,
    num_experts_per_tok=2, num_hash_layers=1, compress_ratios=(SWA, HCA, CSA, SWA), num_nextn_predict_layers=1,
    vocab_size=66, index_n_heads=8,
)  # fmt: skip


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("cfg", [*CONFIGS.values(), SMALL, FLASH.slice(4, 32)], ids=lambda cfg: cfg.name)
def test_a_written_config_is_read_again(tmp_path, cfg, fmt):
    (tmp_path / "config.json").write_text(json.dumps(config_json.to_json(cfg, fmt)))
    assert config_from_json(tmp_path) == config_from_json(tmp_path / "config.json") == cfg


def test_an_unnamed_model_is_called_as_its_folder(tmp_path):
    fields = config_json.to_json(FLASH, "released")
    del fields["_name_or_path"]
    assert fields["quantization_config"]["quant_method"] == "fp8" and fields["rope_scaling"]["factor"] == 16
    folder = tmp_path / "DeepSeek-V4-Flash"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields))
    assert config_from_json(folder) == dataclasses.replace(FLASH, name="DeepSeek-V4-Flash")


def test_ratios_without_the_prediction_layer_are_completed(tmp_path):
    fields = config_json.to_json(FLASH, "released")
    fields["compress_ratios"] = fields["compress_ratios"][:-1]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert config_from_json(tmp_path) == FLASH


def test_every_fault_of_a_config_is_named(tmp_path):
    fields = config_json.to_json(SMALL, "released")
    del fields["head_dim"], fields["rope_scaling"]["beta_fast"]
    fields |= {"scoring_func": "softmax", "compress_ratios": [0, 4]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(CheckpointError) as caught:
        config_from_json(tmp_path)
    assert set(caught.value.faults) == {
        "missing head_dim", "missing rope_beta_fast", "scoring_func must be 'sqrtsoftplus', got 'softmax'",
        "compress_ratios must have 3 + 1 entries, got 2",
    }  # fmt: skip
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        config_from_json(tmp_path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        config_from_json(tmp_path / "nowhere" / "config.json")
