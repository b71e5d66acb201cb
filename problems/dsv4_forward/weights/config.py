"""`Config`: sizes, layer kinds and number formats of a DeepSeek-V4 model, as in the released config.json files.

TINY is small enough for a CPU and moves every branch within 300 tokens; TINY_K has the shapes that the kernels take.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

SWA, CSA, HCA = 0, 4, 128  # compression ratio of a layer: window only, selected entries, all entries
BLOCK_TOKENS = 128  # lcm(4, 128): tokens that one block of the paged caches stands for
PLAIN = ("fp32", "bf16")  # formats that quantise nothing
FORMATS = (*PLAIN, "released", "nvfp4_experts", "nvfp4")


@dataclass(frozen=True)
class Config:
    """One model. compress_ratios has an entry a layer, then one for each next-token-prediction layer."""

    name: str
    vocab_size: int
    hidden_size: int
    num_attention_heads: int
    head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    num_hash_layers: int
    compress_ratios: tuple[int, ...]
    index_n_heads: int
    index_topk: int
    max_position_embeddings: int
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = 10.0
    num_nextn_predict_layers: int = 1
    index_head_dim: int = 128
    qk_rope_head_dim: int = 64
    n_shared_experts: int = 1
    sliding_window: int = 128
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_factor: float = 16.0
    rope_original: int = 65536  # original_max_position_embeddings of YaRN
    rope_beta_fast: float = 32.0
    rope_beta_slow: float = 1.0
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    rms_norm_eps: float = 1e-6
    vocab_parts: int = 1  # the head has one of so many equal parts of its rows, the others are other GPUs'

    def __post_init__(self) -> None:
        """ValueError, naming the field, where one is not of its type and range, or does not fit the others."""
        if wrong := wrong_numbers(vars(self)):
            raise ValueError("; ".join(wrong))
        if len(self.compress_ratios) < self.num_nextn_predict_layers + 1:
            raise ValueError(f"compress_ratios must name a layer or more, got {self.compress_ratios}")
        if bad := set(self.compress_ratios) - {SWA, CSA, HCA}:
            raise ValueError(f"compress_ratios must be of {SWA, CSA, HCA}, got {sorted(bad)}")
        if any(self.compress_ratios[self.num_hidden_layers :]):
            raise ValueError(f"prediction layers must be window only, got {self.compress_ratios}")
        if self.n_shared_experts != 1 or self.num_nextn_predict_layers > 1:
            raise ValueError("n_shared_experts must be 1 and num_nextn_predict_layers 0 or 1")
        if self.num_attention_heads % self.o_groups:
            raise ValueError(f"o_groups must divide {self.num_attention_heads} heads, got {self.o_groups}")
        nope = self.head_dim - self.qk_rope_head_dim
        if nope <= 0 or nope % 64:
            raise ValueError(f"head_dim - qk_rope_head_dim must be a multiple of 64 (one FP8 group), got {nope}")
        if self.num_experts_per_tok > self.n_routed_experts:
            raise ValueError(
                f"num_experts_per_tok must be at most n_routed_experts, {self.n_routed_experts}, got "
                f"{self.num_experts_per_tok}"
            )
        if self.rope_beta_fast < self.rope_beta_slow:
            raise ValueError(
                f"rope_beta_fast must be at least rope_beta_slow, {self.rope_beta_slow}, got {self.rope_beta_fast}"
            )
        if self.qk_rope_head_dim % 2 or self.qk_rope_head_dim > self.index_head_dim:
            raise ValueError(
                f"qk_rope_head_dim must be even and at most index_head_dim, {self.index_head_dim}, got "
                f"{self.qk_rope_head_dim}"
            )
        if self.index_head_dim < 32 or self.index_head_dim & self.index_head_dim - 1:
            raise ValueError(f"index_head_dim must be a power of two from 32 on, got {self.index_head_dim}")

    @property
    def num_hidden_layers(self) -> int:
        return len(self.compress_ratios) - self.num_nextn_predict_layers

    @property
    def ratios(self) -> tuple[int, ...]:
        """Compression ratio by layer, without the prediction layers."""
        return self.compress_ratios[: self.num_hidden_layers]

    @property
    def hc_rows(self) -> int:
        """Rows of an mHC mixing matrix: pre, post and the n x n combination."""
        return (2 + self.hc_mult) * self.hc_mult

    def slice(self, layers: int, experts: int | None = None) -> "Config":
        """The first `layers` layers with `experts` of the experts (all if None), at full width, without prediction
        layers: what fits one GPU. For Flash, four layers have every kind: two SWA, one CSA, one HCA.
        """
        most, experts = self.n_routed_experts, self.n_routed_experts if experts is None else experts
        if not 1 <= layers <= self.num_hidden_layers or not self.num_experts_per_tok <= experts <= most:
            raise ValueError(
                f"a slice of {self.name} must have 1 to {self.num_hidden_layers} layers and {self.num_experts_per_tok} "
                f"to {most} experts, got {layers} and {experts}"
            )
        return dataclasses.replace(
            self,
            name=f"{self.name}-{layers}l{experts}e",
            n_routed_experts=experts,
            num_nextn_predict_layers=0,
            compress_ratios=self.ratios[:layers],
            num_hash_layers=min(self.num_hash_layers, layers),
        )


_MAY_BE_0 = ("num_hash_layers", "num_nextn_predict_layers", "hc_eps", "rms_norm_eps")
_ABOVE_1 = ("rope_theta", "compress_rope_theta")  # bases of frequencies that fall, and whose logarithm divides
_INTEGERS = 2**31  # no size reaches it; int32 holds what is smaller
_LEAST, _MOST = 2.0**-126, 2.0**127  # of numbers, where they are not 0: normal ones of fp32


def wrong_numbers(fields: Mapping[str, object]) -> list[str]:
    """What is wrong with fields of Config that are not None, each by itself: no number, or out of its range."""
    found = []
    for field in dataclasses.fields(Config):
        name, value = field.name, fields.get(field.name)
        if value is None or name == "name":
            continue
        kind = "an integer" if field.type is int else "a number"
        if name == "compress_ratios":
            if not isinstance(value, tuple) or not all(_is_number(ratio, int) for ratio in value):
                found.append(f"{name} must be integers, got {value!r}")
        elif not _is_number(value, field.type):
            found.append(f"{name} must be {kind}, got {value!r}")
        elif value < 0 or (not value and name not in _MAY_BE_0):
            found.append(f"{name} must be {kind}, {'0 or more' if name in _MAY_BE_0 else 'positive'}, got {value!r}")
        elif field.type is int and value >= _INTEGERS:
            found.append(f"{name} must be an integer below 2^31, got {_short(value)}")
        elif field.type is float and value and not _LEAST <= value <= _MOST:
            found.append(f"{name} must be a number that fp32 holds, 2^-126 to 2^127, got {_short(value)}")
        elif name in _ABOVE_1 and value <= 1:
            found.append(f"{name} must be a number above 1, got {value!r}")
    return found


def _short(value: float) -> str:
    """A number for a message; an integer may have thousands of digits, or more than Python prints."""
    return repr(value) if isinstance(value, float) or value < 10**20 else f"an integer of {value.bit_length()} bits"


def _is_number(value: object, kind: object) -> bool:
    """Whether it is an int, or for float a finite one or an int."""
    if isinstance(value, bool):
        return False
    return isinstance(value, int) or (kind is float and isinstance(value, float) and math.isfinite(value))


FLASH = Config(
    name="flash",
    vocab_size=129280,
    hidden_size=4096,
    num_attention_heads=64,
    head_dim=512,
    q_lora_rank=1024,
    o_groups=8,
    o_lora_rank=1024,
    n_routed_experts=256,
    num_experts_per_tok=6,
    moe_intermediate_size=2048,
    num_hash_layers=3,
    compress_ratios=(SWA, SWA) + (CSA, HCA) * 20 + (CSA, SWA),
    index_n_heads=64,
    index_topk=512,
    max_position_embeddings=1048576,
)
PRO = Config(
    name="pro",
    vocab_size=129280,
    hidden_size=7168,
    num_attention_heads=128,
    head_dim=512,
    q_lora_rank=1536,
    o_groups=16,
    o_lora_rank=1024,
    n_routed_experts=384,
    num_experts_per_tok=6,
    moe_intermediate_size=3072,
    num_hash_layers=3,
    compress_ratios=(HCA, HCA) + (CSA, HCA) * 29 + (CSA, SWA),
    index_n_heads=64,
    index_topk=1024,
    max_position_embeddings=1048576,
    routed_scaling_factor=2.5,
)
# 32 index heads: with four, all ReLUs vanish together once in 16, scores tie at 0 and the selection depends on shapes.
# YaRN from 256 tokens, top-k 16 and a clamp at 1, so that each of them acts within 300 tokens.
TINY = Config(
    name="tiny",
    vocab_size=512,
    hidden_size=256,
    num_attention_heads=4,
    head_dim=128,
    q_lora_rank=128,
    o_groups=2,
    o_lora_rank=128,
    n_routed_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=128,
    num_hash_layers=2,
    compress_ratios=(SWA, HCA, CSA, HCA, CSA, SWA),
    index_n_heads=32,
    index_topk=16,
    max_position_embeddings=4096,
    swiglu_limit=1.0,
    num_nextn_predict_layers=0,
    rope_original=256,
)
# With the sizes that the CPU variants of fmha_decode and moe_gemm have.
TINY_512 = dataclasses.replace(TINY, name="tiny-512", head_dim=512, swiglu_limit=10.0)
TINY_K = Config(
    name="tiny-k",
    vocab_size=1024,
    hidden_size=1024,
    num_attention_heads=16,
    head_dim=512,
    q_lora_rank=512,
    o_groups=2,
    o_lora_rank=256,
    n_routed_experts=16,
    num_experts_per_tok=6,
    moe_intermediate_size=512,
    num_hash_layers=2,
    compress_ratios=(SWA, HCA, CSA, HCA, CSA, SWA, SWA),
    index_n_heads=64,
    index_topk=32,
    max_position_embeddings=8192,
)
CONFIGS = {config.name: config for config in (FLASH, PRO, TINY, TINY_512, TINY_K)}


def find(name: str) -> Config:
    """Return a configuration by name; flash-4l32e is four layers of Flash with 32 experts. ValueError: no such."""
    base, _, part = name.rpartition("-")
    if name in CONFIGS:
        return CONFIGS[name]
    if base in CONFIGS and (sizes := re.fullmatch("([0-9]{1,9})l([0-9]{1,9})e", part)):
        return CONFIGS[base].slice(*map(int, sizes.groups()))
    raise ValueError(f"config must be one of {sorted(CONFIGS)}, or such as flash-4l32e, got {name!r}")


def check_format(name: str) -> str:
    """Return `name` if it is a number format.

    fp32: the oracle; bf16: all bf16; released: FP8 128x128 ue8m0 linears, MXFP4 experts; nvfp4_experts: as released,
    but NVFP4 routed experts (not those of a prediction layer); nvfp4: NVFP4 experts and linears. ValueError else.
    """
    if name not in FORMATS:
        raise ValueError(f"format must be one of {FORMATS}, got {name!r}")
    return name
