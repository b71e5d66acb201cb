"""Pack a variant as one file for GPU MODE, and a problem as a folder in its format.

The format is that of gpu-mode/kernelbot: directives in the first block of comments, one file of at most 1 MB, without
the word of rule 1; task.yml, reference.py and task.py in a folder, which is put beside an eval.py of theirs.
"""

import ast
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import yaml

from harness.problem import commits, sources
from harness.problem.folders import Case, Problem, Submission
from leaderboard import bundle, inline
from leaderboard.bundle import FOLDER, Bundle
from problems.common import load

MOST_BYTES = 1_000_000  # of a submission, as the service's own check counts
# By problem, the service's board and the GPU that it runs on; by target the GPU of other boards.
BOARDS = {"nvfp4_gemv": ("nvfp4_gemv", "NVIDIA")}
BOARD_TARGETS = {"nvfp4_gemv": "sm100"}
GPUS = {"sm90": "H100", "sm100": "B200"}
UNITS = {".cu", ".cpp", ".cc", ".cxx", ".c"}  # what is compiled; headers go into these

# Names that the packed file adds begin with _packed, so that they are none of the variant's.
SOURCES = '''
_packed_sources = {{{sources}}}


def _packed_written():
    """A folder with the sources, which is removed when this process ends. Builds are kept by their contents."""
    import atexit
    import os
    import pathlib
    import shutil
    import tempfile

    os.environ.setdefault("KERNEL_BUILD_DIR", str(pathlib.Path.home() / ".cache" / "packed-kernels"))
    folder = pathlib.Path(tempfile.mkdtemp(prefix="kernel-"))
    atexit.register(shutil.rmtree, folder, True)
    for name, text in _packed_sources.items():
        (folder / name).write_text(text)
    return folder


{folder} = _packed_written()
'''
# What the service passes is a plain tuple, since it copies data by hand; the tuples' names come back here.
TYPED = '''def _packed_named(kind, value):
    """`value`, a tuple of which a service may have dropped the names, as the NamedTuple `kind`, and so on within it."""
    if type(value) is not tuple and not isinstance(value, list):
        return value
    if getattr(kind, "__origin__", None) is tuple and kind.__args__[-1] is ...:
        return tuple(_packed_named(kind.__args__[0], part) for part in value)
    if not hasattr(kind, "_fields"):
        return value
    parts = zip(kind._fields, value, strict=True)
    return kind(*(_packed_named(kind.__annotations__[name], part) for name, part in parts))
'''
CALL = '''_packed_kernel = custom_kernel


def custom_kernel(data):
    """Call the variant on {data}, in this order{prepared}."""
{body}    return _packed_kernel(data)
'''
PREPARE = """    if getattr(data.weights, "_fields", None) == {weights}._fields:
        data = data._replace(weights=prepare(data.weights))
"""


@dataclass(frozen=True)
class Packed:
    """text: of the file. board: the service's board, "" if it has none of this problem."""

    text: str
    board: str
    target: str
    warnings: list[str]


def pack(problem: Problem, variant: Submission, target: str, gpu: str, notes: list[str]) -> Packed:
    """Return the file for `variant`. gpu: of the directive, "" for the target's own; notes: lines for its header.
    ValueError: it cannot be linked, is larger than MOST_BYTES, or holds the word.
    """
    task = problem.folder / "task.py"
    linked = Bundle(variant.file, {"task": task})
    linked.module_of("task")
    call, roots = _call(linked, variant)
    own = [path for path in sources.files_of(variant.file) if path.suffix in UNITS]
    units = {path.name: inline.text_of(path) for path in own if path.name.startswith(f"{variant.file.stem}.")}
    files = FOLDER in (body := linked.text(roots))
    imports = {*linked.import_lines(roots)}
    prelude = []
    if files:
        shown = "".join(f"\n    {name!r}: {inline.quoted(text)}," for name, text in units.items())
        prelude.append(SOURCES.format(sources=f"{shown}\n" if shown else "", folder=FOLDER).strip("\n"))
    board, on = BOARDS.get(problem.name, ("", ""))
    fits = BOARD_TARGETS.get(problem.name, target) == target
    warnings = [] if fits else [f"The board {board} runs on {BOARD_TARGETS[problem.name]}: this is for {target}."]
    gpu = gpu or (on if board and fits else GPUS.get(target, ""))
    notes = [*notes, *warnings]
    head = [f"#!POPCORN leaderboard {board or problem.name}", *([f"#!POPCORN gpu {gpu}"] if gpu else [])]
    head += ["#", *(f"# {line}" for note in notes for line in textwrap.wrap(note, 117))]
    parts = [
        "\n".join(head) + "\n" + f'"""{_docstring(variant.file)}"""',
        "\n".join(_sorted(imports)),
        *prelude,
        body,
        *call,
    ]
    if any("_packed" in module.text for module in linked.modules.values()):
        raise ValueError("names that hold _packed are for the packed file: rename yours")
    text = parts[0] + "\n\n" + "\n\n\n".join(part.strip("\n") for part in parts[1:]) + "\n"
    return Packed(checked(text), board, target, warnings)


def checked(text: str) -> str:
    """`text`, if the service would take it. ValueError, naming the line, if not."""
    size = len(text.encode())
    if size > MOST_BYTES:
        raise ValueError(f"the packed file has {size} bytes, at most {MOST_BYTES} are taken: leave headers out")
    for number, line in enumerate(text.split("\n"), 1):
        if inline.WORD.search(line):
            raise ValueError(f'line {number} of the packed file has the refused word "stream": {line.strip()[:80]}')
    ast.parse(text)
    return text


def _sorted(imports: Iterable[str]) -> list[str]:
    return sorted(imports, key=lambda line: (line.startswith("from"), line))


def _docstring(file: Path) -> str:
    return (ast.get_docstring(load.parse(file)) or file.stem).replace("\\", "\\\\").replace('"""', "'''")


def _call(linked: Bundle, variant: Submission) -> tuple[list[str], list[bundle.Name]]:
    """-> (what follows the variant: custom_kernel for plain tuples; the names of task.py that it needs)."""
    classes = commits.data_classes(linked.files["task"])
    if not classes:
        return [], []
    top = next(iter(classes))
    spell = {name: linked.linked("task", name) for name in classes}
    body = f"    data = _packed_named({spell[top]}, data)\n"
    weights = next((kind for field, kind in classes[top].items() if field == "weights"), "")
    prepares = weights in classes and any(s.names == ["prepare"] for s in linked.main.statements)
    if prepares:
        body += PREPARE.format(weights=spell[weights])
    said = ". Its weights are prepared within the call where no service has done that" if prepares else ""
    call = CALL.format(data=f"({', '.join(classes[top])})", prepared=said, body=body)
    return [TYPED, call], [("task", name) for name in classes]


# ---------------------------------------------------------------- a folder for problems that have no board there

GENERATE = '''

def _packed_value(word: object) -> object:
    """An argument as task.py has it: cases are passed as text, in which true, false and null are words."""
    return {{"True": True, "False": False, "None": None}}.get(word, word) if isinstance(word, str) else word


_packed_input = generate_input


def generate_input({arguments}) -> {data}:
    """A call's data on the GPU, or on a CPU where there is none."""
    case = {{name: _packed_value(word) for name, word in locals().items()}}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return {made}
'''
CHECK = '''

{typed}

_packed_reference = ref_kernel


def ref_kernel(data):
    """The answer as a submission gives it, rounded to the dtypes of the outputs. data: as generate_input makes it, or
    a copy without names.
    """
    data = _packed_named({data}, data)
    exact = _packed_reference({given})
    exact = exact if isinstance(exact, tuple) else (exact,)
    outputs = [getattr({holder}, name) for name in {outputs!r}]
    rounded = [torch.empty_like(output).copy_(one) for output, one in zip(outputs, exact, strict=True)]
    return tuple(rounded) if len(rounded) > 1 else rounded[0]


def check_implementation(data, output) -> tuple[bool, str]:
    """(whether `output` is right, what is wrong), by the exact answer, in higher precision."""
    data = _packed_named({data}, data)
    result = compare(data, _packed_reference({given}), output)
    return result.ok, result.message
'''
UTILS = '''"""What an eval.py of the service takes from here."""

import random

import numpy
import torch


def set_seed(seed: int = 42) -> None:
    """Seed every generator."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def get_device() -> torch.device:
    """The device that data are on."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def clear_l2_cache() -> None:
    """Overwrite more than any L2 cache holds."""
    torch.empty(2**28, dtype=torch.uint8, device="cuda").fill_(42)
'''

# Names of task.py that only this judge reads; with OUTPUTS it takes a folder for one of this project's format.
OURS = (
    "OUTPUTS",
    "INOUT",
    "OPAQUE",
    "TESTS",
    "BENCHMARKS",
    "BENCHMARKS_CPU",
    "BENCHMARKS_SM100",
    "ONLY_BY_TARGET",
    "PRECISION",
)


def task_folder(problem: Problem) -> dict[str, str]:
    """The files of a folder in the service's format, by name. ValueError: the problem cannot be linked."""
    task_file, reference_file = problem.folder / "task.py", problem.folder / "reference.py"
    classes = commits.data_classes(task_file)
    if not classes:
        raise ValueError(
            f"{problem.name}/task.py must say what a call receives, to be packed: input_t = its NamedTuple that "
            "generate_input returns"
        )
    data = next(iter(classes))
    task, reference = Bundle(task_file, {}), Bundle(reference_file, {})
    wanted = [name for s in task.main.statements for name in s.names if name not in OURS]
    roots = [("task", name) for name in wanted]
    made = "_packed_input(**case, device=device)"
    split = any("generate_weights" in one.names for one in reference.main.statements)
    if split:
        made = f"{data}(generate_weights(**case, device=device), *{made})"
    arguments = ", ".join([*problem.tests[0].params, "seed"])
    kept = [
        (reference.main.key, name)
        for one in reference.main.statements
        for name in one.names
        if name != "check_implementation"
    ]
    lines = {*reference.import_lines(kept, whole=False), "import torch", f"from task import {data}"}
    here = [name for name in OURS if f"from task import {name}" in lines]  # which the reference wants all the same
    lines -= {f"from task import {name}" for name in here}
    said = load.constants(task_file, *here, "INOUT", "OUTPUTS")
    inout = bool(said.get("INOUT"))  # then the reference may overwrite what it gets
    lines |= {"import copy"} if inout else set()
    text = f'"""{_docstring(reference_file)}"""\n\n' + "\n".join(_sorted(lines)) + "\n\n\n"
    text += "".join(f"{name} = {said[name]!r}\n" for name in here) + ("\n\n" if here else "")
    text += f"{reference.text(kept, whole=False)}\n" + GENERATE.format(arguments=arguments, data=data, made=made)
    given = "copy.deepcopy(data)" if inout else "data"
    form = {"holder": "data.outputs" if split else "data", "outputs": said["OUTPUTS"]}
    text += CHECK.format(data=data, typed=TYPED.rstrip(), given=given, **form)
    both = f'"""{_docstring(task_file)}"""\n\n' + "\n".join(_sorted(task.import_lines(roots, whole=False)))
    both += f"\n\n\n{task.text(roots, whole=False)}\n"
    files = [{"name": "submission.py", "source": "@SUBMISSION@"}]
    files += [{"name": name, "source": name} for name in ("task.py", "reference.py", "utils.py")]
    spec = {
        "files": [*files, {"name": "eval.py", "source": "../eval.py"}],
        "lang": "py",
        "description": _docstring(task_file) + "\n",
        "config": {"main": "eval.py"},
        "ranking_by": problem.ranking_by,
        "tests": [_case(case) for case in problem.tests],
        "benchmarks": [_case(case) for case in problem.benchmarks["cuda"]],
    }
    yml = yaml.safe_dump(spec, sort_keys=False, width=120, default_flow_style=None)
    head = "# Put this folder into a set of problems of the service, beside whose folders its eval.py is.\n"
    found = {"task.yml": head + yml, "task.py": both, "reference.py": text, "utils.py": UTILS}
    for name, content in found.items():
        if name.endswith(".py"):
            ast.parse(content, name)
    return found


def _case(case: Case) -> dict:
    return {**case.params, "seed": case.seed}
