"""`ModelWeights`: the weights of a model as a tree over the tensors of layout.py; `assemble` builds it.

`random`, `quick` and `empty` make new tensors. The name of a Linear is the layer's in the checkpoint, such as
"layers.2.attn.wq_b". Tensors that are not fp32 or int64 below are bf16, fp32 in the format fp32.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from problems.dsv4_forward.weights import layout, partition, quick_weights, random_weights
from problems.dsv4_forward.weights.config import CSA, SWA, Config
from problems.dsv4_forward.weights.linear import Linear

# Without calibration REF's BF16 product is kept for wo_a: its input is not quantised in the formats with FP8 linears.
_PLAIN_INPUT = ("released", "nvfp4_experts")


@dataclass(frozen=True)
class Site:
    """An mHC mix: fn fp32 (rows, n * d), base fp32 (rows,), scale fp32 (3,); the head's has n rows and one scale."""

    fn: torch.Tensor
    base: torch.Tensor
    scale: torch.Tensor


@dataclass(frozen=True)
class CompressorWeights:
    """project (2 * coff * D, d): rows of wkv, then of wgate; ape fp32 (ratio, coff * D); norm (D,)."""

    project: torch.Tensor
    ape: torch.Tensor
    norm: torch.Tensor


@dataclass(frozen=True)
class IndexerWeights:
    """wq_b (h * 128, q_lora); weights_proj (h, d); compressor with D = 128."""

    wq_b: Linear
    weights_proj: torch.Tensor
    compressor: CompressorWeights


@dataclass(frozen=True)
class AttentionWeights:
    """wq_a (q_lora, d), q_norm (q_lora,), wq_b (H * D, q_lora), wkv (D, d), kv_norm (D,), wo_a (G, o_lora, H * D / G),
    wo_b (d, G * o_lora), sink fp32 (H,); compressor if the ratio is not 0, indexer if it is 4.
    """

    wq_a: Linear
    q_norm: torch.Tensor
    wq_b: Linear
    wkv: Linear
    kv_norm: torch.Tensor
    wo_a: Linear
    wo_b: Linear
    sink: torch.Tensor
    compressor: CompressorWeights | None
    indexer: IndexerWeights | None


@dataclass(frozen=True)
class RouterWeights:
    """weight (E, d); bias fp32 (E,) in a layer that routes by score, table int64 (V, K) in one that routes by token."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    table: torch.Tensor | None


@dataclass(frozen=True)
class FfnWeights:
    """w13 (E, 2 I, d): gate rows, then up rows; w2 (E, d, I); the shared expert's with E = 1."""

    router: RouterWeights
    w13: Linear
    w2: Linear
    shared_w13: Linear
    shared_w2: Linear


@dataclass(frozen=True)
class BlockWeights:
    """attn_norm, ffn_norm (d,); two mHC sites; two sublayers."""

    attn_norm: torch.Tensor
    ffn_norm: torch.Tensor
    hc_attn: Site
    hc_ffn: Site
    attn: AttentionWeights
    ffn: FfnWeights


@dataclass(frozen=True)
class MtpWeights:
    """enorm, hnorm, norm (d,); e_proj, h_proj (d, d)."""

    block: BlockWeights
    enorm: torch.Tensor
    hnorm: torch.Tensor
    norm: torch.Tensor
    e_proj: Linear
    h_proj: Linear
    hc_head: Site


@dataclass(frozen=True)
class ModelWeights:
    """embed, head (V, d); norm (d,). tensors: all of them by name, as layout.layout(config, format) says. disposable:
    who lays the routed experts out anew frees the tensors here, since a whole model has no room for both.
    """

    config: Config
    format: str
    embed: torch.Tensor
    layers: tuple[BlockWeights, ...]
    hc_head: Site
    norm: torch.Tensor
    head: torch.Tensor
    mtp: MtpWeights | None
    tensors: dict[str, torch.Tensor] = field(repr=False, compare=False)
    disposable: bool = False

    def blocks(self) -> Iterator[BlockWeights]:
        """Yield every block, that of the prediction layer last."""
        yield from self.layers
        if self.mtp:
            yield self.mtp.block

    def linears(self) -> Iterator[Linear]:
        """Yield every Linear that the ops linear and grouped_linear receive."""
        for attn in (block.attn for block in self.blocks()):
            yield from (attn.wq_a, attn.wq_b, attn.wkv, attn.wo_a, attn.wo_b)
            if attn.indexer:
                yield attn.indexer.wq_b
        if self.mtp:
            yield from (self.mtp.e_proj, self.mtp.h_proj)


@dataclass(frozen=True)
class _Tree:
    """Builds the tree's parts from the tensors by name."""

    cfg: Config
    fmt: str
    units: dict[str, layout.Spec | layout.LinearSpec]
    tensors: dict[str, torch.Tensor]

    def linear(self, name: str) -> Linear:
        spec = self.units[name]
        fields = {part: self.tensors[f"{name}.{part}"] for part in spec.tensors()}
        raw = name.endswith("wo_a") and self.fmt in _PLAIN_INPUT
        return Linear(kind=spec.kind, **fields, quantise_input=not raw, name=name)

    def site(self, name: str) -> Site:
        return Site(*(self.tensors[f"{name}_{part}"] for part in ("fn", "base", "scale")))

    def compressor(self, name: str) -> CompressorWeights:
        return CompressorWeights(*(self.tensors[f"{name}.{part}"] for part in ("project", "ape", "norm.weight")))

    def indexer(self, name: str) -> IndexerWeights:
        projection = self.tensors[f"{name}.weights_proj.weight"]
        return IndexerWeights(self.linear(f"{name}.wq_b"), projection, self.compressor(f"{name}.compressor"))

    def attention(self, name: str, ratio: int) -> AttentionWeights:
        return AttentionWeights(
            **{part: self.linear(f"{name}.{part}") for part in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b")},
            **{part: self.tensors[f"{name}.{part}.weight"] for part in ("q_norm", "kv_norm")},
            sink=self.tensors[f"{name}.attn_sink"],
            compressor=None if ratio == SWA else self.compressor(f"{name}.compressor"),
            indexer=self.indexer(f"{name}.indexer") if ratio == CSA else None,
        )

    def ffn(self, name: str) -> FfnWeights:
        gate = f"{name}.gate"
        router = RouterWeights(
            self.tensors[f"{gate}.weight"], self.tensors.get(f"{gate}.bias"), self.tensors.get(f"{gate}.tid2eid")
        )
        parts = ("experts.w13", "experts.w2", "shared_experts.w13", "shared_experts.w2")
        return FfnWeights(router, *(self.linear(f"{name}.{part}") for part in parts))

    def block(self, name: str, ratio: int) -> BlockWeights:
        norms = (self.tensors[f"{name}.{part}.weight"] for part in ("attn_norm", "ffn_norm"))
        sites = (self.site(f"{name}.hc_{part}") for part in ("attn", "ffn"))
        return BlockWeights(*norms, *sites, self.attention(f"{name}.attn", ratio), self.ffn(f"{name}.ffn"))

    def prediction(self, name: str) -> MtpWeights:
        norms = (self.tensors[f"{name}.{part}.weight"] for part in ("enorm", "hnorm", "norm"))
        projections = (self.linear(f"{name}.{part}") for part in ("e_proj", "h_proj"))
        return MtpWeights(self.block(name, SWA), *norms, *projections, self.site(f"{name}.hc_head"))


def assemble(cfg: Config, fmt: str, tensors: dict[str, torch.Tensor]) -> ModelWeights:
    """Return the tree over `tensors`, which must be those of layout.layout(cfg, fmt); no copies.

    ValueError, naming each, where one is missing, unknown, or of another shape or dtype.
    """
    if faults := _faults(layout.layout(cfg, fmt), tensors):
        raise ValueError(f"weights of {cfg.name} in {fmt}: " + "; ".join(faults))
    tree = _Tree(cfg, fmt, layout.units(cfg, fmt), tensors)
    return ModelWeights(
        config=cfg,
        format=fmt,
        embed=tensors["embed.weight"],
        layers=tuple(tree.block(f"layers.{layer}", ratio) for layer, ratio in enumerate(cfg.ratios)),
        hc_head=tree.site("hc_head"),
        norm=tensors["norm.weight"],
        head=tensors["head.weight"],
        mtp=tree.prediction("mtp.0") if cfg.num_nextn_predict_layers else None,
        tensors=dict(tensors),
    )


def _faults(specs: dict[str, layout.Spec], tensors: dict[str, torch.Tensor]) -> list[str]:
    faults = [f"missing {name}" for name in specs if name not in tensors]
    faults += [f"unknown {name}" for name in tensors if name not in specs]
    for name in specs.keys() & tensors.keys():
        want, came = specs[name], tensors[name]
        if (want.shape, want.dtype) != (tuple(came.shape), came.dtype):
            faults.append(f"{name} must be {want.dtype} {want.shape}, got {came.dtype} {tuple(came.shape)}")
    return sorted(faults)


def random(
    cfg: Config,
    fmt: str,
    seed: int,
    device: str | torch.device = "cpu",
    tensors: dict[str, torch.Tensor] | None = None,
) -> ModelWeights:
    """Make random weights (random_weights.py says which), in `tensors` of the layout if given, else in new memory.

    A seed gives the same bits on the same kind of device, and the same matrices before rounding in every format.
    """
    made = assemble(cfg, fmt, empty(cfg, fmt, device) if tensors is None else tensors)
    random_weights.fill(cfg, fmt, seed, made.tensors)
    return made


def quick(
    cfg: Config,
    fmt: str,
    seed: int,
    device: str | torch.device = "cpu",
    tensors: dict[str, torch.Tensor] | None = None,
    gpus: int = 1,
    rank: int = 0,
) -> ModelWeights:
    """Make random weights at memory speed (quick_weights.py says which), in `tensors` if given, else in new memory.

    A seed gives the same bits on every device, and another model in every format. gpus, rank: make what GPU `rank` of
    so many has of them (partition.py). ValueError: so many cannot share the model.
    """
    mine = partition.local(cfg, fmt, gpus)
    made = assemble(mine, fmt, empty(mine, fmt, device) if tensors is None else tensors)
    quick_weights.fill(cfg, fmt, seed, made.tensors, gpus, rank)
    return made


def shard(weights: ModelWeights, gpus: int, rank: int) -> ModelWeights:
    """Return what GPU `rank` of `gpus` has: copies of what is cut, the rest as it is. ValueError as quick()."""
    mine = partition.local(weights.config, weights.format, gpus)
    parts = {name: partition.part(name, tensor, gpus, rank) for name, tensor in weights.tensors.items()}
    return assemble(mine, weights.format, parts)


def empty(cfg: Config, fmt: str, device: str | torch.device = "cpu") -> dict[str, torch.Tensor]:
    """Return the tensors of layout.layout(cfg, fmt), unwritten: routed experts' each by itself, else on one buffer.

    MemoryError: a host has not so much free. Its kernel would give it, and kill the process that writes to it.
    """
    specs = layout.layout(cfg, fmt)
    if torch.device(device).type == "cpu":
        free = 1024 * int(Path("/proc/meminfo").read_text().partition("MemAvailable:")[2].split()[0])
        need = layout.nbytes(specs)
        if need > free:
            raise MemoryError(f"weights of {cfg.name} in {fmt} take {need / 1e9:.0f} GB, {free / 1e9:.0f} are free")
    apart = {name: spec for name, spec in specs.items() if ".experts." in name}
    shared = {name: spec for name, spec in specs.items() if name not in apart}
    made = layout.views(torch.empty(layout.nbytes(shared), dtype=torch.uint8, device=device), shared)
    made |= {name: torch.empty(spec.shape, dtype=spec.dtype, device=device) for name, spec in apart.items()}
    return {name: made[name] for name in specs}
