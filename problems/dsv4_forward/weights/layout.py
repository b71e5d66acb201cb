"""Name the tensors of a model, with shape and dtype, and place them on one buffer: the internal layout.

Names are those of the released checkpoint, but for what is kept together because it is used together: the experts'
w1 (gate) and w3 (up) as ffn.experts.w13 and their w2 as ffn.experts.w2, over a leading axis of experts; likewise
ffn.shared_experts, with a leading axis of 1; the compressors' wkv and wgate as compressor.project; wo_a with a leading
axis of groups. A linear layer X is the tensors X.weight, X.scale, X.scale_2 and X.input_scale, as far as its kind has
them (see weights/linear.py).
"""

import math
from dataclasses import dataclass

import torch

from problems.common import kv_pages
from problems.dsv4_forward.weights.config import CSA, PLAIN, SWA, Config, check_format

ALIGNMENT = 256  # bytes; what a tensor-map descriptor and the widest vector loads ask for, and cudaMalloc gives
FP8_BLOCK = 128  # rows and columns that share a scale
FP4_GROUP = {"mxfp4": 32, "nvfp4": 16}  # elements along k that share a scale


@dataclass(frozen=True)
class Kinds:
    """Linear kinds of a format: of the linear layers, of the routed experts, of a prediction layer's experts."""

    linear: str
    experts: str
    mtp_experts: str


KINDS = {
    "fp32": Kinds("plain", "plain", "plain"),
    "bf16": Kinds("plain", "plain", "plain"),
    "released": Kinds("fp8", "mxfp4", "mxfp4"),
    "nvfp4_experts": Kinds("fp8", "nvfp4", "mxfp4"),
    "nvfp4": Kinds("nvfp4", "nvfp4", "nvfp4"),
}


@dataclass(frozen=True)
class Spec:
    """One tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class LinearSpec:
    """One linear layer y = W x, W (*lead, n, k). dtype: of a plain weight."""

    kind: str
    lead: tuple[int, ...]
    n: int
    k: int
    dtype: torch.dtype

    def tensors(self) -> dict[str, Spec]:
        """Field of Linear -> its Spec."""
        rows, scalar = (*self.lead, self.n), Spec(self.lead, torch.float32)
        if self.kind == "plain":
            return {"weight": Spec((*rows, self.k), self.dtype)}
        if self.kind == "fp8":
            blocks = (*self.lead, -(-self.n // FP8_BLOCK), -(-self.k // FP8_BLOCK))
            return {"weight": Spec((*rows, self.k), torch.float8_e4m3fn), "scale": Spec(blocks, torch.uint8)}
        codes, scales = Spec((*rows, self.k // 2), torch.uint8), (*rows, self.k // FP4_GROUP[self.kind])
        if self.kind == "mxfp4":
            return {"weight": codes, "scale": Spec(scales, torch.uint8)}
        return {"weight": codes, "scale": Spec(scales, torch.float8_e4m3fn), "scale_2": scalar, "input_scale": scalar}


@dataclass(frozen=True)
class _Describe:
    """Adds the units of a model, by name: a Spec for a tensor, a LinearSpec for a linear layer."""

    cfg: Config
    fmt: str
    units: dict[str, Spec | LinearSpec]

    @property
    def plain(self) -> torch.dtype:
        """What is bf16 in every format but fp32."""
        return torch.float32 if self.fmt == "fp32" else torch.bfloat16

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> None:
        self.units[name] = Spec(shape, dtype or self.plain)

    def linear(self, name: str, n: int, k: int, *lead: int, kind: str = "") -> None:
        self.units[name] = LinearSpec(kind or KINDS[self.fmt].linear, lead, n, k, self.plain)

    def site(self, name: str, rows: int, scales: int) -> None:
        """One mHC site: name_fn, name_base, name_scale."""
        self.tensor(f"{name}_fn", rows, self.cfg.hc_mult * self.cfg.hidden_size, dtype=torch.float32)
        self.tensor(f"{name}_base", rows, dtype=torch.float32)
        self.tensor(f"{name}_scale", scales, dtype=torch.float32)

    def compressor(self, name: str, ratio: int, width: int) -> None:
        channels = (2 if ratio == CSA else 1) * width
        self.tensor(f"{name}.project", 2 * channels, self.cfg.hidden_size)
        self.tensor(f"{name}.ape", ratio, channels, dtype=torch.float32)
        self.tensor(f"{name}.norm.weight", width)

    def attention(self, name: str, ratio: int) -> None:
        cfg = self.cfg
        heads, d = cfg.num_attention_heads * cfg.head_dim, cfg.hidden_size
        self.linear(f"{name}.wq_a", cfg.q_lora_rank, d)
        self.tensor(f"{name}.q_norm.weight", cfg.q_lora_rank)
        self.linear(f"{name}.wq_b", heads, cfg.q_lora_rank)
        self.linear(f"{name}.wkv", cfg.head_dim, d)
        self.tensor(f"{name}.kv_norm.weight", cfg.head_dim)
        self.linear(f"{name}.wo_a", cfg.o_lora_rank, heads // cfg.o_groups, cfg.o_groups)
        self.linear(f"{name}.wo_b", d, cfg.o_groups * cfg.o_lora_rank)
        self.tensor(f"{name}.attn_sink", cfg.num_attention_heads, dtype=torch.float32)
        if ratio != SWA:
            self.compressor(f"{name}.compressor", ratio, cfg.head_dim)
        if ratio == CSA:
            self.linear(f"{name}.indexer.wq_b", cfg.index_n_heads * cfg.index_head_dim, cfg.q_lora_rank)
            self.tensor(f"{name}.indexer.weights_proj.weight", cfg.index_n_heads, d)
            self.compressor(f"{name}.indexer.compressor", ratio, cfg.index_head_dim)

    def ffn(self, name: str, kind: str, hashed: bool) -> None:
        cfg = self.cfg
        experts, inner, d = cfg.n_routed_experts, cfg.moe_intermediate_size, cfg.hidden_size
        self.tensor(f"{name}.gate.weight", experts, d)
        if hashed:
            self.tensor(f"{name}.gate.tid2eid", cfg.vocab_size, cfg.num_experts_per_tok, dtype=torch.int64)
        else:
            self.tensor(f"{name}.gate.bias", experts, dtype=torch.float32)
        self.linear(f"{name}.experts.w13", 2 * inner, d, experts, kind=kind)
        self.linear(f"{name}.experts.w2", d, inner, experts, kind=kind)
        self.linear(f"{name}.shared_experts.w13", 2 * inner, d, 1)
        self.linear(f"{name}.shared_experts.w2", d, inner, 1)

    def block(self, name: str, ratio: int, kind: str, hashed: bool) -> None:
        self.tensor(f"{name}.attn_norm.weight", self.cfg.hidden_size)
        self.tensor(f"{name}.ffn_norm.weight", self.cfg.hidden_size)
        self.site(f"{name}.hc_attn", self.cfg.hc_rows, 3)
        self.site(f"{name}.hc_ffn", self.cfg.hc_rows, 3)
        self.attention(f"{name}.attn", ratio)
        self.ffn(f"{name}.ffn", kind, hashed)

    def prediction(self, name: str) -> None:
        d = self.cfg.hidden_size
        self.block(name, SWA, KINDS[self.fmt].mtp_experts, hashed=False)
        for norm in ("enorm", "hnorm", "norm"):
            self.tensor(f"{name}.{norm}.weight", d)
        self.linear(f"{name}.e_proj", d, d)
        self.linear(f"{name}.h_proj", d, d)
        self.site(f"{name}.hc_head", self.cfg.hc_mult, 1)


def units(cfg: Config, fmt: str) -> dict[str, Spec | LinearSpec]:
    """Every tensor and linear layer by name, in an order that does not depend on the format.

    ValueError: no such format, or sizes that it cannot hold.
    """
    made = _Describe(cfg, check_format(fmt), {})
    _check_entries(cfg, fmt)
    made.tensor("embed.weight", cfg.vocab_size, cfg.hidden_size)
    for layer, ratio in enumerate(cfg.ratios):
        made.block(f"layers.{layer}", ratio, KINDS[fmt].experts, hashed=layer < cfg.num_hash_layers)
    made.site("hc_head", cfg.hc_mult, 1)
    made.tensor("norm.weight", cfg.hidden_size)
    made.tensor("head.weight", cfg.vocab_size // cfg.vocab_parts, cfg.hidden_size)
    for layer in range(cfg.num_nextn_predict_layers):
        made.prediction(f"mtp.{layer}")
    for name, unit in made.units.items():
        _check(name, unit)
    return made.units


def _check_entries(cfg: Config, fmt: str) -> None:
    """ValueError unless the cache of the format holds keys of such heads."""
    rope = cfg.qk_rope_head_dim
    if fmt in PLAIN:
        return
    try:
        kv_pages.payload_bytes(cfg.head_dim - rope, rope)
    except ValueError as error:
        most = kv_pages.GROUP * kv_pages.SCALE_BYTES
        raise ValueError(
            f"head_dim - qk_rope_head_dim must be at most {most} and qk_rope_head_dim a multiple of 4 in {fmt}, got "
            f"{cfg.head_dim - rope} and {rope}"
        ) from error


def _check(name: str, unit: Spec | LinearSpec) -> None:
    """ValueError unless whole groups along k, and whole FP8 blocks in each half or group that is stored as one."""
    if not isinstance(unit, LinearSpec) or unit.kind == "plain":
        return
    if unit.kind == "fp8":
        parts = {"w13": ("moe_intermediate_size", unit.n // 2), "wo_a": ("o_lora_rank", unit.n)}
        field, rows = parts.get(name.rpartition(".")[2], ("", 0))
        if rows % FP8_BLOCK:
            raise ValueError(f"{name}: rows of a part ({field}) must be a multiple of {FP8_BLOCK} in fp8, got {rows}")
    elif unit.k % FP4_GROUP[unit.kind]:
        raise ValueError(f"{name}: k must be a multiple of {FP4_GROUP[unit.kind]} in {unit.kind}, got {unit.k}")


def layout(cfg: Config, fmt: str) -> dict[str, Spec]:
    """Every tensor of the model by name. ValueError as units()."""
    return {key: spec for name, unit in units(cfg, fmt).items() for key, spec in tensors_of(name, unit).items()}


def tensors_of(name: str, unit: Spec | LinearSpec) -> dict[str, Spec]:
    """The tensors of one unit by name."""
    if isinstance(unit, Spec):
        return {name: unit}
    return {f"{name}.{field}": spec for field, spec in unit.tensors().items()}


def _offsets(specs: dict[str, Spec]) -> tuple[dict[str, int], int]:
    """Byte at which each tensor starts, and the end of the last one, rounded up to ALIGNMENT."""
    offsets, end = {}, 0
    for name, spec in specs.items():
        offsets[name] = end
        end += -(-spec.nbytes // ALIGNMENT) * ALIGNMENT
    return offsets, end


def nbytes(specs: dict[str, Spec]) -> int:
    """Bytes of a buffer that holds all of `specs`, each tensor at a multiple of ALIGNMENT."""
    return _offsets(specs)[1]


def views(buffer: torch.Tensor, specs: dict[str, Spec]) -> dict[str, torch.Tensor]:
    """buffer: uint8 (nbytes(specs) or more,), contiguous -> the tensors of `specs`, in its memory. ValueError else."""
    offsets, end = _offsets(specs)
    if buffer.dtype != torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous() or len(buffer) < end:
        raise ValueError(f"buffer must be uint8 ({end},), contiguous, got {buffer.dtype} {tuple(buffer.shape)}")
    if buffer.data_ptr() % 16:  # the widest element is 8 bytes, the widest load of a kernel 16
        raise ValueError(f"buffer must start at a multiple of 16 bytes, got address {buffer.data_ptr():#x}")
    return {
        name: buffer[offsets[name] : offsets[name] + spec.nbytes].view(spec.dtype).view(spec.shape)
        for name, spec in specs.items()
    }
