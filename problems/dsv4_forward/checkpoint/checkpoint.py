"""Load checkpoints from disk: the released model, NVIDIA's NVFP4 variant, what transformers saves; save the first two.

Files are safetensors, memory-mapped, and go to the device tensor by tensor. Names and formats: checkpoint_names.py.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePosixPath

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from problems.dsv4_forward.checkpoint import checkpoint_names, config_json, convert, values
from problems.dsv4_forward.checkpoint.checkpoint_names import CheckpointError, Piece, Stored
from problems.dsv4_forward.checkpoint.config_json import config_from_json
from problems.dsv4_forward.weights import layout, partition, tree
from problems.dsv4_forward.weights.config import Config
from problems.dsv4_forward.weights.tree import ModelWeights

__all__ = ["CheckpointError", "config_from_json", "load", "save"]

INDEX = "model.safetensors.index.json"
SHARD_BYTES = 4 * 2**30  # of a saved file, unless one tensor is larger
KINDS = {"released": ("released",), "nvfp4": ("nvfp4_experts", "nvfp4"), "plain": ("fp32", "bf16")}
DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I64": torch.int64,
}
Advance = Callable[[int], None]  # receives the bytes that were done


class _Files:
    """The open files of a checkpoint. stored: their tensors by DeepSeek's name; faults: what is wrong with the files;
    lost: names that the index puts into files which cannot be read, or lack them.
    """

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self.faults: list[str] = []
        self.lost: set[str] = set()
        self.stored: dict[str, Stored] = {}
        self._handles = {}
        expected = self._expected(path)
        for file, names in expected.items():
            try:
                self._handles[file] = stack.enter_context(safe_open(file, framework="pt"))
            except (OSError, SafetensorError) as error:
                self.faults.append(f"{Path(file).name} cannot be read (truncated or damaged?): {error}")
                self.lost |= {checkpoint_names.canonical(name) for name in names}
                continue
            self._read_header(file, names)

    def _expected(self, path: Path) -> dict[str, list[str]]:
        """File -> names that the index puts there (none if there is no index)."""
        if path.is_file():
            return {str(path): []}
        if (path / INDEX).exists():
            files: dict[str, list[str]] = {}
            for name, file in _index(path / INDEX).items():
                files.setdefault(str(path / file), []).append(name)
            return files
        found = sorted(path.glob("*.safetensors"))
        if len(found) == 1:
            return {str(found[0]): []}
        several = f"must hold {INDEX}, which says what each of its {len(found)} .safetensors files holds"
        self.faults.append(several if found else "must hold .safetensors files, got none")
        return {}

    def _read_header(self, file: str, promised: list[str]) -> None:
        """promised: names that the index puts into the file."""
        held_here, expected = self._handles[file].keys(), set(promised)
        lacking = sorted(expected.difference(held_here))
        self.lost |= {checkpoint_names.canonical(name) for name in lacking}
        self.faults += [f"{Path(file).name} lacks {name}, which {INDEX} puts there" for name in lacking]
        for name in held_here:
            held = self._handles[file].get_slice(name)
            known = checkpoint_names.canonical(name)
            if known in self.stored:
                self.faults.append(f"{name} of {Path(file).name} is {self.stored[known].name} once more")
            elif promised and name not in expected:
                self.faults.append(f"{Path(file).name} holds {name}, which {INDEX} does not put there")
            self.stored[known] = Stored(file, name, held.get_dtype(), tuple(held.get_shape()))

    def read(self, name: str) -> torch.Tensor:
        """A tensor by DeepSeek's name, on the host."""
        held = self.stored[name]
        return self._handles[held.file].get_tensor(held.name)


def _index(file: Path) -> dict[str, str]:
    """Name -> file, as the index says. CheckpointError: it cannot be read, or a file is not one within its folder."""
    found = config_json.read_json(file).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise CheckpointError(file, [f"weight_map must name a file for each tensor, got {found!r}"])
    outside = {name: to for name, to in found.items() if not isinstance(to, str) or not _within(to)}
    if outside:
        faults = [f"{name} must be in a file of the index's folder, got {to!r}" for name, to in outside.items()]
        raise CheckpointError(file, faults)
    return found


def _within(name: str) -> bool:
    """Whether it names a file within a folder. (What is there may be a link, as in the caches of model hubs.)"""
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and not {"\\", "\0"} & {*name}


def load(
    path: str | Path,
    cfg: Config | None = None,
    fmt: str | None = None,
    device: str | torch.device = "cpu",
    progress: bool = True,
    gpus: int = 1,
    rank: int = 0,
) -> ModelWeights:
    """The weights of a checkpoint: a folder with an index and its files, or with one file, or a file.

    cfg: config.json's if None; one without prediction layers leaves those of the checkpoint out. So are those left out
    that are not one layer of the model's kind (the release of July 2026 drafts with three of another). fmt: the format
    to hold the weights in, the checkpoint's if None; convert.convert says what can become what. progress: show a bar.
    gpus, rank: load what GPU `rank` of so many has of the model (weights/partition.py).
    CheckpointError, naming every missing, unknown, misshapen or wrongly typed tensor and every file that cannot be read
    before any weight is loaded, or in the end every tensor with wrong values (values.fault); ValueError: the checkpoint
    cannot become `fmt`.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(path, ["is not there: name a folder of safetensors with a config.json, or a file"])
    folder = path if path.is_dir() else path.parent
    cfg = cfg or config_from_json(folder)
    with ExitStack() as stack:
        files = _Files(path, stack)
        try:
            source = checkpoint_names.detect(files.stored)
        except ValueError as error:
            # Where no file could be read there is nothing to tell a format from.
            other = [] if files.faults and not files.stored else [str(error)]
            raise CheckpointError(path, files.faults + other) from error
        joined = any(name.endswith(".experts.w13.weight") for name in files.stored)
        pieces = checkpoint_names.pieces(cfg, source, joined)
        unknown = [name for name in files.stored if name not in pieces and not checkpoint_names.ignored(cfg, name)]
        if any(name.startswith("mtp.") for name in unknown):
            cfg = dataclasses.replace(cfg, num_nextn_predict_layers=0, compress_ratios=cfg.ratios)
            pieces = checkpoint_names.pieces(cfg, source, joined)
        if faults := files.faults + _faults(cfg, pieces, files) + _wrong_values(cfg, pieces, files):
            raise CheckpointError(f"{path} as {cfg.name} in {source}", faults)
        fmt = fmt or source
        convert.check(source, fmt)
        mine = partition.local(cfg, fmt, gpus)
        tensors = tree.empty(mine, fmt, device)
        with _bar(progress, layout.nbytes(layout.layout(cfg, source))) as advance:
            wrong = _fill(cfg, source, fmt, pieces, files, tensors, advance, gpus, rank)
        if wrong:
            raise CheckpointError(f"{path} as {cfg.name} in {source}", wrong)
    return tree.assemble(mine, fmt, tensors)


def _faults(cfg: Config, pieces: dict[str, Piece], files: _Files) -> list[str]:
    """Tensors that are missing, unknown, misshapen or of another dtype."""
    faults = [f"missing {name}" for name in pieces if name not in files.stored and name not in files.lost]
    for name, held in files.stored.items():
        if name not in pieces:
            if not checkpoint_names.ignored(cfg, name):
                faults.append(f"unknown {held.name} ({held.dtype} {held.shape}) in {Path(held.file).name}")
            continue
        want = pieces[name]
        if not want.fits(held.shape):
            faults.append(f"{held.name} must have shape {want.shape}, got {held.shape}")
        if held.dtype not in want.dtypes:
            faults.append(f"{held.name} must be {' or '.join(want.dtypes)}, got {held.dtype}")
    return faults


def _wrong_values(cfg: Config, pieces: dict[str, Piece], files: _Files) -> list[str]:
    """Values that could not be computed with: w1 and w3 of different NVFP4 scalars, tables of wrong experts."""
    faults = []
    sound = {name for name in pieces if name in files.stored and files.stored[name].dtype in pieces[name].dtypes}
    for name in sorted(sound):
        first = pieces[name].repeats
        if first in sound and all(pieces[one].fits(files.stored[one].shape) for one in (name, first)):
            one, other = files.read(first).squeeze(), files.read(name).squeeze()
            if not torch.equal(one, other):
                faults.append(f"{name} must be {first}'s {one.tolist()}, got {other.tolist()}")
        if name.endswith("tid2eid"):
            faults += _wrong_table(name, files.read(name), cfg.n_routed_experts)
    return faults


def _wrong_table(name: str, table: torch.Tensor, experts: int) -> list[str]:
    """What is wrong with a table of the experts of each token: one that does not exist, or is there twice."""
    if table.numel() and not 0 <= int(table.min()) <= int(table.max()) < experts:
        return [f"{name} must be of 0..{experts - 1}, got {table.min()}..{table.max()}"]
    ordered = table.sort(-1).values
    if table.dim() != 2 or not bool((twice := (ordered[:, 1:] == ordered[:, :-1]).any(-1)).any()):
        return []
    row, count = int(twice.nonzero()[0]), int(twice.sum())
    got = f"{table[row].tolist()} in row {row}" + (f", the first of {count} such rows" if count > 1 else "")
    return [f"{name} must have distinct experts for each token, got {got}"]


def _fill(
    cfg: Config,
    source: str,
    fmt: str,
    pieces: dict[str, Piece],
    files: _Files,
    tensors: dict[str, torch.Tensor],
    advance: Advance,
    gpus: int,
    rank: int,
) -> list[str]:
    """Read every tensor or linear layer, as it is or, where the format differs or a GPU has a part of it, by way of
    temporary memory.

    -> what is wrong with their values.
    """
    faults: list[str] = []
    before, after = layout.units(cfg, source), layout.units(cfg, fmt)
    parts: dict[str, dict[str, Piece]] = {name: {} for name in before}
    for name, piece in pieces.items():
        parts[piece.unit][name] = piece
    for name, unit in before.items():
        specs = layout.tensors_of(name, unit)
        with partition.filling(name, after[name], tensors, gpus, rank) as whole:
            if isinstance(unit, layout.Spec) or unit.kind == after[name].kind:
                faults += _read(parts[name], unit, files, whole)
            else:
                buffer = torch.empty(layout.nbytes(specs), dtype=torch.uint8, device=tensors["embed.weight"].device)
                held = layout.views(buffer, specs)
                faults += (wrong := _read(parts[name], unit, files, held))
                fields = {field: held[f"{name}.{field}"] for field in unit.tensors()}
                if not wrong:
                    convert.transfer(cfg, name, unit, after[name], fields, whole)
        advance(sum(spec.nbytes for spec in specs.values()))
    return faults


def _read(
    parts: dict[str, Piece], unit: layout.Spec | layout.LinearSpec, files: _Files, tensors: dict[str, torch.Tensor]
) -> list[str]:
    """Copy the pieces of a unit. -> what is wrong with their values."""
    faults = []
    for name, piece in parts.items():
        target, value = piece.view(tensors[piece.target]), files.read(name)
        kind, field = ("", "") if isinstance(unit, layout.Spec) else (unit.kind, piece.target.rpartition(".")[2])
        if said := values.fault(files.stored[name].name, value, kind, field):
            faults.append(said)
        value = value.reshape(()) if value.numel() == 1 and value.shape != piece.shape else value
        # Bytes for which PyTorch has a separate type (ue8m0, packed codes) are uint8 here.
        target.copy_(value.view(torch.uint8) if target.dtype == torch.uint8 else value)
    return faults


@contextmanager
def _bar(show: bool, total: int) -> Iterator[Advance]:
    """A progress bar over `total` bytes, on standard error."""
    if not show:
        yield lambda done: None
        return
    from rich import progress
    from rich.console import Console

    columns = (*progress.Progress.get_default_columns(), progress.DownloadColumn(), progress.TransferSpeedColumn())
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("weights", total=total)
        yield lambda done: bar.advance(task, done)


def save(source: ModelWeights, path: str | Path, kind: str, shard_bytes: int = SHARD_BYTES) -> None:
    """Write a checkpoint and its config.json into the folder `path`, made if need be.

    kind: "released" (DeepSeek's layout; weights in the format released), "nvfp4" (NVIDIA's; nvfp4_experts or nvfp4,
    whose other linear layers are then stored as the experts are) or "plain" (DeepSeek's names; fp32 or bf16).
    shard_bytes: size at which a file is ended. ValueError: the weights are in a format of another kind (convert them
    first). FileExistsError: the folder holds a checkpoint.
    """
    if source.format not in KINDS.get(kind, ()):
        raise ValueError(f"kind must be one of {KINDS}, and the format one of its, got {kind!r}, {source.format!r}")
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    if found := sorted(path.glob("*.safetensors*")):
        raise FileExistsError(f"{path} holds a checkpoint already: {found[0].name}")
    pieces = checkpoint_names.pieces(source.config, source.format)
    shards = _shards(pieces, source, shard_bytes)
    names = ["model.safetensors"]
    if len(shards) > 1:
        names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    for file, shard in zip(names, shards, strict=True):
        save_file({name: _stored(pieces[name], source) for name in shard}, path / file, metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config_json.to_json(source.config, source.format), indent=2) + "\n")
    if len(shards) > 1:
        total = sum(_nbytes(piece) for piece in pieces.values())
        index = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2)
        (path / INDEX).write_text(text + "\n")


def _nbytes(piece: Piece) -> int:
    return layout.Spec(piece.shape, DTYPES[piece.dtypes[0]]).nbytes


def _shards(pieces: dict[str, Piece], source: ModelWeights, shard_bytes: int) -> list[list[str]]:
    """Names by file, each ended before it would pass shard_bytes."""
    shards, size = [[]], 0
    for name, piece in pieces.items():
        if shards[-1] and size + _nbytes(piece) > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += _nbytes(piece)
    return shards


def _stored(piece: Piece, source: ModelWeights) -> torch.Tensor:
    """The tensor of a file: a copy on the host, in the file's dtype."""
    part, dtype = piece.view(source.tensors[piece.target]), DTYPES[piece.dtypes[0]]
    return torch.empty(part.shape, dtype=part.dtype).copy_(part).view(dtype)
