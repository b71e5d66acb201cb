"""config.json: what is written is read again, and every fault is named."""

import dataclasses
import json

import pytest

from problems.dsv4_forward.checkpoint import config_json
from problems.dsv4_forward.checkpoint.checkpoint import CheckpointError, config_from_json
from problems.dsv4_forward.weights.config import CONFIGS, CSA, FLASH, FORMATS, HCA, SWA
from tests.dsv4.models import SMALL


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
    assert read(tmp_path, compress_ratios=FLASH.compress_ratios[:-1]) == FLASH, "the prediction layer's is completed"


def test_every_fault_of_a_config_is_named(tmp_path):
    fields = config_json.to_json(SMALL, "released")
    del fields["head_dim"], fields["rope_scaling"]["beta_fast"]
    fields |= {"scoring_func": "softmax", "compress_ratios": [0, 4]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(CheckpointError) as caught:
        config_from_json(tmp_path)
    assert set(caught.value.faults) == {
        "missing head_dim",
        "missing rope_scaling.beta_fast",
        "scoring_func must be 'sqrtsoftplus', got 'softmax'",
        "compress_ratios must have 3 + 1 entries, got 2",
    }
    with pytest.raises(CheckpointError, match="cannot be read"):
        config_from_json(tmp_path / "nowhere" / "config.json")


def read(tmp_path, **changes):
    """The Config of FLASH's file with other values; "a.b" is key b of the object a."""
    fields = json.loads(json.dumps(config_json.to_json(FLASH, "released")))
    for name, value in changes.items():
        *path, last = name.split(".")
        where = fields
        for key in path:
            where = where.setdefault(key, {})
        where[last] = json.loads(json.dumps(value))
    (tmp_path / "config.json").write_text(json.dumps(fields))
    return config_from_json(tmp_path)


def refused(tmp_path, **changes) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path, **changes)
    return caught.value.faults


# Each of them by itself: of every branch some.
REFUSED = [
    {"rope_scaling.type": "linear", "rope_scaling.attention_factor": 1.2, "rope_scaling.truncate": False},
    {"rope_scaling.factor": "16", "rope_scaling.beta_fast": float("nan"), "rope_scaling.low_freq_factor": 1.0},
    {"rope_scaling": "yarn", "rope_scaling.original_max_position_embeddings": 65536.5, "rope_theta": "10000"},
    {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 4, "moe_layer_freq": 2},
    {"first_k_dense_replace": 1, "num_key_value_heads": 64, "scoring_func": "sigmoid", "norm_topk_prob": False},
    {"hidden_act": "gelu", "mlp_bias": True, "tie_word_embeddings": True, "model_type": "deepseek_v3"},
    {"sliding_window": 64, "architectures": ["DeepseekV3ForCausalLM"], "expert_dtype": "fp8", "compress_rate_csa": 8},
    {"compress_rates": {"compressed_sparse_attention": 8, "heavily_compressed_attention": 128}},
    {"qk_nope_head_dim": 512, "v_head_dim": 128, "num_local_experts": 8, "partial_rotary_factor": 0.5},
    {"query_pre_attn_scalar": 256, "intermediate_size": 18432, "engram_layer_ids": [1], "kv_source_layer_ids": [1]},
    {"quantization_config": "fp8", "quantization_config.weight_block_size": [128], "quantization_config.bits": 4},
    {"quantization_config.quant_method": "awq", "quantization_config.group_size": 32},
    {"quantization_config.config_groups": [4], "quantization_config.quantized_layers.layers_0": {"zero_point": 1}},
    *({f"quantization_config.config_groups.group_0.{key}": 3} for key in ("weights.zero", "rotation")),
    {"hidden_size": 0, "vocab_size": [129280], "num_hidden_layers": "43", "num_nextn_predict_layers": "1"},
    {"hidden_size": True, "num_hidden_layers": -1, "num_hash_layers": -1, "routed_scaling_factor": float("inf")},
    {"swiglu_limit": 0, "rms_norm_eps": "1e-6", "rope_theta": 0, "compress_rope_theta": {}},
    *({"compress_ratios": ratios} for ratios in ("all", ["4"] * 44, [4.0] * 44, [8] * 44, {"0": 4})),
    {"layer_types": ["full_attention"] * 43, "mlp_layer_types": ["dense"] * 43, "n_shared_experts": 2},
    {"mlp_layer_types": ["moe"], "num_experts_per_tok": 257, "num_hash_layers": 44, "index_head_dim": 96},
    {"o_groups": 7, "qk_rope_head_dim": 63, "attn_logit_softcapping": 50.0, "something": ["else"]},
]


@pytest.mark.parametrize("changes", REFUSED, ids=lambda changes: next(iter(changes)))
def test_what_would_be_computed_otherwise_is_refused_by_name(tmp_path, changes):
    for key, value in changes.items():
        faults = refused(tmp_path, **{key: value})
        assert any(key in fault for fault in faults) and len(faults) <= 5, faults


# What the file of deepseek-ai/DeepSeek-V4-Flash has besides the keys that to_json writes, and what transformers 5.17
# writes for it with use_diff=False.
RELEASED = {"attention_dropout": 0.0, "bos_token_id": 0, "eos_token_id": 1, "initializer_range": 0.02}
RELEASED |= {"use_cache": True, "torch_dtype": "bfloat16", "transformers_version": "4.57.1"}
OFF = ("output_hidden_states", "is_encoder_decoder", "mlp_bias", "output_router_logits", "output_attentions")
TRANSFORMERS = dict.fromkeys(OFF, False) | {
    **RELEASED,
    "id2label": {"0": "LABEL_0"},
    "pad_token_id": None,
    "router_aux_loss_coef": 0.001,
    "partial_rotary_factor": 0.125,
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
}

TRAINING = {"attention_dropout": 0.1, "initializer_range": 1.0, "router_jitter_noise": 0.5, "use_cache": False}
TOKENS = {"pad_token_id": 7, "eos_token_id": [1, 2], "transformers_version": "9", "auto_map": {}}
NONE = {"something": None, "norm_topk_prob": None, "topk_group": None, "n_group": 1, "mlp_bias": False}
SIZES = {"query_pre_attn_scalar": 512, "qk_nope_head_dim": 448, "partial_rotary_factor": 0.125}
PARTS = {"rope_scaling.mscale": 1.0, "quantization_config.modules_to_not_convert": None, "dspark_block_size": 5}
PARTS |= {"quantization_config.ignored_layers": ["head"]}


@pytest.mark.parametrize("keys", [RELEASED, TRANSFORMERS, TRAINING | TOKENS | NONE | SIZES | PARTS])
def test_the_released_file_what_transformers_writes_and_keys_that_change_nothing_are_read(tmp_path, keys):
    assert read(tmp_path, **keys) == FLASH


KINDS = {SWA: "sliding_attention", CSA: "compressed_sparse_attention", HCA: "heavily_compressed_attention"}
YARN = {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1}
NESTED = {"main": {"rope_type": "default", "rope_theta": 10000}, "compress": {**YARN, "rope_theta": 160000}}
MAIN, COMPRESS = "rope_parameters.main", "rope_parameters.compress"
RENAMED = {"rope_scaling": None, "rope_theta": None, "rope_parameters": NESTED}  # as transformers writes it
LAYERS = [KINDS[ratio] for ratio in FLASH.ratios]
ROUTERS = ["hash_moe"] * 3 + ["moe"] * 40


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"rope_parameters": NESTED}, ""),
        ({"rope_parameters": YARN}, ""),
        ({"rope_parameters": NESTED, "rope_scaling": {}}, ""),
        ({"rope_parameters": NESTED, "rope_scaling.factor": 40}, "compress.factor is 16 and rope_scaling.factor 40"),
        ({"rope_parameters": {**YARN, "beta_fast": 16}}, "rope_parameters.beta_fast is 16 and rope_scaling.beta_fast"),
        ({"rope_parameters": NESTED, "rope_scaling.mscale": 0.7}, "rope_scaling.mscale must be 1.0, got 0.7"),
        ({"rope_parameters": NESTED, "rope_scaling": None, "rope_theta": 5000}, "rope_theta must be 5000, got 10000"),
        ({"rope_scaling.rope_theta": 1e6}, "rope_scaling.rope_theta must be 10000.0 or 160000.0, got 1000000.0"),
        ({**RENAMED, f"{COMPRESS}.attention_factor": 1.0, f"{MAIN}.partial_rotary_factor": 0.125}, ""),
        *(
            ({**RENAMED, key: value}, said)
            for key, value, said in (
                (f"{MAIN}.rope_type", "linear", f"{MAIN}.rope_type must be 'default', got 'linear'"),
                (f"{COMPRESS}.rope_theta", 1e6, f"{COMPRESS}.rope_theta must be 160000.0, got 1000000.0"),
                (f"{COMPRESS}.attention_factor", 1.277, f"{COMPRESS}.attention_factor must be 1.0"),
                (f"{MAIN}.partial_rotary_factor", 1.0, f"{MAIN}.partial_rotary_factor must be 0.125, got 1.0"),
                (f"{MAIN}.short_factor", [1.0], f"{MAIN}.short_factor must be a key that is known here"),
                (f"{MAIN}.rope_theta", None, f"missing {MAIN}.rope_theta"),
                (f"{COMPRESS}.beta_slow", 32.5, f"{COMPRESS}.beta_fast must be at least {COMPRESS}.beta_slow"),
            )
        ),
        ({"rope_scaling.beta_fast": 1, "rope_scaling.beta_slow": 2}, "beta_fast must be at least rope_scaling.beta_sl"),
        ({"layer_types": LAYERS}, ""),
        ({"layer_types": LAYERS, "compress_ratios": None}, ""),
        ({"layer_types": LAYERS[::-1]}, "compress_ratios must be those of layer_types, [4, 128, "),
        ({"layer_types": LAYERS[:-1], "compress_ratios": None}, "layer_types must have 43 entries, got 42"),
        ({"layer_types": LAYERS, "num_nextn_predict_layers": "1"}, "num_nextn_predict_layers must be an integer"),
        ({"mlp_layer_types": ROUTERS}, ""),
        ({"mlp_layer_types": ROUTERS, "num_hash_layers": 2}, "num_hash_layers must be 3, got 2"),
        ({"dtype": None, "torch_dtype": "float16"}, ""),
        ({"dtype": "float16"}, ""),
        ({"torch_dtype": "float16"}, "torch_dtype must be 'bfloat16', got 'float16'"),
    ],
)
def test_keys_that_say_the_same_must_agree(tmp_path, changes, match):
    if not match:
        other = {"num_nextn_predict_layers": 0, "compress_ratios": FLASH.ratios} if "layer_types" in changes else {}
        other |= {f"rope_{key[13:]}": value for key, value in changes.items() if key.startswith("rope_scaling.beta")}
        assert read(tmp_path, **changes) == dataclasses.replace(FLASH, **other)
        return
    (fault,) = refused(tmp_path, **changes)
    assert match in fault


@pytest.mark.parametrize("value", [[1], [], 5, "yarn", True, [0] * 999])
def test_what_is_no_object_is_one_fault(tmp_path, value):
    """And no key of it is missing as well."""
    for changes, key in (
        ({"rope_scaling": value}, "rope_scaling"),
        ({"quantization_config": value}, "quantization_config"),
        ({"rope_scaling": None, "rope_parameters": value}, "rope_parameters"),
        (RENAMED | {COMPRESS: value}, COMPRESS),
        (RENAMED | {MAIN: value}, MAIN),
    ):
        assert refused(tmp_path, **changes) == (f"{key} must be an object, got {value!r:.80}",)


def test_numbers_that_nothing_could_compute_with_are_refused(tmp_path):
    wrong = [("rope_theta", 1), ("rope_theta", 0.5), ("compress_rope_theta", 1), ("rope_scaling.beta_fast", 1e-320)]
    wrong += [("swiglu_limit", 1e39), ("hc_eps", 1e39), ("rms_norm_eps", 1e-50), ("index_topk", 2**31)]
    large = "routed_scaling_factor", "compress_rope_theta", "rope_scaling.factor"
    wrong += [(key, 10**400) for key in (*large, "rope_scaling.original_max_position_embeddings", "vocab_size")]
    for key, value in wrong:
        with pytest.raises(CheckpointError, match=r"below 2\^31|that fp32 holds|above 1"):
            read(tmp_path, **{key: value})
    assert read(tmp_path, rope_theta=1.5, hc_eps=0, swiglu_limit=7).rope_theta == 1.5
