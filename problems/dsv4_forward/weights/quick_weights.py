"""Fill a model with random weights within seconds, at memory speed: for measured steps, and slices with all experts.

Sizes are those of random_weights.py: an input of rms 1 gives an output of rms `gain`, and nothing is constant. Codes
are random bytes instead of rounded normals, so two formats do not hold one and the same model. Every large tensor
repeats one table of random contents, made on the host: a seed gives the same bits on every device. The table's length
is prime, so that rows of equal contents lie gigabytes apart.
"""

import math
from collections.abc import Iterator

import torch

from problems.common import nvfp4
from problems.dsv4_forward.weights import layout, packing, partition, random_weights
from problems.dsv4_forward.weights.config import Config

BYTES, NORMALS = 2**26 - 5, 2**24 - 3  # primes: entries of the two tables
SMALL = 2**17  # values of a tensor, up to which it is drawn by itself
CLIP = 4.9  # of the table of normals: what it is multiplied by to make e4m3 codes stays below 448 / CLIP
E2M1_RMS = math.sqrt(sum(value * value for value in nvfp4.E2M1) / 16)  # of uniform codes: 2.93
E4M3_FIRST = 0x2E  # the first of 16 e4m3 values near 1, 0.4375 to 1.625, that NVFP4's scales are of
E4M3_RMS = 0.978
JITTER = 0.05  # relative: no two matrices have the same second scale


class _Tables:
    """Random bytes and normals on a device, read in order and again from the start; source: draws small tensors."""

    def __init__(self, seed: int, most_bytes: int, most_normals: int, device: torch.device) -> None:
        """most_bytes, most_normals: how much is needed in all, so that a small model does not make whole tables."""
        self.source = torch.Generator().manual_seed(seed)
        words = torch.randint(-(2**63), 2**63 - 1, (min(BYTES, most_bytes) // 8 + 1,), generator=self.source)
        self._bytes = words.view(torch.uint8)[: min(BYTES, max(most_bytes, 1))].to(device)
        normals = torch.randn(min(NORMALS, max(most_normals, 1)), generator=self.source)
        self._normals = normals.clamp_(-CLIP, CLIP).bfloat16().to(device)
        self._at = {self._bytes: 0, self._normals: 0}

    def bytes(self, out: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield parts of `out`, contiguous with one byte a value, as uint8, and as many random bytes for each."""
        return self._parts(out.view(torch.uint8), self._bytes)

    def normals(self, out: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield parts of `out`, contiguous, and as many bf16 normals for each."""
        return self._parts(out, self._normals)

    def _parts(self, out: torch.Tensor, table: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        flat, done = out.view(-1), 0
        while done < len(flat):
            at = self._at[table]
            count = min(len(flat) - done, len(table) - at)
            yield flat[done : done + count], table[at : at + count]
            done += count
            self._at[table] = (at + count) % len(table)


def fill(cfg: Config, fmt: str, seed: int, tensors: dict[str, torch.Tensor], gpus: int = 1, rank: int = 0) -> None:
    """Write every tensor of layout.layout(cfg, fmt), or what GPU `rank` of `gpus` has of it, in place.

    Extra memory: two tables, of 64 and 32 MiB, and for several GPUs one linear layer.
    """
    units = layout.units(cfg, fmt)
    specs = layout.layout(cfg, fmt).values()
    coded = sum(spec.nbytes for spec in specs if spec.dtype.itemsize == 1)
    plain = sum(spec.nbytes for spec in specs if spec.dtype.is_floating_point)
    tables = _Tables(seed, coded, plain, tensors["embed.weight"].device)
    for name, unit in units.items():
        with partition.filling(name, unit, tensors, gpus, rank) as whole:
            _fill(cfg, name, unit, whole, tables)


def _fill(
    cfg: Config, name: str, unit: layout.Spec | layout.LinearSpec, tensors: dict[str, torch.Tensor], tables: _Tables
) -> None:
    if isinstance(unit, layout.LinearSpec):
        fields = {part: tensors[f"{name}.{part}"] for part in unit.tensors()}
        _KINDS[unit.kind](fields, random_weights.gain(cfg, name) / math.sqrt(unit.k), tables)
        if "input_scale" in fields:
            amax = random_weights.input_amax(cfg, name) / packing.NVFP4_LARGEST
            fields["input_scale"].copy_(amax * (1 + random_weights.AMAX_SPREAD * _uniform(unit.lead, tables)))
    elif name.endswith("tid2eid"):
        tensors[name].copy_(_experts(cfg, unit.shape, tables))
    elif math.prod(unit.shape) <= SMALL:
        tensors[name].copy_(random_weights.tensor(cfg, name, unit.shape, tables.source))
    else:
        mean, spread = random_weights.moments(name, unit.shape)
        for part, normals in tables.normals(tensors[name]):
            part.copy_(normals).mul_(spread).add_(mean)


def _uniform(shape: tuple[int, ...], tables: _Tables) -> torch.Tensor:
    return torch.rand(shape, generator=tables.source)


def _experts(cfg: Config, shape: tuple[int, ...], tables: _Tables) -> torch.Tensor:
    """int64 (V, K), distinct experts in each row: a first one, and equal steps from there."""
    size, (vocab, count) = cfg.n_routed_experts, shape
    first = torch.randint(size, (vocab, 1), generator=tables.source)
    step = torch.randint(1, max(size // count, 1) + 1, (vocab, 1), generator=tables.source)
    return (first + step * torch.arange(count)) % size


# One function a kind of linear layer. rms: of the matrix's values.


def _plain(fields: dict[str, torch.Tensor], rms: float, tables: _Tables) -> None:
    for part, normals in tables.normals(fields["weight"]):
        part.copy_(normals).mul_(rms)


def _fp8(fields: dict[str, torch.Tensor], rms: float, tables: _Tables) -> None:
    """Normals as codes, blocks of three sizes."""
    scale, weight = fields["scale"], fields["weight"]
    steps = torch.randperm(scale.numel(), generator=tables.source).remainder_(3).sub_(1).view(scale.shape)
    rows, columns = (_block_sizes(size) for size in weight.shape[-2:])
    mean = float((torch.exp2(2.0 * steps) * rows[:, None] * columns).sum() / math.prod(weight.shape))
    middle = _power(rms / math.sqrt(mean) / 45)  # codes have an rms of 45 to 90
    scale.copy_(steps + 127 + middle)
    factor = rms / math.sqrt(mean) / 2.0**middle
    for part, normals in tables.normals(weight):
        part.copy_((normals.float() * factor).to(torch.float8_e4m3fn))


def _block_sizes(size: int) -> torch.Tensor:
    """int64 (blocks,): values of each block along an axis; the last one may be short."""
    starts = torch.arange(0, size, layout.FP8_BLOCK)
    return (size - starts).clamp(max=layout.FP8_BLOCK)


def _mxfp4(fields: dict[str, torch.Tensor], rms: float, tables: _Tables) -> None:
    """Uniform codes; scales of two neighbouring powers of two, as often as the rms wants them."""
    _codes(fields["weight"], tables)
    wanted = rms / E2M1_RMS
    low = _power(wanted)
    share = ((wanted / 2.0**low) ** 2 - 1) / 3  # of the larger one
    for part, drawn in tables.bytes(fields["scale"]):
        part.copy_(drawn < round(256 * share)).add_(127 + low)


def _nvfp4(fields: dict[str, torch.Tensor], rms: float, tables: _Tables) -> None:
    """Uniform codes; scales of 16 values near 1; the second scale takes them to the rms."""
    _codes(fields["weight"], tables)
    for part, drawn in tables.bytes(fields["scale"]):
        torch.bitwise_and(drawn, 15, out=part).add_(E4M3_FIRST)
    second = fields["scale_2"]
    jitter = 1 + JITTER * (2 * _uniform(tuple(second.shape), tables) - 1)
    second.copy_(jitter * (rms / (E2M1_RMS * E4M3_RMS)))


def _power(value: float) -> int:
    """The exponent of the largest power of two that is at most `value`."""
    return math.frexp(value)[1] - 1


def _codes(out: torch.Tensor, tables: _Tables) -> None:
    for part, drawn in tables.bytes(out):
        part.copy_(drawn)


_KINDS = {"plain": _plain, "fp8": _fp8, "mxfp4": _mxfp4, "nvfp4": _nvfp4}
