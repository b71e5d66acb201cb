"""Choose the kernels that the option --kernels names, for the check and for generate.py; say of it what was typed.

ops.choose reads the same text, and later parts of it go over earlier ones. On a command line a part that has no effect
is a slip.
"""

import ast
from pathlib import Path

from problems.common import load
from problems.dsv4_forward import ops
from problems.dsv4_forward.ops import Chosen, OpSpec, Provider
from problems.dsv4_forward.weights.tree import ModelWeights

EVERYWHERE = ("reference", "winners")  # parts that are about every op
OWN = load.PROBLEMS / "dsv4_forward" / "wrong"


def choose(text: str, target: str, weights: ModelWeights) -> Chosen:
    """Return ops.choose(text, target, weights). ValueError as `see`, and as ops.choose."""
    see(text, target)
    try:
        return ops.choose(text, target, weights)
    except ValueError as error:
        raise ValueError(_as_typed(str(error), text)) from error


def see(text: str, target: str) -> None:
    """Raise ValueError unless `text` names ops or problems that there are, each once, with variants that there are."""
    parts = [part.strip() for part in text.split(",")]
    names = [part.partition("=")[0] for part in parts]
    for part, name in zip(parts, names, strict=True):
        if part not in EVERYWHERE:
            _see_part(part, target)
        elif part != parts[0] or names.count(name) > 1:
            raise ValueError(f"--kernels: {part} is about every op, so it must come first, and once, got {text!r}")
        if names.count(name) > 1:
            raise ValueError(f"--kernels must name {name} once, got {text!r}: leave one of the two out")


def _see_part(part: str, target: str) -> None:
    """Raise ValueError unless NAME is an op or a problem, and VARIANT is there."""
    name, _, variant = part.partition("=")
    specs = [spec for spec in ops.SPECS if name in (spec.name, *(provider.problem for provider in spec.providers))]
    if not specs:
        problems = (provider.problem for spec in ops.SPECS for provider in spec.providers)
        known = ", ".join(dict.fromkeys((*ops.NAMES, *problems)))
        raise ValueError(
            f"--kernels must be reference, winners or NAME=VARIANT with commas between, NAME one of {known}; "
            f"got {part!r}"
        )
    if variant in ("reference", "winner"):
        return
    providers = [one for spec in specs for one in spec.providers if name in (spec.name, one.problem)]
    folders = [load.PROBLEMS / one.problem / folder for one in providers for folder in ("variants", "wrong")]
    files = [*(folder / f"{variant}.py" for folder in (*folders, OWN)), Path(variant)]
    if found := [file for file in files if file.suffix == ".py" and file.is_file()]:
        _see_folder(part, found[0].resolve(), [one.problem for one in providers])
        _see_file(part, found[0].resolve(), [spec.name for spec in specs], [one.problem for one in providers])
        return
    own = next((spec for spec in specs if spec.name == name), None)
    raise ValueError(
        f"--kernels {part}: VARIANT must be reference, winner, {_known(providers, own, target)}or the path of a Python "
        f"file, got {variant!r}"
    )


def _see_folder(part: str, file: Path, problems: list[str]) -> None:
    """Raise ValueError for a path in the folder of a problem other than the first of `problems`, which can fill the op:
    ops.choose takes it for a file of the first one.
    """
    name, _, variant = part.partition("=")
    folder = file.relative_to(load.PROBLEMS).parts[0] if load.PROBLEMS in file.parents else OWN.parent.name
    if Path(variant).suffix != ".py" or folder in (OWN.parent.name, *problems[:1]):
        return
    if folder not in problems:
        raise ValueError(f"--kernels {part}: a file of {folder} cannot fill {name}: give one of {name}'s problem")
    places = [load.PROBLEMS / one / below / file.name for one in problems for below in ("variants", "wrong")]
    first = next((place for place in places if place.is_file()), None)
    plain = f"{name if first == file else folder}={file.stem}"
    raise ValueError(f"--kernels {part}: a file of {folder} must be named without its path, as {plain}")


def _see_file(part: str, file: Path, wanted: list[str], problems: list[str]) -> None:
    """Raise ValueError unless the file is Python and defines an op of `wanted`, or custom_kernel for `problems`."""
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except (SyntaxError, ValueError) as error:  # ValueError: a null byte
        where = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise ValueError(f"--kernels {part}: {file}{where}: not Python: {getattr(error, 'msg', error)}") from error
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    names |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    names |= {a.asname or a.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for a in node.names}
    if names & {*wanted, *(["custom_kernel"] if problems else [])}:
        return
    op = wanted[0] if len(wanted) == 1 else f"one of {', '.join(wanted)}"
    also = f", or custom_kernel, as {' or '.join(dict.fromkeys(problems))} has it" if problems else ""
    raise ValueError(f"--kernels {part}: {file.name} must define {op}, with the op's interface (torch_ops/){also}")


def _known(providers: list[Provider], own: OpSpec | None, target: str) -> str:
    """What else VARIANT may be on a machine of `target`. own: the op, where one is named."""
    said = []
    for problem in dict.fromkeys(one.problem for one in providers):
        files = sorted((load.PROBLEMS / problem / "variants").glob("*.py"))
        names = [file.stem for file in files if _runs(file, target)]
        said.append(f"a variant of {problem} ({', '.join(names) or f'none for {target}'}), ")
    if said:
        said.append(f"a file of {'its' if len(said) == 1 else 'their'} wrong/, ")
    wrong = [file.stem for file in sorted(OWN.glob("*.py")) if own and f"\ndef {own.name}(" in file.read_text()]
    return "".join(said) + (f"a file of dsv4_forward/wrong ({', '.join(wrong)}), " if wrong else "")


def _runs(file: Path, target: str) -> bool:
    """Whether a variant is for such a machine and, on a CPU, for this one; baselines are not."""
    if file.stem.startswith("peer_") or target not in load.constants(file, "TARGETS").get("TARGETS", ()):
        return False
    return target != "cpu" or not load.missing_cpu_flags(file)


def _as_typed(said: str, text: str) -> str:
    """What ops.choose says of an op and its variant, said of the part of the option that asked for them."""
    for part in text.split(","):
        name, _, variant = part.strip().partition("=")
        for op in ops.NAMES:
            if said.startswith(f"{op}={variant}: ") and variant:
                of = "" if op == name else f"for {op}, "
                return f"--kernels {part.strip()}: {of}{said.partition(': ')[2]}"
    return said
