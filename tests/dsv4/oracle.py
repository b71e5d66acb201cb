"""Hugging Face transformers' DeepSeek-V4 as an independent oracle: the same random weights in both, all in fp32."""

import dataclasses
import functools
from typing import TYPE_CHECKING

import torch

from problems.dsv4_forward.weights import tree
from problems.dsv4_forward.weights.config import CSA, HCA, SWA, TINY, Config
from problems.dsv4_forward.weights.tree import ModelWeights

# Imported by what needs it: transformers takes 4 s of a processor, also where tests are only collected.
if TYPE_CHECKING:
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

# Other head counts, ratios, top-k, groups and hash layers than TINY; no two sizes alike.
_OTHER = {"hidden_size": 320, "num_attention_heads": 6, "q_lora_rank": 192, "o_groups": 3, "o_lora_rank": 64}
_OTHER |= {"n_routed_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 192, "num_hash_layers": 1}
_OTHER |= {"compress_ratios": (CSA, SWA, HCA, CSA), "index_n_heads": 24, "index_topk": 9, "vocab_size": 383}
_OTHER |= {"routed_scaling_factor": 2.5, "rope_original": 128, "rms_norm_eps": 1e-3}
OTHER = dataclasses.replace(TINY, name="other", **_OTHER)
_WIDE = {"hidden_size": 192, "num_attention_heads": 8, "head_dim": 192, "q_lora_rank": 64, "o_groups": 4}
_WIDE |= {"n_routed_experts": 12, "num_experts_per_tok": 4, "num_hash_layers": 0, "compress_ratios": (HCA, CSA, CSA)}
_WIDE |= {"index_n_heads": 48, "index_topk": 21, "swiglu_limit": 0.7, "vocab_size": 257}
WIDE = dataclasses.replace(TINY, name="wide", **_WIDE)
# Standard deviation and mean, by the end of a tensor's name.
SIZES = {"norm.weight": (0.1, 1.0), "e_score_correction_bias": (0.3, 0.0), "scale": (0.2, 1.0), "sinks": (0.7, 0.0)}
SIZES |= {"base": (0.7, 0.0), "position_bias": (0.5, 0.0), "embed_tokens.weight": (1.0, 0.0)}
CONFIGS = {config.name: config for config in (TINY, OTHER, WIDE)}


def hf_config(cfg: Config) -> "DeepseekV4Config":
    """The same model in transformers' words."""
    from transformers import DeepseekV4Config

    others = ("name", "vocab_parts")
    same = {name: value for name, value in vars(cfg).items() if name not in others and name[:5] != "rope_"}
    return DeepseekV4Config(
        **same | {"compress_ratios": list(cfg.ratios), "num_nextn_predict_layers": 0},
        num_hidden_layers=cfg.num_hidden_layers,
        rope_theta=cfg.rope_theta,
        attn_implementation="eager",
        rope_parameters={
            "rope_type": "yarn",
            "factor": cfg.rope_factor,
            "beta_fast": cfg.rope_beta_fast,
            "beta_slow": cfg.rope_beta_slow,
            "original_max_position_embeddings": cfg.rope_original,
            "rope_theta": cfg.rope_theta,
        },
    )


@functools.cache
def hf_model(name: str, seed: int = 1) -> "DeepseekV4ForCausalLM":
    """A model in which nothing is constant; logits have a standard deviation of about 1."""
    from transformers import DeepseekV4ForCausalLM

    cfg = CONFIGS[name]
    model = DeepseekV4ForCausalLM(hf_config(cfg)).eval()
    gen = torch.Generator().manual_seed(seed)

    with torch.no_grad():
        for key, value in model.state_dict().items():
            shape = tuple(value.shape)
            if key.endswith("tid2eid"):
                value.copy_(torch.rand(shape[0], cfg.n_routed_experts, generator=gen).argsort(1)[:, : shape[1]])
                continue
            matrix = shape[-1] ** -0.5 if shape else 1.0, 0.0  # (..., out, in)
            std, mean = next((size for end, size in SIZES.items() if key.endswith(end)), matrix)
            value.copy_(mean + std * torch.randn(shape, generator=gen))
    return model


def weights_of(name: str, seed: int = 1) -> ModelWeights:
    """The weights of hf_model(name, seed) in our form, sharing its memory where the form allows."""
    cfg, sd = CONFIGS[name], hf_model(name, seed).state_dict()
    ours = {"embed.weight": sd["model.embed_tokens.weight"], "norm.weight": sd["model.norm.weight"]}
    ours["head.weight"] = sd["lm_head.weight"]
    ours |= {f"hc_head_{part}": sd[f"model.hc_head.hc_{part}"] for part in ("fn", "base", "scale")}
    for number, ratio in enumerate(cfg.ratios):
        layer = _block(sd, f"model.layers.{number}", ratio, cfg)
        ours |= {f"layers.{number}.{key}": value for key, value in layer.items()}
    return tree.assemble(cfg, "fp32", ours)


def _block(sd: dict, at: str, ratio: int, cfg: Config) -> dict[str, torch.Tensor]:
    attn, mlp = f"{at}.self_attn", f"{at}.mlp"
    ours = {
        "attn_norm.weight": sd[f"{at}.input_layernorm.weight"],
        "ffn_norm.weight": sd[f"{at}.post_attention_layernorm.weight"],
        "attn.attn_sink": sd[f"{attn}.sinks"],
        "attn.wo_a.weight": sd[f"{attn}.o_a_proj.weight"].unflatten(0, (cfg.o_groups, -1)),
        "ffn.gate.weight": sd[f"{mlp}.gate.weight"],
        "ffn.experts.w13.weight": sd[f"{mlp}.experts.gate_up_proj"],
        "ffn.experts.w2.weight": sd[f"{mlp}.experts.down_proj"],
    }
    for site in ("attn", "ffn"):
        ours |= {f"hc_{site}_{part}": sd[f"{at}.{site}_hc.{part}"] for part in ("fn", "base", "scale")}
    for mine, theirs in (
        ("wq_a", "q_a_proj"),
        ("wq_b", "q_b_proj"),
        ("wkv", "kv_proj"),
        ("wo_b", "o_b_proj"),
        ("q_norm", "q_a_norm"),
        ("kv_norm", "kv_norm"),
    ):
        ours[f"attn.{mine}.weight"] = sd[f"{attn}.{theirs}.weight"]
    for mine, theirs in (("bias", "e_score_correction_bias"), ("tid2eid", "tid2eid")):
        if f"{mlp}.gate.{theirs}" in sd:
            ours[f"ffn.gate.{mine}"] = sd[f"{mlp}.gate.{theirs}"]
    gate, up, down = (sd[f"{mlp}.shared_experts.{part}_proj.weight"] for part in ("gate", "up", "down"))
    ours |= {"ffn.shared_experts.w13.weight": torch.cat([gate, up])[None], "ffn.shared_experts.w2.weight": down[None]}
    if ratio:
        ours |= _compressor(sd, f"{attn}.compressor", "attn.compressor")
    if ratio == CSA:
        inner, indexer = f"{attn}.compressor.indexer", "attn.indexer"
        ours |= _compressor(sd, inner, f"{indexer}.compressor")
        ours[f"{indexer}.wq_b.weight"] = sd[f"{inner}.q_b_proj.weight"]
        ours[f"{indexer}.weights_proj.weight"] = sd[f"{inner}.scorer.weights_proj.weight"]
    return ours


def _compressor(sd: dict, theirs: str, mine: str) -> dict[str, torch.Tensor]:
    return {
        f"{mine}.project": torch.cat([sd[f"{theirs}.kv_proj.weight"], sd[f"{theirs}.gate_proj.weight"]]),
        f"{mine}.ape": sd[f"{theirs}.position_bias"],
        f"{mine}.norm.weight": sd[f"{theirs}.kv_norm.weight"],
    }
