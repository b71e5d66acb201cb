"""Map the tensors of checkpoint files, with name, shape and dtype, to parts of the internal tensors.

Three spellings are read: DeepSeek's ("layers.0.attn.wq_a.weight"), used by NVIDIA's NVFP4 variant as well, and the two
that transformers writes ("model.layers.0.self_attn.q_a_proj.weight"; by default a mixture of both). Dtypes are written
as safetensors writes them: F32, BF16, F8_E4M3, F8_E8M0, I8, U8, I64.
"""

import math
import re
from dataclasses import dataclass
from typing import NamedTuple

import torch

from problems.dsv4_forward.weights import layout
from problems.dsv4_forward.weights.config import PLAIN, Config

# To DeepSeek's names, applied in this order; the patterns match none of them.
_RENAMES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^model\.", ""),
        (r"^embed_tokens\.", "embed."),
        (r"^lm_head\.", "head."),
        (r"^hc_head\.hc_", "hc_head_"),
        (r"\.(attn|ffn)_hc\.", r".hc_\1_"),
        (r"\.input_layernorm\.", ".attn_norm."),
        (r"\.post_attention_layernorm\.", ".ffn_norm."),
        (r"\.self_attn\.", ".attn."),
        (r"\.mlp\.", ".ffn."),
        (r"\.compressor\.indexer\.(kv_proj|gate_proj|kv_norm|position_bias)\b", r".indexer.compressor.\1"),
        (r"\.compressor\.indexer\.(?:scorer\.)?", ".indexer."),
        (r"\.compressor\.kv_norm\.", ".compressor.norm."),
        (r"\.compressor\.gate_proj\.", ".compressor.wgate."),
        (r"\.position_bias$", ".ape"),
        (r"\.attn\.norm\.", ".attn.kv_norm."),  # transformers' default spelling of kv_norm
        (r"\.q_a_norm\.", ".q_norm."),
        (r"\.(q_a|q_b|kv|o_a|o_b)_proj\.", r".w\1."),
        (r"\.sinks$", ".attn_sink"),
        (r"\.gate\.e_score_correction_bias$", ".gate.bias"),
        (r"\.shared_experts\.gate_proj\.", ".shared_experts.w1."),
        (r"\.shared_experts\.up_proj\.", ".shared_experts.w3."),
        (r"\.shared_experts\.down_proj\.", ".shared_experts.w2."),
        (r"\.experts\.gate_up_proj$", ".experts.w13.weight"),
        (r"\.experts\.down_proj$", ".experts.w2.weight"),
    )
)
_SHARED_WITH_MAIN = re.compile(r"^mtp\.\d+\.(emb|head\.weight$)")  # copies that some files hold; converters skip them

_FIELDS = {  # kind of a linear layer -> field -> (suffix, dtype) in a file
    "fp8": {"weight": ("weight", "F8_E4M3"), "scale": ("scale", "F8_E8M0")},
    "mxfp4": {"weight": ("weight", "I8"), "scale": ("scale", "F8_E8M0")},
    "nvfp4": {
        "weight": ("weight", "U8"),
        "scale": ("weight_scale", "F8_E4M3"),
        "scale_2": ("weight_scale_2", "F32"),
        "input_scale": ("input_scale", "F32"),
    },
}
# What `detect` looks at: dtypes of attention and expert matrices -> format. Plain ones are told apart further.
_LINEAR = re.compile(r"^layers\.\d+\.attn\.(wq_a|wq_b|wkv|wo_a|wo_b)\.weight$")
_EXPERT = re.compile(r"^layers\.\d+\.ffn\.experts\.(\d+\.w[123]|w13|w2)\.weight$")
_DETECTED = {("F8_E4M3", "I8"): "released", ("F8_E4M3", "U8"): "nvfp4_experts", ("U8", "U8"): "nvfp4"}


class CheckpointError(ValueError):
    """What is wrong with a checkpoint. faults: every single fault. The message shows the first of very many, each on a
    line, or the only one behind the place.
    """

    SHOWN = 200  # faults; a wrong configuration makes one of each of 70,000 tensors

    def __init__(self, where: object, faults: list[str]) -> None:
        self.faults = tuple(faults)
        more = len(faults) - self.SHOWN
        rest = [f"and {more} more: correct these, then load again to see the others"] if more > 0 else []
        listed = "\n  ".join([f"{where}: {len(faults)} faults", *faults[: self.SHOWN], *rest])
        super().__init__(f"{where}: {faults[0]}" if len(faults) == 1 else listed)


@dataclass(frozen=True)
class Stored:
    """A tensor of a file: where it lies, its name there, its dtype as safetensors writes it."""

    file: str
    name: str
    dtype: str
    shape: tuple[int, ...]


class Piece(NamedTuple):  # a released model has 145,000: a dataclass would take three times as long
    """A file's tensor is a part of the internal tensor `target` of `unit`: target[lead][rows], reshaped to `shape`.

    dtypes: those that it may have, whose values the internal one holds exactly; files are written in the first.
    repeats: the name of a piece that holds the same value: w1 and w3 share NVFP4's scalars.
    """

    unit: str
    target: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    lead: int | None = None
    rows: slice | None = None
    repeats: str = ""

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a file's tensor may have the shape: a scale of a whole matrix is one number, of any number of axes.
        Where the internal matrix is several groups (wo_a), it may be one for all of them.
        """
        scalar = self.target.endswith((".scale_2", ".input_scale"))
        return shape == self.shape or (scalar and math.prod(shape) == 1)

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part of the internal tensor, sharing its memory."""
        part = tensor if self.lead is None else tensor[self.lead]
        return (part if self.rows is None else part[self.rows]).view(self.shape)


def canonical(name: str) -> str:
    """A file's name for a tensor -> DeepSeek's; the experts that transformers joins become layers.L.ffn.experts.w13."""
    for pattern, replacement in _RENAMES:
        name = pattern.sub(replacement, name)
    return name


def ignored(cfg: Config, name: str) -> bool:
    """Whether a tensor that no piece asks for may be there: all of a prediction layer that `cfg` goes without."""
    return bool(_SHARED_WITH_MAIN.match(name)) or (not cfg.num_nextn_predict_layers and name.startswith("mtp."))


def detect(stored: dict[str, Stored]) -> str:
    """The format of a checkpoint, from what most of its attention and expert matrices are. ValueError: none known."""
    linear, expert = (_most(stored, pattern) for pattern in (_LINEAR, _EXPERT))
    if linear in ("F32", "BF16") and expert in ("F32", "BF16"):
        return "fp32" if any(held.dtype == "F32" and _is_bf16(name) for name, held in stored.items()) else "bf16"
    if linear == expert == "none":
        raise ValueError(f"none of the {len(stored)} tensors is of a layer's attention or experts, by its name")
    if (linear, expert) not in _DETECTED:
        known = ", ".join(f"{linear} + {expert}" for linear, expert in _DETECTED)
        raise ValueError(f"attention + expert matrices must be {known}, or F32 or BF16 both, got {linear} + {expert}")
    return _DETECTED[linear, expert]


def _most(stored: dict[str, Stored], pattern: re.Pattern) -> str:
    """The commonest dtype of the tensors whose names match, "none" if there are none."""
    dtypes = [held.dtype for name, held in stored.items() if pattern.match(name)]
    return max(sorted(set(dtypes)), key=dtypes.count, default="none")


def _is_bf16(name: str) -> bool:
    """Whether the format bf16 holds the tensor in bf16."""
    return not re.search(r"(hc_(attn|ffn|head)_\w+|\.ape|\.attn_sink|\.gate\.bias)$", name)


def pieces(cfg: Config, fmt: str, joined: bool = False) -> dict[str, Piece]:
    """Every tensor of a checkpoint in `fmt` by DeepSeek's name. joined: experts of a layer are one tensor, as in
    transformers.
    """
    found: dict[str, Piece] = {}
    for name, unit in layout.units(cfg, fmt).items():
        if isinstance(unit, layout.LinearSpec):
            found |= _linear(name, unit, joined)
        elif name.endswith(".project"):
            found |= _compressor(name, unit)
        else:
            dtypes = _floats(unit.dtype) if fmt in PLAIN else _floats(unit.dtype)[:1]
            found[name] = Piece(name, name, unit.shape, dtypes)
    return found


def _floats(dtype: torch.dtype) -> tuple[str, ...]:
    """Dtypes of a file whose values `dtype` holds exactly; a file is written in the first."""
    return {torch.float32: ("F32", "BF16"), torch.bfloat16: ("BF16",), torch.int64: ("I64", "I32")}[dtype]


def _compressor(name: str, unit: layout.Spec) -> dict[str, Piece]:
    """project holds the rows of wkv, then those of wgate."""
    channels, d = unit.shape[0] // 2, unit.shape[1]
    owner = name.removesuffix(".project")
    return {
        f"{owner}.{part}.weight": Piece(
            name, name, (channels, d), _floats(unit.dtype), rows=slice(start, start + channels)
        )
        for part, start in (("wkv", 0), ("wgate", channels))
    }


def _linear(name: str, unit: layout.LinearSpec, joined: bool) -> dict[str, Piece]:
    found: dict[str, Piece] = {}
    owners, specs = _owners(name, unit, joined), unit.tensors()
    for field, (suffix, *dtypes) in _fields(unit).items():
        target, shape, dtypes = f"{name}.{field}", specs[field].shape, tuple(dtypes)
        if owners[0][1] is not None:
            shape = shape[1:]
        elif name.endswith("wo_a") and len(shape) == 3:  # the groups are one matrix in a file
            shape = (shape[0] * shape[1], shape[2])
        count = shape[0] // 2 if shape else 0
        halves = (slice(0, count), slice(count, 2 * count))
        for owner, lead, half in owners:
            if half is None:
                piece = Piece(name, target, shape, dtypes, lead)
            elif shape:
                piece = Piece(name, target, (count, *shape[1:]), dtypes, lead, halves[half])
            else:
                piece = Piece(name, target, (), dtypes, lead, repeats=f"{owner[:-1]}1.{suffix}" if half else "")
            found[f"{owner}.{suffix}"] = piece
    return found


def _fields(unit: layout.LinearSpec) -> dict[str, tuple[str, ...]]:
    """Field of linear.Linear -> suffix in a file, then the dtypes that it may have there."""
    if unit.kind == "plain":
        return {"weight": ("weight", *_floats(unit.dtype))}
    return _FIELDS[unit.kind]


def _owners(name: str, unit: layout.LinearSpec, joined: bool) -> list[tuple[str, int | None, int | None]]:
    """(name in a file, leading index, half of the rows) of the matrices that a linear layer is of."""
    base, _, last = name.rpartition(".")
    whole = not unit.lead or last == "wo_a" or (joined and base.endswith(".experts"))
    if whole:
        return [(name, None, None)]
    halves = (("w1", 0), ("w3", 1)) if last == "w13" else ((last, None),)
    if base.endswith(".shared_experts"):
        return [(f"{base}.{part}", 0, half) for part, half in halves]
    return [(f"{base}.{expert}.{part}", expert, half) for expert in range(unit.lead[0]) for part, half in halves]
