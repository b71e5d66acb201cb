"""`Ops`: the kernels of a forward pass, one function for each op; `choose` decides which function computes which op.

SPECS is the table of ops. An op that another problem's variants can compute names its providers there, in order.
"""

import ast
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

from problems.common import load
from problems.dsv4_forward.adapters import decode, fmha_decode, gemv, mhc_site, moe
from problems.dsv4_forward.adapters import indexer as choosing
from problems.dsv4_forward.adapters import linear as moe_linear
from problems.dsv4_forward.adapters.common import Adapted, Fallback, Joined, Partial
from problems.dsv4_forward.kernels import cache_rows, copies, fused, matmuls
from problems.dsv4_forward.kernels import experts as experts_kernel
from problems.dsv4_forward.kernels import fmha as fmha_kernel
from problems.dsv4_forward.kernels import indexer as indexer_kernel
from problems.dsv4_forward.kernels import router as router_kernel
from problems.dsv4_forward.kernels import start as start_kernel
from problems.dsv4_forward.torch_ops import (
    chains,
    compressor,
    experts,
    fmha,
    indexer,
    linear,
    mhc,
    norm,
    rope,
    router,
    start,
    writes,
)
from problems.dsv4_forward.weights import layout
from problems.dsv4_forward.weights.config import PLAIN, Config
from problems.dsv4_forward.weights.tree import ModelWeights

Op = Callable[..., None]
# (a variant of the problem, the weights, what computes the calls that it does not serve) -> the variant's functions.
Adapter = Callable[[ModuleType, ModelWeights, Fallback], Adapted]


@dataclass(frozen=True)
class Ops:
    """A function for each op, with the interface of the function that REFERENCE has there; all write in place."""

    plan: Op
    embed: Op
    start: Op
    rms_norm: Op
    mhc_pre: Op
    mhc_post: Op
    mhc_post_sum: Op
    mhc_site: Op
    matmul: Op
    matmuls: Op
    linear: Op
    grouped_linear: Op
    two_linears: Op
    norm_linears: Op
    rotate: Op
    norm_rotate: Op
    write: Op
    write_key: Op
    compress: Op
    write_entry: Op
    index_query: Op
    layer_rows: Op
    index_scores: Op
    select: Op
    locate: Op
    choose: Op
    fmha: Op
    fmha_rotate: Op
    route: Op
    experts: Op
    shared: Op
    all_experts: Op


@dataclass(frozen=True)
class Provider:
    """A problem whose variants compute calls of an op, through an adapter."""

    problem: str  # a folder in problems/; it may be still to come
    scope: str  # which calls its variants serve
    serves: Callable[[Config, str], str]  # (configuration, format) -> "", or why no call is in its scope
    adapt: Adapter | None  # None: not written yet
    lacks: Callable[[ModuleType, str], str] = lambda _module, _format: ""  # why a variant serves no call of the format


@dataclass(frozen=True)
class OpSpec:
    """One op. The first provider that has calls in its scope can fill it. Calls that this one does not serve are passed
    to the next one, if a variant of its problem fills another op, and in the end to the reference, which serves all.

    An op that spans others is their chain: `chain` makes it of what fills `parts`, and the reference is that of theirs.
    """

    name: str
    reference: Op
    providers: tuple[Provider, ...] = ()
    chain: Callable[[chains.Parts], Op] | None = None
    parts: tuple[str, ...] = ()


_POST_SUM = chains.mhc_post_sum(SimpleNamespace(mhc_post=mhc.post))
_ROWS = SimpleNamespace(rms_norm=norm.rms_norm, rotate=rope.rotate, compress=compressor.compress, write=writes.write)
_NORM_ROTATE, _WRITE_KEY = chains.norm_rotate(_ROWS), chains.write_key(_ROWS)
_WRITE_ENTRY, _INDEX_QUERY = chains.write_entry(_ROWS), chains.index_query(_ROWS)


@dataclass(frozen=True)
class _Steps:
    """The references that chains are made of."""

    plan: Op = start.plan
    embed: Op = start.embed
    mhc_post: Op = mhc.post
    matmul: Op = linear.matmul
    linear: Op = linear.linear
    mhc_post_sum: Op = _POST_SUM
    rms_norm: Op = norm.rms_norm
    mhc_pre: Op = mhc.pre
    rotate: Op = rope.rotate
    compress: Op = compressor.compress
    write: Op = writes.write
    norm_rotate: Op = _NORM_ROTATE
    write_key: Op = _WRITE_KEY
    write_entry: Op = _WRITE_ENTRY
    index_query: Op = _INDEX_QUERY
    index_scores: Op = indexer.index_scores
    select: Op = indexer.select
    locate: Op = indexer.locate
    fmha: Op = fmha.fmha
    shared: Op = experts.shared
    experts: Op = experts.experts


def _spanning(chain: Callable[[chains.Parts], Op], *parts: str, providers: tuple[Provider, ...] = ()) -> OpSpec:
    return OpSpec(chain.__name__, chain(_Steps()), providers, chain=chain, parts=parts)


def _nvfp4_linears(cfg: Config, fmt: str) -> str:
    return "" if layout.KINDS[fmt].linear == "nvfp4" else f"no NVFP4 linears in {fmt}"


def _entries_of_512(cfg: Config, fmt: str) -> str:
    if fmt in PLAIN:
        return f"no 584-byte cache entries in {fmt}"
    return "" if cfg.head_dim == 512 else f"head_dim must be 512, is {cfg.head_dim}"


def _index_keys(cfg: Config, fmt: str) -> str:
    if fmt in PLAIN:
        return f"no MXFP4 keys in {fmt}"
    heads, width = choosing.heads(), choosing.width()
    if cfg.index_n_heads not in heads or cfg.index_head_dim != width:
        found = f"{cfg.index_n_heads} of {cfg.index_head_dim}"
        return f"index heads must be {' or '.join(map(str, heads))} of {width}, are {found}"
    return ""


def _fp4_experts(cfg: Config, fmt: str) -> str:
    return _clamp(cfg) if layout.KINDS[fmt].experts in moe.KINDS else f"no FP4 experts in {fmt}"


def _no_mxfp4(module: ModuleType, fmt: str) -> str:
    return moe.unprepared(module) if layout.KINDS[fmt].experts == "mxfp4" else ""


def _nvfp4_shared(cfg: Config, fmt: str) -> str:
    return _nvfp4_linears(cfg, fmt) or _clamp(cfg)


def _bf16_sites(cfg: Config, fmt: str) -> str:
    return f"no bf16 activations in {fmt}" if fmt == "fp32" else mhc_site.unserved(cfg)


def _decode_linears(cfg: Config, fmt: str) -> str:
    return decode.serves(fmt)


def _clamp(cfg: Config) -> str:
    return "" if cfg.swiglu_limit == moe.limit() else f"swiglu_limit must be {moe.limit():g}, is {cfg.swiglu_limit:g}"


GEMV = Provider(gemv.PROBLEM, f"NVFP4, at most {gemv.TOKENS} tokens", _nvfp4_linears, gemv.adapt)
MOE_LINEAR = Provider(moe.PROBLEM, "NVFP4", _nvfp4_linears, moe_linear.adapt)
FMHA_DECODE = Provider(fmha_decode.PROBLEM, "584-byte entries", _entries_of_512, fmha_decode.adapt)
INDEXER = Provider(choosing.PROBLEM, "MXFP4 keys", _index_keys, choosing.adapt)
MOE_EXPERTS = Provider(moe.PROBLEM, "NVFP4 or MXFP4", _fp4_experts, moe.adapt_experts, _no_mxfp4)
MOE_SHARED = Provider(moe.PROBLEM, "NVFP4, as one expert", _nvfp4_shared, moe.adapt_shared)
DECODE_LINEARS = Provider(decode.PROBLEM, "at most 32 tokens", _decode_linears, decode.adapt_linears)
DECODE_SHARED = Provider(decode.PROBLEM, "at most 32 tokens", _decode_linears, decode.adapt_shared)
MHC_SITE = Provider(mhc_site.PROBLEM, "bf16, 4 copies", _bf16_sites, mhc_site.adapt)
SPECS = (
    OpSpec("plan", start.plan),
    OpSpec("embed", start.embed),
    _spanning(chains.start, "plan", "embed"),
    OpSpec("rms_norm", norm.rms_norm),
    OpSpec("mhc_pre", mhc.pre),
    OpSpec("mhc_post", mhc.post),
    _spanning(chains.mhc_post_sum, "mhc_post"),
    _spanning(chains.mhc_site, "mhc_post", "mhc_post_sum", "mhc_pre", "rms_norm", providers=(MHC_SITE,)),
    OpSpec("matmul", linear.matmul),
    _spanning(chains.matmuls, "matmul"),
    OpSpec("linear", linear.linear, (DECODE_LINEARS, GEMV, MOE_LINEAR)),
    OpSpec("grouped_linear", linear.grouped_linear, (DECODE_LINEARS, GEMV, MOE_LINEAR)),
    _spanning(chains.two_linears, "linear", providers=(DECODE_LINEARS,)),
    _spanning(chains.norm_linears, "rms_norm", "linear", providers=(DECODE_LINEARS,)),
    OpSpec("rotate", rope.rotate),
    _spanning(chains.norm_rotate, "rms_norm", "rotate"),
    OpSpec("write", writes.write),
    _spanning(chains.write_key, "rms_norm", "rotate", "write"),
    OpSpec("compress", compressor.compress),
    _spanning(chains.write_entry, "compress", "write"),
    _spanning(chains.index_query, "rotate"),
    _spanning(chains.layer_rows, "norm_rotate", "write_key", "write_entry", "index_query"),
    OpSpec("index_scores", indexer.index_scores),
    OpSpec("select", indexer.select),
    OpSpec("locate", indexer.locate),
    _spanning(chains.choose, "index_scores", "select", "locate", providers=(INDEXER,)),
    OpSpec("fmha", fmha.fmha, (FMHA_DECODE,)),
    _spanning(chains.fmha_rotate, "fmha", "rotate", providers=(FMHA_DECODE,)),
    OpSpec("route", router.route),
    OpSpec("experts", experts.experts, (MOE_EXPERTS,)),
    OpSpec("shared", experts.shared, (DECODE_SHARED, MOE_SHARED)),
    _spanning(chains.all_experts, "experts", "shared", providers=(MOE_EXPERTS,)),
)
REFERENCE = Ops(**{spec.name: spec.reference for spec in SPECS})
NAMES = tuple(field.name for field in fields(Ops))
# This folder's own; the first that has an op fills it. A module may define FORMATS, those that it fills ops in, and
# SERVES, by op that spans others which calls it serves, as Partial has it.
KERNELS = (start_kernel, copies, fused, matmuls, cache_rows, indexer_kernel, router_kernel, fmha_kernel, experts_kernel)


@dataclass(frozen=True)
class Choice:
    """What fills an op: the reference, `module` (a variant of the provider's problem), `function` itself, or the chain
    of what fills the op's parts.
    """

    op: str
    why: str
    name: str = "reference"
    provider: Provider | None = None
    module: ModuleType | None = None
    function: Op | None = None
    chain: Callable[[chains.Parts], Op] | None = None


@dataclass(frozen=True)
class Chosen:
    """ops: ready for the weights that they were chosen for. names: what fills each op, "reference" or such as
    "nvfp4_gemv/cpu_avx2". report: a line for each op with the reason, then what the adapters have to say. fallbacks:
    by op with a provider's variant in it, what computes the calls that this variant does not serve, in order.
    """

    ops: Ops
    names: dict[str, str]
    report: tuple[str, ...]
    fallbacks: dict[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Model:
    """What a choice is made for."""

    target: str
    cfg: Config
    fmt: str


def choose(text: str, target: str, weights: ModelWeights, functions: Mapping[str, Op] | None = None) -> Chosen:
    """Fill every op as `text` says, for these weights on a machine of `target` ("cpu", "sm90" or "sm100").

    functions: by op, what fills it whatever `text` says.

    text: "reference", "winners" or NAME=VARIANT, or several with commas, later ones over earlier ones; ops that are
    not named hold the reference. NAME is an op, or a problem for all ops that its variants fill. VARIANT is
    "reference", "winner", a file of the problem's variants/ or wrong/, or the path of a Python file that defines either
    custom_kernel, as the problem has it, or a function of the op's name with the op's interface. "winners" fills an op
    where a problem or a kernel of this folder can, else says why not. An op that spans others, and is to hold the
    reference, is the chain of what fills them. ValueError: a VARIANT that cannot be had. Reads the weights where an
    adapter measures them.
    """
    model = _Model(target, weights.config, weights.format)
    choices = {name: Choice(name, "not asked for otherwise") for name in NAMES}
    for item in text.split(","):
        choices |= {choice.op: choice for choice in _item(item.strip(), model)}
    choices |= {op: Choice(op, "given", "a function", function=function) for op, function in (functions or {}).items()}
    choices |= {choice.op: choice for choice in _chained(choices)}
    filled, fallbacks, report = _fitted(list(choices.values()), weights)
    lines = [f"{choice.op}: {choice.name} ({choice.why})" for choice in choices.values()]
    names = {choice.op: choice.name for choice in choices.values()}
    return Chosen(filled, names, (*lines, *report), fallbacks)


def _item(item: str, model: _Model) -> list[Choice]:
    """One of the parts of `text`."""
    if item == "reference":
        return [Choice(name, "asked for") for name in NAMES]
    if item == "winners":
        return [_winner(name, model) for name in NAMES]
    name, _, variant = item.partition("=")
    leading = {op: _leading(op, model) for op in NAMES}
    found = [name] if name in NAMES else [op for op in NAMES if any(p.problem == name for p in leading[op])]
    if not found:  # a problem that leads nowhere fills what it can behind others
        leading = {op: _providers(op) for op in NAMES}
        found = [op for op in NAMES if any(p.problem == name for p in leading[op])]
    if not found or not variant:
        problems = dict.fromkeys(provider.problem for providers in leading.values() for provider in providers)
        raise ValueError(
            f"kernels must be reference, winners or NAME=VARIANT with commas between, NAME one of "
            f"{', '.join(dict.fromkeys((*NAMES, *problems)))}; got {item!r}"
        )
    return [_named(op, variant, model, next((p for p in leading[op] if p.problem == name), None)) for op in found]


def _chained(choices: Mapping[str, Choice]) -> list[Choice]:
    """The ops that span others, hold the reference, and have a part that does not: they are chains of their parts."""
    found: dict[str, Choice] = {}
    for spec in SPECS:
        known = {**choices, **found}
        filled = any(known[part].name != "reference" for part in spec.parts)
        if spec.chain and known[spec.name].name == "reference" and filled:
            why = f"the chain of {', '.join(spec.parts)}"
            found[spec.name] = Choice(spec.name, why, "its parts", chain=spec.chain)
    return list(found.values())


def _providers(op: str) -> tuple[Provider, ...]:
    return next((spec.providers for spec in SPECS if spec.name == op), ())


def _first(op: str, model: _Model) -> Provider | None:
    """The provider that can fill the op, or would for another model; those behind it are fallbacks."""
    return next(iter(_leading(op, model)), None)


def _leading(op: str, model: _Model) -> tuple[Provider, ...]:
    """The first provider that serves such a model, if there is one; then the first of all, if it is another."""
    providers = _providers(op)
    serving = [provider for provider in providers if not _unserved(provider, model)]
    return tuple(dict.fromkeys((*serving[:1], *providers[:1])))


def _unserved(provider: Provider, model: _Model) -> str:
    """Why the provider cannot fill its op for such a model, "" if it can."""
    if not (load.PROBLEMS / provider.problem / "submission.py").is_file():
        return f"no folder problems/{provider.problem} yet"
    if provider.adapt is None:
        return f"no adapter for {provider.problem} yet"
    return provider.serves(model.cfg, model.fmt)


def _winner(op: str, model: _Model, asked: Provider | None = None) -> Choice:
    provider = asked or _first(op, model)
    reason = "no tuned kernel" if provider is None else _unserved(provider, model) or _winnerless(provider, model)
    if not reason:
        # Not submission.custom_kernel, which finds the variant anew in every call: 0.16 ms.
        name = load.winner(load.PROBLEMS / provider.problem, model.target)
        variant = load.variant(provider.problem, name)
        if not (reason := provider.lacks(variant, model.fmt)):
            return Choice(op, provider.scope, f"{provider.problem}/{name}", provider, variant)
    if asked:
        return Choice(op, reason)
    for kernels in KERNELS:
        formats = getattr(kernels, "FORMATS", (model.fmt,))
        if op in kernels.OPS and model.target in kernels.TARGETS and model.fmt in formats:
            name = f"dsv4_forward/{kernels.SOURCE.stem}"
            function, serves = kernels.ops(model.target)[op], getattr(kernels, "SERVES", {}).get(op)
            function = Partial(function, serves) if serves else function
            return Choice(op, "a fused kernel of this folder", name, function=function)
    return Choice(op, reason)


def _winnerless(provider: Provider, model: _Model) -> str:
    """Why the provider's problem has no winner for the machine, "" if it has one."""
    has = model.target in load.winners(load.PROBLEMS / provider.problem)
    return "" if has else f"{provider.problem} has no winner for {model.target}"


def _named(op: str, variant: str, model: _Model, asked: Provider | None) -> Choice:
    """asked: the provider of the problem that was named instead of an op."""
    if variant == "reference":
        return Choice(op, "asked for")
    if variant == "winner":
        return _winner(op, model, asked)
    provider, what = asked or _having(op, variant, model), f"{op}={variant}"
    file = _file(provider, variant, what)
    # In the folder of the problem a file has the problem's interface.
    others = provider is not None and load.PROBLEMS / provider.problem in file.parents
    if not others and op in _functions(file):
        return Choice(op, "a function with the op's interface", str(file), function=_function(file, op))
    if provider is None:
        raise ValueError(f"{what}: {file.name} must define {op}, with the op's interface: no problem is for it")
    if reason := _unserved(provider, model) or _unrunnable(file, model.target):
        raise ValueError(f"{what}: {reason}")
    module = load.from_file(load.PROBLEMS / provider.problem, file)
    if reason := provider.lacks(module, model.fmt):
        raise ValueError(f"{what}: {reason}")
    return Choice(op, provider.scope, f"{provider.problem}/{file.stem}", provider, module)


def _having(op: str, variant: str, model: _Model) -> Provider | None:
    """The provider whose problem has a variant of that name, the first that can fill the op first; else that one."""
    first = _first(op, model)
    for provider in (*([first] if first else []), *_providers(op)):
        if any((folder / f"{variant}.py").is_file() for folder in _folders(provider)):
            return provider
    return first


def _folders(provider: Provider) -> list[Path]:
    return [load.PROBLEMS / provider.problem / part for part in ("variants", "wrong")]


def _file(provider: Provider | None, variant: str, what: str) -> Path:
    folders = _folders(provider) if provider else []
    folders.append(Path(__file__).parent / "wrong")
    for file in (*(folder / f"{variant}.py" for folder in folders), Path(variant)):
        if file.suffix == ".py" and file.is_file():
            return file.resolve()
    known = [file.stem for folder in folders[:-1] for file in sorted(folder.glob("*.py"))]
    also = f", nor one of {provider.problem}'s {', '.join(known)}" if known else ""
    raise ValueError(f"{what}: no file {variant}{also}")


def _unrunnable(file: Path, target: str) -> str:
    """Why the variant in `file` is not for a machine of `target`, "" if it is."""
    targets = load.constants(file, "TARGETS").get("TARGETS", ())
    if file.stem.startswith("peer_"):
        return "a baseline is there to be compared with, not to be built on"
    if target not in targets:
        return f"{file.stem} is for {', '.join(targets) or 'no target'}, not {target}"
    missing = load.missing_cpu_flags(file) if target == "cpu" else []
    return f"this CPU lacks {', '.join(missing)}" if missing else ""


def _functions(file: Path) -> set[str]:
    """Names of the functions that `file` defines, read without running it."""
    return {node.name for node in ast.parse(file.read_text(), str(file)).body if isinstance(node, ast.FunctionDef)}


def _function(file: Path, name: str) -> Op:
    spec = importlib.util.spec_from_file_location(f"{__package__}._{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return vars(module)[name]


def _fitted(choices: list[Choice], weights: ModelWeights) -> tuple[Ops, dict[str, tuple[str, ...]], tuple[str, ...]]:
    """Fit each variant to the weights, once for all ops of an adapter. -> the ops, their fallbacks by name, lines."""
    functions = {choice.op: choice.function for choice in choices if choice.function}
    if "all_experts" in functions:  # a layer asks for the op where it says what it serves
        functions["all_experts"] = Joined(functions["all_experts"], lambda _w13, _x: True)
    filled = [choice for choice in choices if choice.module]
    used = {choice.provider.problem: choice for choice in reversed(filled)}
    fallbacks: dict[str, tuple[str, ...]] = {}
    report: list[str] = []
    for name, adapt in dict.fromkeys((choice.module.__name__, choice.provider.adapt) for choice in filled):
        mine = [choice for choice in filled if (choice.module.__name__, choice.provider.adapt) == (name, adapt)]
        providers = _providers(mine[0].op)
        fallback, order, also = _fallback(providers[providers.index(mine[0].provider) + 1 :], used, weights)
        found = adapt(mine[0].module, weights, fallback)
        functions |= {choice.op: found.functions[choice.op] for choice in mine}
        fallbacks |= {choice.op: order for choice in mine}
        report += (*found.report, *also)
    table = replace(REFERENCE, **functions)
    chained = {choice.op: choice.chain for choice in choices if choice.chain}
    for spec in SPECS:  # in the order of ops, so that a chain's parts may be chains
        found = vars(table)[spec.name]
        if isinstance(found, Partial):
            table = replace(table, **{spec.name: found.before(spec.chain(table))})
        if spec.name in chained:
            table = replace(table, **{spec.name: chained[spec.name](table)})
    return table, fallbacks, tuple(report)


def _fallback(
    providers: tuple[Provider, ...], used: dict[str, Choice], weights: ModelWeights
) -> tuple[Fallback, tuple[str, ...], tuple[str, ...]]:
    """Build what takes over behind an op's first provider: those of `providers` that are in use, in order, then the
    reference. -> it, the names in order, lines to report. used: the choice that has a problem's variant, by problem.
    """
    fallback, order, report = Fallback(REFERENCE), (Fallback(REFERENCE).name,), ()
    for provider in reversed([provider for provider in providers if provider.problem in used]):
        choice = used[provider.problem]
        found = provider.adapt(choice.module, weights, fallback)
        report = (*found.report, *report)
        if found.functions:
            filled = replace(fallback.ops, **found.functions)
            fallback = Fallback(filled, choice.name, found.served | fallback.served)
            order = (choice.name, *order)
    return fallback, order, report
