"""Hugging Face transformers' DeepSeek-V4 as an independent oracle: the same random weights in both, all in fp32."""

import dataclasses
import functools
import tempfile
from typing import TYPE_CHECKING

import torch

from problems.dsv4_forward.checkpoint import checkpoint
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


@functools.cache
def weights_of(name: str, seed: int = 1) -> ModelWeights:
    """The weights of hf_model(name, seed), as we read what transformers saves."""
    with tempfile.TemporaryDirectory() as folder:
        hf_model(name, seed).save_pretrained(folder)
        return checkpoint.load(folder, CONFIGS[name], "fp32", progress=False)
