"""`Ops`: the functions that a walk through the model calls (layers.py); `choose` fills it for given weights.

What computes an op is the first of its kernels that serves the call, behind them torch: WINNERS names them in order.
FUSED ops do several steps at once: where no kernel serves a call they return NotImplemented, and the walk does the
steps one by one.
"""

import ast
import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from problems.common import load
from problems.dsv4_forward.kernels.arguments import Own
from problems.dsv4_forward.kernels.cache_rows import LayerRows
from problems.dsv4_forward.kernels.copies import Copies
from problems.dsv4_forward.kernels.dense import Dense
from problems.dsv4_forward.kernels.experts import Experts
from problems.dsv4_forward.kernels.fmha import Attention
from problems.dsv4_forward.kernels.matmuls import Matmuls
from problems.dsv4_forward.kernels.norm import Norm
from problems.dsv4_forward.kernels.router import Router
from problems.dsv4_forward.kernels.start import Start
from problems.dsv4_forward.prepared import Fitted
from problems.dsv4_forward.torch_ops import experts, fmha, indexer, linear, mhc, norm, router, rows, start
from problems.dsv4_forward.weights.tree import ModelWeights

Op = Callable[..., object]


@dataclass(frozen=True)
class Ops:
    """A function for each op, with the interface of the function that REFERENCE has there; all write in place."""

    start: Op
    embed: Op
    rms_norm: Op
    mhc_pre: Op
    mhc_post: Op
    mhc_site: Op
    matmuls: Op
    linear: Op
    grouped_linear: Op
    two_linears: Op
    norm_linears: Op
    layer_rows: Op
    choose: Op
    fmha: Op
    route: Op
    experts: Op
    shared: Op
    all_experts: Op


REFERENCE = Ops(
    start=start.start,
    embed=start.embed,
    rms_norm=norm.rms_norm,
    mhc_pre=mhc.pre,
    mhc_post=mhc.post,
    mhc_site=mhc.site,
    matmuls=linear.matmuls,
    linear=linear.linear,
    grouped_linear=linear.grouped_linear,
    two_linears=linear.two_linears,
    norm_linears=linear.norm_linears,
    layer_rows=rows.layer_rows,
    choose=indexer.choose,
    fmha=fmha.fmha,
    route=router.route,
    experts=experts.experts,
    shared=experts.shared,
    all_experts=experts.all_experts,
)
NAMES = tuple(field.name for field in fields(Ops))
FUSED = ("mhc_site", "two_linears", "norm_linears", "all_experts")
OWN = "dsv4_forward"  # kernels of this folder, of the first of KERNELS that has the op
KERNELS = (Start, Copies, Norm, Matmuls, Dense, LayerRows, Router, Attention, Experts)
# The problems whose winners compute an op, in order. linear_decode takes up to 32 tokens; OWN multiplies any number by
# FP8 and NVFP4 matrices, attends where pages are plain, and has experts in bf16.
WINNERS: dict[str, tuple[str, ...]] = {
    "start": (OWN,),
    "embed": (OWN,),
    "rms_norm": (OWN,),
    "mhc_pre": (OWN,),
    "mhc_post": (OWN,),
    "mhc_site": ("mhc_site",),
    "matmuls": (OWN,),
    "linear": ("linear_decode", OWN),
    "grouped_linear": ("linear_decode", OWN),
    "two_linears": ("linear_decode",),
    "norm_linears": ("linear_decode",),
    "layer_rows": (OWN,),
    "choose": ("indexer",),
    "fmha": ("fmha_prefill", "fmha_decode", OWN),
    "route": (OWN,),
    "experts": ("moe_gemm", OWN),
    "shared": ("linear_decode", OWN, "moe_gemm"),
    "all_experts": ("moe_gemm",),
}
ASKED_FOR = dict.fromkeys(("linear", "grouped_linear"), ("nvfp4_gemv",))  # fills them too, but leads nowhere


@dataclass(frozen=True)
class Kernel:
    """What may fill an op: a variant of `problem` in `file`, a function of the op's name in `file`, or one of `own`.

    asked: the part of --kernels that named it.
    """

    name: str  # such as "nvfp4_gemv/cpu_avx2"
    problem: str = ""
    file: Path | None = None
    own: type[Own] | None = None
    asked: str = ""

    def function(self, op: str, target: str) -> Op:
        """Return the function of the op, loaded; not of a problem's variant."""
        if self.own:
            return self.own.ops(target)[op]
        spec = importlib.util.spec_from_file_location(f"{__package__}._{self.file.stem}", self.file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return vars(module)[op]


@dataclass(frozen=True)
class Chosen:
    """ops: ready for the weights that they were chosen for. names: the first that fills each op, "reference" or such as
    "nvfp4_gemv/cpu_avx2". report: a line for each op with all that fill it, then what the problems have to say.
    """

    ops: Ops
    names: dict[str, str]
    report: tuple[str, ...]


def choose(text: str, target: str, weights: ModelWeights, functions: Mapping[str, Op] | None = None) -> Chosen:
    """Fill every op as `text` says, for these weights on a machine of `target` ("cpu", "sm90" or "sm100").

    text: as `kernels` takes it. functions: by op, what fills it whatever `text` says. ValueError: as `kernels`, or a
    variant that was asked for and serves no call of this model. Reads the weights where a problem prepares them.
    """
    filled = kernels(text, target)
    given = functions or {}
    filled = {op: () if op in given else several for op, several in filled.items()}
    fitted = _fitted(filled, weights)
    table: dict[str, Op] = {}
    names: dict[str, str] = {}
    lines: list[str] = []
    for op in NAMES:
        found, left = [("a function", given[op])] if op in given else [], ""
        for one in filled[op]:
            made = fitted[one.problem, one.file] if one.problem else Fitted({op: one.function(op, target)})
            if op in made.functions:
                found.append((one.name, made.functions[op]))
            else:
                left += f" (not {one.name}: {made.refused[op]})"
        table[op] = _first([function for _, function in found], op)
        names[op] = found[0][0] if found else "reference"
        lines.append(f"{op}: {', '.join((*(name for name, _ in found), 'reference'))}{left}")
    if not given and not any(filled.values()):
        return Chosen(REFERENCE, names, tuple(lines))
    return Chosen(Ops(**table), names, (*lines, *(line for one in fitted.values() for line in one.report)))


def _fitted(filled: Mapping[str, Sequence[Kernel]], weights: ModelWeights) -> dict[tuple[str, Path | None], Fitted]:
    """Fit each variant to the weights, once, for all ops that it may fill. -> by problem and file. ValueError: one that
    was asked for serves none of the ops that it was asked for.
    """
    wanted: dict[tuple[str, Path | None], list[str]] = {}
    for op, several in filled.items():
        for one in several:
            if one.problem:
                wanted.setdefault((one.problem, one.file), []).append(op)
    fitted = {}
    for (problem, file), ops in wanted.items():
        folder = load.PROBLEMS / problem
        fitted[problem, file] = load.module(folder, "in_model").fit(load.from_file(folder, file), weights, ops)
    asked = [(one.asked, op, fitted[one.problem, one.file]) for op in filled for one in filled[op] if one.problem]
    for part in dict.fromkeys(part for part, _, _ in asked if part):
        several = [(op, made) for of, op, made in asked if of == part]
        if not any(op in made.functions for op, made in several):
            op, made = several[0]
            raise ValueError(f"--kernels {part}: {op}: {made.refused[op]}")
    return fitted


def _first(functions: Sequence[Op], op: str) -> Op:
    """The first of the functions that serves a call, then torch, or the steps of an op of several."""
    rest = apart if op in FUSED else getattr(REFERENCE, op)
    if not functions:
        return rest

    def run(**call: object) -> object:
        for function in functions:
            if function(**call) is not NotImplemented:
                return None
        return rest(**call)

    return run


def apart(**_: object) -> object:
    """Serve no call: the walk does the steps of the op one by one."""
    return NotImplemented


# ---------------------------------------------------------------- what --kernels says


def kernels(text: str, target: str) -> dict[str, tuple[Kernel, ...]]:
    """Return by op the kernels that `text` names, in order; torch is behind them.

    text: parts with commas between, later ones over earlier ones. "reference" or "winners", first, is about every op;
    without it all hold the reference. NAME=VARIANT: NAME is an op, which gets that kernel alone, or a problem, whose
    variant comes first in all ops that it can fill. VARIANT is "reference", "winner", a file of the problem's variants/
    or wrong/, or the path of a Python file, in such a folder or with a function of the op's name and interface.
    ValueError: a name that is none or is there twice, a variant that is not for `target`.
    """
    parts = [part.strip() for part in text.split(",")]
    names = [part.partition("=")[0] for part in parts]
    filled: dict[str, tuple[Kernel, ...]] = dict.fromkeys(NAMES, ())
    for part, name in zip(parts, names, strict=True):
        if part in ("reference", "winners") and (part != parts[0] or names.count(name) > 1):
            raise ValueError(f"--kernels: {part} is about every op, so it must come first, and once, got {text!r}")
        if names.count(name) > 1:
            raise ValueError(f"--kernels must name {name} once, got {text!r}: leave one of the two out")
        if part == "winners":
            filled = {op: _winners(op, target) for op in NAMES}
        elif part != "reference":
            filled |= _part(part, target, filled)
    return filled


def problems_of(op: str) -> tuple[str, ...]:
    """Return the problems whose variants may fill an op."""
    return tuple(one for one in (*WINNERS[op], *ASKED_FOR.get(op, ())) if one != OWN)


def _winners(op: str, target: str) -> tuple[Kernel, ...]:
    found = (_winner(problem, op, target) for problem in WINNERS[op])
    return tuple(one for one in found if one)


def _winner(problem: str, op: str, target: str, asked: str = "") -> Kernel | None:
    """None: there is none for the target."""
    if problem == OWN:
        for one in KERNELS:
            if op in one.OPS and target in one.TARGETS:
                return Kernel(f"{OWN}/{one.SOURCE.stem}", own=one)
        return None
    folder = load.PROBLEMS / problem
    if target not in load.winners(folder):
        return None
    # Not submission.custom_kernel, which finds the variant anew in every call: 0.16 ms.
    name = load.winner(folder, target)
    return Kernel(f"{problem}/{name}", problem, folder / "variants" / f"{name}.py", asked=asked)


def _part(part: str, target: str, filled: Mapping[str, tuple[Kernel, ...]]) -> dict[str, tuple[Kernel, ...]]:
    """NAME=VARIANT: what fills the ops that it names. ValueError as `kernels`."""
    name, _, variant = part.partition("=")
    ops = [name] if name in NAMES else [op for op in NAMES if name in problems_of(op)]
    if not ops:
        known = ", ".join(dict.fromkeys((*NAMES, *(one for op in NAMES for one in problems_of(op)))))
        raise ValueError(
            f"--kernels must be reference, winners or NAME=VARIANT with commas between, NAME one of {known}; "
            f"got {part!r}"
        )
    others = {op: () if name in NAMES else tuple(one for one in filled[op] if one.problem != name) for op in ops}
    if variant == "reference":
        return others
    if variant == "winner" and name in NAMES:
        return {name: _winners(name, target)}
    problems = list(problems_of(name)) if name in NAMES else [name]
    if variant == "winner":
        one = _winner(name, ops[0], target, part)
        if one is None:
            raise ValueError(f"--kernels {part}: {name} has no winner for {target}")
    else:
        one = _named(part, variant, name if name in NAMES else "", problems, target)
    return {op: (one, *others[op]) for op in ops}


def _named(part: str, variant: str, op: str, problems: Sequence[str], target: str) -> Kernel:
    """The file that VARIANT names. op: what its function must be called; "": of a problem's variant nothing."""
    places = [*(load.PROBLEMS / problem / "variants" / f"{variant}.py" for problem in problems), Path(variant)]
    file = next((place.resolve() for place in places if place.suffix == ".py" and place.is_file()), None)
    if file is None:
        file = next((file for problem in (*problems, *[OWN] * bool(op)) for file in _wrong(problem, variant)), None)
    if file is None:
        raise ValueError(
            f"--kernels {part}: VARIANT must be reference, winner, {_known(problems, op, target)}or the path of a "
            f"Python file, got {variant!r}"
        )
    folder = file.relative_to(load.PROBLEMS).parts[0] if load.PROBLEMS in file.parents else OWN
    if folder not in (OWN, *problems):
        raise ValueError(f"--kernels {part}: a file of {folder} cannot fill {op or problems[0]}")
    defined = _defined(part, file)
    if problems and "custom_kernel" in defined and (folder != OWN or op not in defined):
        if reason := _unrunnable(file, target):
            raise ValueError(f"--kernels {part}: {reason}")
        problem = problems[0] if folder == OWN else folder
        return Kernel(f"{problem}/{file.stem}", problem, file, asked=part)
    if op not in defined:
        wanted = f"{op}, with the op's interface (torch_ops/)" if op else ""
        kernel = f"custom_kernel, as {' or '.join(problems)} has it" if problems else ""
        raise ValueError(f"--kernels {part}: {file.name} must define {', or '.join(filter(None, (wanted, kernel)))}")
    return Kernel(str(file), file=file, asked=part)


def _defined(part: str, file: Path) -> set[str]:
    """Names that a file defines, read without running it. ValueError: it is not Python."""
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except (SyntaxError, ValueError) as error:  # ValueError: a null byte
        where = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise ValueError(f"--kernels {part}: {file}{where}: not Python: {getattr(error, 'msg', error)}") from error
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    names |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return names | {a.asname or a.name for node in tree.body if isinstance(node, ast.ImportFrom) for a in node.names}


def _known(problems: Sequence[str], op: str, target: str) -> str:
    """What else VARIANT may be on a machine of `target`."""
    said = []
    for problem in problems:
        files = sorted((load.PROBLEMS / problem / "variants").glob("*.py"))
        names = [file.stem for file in files if not _unrunnable(file, target)]
        said.append(f"a variant of {problem} ({', '.join(names) or f'none for {target}'}), ")
    if said:
        said.append(f"a kernel of {'its' if len(said) == 1 else 'their'} wrong.py, ")
    names = [file.stem for file in _wrong(OWN) if op and f"\ndef {op}(" in file.read_text()]
    return "".join(said) + (f"a kernel of dsv4_forward/wrong.py ({', '.join(names)}), " if names else "")


def _wrong(problem: str, name: str | None = None) -> list[Path]:
    """Files of the problem's wrong kernels, or of one."""
    wrong = importlib.import_module("problems.wrong")  # which a judged submission does not bring along
    return [file for file in wrong.write(load.PROBLEMS / problem) if name in (None, file.stem)]


def _unrunnable(file: Path, target: str) -> str:
    """Why the variant in `file` is not for this machine, one of `target`; "" if it is."""
    targets = load.constants(file, "TARGETS").get("TARGETS", ())
    if file.stem.startswith("peer_"):
        return "a baseline is there to be compared with, not to be built on"
    if target not in targets:
        return f"{file.stem} is for {', '.join(targets) or 'no target'}, not {target}"
    missing = load.missing_cpu_flags(file) if target == "cpu" else []
    return f"this CPU lacks {', '.join(missing)}" if missing else ""
