"""The kernels of a forward pass: a slot for each component, and what fills it.

ROWS is the table of slots that problems can fill: a further problem is a further row, and the adapter that it names.
"""

import ast
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import ModuleType

from problems.common import load
from problems.dsv4_forward.adapters import fmha_decode, gemv, moe
from problems.dsv4_forward.kernels import fused
from problems.dsv4_forward.torch_ops import compressor, experts, fmha, indexer, linear, mhc, norm, rope, router
from problems.dsv4_forward.weights import layout
from problems.dsv4_forward.weights.config import PLAIN, Config
from problems.dsv4_forward.weights.tree import ModelWeights

Slot = Callable[..., None]
# (a variant of the problem, the weights, the reference for what it does not serve) -> slot functions, lines to report.
Adapter = Callable[[ModuleType, ModelWeights, "Kernels"], tuple[dict[str, Slot], tuple[str, ...]]]


@dataclass(frozen=True)
class Kernels:
    """A callable for each slot, with the interface of the function that REFERENCE has there; all write in place."""

    rms_norm: Slot
    mhc_pre: Slot
    mhc_post: Slot
    mhc_head: Slot
    matmul: Slot
    linear: Slot
    grouped_linear: Slot
    rotate: Slot
    compress: Slot
    index_scores: Slot
    select: Slot
    fmha: Slot
    route: Slot
    experts: Slot
    shared: Slot


REFERENCE = Kernels(
    rms_norm=norm.rms_norm, mhc_pre=mhc.pre, mhc_post=mhc.post, mhc_head=mhc.head, matmul=linear.matmul,
    linear=linear.linear, grouped_linear=linear.grouped_linear, rotate=rope.rotate, compress=compressor.compress,
    index_scores=indexer.index_scores, select=indexer.select, fmha=fmha.fmha, route=router.route,
    experts=experts.experts, shared=experts.shared,
)  # fmt: skip
SLOTS = tuple(field.name for field in fields(Kernels))


@dataclass(frozen=True)
class Row:
    """A slot that the variants of a problem can fill."""

    slot: str
    problem: str  # a folder beside this one; it may be still to come
    scope: str  # which calls its kernels take; the adapter passes the others on to the reference
    serves: Callable[[Config, str], str]  # (configuration, format) -> "", or why no call is in its scope
    adapt: Adapter | None  # None: not written yet
    # A problem, the variant of which that fills another slot takes calls out of the scope, and the adapter of that.
    beyond: tuple[str, Adapter] | None = None


def _nvfp4_linears(cfg: Config, fmt: str) -> str:
    return "" if layout.KINDS[fmt].linear == "nvfp4" else f"no NVFP4 linears in {fmt}"


def _entries_of_512(cfg: Config, fmt: str) -> str:
    if fmt in PLAIN:
        return f"no 584-byte cache entries in {fmt}"
    return "" if cfg.head_dim == 512 else f"head_dim must be 512, is {cfg.head_dim}"


def _nvfp4_experts(cfg: Config, fmt: str) -> str:
    return _clamp(cfg) if layout.KINDS[fmt].experts == "nvfp4" else f"no NVFP4 experts in {fmt}"


def _nvfp4_shared(cfg: Config, fmt: str) -> str:
    return _nvfp4_linears(cfg, fmt) or _clamp(cfg)


def _clamp(cfg: Config) -> str:
    return "" if cfg.swiglu_limit == moe.limit() else f"swiglu_limit must be {moe.limit():g}, is {cfg.swiglu_limit:g}"


_FEW, _BEYOND = f"NVFP4, at most {gemv.TOKENS} tokens", (moe.PROBLEM, moe.adapt_linears)
ROWS = (
    Row("linear", "nvfp4_gemv", _FEW, _nvfp4_linears, gemv.adapt, _BEYOND),
    Row("grouped_linear", "nvfp4_gemv", _FEW, _nvfp4_linears, gemv.adapt, _BEYOND),
    Row("fmha", "fmha_decode", "584-byte entries", _entries_of_512, fmha_decode.adapt),
    Row("experts", "moe_gemm", "NVFP4", _nvfp4_experts, moe.adapt_experts),
    Row("shared", "moe_gemm", "NVFP4, as one expert", _nvfp4_shared, moe.adapt_shared),
)
PROBLEMS = tuple(dict.fromkeys(row.problem for row in ROWS))


@dataclass(frozen=True)
class Pick:
    """What fills a slot: the reference, `module` (a variant of the row's problem), or `function` itself."""

    slot: str
    why: str
    name: str = "reference"
    row: Row | None = None
    module: ModuleType | None = None
    function: Slot | None = None


@dataclass(frozen=True)
class Chosen:
    """kernels, ready for the weights that they were chosen for; names: what fills each slot, "reference" or such as
    "nvfp4_gemv/cpu_avx2"; report: a line for each slot with the reason, then what the adapters have to say.
    """

    kernels: Kernels
    names: dict[str, str]
    report: tuple[str, ...]


@dataclass(frozen=True)
class _Model:
    """What a choice is made for."""

    target: str
    cfg: Config
    fmt: str


def choose(text: str, target: str, weights: ModelWeights) -> Chosen:
    """text: "reference", "winners" or NAME=VARIANT, or several with commas, later ones over earlier ones; slots that
    are not named hold the reference. target: "cpu", "sm90" or "sm100", where the weights are.

    NAME is a slot, or a problem for all its slots. VARIANT is "reference", "winner", a file of the problem's variants/
    or wrong/, or the path of a Python file that defines either custom_kernel, as the problem has it, or a function of
    the slot's name with the slot's interface. "winners" fills a slot where a problem can, else says why not; a VARIANT
    that cannot be had is a ValueError. Linears that the variant in their slots does not take go to the one of moe_gemm
    that fills another slot, if there is one. Reads the weights where an adapter measures them.
    """
    model = _Model(target, weights.config, weights.format)
    picks = {slot: Pick(slot, "not asked for otherwise") for slot in SLOTS}
    for item in text.split(","):
        picks |= {pick.slot: pick for pick in _item(item.strip(), model)}
    kernels, report = _adapted(list(picks.values()), weights)
    lines = [f"{pick.slot}: {pick.name} ({pick.why})" for pick in picks.values()]
    return Chosen(kernels, {slot: pick.name for slot, pick in picks.items()}, (*lines, *report))


def _item(item: str, model: _Model) -> list[Pick]:
    """One of the parts of `text`."""
    if item == "reference":
        return [Pick(slot, "asked for") for slot in SLOTS]
    if item == "winners":
        return [_winner(slot, model) for slot in SLOTS]
    name, _, variant = item.partition("=")
    slots = [name] if name in SLOTS else [row.slot for row in ROWS if row.problem == name]
    if not slots or not variant:
        raise ValueError(
            f"kernels must be reference, winners or NAME=VARIANT with commas between, NAME one of "
            f"{', '.join((*SLOTS, *PROBLEMS))}; got {item!r}"
        )
    return [_named(slot, variant, model) for slot in slots]


def _row(slot: str) -> Row | None:
    return next((row for row in ROWS if row.slot == slot), None)


def _unserved(row: Row, model: _Model) -> str:
    """Why the row's problem cannot fill the slot of such a model, "" if it can."""
    if not (load.PROBLEMS / row.problem / "submission.py").is_file():
        return f"no folder problems/{row.problem} yet"
    if row.adapt is None:
        return f"no adapter for {row.problem} yet"
    return row.serves(model.cfg, model.fmt)


def _winner(slot: str, model: _Model) -> Pick:
    row = _row(slot)
    if row is None and slot in fused.SLOTS and model.target in fused.TARGETS:
        return Pick(slot, "this folder's own", "dsv4_forward/fused", function=fused.slots(model.target)[slot])
    if row is None:
        return Pick(slot, "no problem for it")
    if reason := _unserved(row, model):
        return Pick(slot, reason)
    folder = load.PROBLEMS / row.problem
    winners = load.constants(folder / "submission.py", "WINNERS")["WINNERS"]
    if model.target not in winners:
        return Pick(slot, f"{row.problem} has no winner for {model.target}")
    # Not submission.custom_kernel, which finds the variant anew in every call: 0.16 ms.
    name = load.winner(folder, winners, model.target)
    return Pick(slot, row.scope, f"{row.problem}/{name}", row, load.variant(row.problem, name))


def _named(slot: str, variant: str, model: _Model) -> Pick:
    if variant == "reference":
        return Pick(slot, "asked for")
    if variant == "winner":
        return _winner(slot, model)
    row, what = _row(slot), f"{slot}={variant}"
    file = _file(row, variant, what)
    others = row is not None and load.PROBLEMS / row.problem in file.parents  # there the interface is the problem's
    if not others and slot in _functions(file):
        return Pick(slot, "the slot's own interface", str(file), function=_function(file, slot))
    if row is None:
        raise ValueError(f"{what}: {file.name} must define {slot}, with the slot's interface: no problem is for it")
    if reason := _unserved(row, model) or _unrunnable(file, model.target):
        raise ValueError(f"{what}: {reason}")
    return Pick(slot, row.scope, f"{row.problem}/{file.stem}", row, load.from_file(load.PROBLEMS / row.problem, file))


def _file(row: Row | None, variant: str, what: str) -> Path:
    folders = [load.PROBLEMS / row.problem / part for part in ("variants", "wrong")] if row else []
    folders.append(Path(__file__).parent / "wrong")
    for file in (*(folder / f"{variant}.py" for folder in folders), Path(variant)):
        if file.suffix == ".py" and file.is_file():
            return file.resolve()
    known = [file.stem for folder in folders[:-1] for file in sorted(folder.glob("*.py"))]
    also = f", nor one of {row.problem}'s {', '.join(known)}" if known else ""
    raise ValueError(f"{what}: no file {variant}{also}")


def _unrunnable(file: Path, target: str) -> str:
    """Why the variant in `file` is not for a machine of `target`, "" if it is."""
    targets = load.constants(file, "TARGETS").get("TARGETS", ())
    if file.stem.startswith("peer_"):
        return "a peer is there to be compared with, not to be built on"
    if target not in targets:
        return f"{file.stem} is for {', '.join(targets) or 'no target'}, not {target}"
    missing = load.missing_cpu_flags(file) if target == "cpu" else []
    return f"this CPU lacks {', '.join(missing)}" if missing else ""


def _functions(file: Path) -> set[str]:
    """Names of the functions that `file` defines, read without running it."""
    return {node.name for node in ast.parse(file.read_text(), str(file)).body if isinstance(node, ast.FunctionDef)}


def _function(file: Path, name: str) -> Slot:
    spec = importlib.util.spec_from_file_location(f"{__package__}._{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return vars(module)[name]


def _adapted(picks: list[Pick], weights: ModelWeights) -> tuple[Kernels, tuple[str, ...]]:
    """The table of the picks, each variant fitted to the weights once for all slots of an adapter; and their lines."""
    functions = {pick.slot: pick.function for pick in picks if pick.function}
    filled = [pick for pick in picks if pick.module]
    modules = {pick.row.problem: pick.module for pick in reversed(filled)}
    report: list[str] = []
    for name, adapt in dict.fromkeys((pick.module.__name__, pick.row.adapt) for pick in filled):
        mine = [pick for pick in filled if (pick.module.__name__, pick.row.adapt) == (name, adapt)]
        others, also = _beyond(mine[0].row, modules, weights)
        found, lines = adapt(mine[0].module, weights, others)
        functions |= {pick.slot: found[pick.slot] for pick in mine}
        report += (*lines, *also)
    return replace(REFERENCE, **functions), tuple(report)


def _beyond(row: Row, modules: dict[str, ModuleType], weights: ModelWeights) -> tuple[Kernels, tuple[str, ...]]:
    """What takes the calls that the row's kernels do not serve, and lines. modules: variants in use, by problem."""
    if row.beyond is None or row.beyond[0] not in modules:
        return REFERENCE, ()
    problem, adapt = row.beyond
    found, lines = adapt(modules[problem], weights, REFERENCE)
    return replace(REFERENCE, **found), lines
