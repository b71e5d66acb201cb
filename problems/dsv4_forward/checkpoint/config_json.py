"""Read config.json beside a checkpoint, in DeepSeek's or transformers' spelling; write it in DeepSeek's."""

import dataclasses
import json
from pathlib import Path

from problems.dsv4_forward.checkpoint.checkpoint_names import CheckpointError
from problems.dsv4_forward.weights.config import CSA, HCA, PLAIN, SWA, Config, check_format

_SAME = (  # fields of Config that the file calls the same
    "vocab_size", "hidden_size", "num_attention_heads", "head_dim", "q_lora_rank", "o_groups", "o_lora_rank",
    "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "index_n_heads", "index_topk",
    "max_position_embeddings", "routed_scaling_factor", "swiglu_limit", "index_head_dim", "qk_rope_head_dim",
    "n_shared_experts", "sliding_window", "compress_rope_theta", "hc_mult", "hc_sinkhorn_iters", "hc_eps",
    "rms_norm_eps",
)  # fmt: skip
_YARN = {  # field of Config -> key of the YaRN entry
    "rope_factor": "factor", "rope_original": "original_max_position_embeddings", "rope_beta_fast": "beta_fast",
    "rope_beta_slow": "beta_slow",
}  # fmt: skip
_FIXED = {  # what every model of this family has, and the code relies on; may be left out
    "num_key_value_heads": 1, "scoring_func": "sqrtsoftplus", "norm_topk_prob": True, "tie_word_embeddings": False,
    "hidden_act": "silu", "attention_bias": False,
}  # fmt: skip
_RATIOS = {"sliding_attention": SWA, "compressed_sparse_attention": CSA, "heavily_compressed_attention": HCA}
_FP8 = {
    "quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}  # fmt: skip
_NVFP4 = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "moe_quant_algo": "NVFP4"}


def to_json(cfg: Config, fmt: str) -> dict:
    """The contents of config.json for a checkpoint of `cfg` in `fmt`."""
    known = dataclasses.asdict(cfg)
    fields = {
        "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "_name_or_path": cfg.name,
        **{name: known[name] for name in _SAME}, **_FIXED, "topk_method": "noaux_tc",
        "num_hidden_layers": cfg.num_hidden_layers, "num_hash_layers": cfg.num_hash_layers,
        "num_nextn_predict_layers": cfg.num_nextn_predict_layers, "compress_ratios": list(cfg.compress_ratios),
        "rope_theta": cfg.rope_theta,
        "rope_scaling": {"type": "yarn", **{key: known[name] for name, key in _YARN.items()}},
        "dtype": "float32" if check_format(fmt) == "fp32" else "bfloat16",
    }  # fmt: skip
    if fmt not in PLAIN:
        fields |= {"expert_dtype": "fp4", "quantization_config": _FP8 if fmt == "released" else _NVFP4}
    return fields


def config_from_json(path: str | Path) -> Config:
    """path: a config.json, or the folder of one -> the Config that it describes, named as the file or its folder is.

    A file of transformers describes no prediction layer, whatever it says: such a checkpoint holds none.
    CheckpointError, naming every field that is missing or is not as this family of models has it.
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    try:
        data = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(file, [f"cannot be read: {error}"]) from error
    faults = [
        f"{key} must be {want!r}, got {data[key]!r}" for key, want in _FIXED.items() if data.get(key, want) != want
    ]
    fields = {name: data.get(name) for name in _SAME} | _layers(data, faults) | _rope(data)
    faults += [f"missing {name}" for name, value in fields.items() if value is None]
    if faults:
        raise CheckpointError(file, faults)
    try:
        return Config(name=data.get("_name_or_path") or file.resolve().parent.name, **fields)
    except ValueError as error:
        raise CheckpointError(file, [str(error)]) from error


def _layers(data: dict, faults: list[str]) -> dict[str, object]:
    """The fields of Config that say what each layer is; None for one that cannot be told."""
    layers, extra = data.get("num_hidden_layers"), data.get("num_nextn_predict_layers", 0)
    if "layer_types" in data:
        ratios, extra = tuple(_RATIOS.get(kind, kind) for kind in data["layer_types"]), 0
    else:
        ratios = tuple(data.get("compress_ratios") or ())
    if layers is not None and ratios and len(ratios) not in (layers, layers + extra):
        faults.append(f"compress_ratios must have {layers} + {extra} entries, got {len(ratios)}")
    if layers is not None and ratios:
        ratios = ratios[:layers] + (ratios[layers:] or (SWA,) * extra)
    kinds = data.get("mlp_layer_types")
    hashed = data.get("num_hash_layers") if kinds is None else kinds.count("hash_moe")
    if kinds is not None and "hash_moe" in kinds[hashed:]:
        faults.append(f"mlp_layer_types must have its hash_moe layers first, got {kinds}")
    return {
        "num_hash_layers": hashed,
        "num_nextn_predict_layers": extra,
        "compress_ratios": ratios if layers is not None and ratios else None,
    }


def _rope(data: dict) -> dict[str, object]:
    """transformers has an entry a kind of layer, DeepSeek one for the layers that compress."""
    if "rope_parameters" in data:
        yarn, theta = data["rope_parameters"].get("compress", {}), data["rope_parameters"].get("main", {})
    else:
        yarn, theta = data.get("rope_scaling") or {}, data
    return {"rope_theta": theta.get("rope_theta")} | {name: yarn.get(key) for name, key in _YARN.items()}
