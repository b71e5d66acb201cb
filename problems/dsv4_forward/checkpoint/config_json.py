"""Read config.json beside a checkpoint, in DeepSeek's or transformers' spelling; write it in DeepSeek's.

Every key must be one that is read, one of which a single value is computed here (_COMPUTED), or one that changes no
logits (_WITHOUT_EFFECT). Any other is a fault: in another model it may be a cap on logits, a factor or a bias.
"""

import dataclasses
import json
import re
from pathlib import Path

from problems.dsv4_forward.checkpoint.checkpoint_names import CheckpointError
from problems.dsv4_forward.weights.config import CSA, HCA, PLAIN, SWA, Config, check_format, wrong_numbers

_SAME = (  # fields of Config that the file calls the same
    "vocab_size",
    "hidden_size",
    "num_attention_heads",
    "head_dim",
    "q_lora_rank",
    "o_groups",
    "o_lora_rank",
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "index_n_heads",
    "index_topk",
    "max_position_embeddings",
    "routed_scaling_factor",
    "swiglu_limit",
    "index_head_dim",
    "qk_rope_head_dim",
    "n_shared_experts",
    "sliding_window",
    "compress_rope_theta",
    "hc_mult",
    "hc_sinkhorn_iters",
    "hc_eps",
    "rms_norm_eps",
)
_YARN = {  # field of Config -> key of the YaRN entry
    "rope_factor": "factor",
    "rope_original": "original_max_position_embeddings",
    "rope_beta_fast": "beta_fast",
    "rope_beta_slow": "beta_slow",
}
_FIXED = {  # what every model of this family has, and the code relies on
    "num_key_value_heads": 1,
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
    "topk_method": "noaux_tc",
}
# Keys that change the computation in DeepSeek's or transformers' code, for this model or another -> the values that are
# computed here, none where the key must be left out. Each may be left out, or null.
_COMPUTED = {
    **{key: (value,) for key, value in _FIXED.items()},
    "sliding_window": (128,),
    "model_type": ("deepseek_v4",),
    "architectures": (["DeepseekV4ForCausalLM"], ["DeepseekV4Model"]),
    "mlp_bias": (False,),
    "n_group": (1,),
    "topk_group": (1,),
    "first_k_dense_replace": (0,),
    "moe_layer_freq": (1,),
    "rope_interleave": (True,),
    "compress_rate_csa": (CSA,),
    "compress_rate_hca": (HCA,),
    "expert_dtype": ("fp4",),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "attention_multiplier": (),
    "clip_qkv": (),
    "logit_scale": (1.0,),
    "logits_scaling": (1.0,),
    "embedding_multiplier": (1.0,),
    "residual_multiplier": (1.0,),
    "use_sliding_window": (True,),
    "hidden_activation": ("silu",),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
}
_AGAIN = (  # what other keys say too: _contradictions and _share compare them
    "qk_nope_head_dim",
    "v_head_dim",
    "qk_head_dim",
    "compress_rates",
    "num_local_experts",
    "intermediate_size",
    "query_pre_attn_scalar",
    "partial_rotary_factor",
)
_READ = (
    *_SAME,
    *_COMPUTED,
    *_AGAIN,
    "num_hidden_layers",
    "num_hash_layers",
    "num_nextn_predict_layers",
    "compress_ratios",
    "layer_types",
    "mlp_layer_types",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "quantization_config",
    "_name_or_path",
)
_WITHOUT_EFFECT = (  # names and versions, what only training uses, what a caller is given, and how text is made
    "auto_map",
    "transformers_version",
    "torch_dtype",
    "dtype",
    "_attn_implementation",
    "_commit_hash",
    "use_cache",
    "attention_dropout",
    "initializer_range",
    "router_jitter_noise",
    "router_aux_loss_coef",
    "aux_loss_alpha",
    "seq_aux",
    "output_router_logits",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "ep_size",
    "pretraining_tp",
    "chunk_size_feed_forward",
    "torchscript",
    "is_decoder",
    "problem_type",
    "id2label",
    "label2id",
    "tokenizer_class",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "sep_token_id",
    "decoder_start_token_id",
    "finetuning_task",
    "task_specific_params",
    "tie_encoder_decoder",
    "pruned_heads",
    "prefix",
)
_DRAFT = "dspark_"  # how the keys of a draft head begin, which is not loaded
_COMPUTED_YARN = {
    "type": ("yarn",),
    "rope_type": ("yarn",),
    "attention_factor": (1.0,),
    "mscale": (1.0,),
    "mscale_all_dim": (1.0,),
    "truncate": (True,),
}
_READ_ROPE = (*_YARN.values(), *_COMPUTED_YARN, "rope_theta", "partial_rotary_factor", "main", "compress")
_COMPUTED_PLAIN_ROPE = {"type": ("default",), "rope_type": ("default",)}
_COMPUTED_QUANTISATION = {  # the tensors' dtypes and shapes decide how they are loaded
    "quant_method": ("fp8", "modelopt"),
    "fmt": ("e4m3",),
    "scale_fmt": ("ue8m0",),
    "activation_scheme": ("dynamic",),
    "weight_block_size": ([128, 128],),
    "expert_dtype": ("fp4",),
    "quant_algo": ("MIXED_PRECISION", "NVFP4"),
    "moe_quant_algo": ("NVFP4",),
    "group_size": (16,),
    "kv_cache_quant_algo": ("FP8",),
}
_READ_QUANTISATION = (
    *_COMPUTED_QUANTISATION,
    "modules_to_not_convert",
    "ignored_layers",
    "ignore",
    "exclude_modules",
    "dequantize",
    "producer",
    "kv_cache_scheme",
    "config_groups",
    "quantized_layers",
)
_READ_GROUP = ("weights", "input_activations", "output_activations", "targets", "format", "quant_algo", "group_size")
_READ_WEIGHTS = (
    "num_bits",
    "type",
    "group_size",
    "dynamic",
    "strategy",
    "symmetric",
    "actorder",
    "block_structure",
    "observer",
    "observer_kwargs",
    "scale_dtype",
    "zp_dtype",
)
_OTHER_MODEL = ("engram_", "candidate_", "kv_source_layer_ids", "index_source_layer_ids")  # how V4.1's keys begin
_RATIOS = {"sliding_attention": SWA, "compressed_sparse_attention": CSA, "heavily_compressed_attention": HCA}
_DTYPES = ("dtype", "torch_dtype")  # one key by its new and its old name
_NO_OBJECT = " must be an object"
_ROUTERS = ("hash_moe", "moe")
_FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
_NVFP4 = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "moe_quant_algo": "NVFP4"}


def to_json(cfg: Config, fmt: str) -> dict:
    """The contents of config.json for a checkpoint of `cfg` in `fmt`."""
    known = dataclasses.asdict(cfg)
    fields = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "_name_or_path": cfg.name,
        **{name: known[name] for name in _SAME},
        **_FIXED,
        "num_hidden_layers": cfg.num_hidden_layers,
        "num_hash_layers": cfg.num_hash_layers,
        "num_nextn_predict_layers": cfg.num_nextn_predict_layers,
        "compress_ratios": list(cfg.compress_ratios),
        "rope_theta": cfg.rope_theta,
        "rope_scaling": {"type": "yarn", **{key: known[name] for name, key in _YARN.items()}},
        "dtype": "float32" if check_format(fmt) == "fp32" else "bfloat16",
    }
    if fmt not in PLAIN:
        fields |= {"expert_dtype": "fp4", "quantization_config": _FP8 if fmt == "released" else _NVFP4}
    return fields


def config_from_json(path: str | Path) -> Config:
    """path: a config.json, or the folder of one -> the Config that it describes, named as the file or its folder is.

    A file with layer_types is transformers', which saves no prediction layer and yet writes num_nextn_predict_layers 1:
    the Config has none. CheckpointError, naming every key that is missing, is no number, would have another computation
    than this family's, or says something else than another key.
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    data = read_json(file)
    faults = _others(data, _COMPUTED)
    faults += _quantisation(data)
    faults += [f"{key}: keys of DeepSeek-V4.1, another model, must not be there" for key in data if _of_another(key)]
    faults += _unknown(data, (*_READ, *_WITHOUT_EFFECT))
    rope = _rope(data, faults)
    fields = {name: data.get(name) for name in _SAME} | _layers(data, faults)
    fields |= {name: value for name, (_, value) in rope.items()}
    keys = {name: key for name, (key, _) in rope.items()}  # the file's, where they are not called as the field is
    if data.get("layer_types") is not None:
        keys["compress_ratios"] = "layer_types"
    missing = [keys.get(name, name) for name, value in fields.items() if value is None]
    odd = tuple(f"{fault.partition(_NO_OBJECT)[0]}." for fault in faults if _NO_OBJECT in fault)
    faults += [f"missing {key}" for key in missing if not key.startswith(odd)]
    faults += [_in_the_file(fault, keys) for fault in wrong_numbers(fields)] + _contradictions(data)
    if faults:
        raise CheckpointError(file, list(dict.fromkeys(faults)))
    name = data.get("_name_or_path")
    try:
        return Config(name=name if name and isinstance(name, str) else file.resolve().parent.name, **fields)
    except ValueError as error:
        raise CheckpointError(file, [_in_the_file(str(error), keys)]) from error


def _quantisation(data: dict) -> list[str]:
    """Keys of quantization_config that are not known, at any depth: a rotation, say, shows in no tensor."""
    faults: list[str] = []
    said, at = _part(data, "quantization_config", faults), "quantization_config."
    faults += _others(said, _COMPUTED_QUANTISATION, at) + _unknown(said, _READ_QUANTISATION, at)
    for part in ("config_groups", "quantized_layers"):
        groups = _part(said, part, faults, at)
        for name in groups:
            group, path = _part(groups, name, faults, f"{at}{part}."), f"{at}{part}.{name}."
            faults += _unknown(group, _READ_GROUP, path)
            for inner in _READ_GROUP[:3]:
                faults += _unknown(_part(group, inner, faults, path), _READ_WEIGHTS, f"{path}{inner}.")
    return faults


def _in_the_file(fault: str, keys: dict[str, str]) -> str:
    """A fault of fields of Config under the file's keys for them. keys: by field, where the two differ."""
    return re.sub(r"\w+", lambda found: keys.get(found[0], found[0]), fault)


def read_json(file: Path) -> dict:
    """The object that a JSON file holds. CheckpointError: it cannot be read, is no object, or names a key twice."""
    try:
        data = json.loads(file.read_text(), object_pairs_hook=_distinct)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(file, [f"cannot be read: {error}"]) from error
    if not isinstance(data, dict):
        raise CheckpointError(file, [f"cannot be read: must hold an object, got {type(data).__name__}"])
    return data


def _distinct(pairs: list[tuple[str, object]]) -> dict:
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key!r} is there twice")
        found[key] = value
    return found


def _others(data: dict, computed: dict[str, tuple], prefix: str = "") -> list[str]:
    """A fault for each value that is not among those of `computed`; 1.0 is 1, true is not."""
    return [
        f"{prefix}{key} must be {' or '.join(map(repr, values)) or 'left out'}, got {data[key]!r}"
        for key, values in computed.items()
        if data.get(key) is not None and not any(_equal(data[key], value) for value in values)
    ]


def _unknown(data: dict, known: tuple[str, ...], prefix: str = "") -> list[str]:
    """A fault for each key with a value that is not `known`, nor another model's or a draft head's."""
    return [
        f"{prefix}{key} must be a key that is known here, since it may change what is computed, got {data[key]!r:.80}: "
        "remove it from the file if it does not"
        for key in data
        if data[key] is not None and key not in known and not key.startswith((*_OTHER_MODEL, _DRAFT))
    ]


def _equal(one: object, other: object) -> bool:
    """Whether two values of a file are the same; 1.0 is 1, true is not."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _of_another(key: str) -> bool:
    return key.startswith(_OTHER_MODEL)


def _part(data: dict, key: str, faults: list[str], prefix: str = "") -> dict:
    """An object within the file; empty if it is left out, or no object."""
    value = data.get(key)
    if value is not None and not isinstance(value, dict):
        faults.append(f"{prefix}{key}{_NO_OBJECT}, got {value!r:.80}")
    return value if isinstance(value, dict) else {}


def _texts(data: dict, key: str, known: tuple[str, ...], faults: list[str]) -> list[str]:
    """A list of some of the `known` texts; empty, with a fault, if it is another."""
    value = data[key]
    if isinstance(value, list) and all(isinstance(text, str) and text in known for text in value):
        return value
    faults.append(f"{key} must be a list of {' or '.join(map(repr, known))}, got {value!r}")
    return []


def _layers(data: dict, faults: list[str]) -> dict[str, object]:
    """The fields of Config that say what each layer is; None for one that cannot be told."""
    layers, extra = data.get("num_hidden_layers"), data.get("num_nextn_predict_layers") or 0
    counts = {"num_hidden_layers": layers, "num_nextn_predict_layers": extra}
    wrong = [name for name, count in counts.items() if type(count) is not int or count < 0]
    if wrong:
        said = f"{wrong[0]} must be an integer, 0 or more, got {counts[wrong[0]]!r}"
        faults += ["missing num_hidden_layers" if layers is None else said]
    key, listed = "compress_ratios", data.get("compress_ratios") or ()
    if not isinstance(listed, list | tuple):
        faults.append(f"compress_ratios must be a list, got {listed!r}")
        listed = ()
    ratios = tuple(listed)
    if data.get("layer_types") is not None:
        key, extra = "layer_types", 0
        kinds = tuple(_RATIOS[kind] for kind in _texts(data, key, tuple(_RATIOS), faults))
        if kinds and ratios and not wrong and ratios[:layers] != kinds[:layers]:
            faults.append(f"compress_ratios must be those of layer_types, {list(kinds)}, got {listed!r}")
        ratios = kinds
    if wrong:
        ratios = ()
    elif ratios and len(ratios) not in (layers, layers + extra):
        many = f"{layers} + {extra}" if extra else layers
        faults.append(f"{key} must have {many} entries, got {len(ratios)}")
    elif extra != 1:  # several layers are another way to draft, and are left out
        ratios, extra = ratios[:layers], 0
    elif ratios:
        ratios = ratios[:layers] + (ratios[layers:] or (SWA,))
    return {
        "num_hash_layers": _hashed(data, layers, faults),
        "num_nextn_predict_layers": 0 if wrong else extra,
        "compress_ratios": ratios or (() if faults else None),
    }


def _hashed(data: dict, layers: object, faults: list[str]) -> object:
    """How many layers, the first ones, route by token."""
    if data.get("mlp_layer_types") is None:
        hashed = data.get("num_hash_layers")
        if type(hashed) is int and type(layers) is int and hashed > layers:
            faults.append(f"num_hash_layers must be at most num_hidden_layers, {layers}, got {hashed}")
        return hashed
    kinds = _texts(data, "mlp_layer_types", _ROUTERS, faults)
    hashed = kinds.count("hash_moe")
    if "hash_moe" in kinds[hashed:]:
        faults.append(f"mlp_layer_types must have its hash_moe layers first, got {kinds}")
    if kinds and len(kinds) != layers:
        faults.append(f"mlp_layer_types must have {layers} entries, got {len(kinds)}")
    faults += _others(data, {"num_hash_layers": (hashed,)} if kinds else {})
    return hashed


def _rope(data: dict, faults: list[str]) -> dict[str, tuple[str, object]]:
    """Field of Config -> (its key in the file, its value).

    transformers calls the object rope_parameters, and reads rope_scaling in its place where both are there: they must
    agree.
    """
    given = [key for key in ("rope_parameters", "rope_scaling") if data.get(key) not in (None, {})]
    first, *others = [_rope_of(data, key, faults) for key in given or ["rope_scaling"]]
    for other in others:
        faults += [
            f"{one} is {value!r} and {key} {again!r}: they must agree, or one of the two be left out"
            for (one, value), (key, again) in zip(first.values(), other.values(), strict=True)
            if value is not None and again is not None and not _equal(value, again)
        ]
    return first


def _rope_of(data: dict, key: str, faults: list[str]) -> dict[str, tuple[str, object]]:
    """transformers has an entry a kind of layer, or one of YaRN; DeepSeek one for the layers that compress."""
    yarn, base, theta = _part(data, key, faults), "rope_theta", data.get("rope_theta")
    faults += _unknown(yarn, _READ_ROPE, f"{key}.")
    if "main" in yarn or "compress" in yarn:
        main, yarn = (_part(yarn, kind, faults, f"{key}.") for kind in ("main", "compress"))
        for kind, part in (("main", main), ("compress", yarn)):
            faults += _unknown(part, _READ_ROPE, f"{key}.{kind}.")
        base, theta = f"{key}.main.rope_theta", main.get("rope_theta")
        faults += _others(main, _COMPUTED_PLAIN_ROPE | _share(data) | _bases(data, "rope_theta"), f"{key}.main.")
        key = f"{key}.compress"
        faults += _others(yarn, _bases(data, "compress_rope_theta"), f"{key}.")
    elif theta is None and yarn.get("rope_theta") is not None:
        base, theta = f"{key}.rope_theta", yarn["rope_theta"]
    else:
        faults += _others(yarn, _bases(data, "rope_theta", "compress_rope_theta"), f"{key}.")
    faults += _others(yarn, _COMPUTED_YARN | _share(data), f"{key}.")
    if yarn and yarn.get("type") is None and yarn.get("rope_type") is None:
        faults.append(f"missing {key}.type: it must be 'yarn'")
    found = {name: (f"{key}.{its}", yarn.get(its)) for name, its in _YARN.items()}
    return {"rope_theta": (base, theta)} | found


def _bases(data: dict, *keys: str) -> dict[str, tuple]:
    """What a rope_theta within an object must be: one of these keys of the file, where it has them."""
    known = tuple(data[key] for key in keys if data.get(key) is not None)
    return {"rope_theta": known} if known else {}


def _share(data: dict) -> dict[str, tuple]:
    """What transformers' share of a head that is rotated must be, if it can be told."""
    rope, width = data.get("qk_rope_head_dim"), data.get("head_dim")
    known = type(rope) is int and type(width) is int and width > 0
    return {"partial_rotary_factor": (rope / width,)} if known else {}


def _contradictions(data: dict) -> list[str]:
    """Keys that say once more what others say, and something else."""
    width, rope = (data[key] if type(data.get(key)) is int else 0 for key in ("head_dim", "qk_rope_head_dim"))
    rates = {name: ratio for name, ratio in _RATIOS.items() if ratio}
    again = {
        "qk_nope_head_dim": width - rope,
        "v_head_dim": width,
        "qk_head_dim": width,
        "compress_rates": rates,
        "num_local_experts": data.get("n_routed_experts"),
        "intermediate_size": data.get("moe_intermediate_size"),
        "query_pre_attn_scalar": width,
    }
    said = data | {key: data[key].removeprefix("torch.") for key in _DTYPES if isinstance(data.get(key), str)}
    if said.get("dtype") is not None:
        again["torch_dtype"] = said["dtype"]
    return _others(said, {key: (value,) for key, value in again.items()} | _share(data))
