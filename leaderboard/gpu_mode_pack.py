"""Pack a variant as one file for GPU MODE, in which the modules and sources that it uses are texts.

When the file is imported, it writes these to a temporary folder and imports the modules from there, as a package of a
name that nothing else has. Of the variant's own statements only the imports of these modules change. The format is that
of gpu-mode/kernelbot: directives in the first comments, at most 1 MB, without the word of rule 1.
"""

import ast
import hashlib
import re
import textwrap
from pathlib import Path

from harness.problem import sources
from harness.problem.folders import Problem, Submission
from harness.problem.scan import WORD
from problems.common import build, load

MOST_BYTES = 1_000_000  # of a submission, as the service's own check counts
BOARDS = {"nvfp4_gemv": ("sm100", "NVIDIA")}  # by problem, of the service's board: the target and the GPU it runs on
GPUS = {"sm90": "H100", "sm100": "B200"}  # of other boards
LOADER = '''
_packed_files = {{
{files}}}


def _packed_write():
    """Write the files to a folder, which goes with this process, for imports. Return the place beside the sources."""
    import atexit, os, pathlib, shutil, sys, tempfile

    os.environ.setdefault("KERNEL_BUILD_DIR", str(pathlib.Path.home() / ".cache" / "packed-kernels"))
    folder = pathlib.Path(tempfile.mkdtemp(prefix="kernel-"))
    atexit.register(shutil.rmtree, folder, True)
    for name, text in _packed_files.items():
        (folder / "{package}" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "{package}" / name).write_text(text)
    sys.path.append(str(folder))
    return str(folder / "{package}" / "{name}")


{place}_packed_write()
import torch
import {package}.task as _packed_task
'''
# Services refuse the word of rule 1 in every file. What cuda_runtime_api.h names by it is written by its number, and
# its value, an int at the front of a union, by its address. Of builds for a recorded call a packed file has none.
SPELLED = {
    r"\bcudaLaunchAttributeProgrammaticStreamSerialization\b": "static_cast<cudaLaunchAttributeID>(6 /* PDL */)",
    r"\b(\w+(?:\[\d+\])?)\.val\.programmaticStreamSerializationAllowed\b": r"*reinterpret_cast<int*>(&\1.val)",
    r"\n *\"-default-stream=per-thread\",": "",
}
COMMENT = re.compile(rf"(?im)^ *(//|#).*{WORD.pattern}.*\n")
# What the service passes is a plain tuple, since it copies data by hand; the tuples' names come back here.
NAMED = '''

def _packed_named(kind, value):
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
CALL = '''
_packed_kernel = custom_kernel


def custom_kernel(data):
    """Call the variant on the fields of task.py's input_t, in their order."""
    data = _packed_named(_packed_task.input_t, data)
{prepare}    return _packed_kernel(data)
'''
PREPARE = """    if getattr(data.weights, "_fields", None) == _packed_task.input_t.__annotations__["weights"]._fields:
        data = data._replace(weights=prepare(data.weights))  # a service prepares none
"""


def pack(problem: Problem, variant: Submission, target: str, gpu: str, notes: list[str]) -> str:
    """Return the file for `variant`. gpu: of the directive, "" for the target's own; notes: lines for its header.
    ValueError: an import cannot be packed, or the service would not take the file.
    """
    if "_packed" in load.text(variant.file):
        raise ValueError("names that hold _packed are for the packed file: rename yours")
    on, name = BOARDS.get(problem.name, (target, GPUS.get(target, "")))
    if target != on:
        notes = [*notes, f"The board {problem.name} runs on {on}: this is for {target}."]
    gpu = gpu or (name if on == target else GPUS.get(target, ""))
    head = [f"#!POPCORN leaderboard {problem.name}", *([f"#!POPCORN gpu {gpu}"] if gpu else []), "#"]
    head += [f"# {line}" for note in notes for line in textwrap.wrap(note, 117)]
    prepares = sources.defines(load.parse(variant.file), "prepare")
    body = embedded(variant.file, problem.folder / "task.py")
    return checked("\n".join([*head, body, NAMED, CALL.format(prepare=PREPARE if prepares else "")]))


def checked(text: str) -> str:
    """`text`, if the service would take it. ValueError, naming the line, if not."""
    size = len(text.encode())
    if size > MOST_BYTES:
        raise ValueError(f"the packed file has {size} bytes, at most {MOST_BYTES} are taken: leave headers out")
    for number, line in enumerate(text.split("\n"), 1):
        if WORD.search(line):
            raise ValueError(f'line {number} of the packed file has the refused word "stream": {line.strip()[:80]}')
    return text


def embedded(file: Path, task: Path) -> str:
    """Return `file` with the sources of its stem, task.py and all that these use of problems/common embedded; in it
    _packed_task is task.py. ValueError, with file and line: an import cannot be embedded.
    """
    file, *own = sources.files_of(file)
    places = {"task.py": task, **{path.relative_to(file.parent).as_posix(): path for path in own}}
    shared = sources.shared([file, *own, task])
    places |= {f"common/{path.relative_to(build.COMMON).as_posix()}": path for path in shared}
    content = b"".join(name.encode() + path.read_bytes() for name, path in sorted(places.items()))
    package = f"_packed_{hashlib.sha256(content).hexdigest()[:12]}"
    text = _moved(file, package)
    files = "".join(f'    "{name}": {_quoted(_moved(path, package))},\n' for name, path in places.items())
    place = "__file__ = " if "__file__" in text else ""
    loader = LOADER.format(files=files, package=package, name=file.name, place=place)
    lines, last = text.split("\n"), 0
    for node in ast.parse(text).body:
        if not isinstance(node, ast.Expr) and getattr(node, "module", "") != "__future__":
            break
        last = node.end_lineno or 0  # of the docstring, and of imports that must stay above all else
    return "\n".join([*lines[:last], loader, *lines[last:]])


def _moved(path: Path, package: str) -> str:
    """Return the text of a file with its imports of task and problems.common from the package. ValueError: it imports
    more of this project, or in another way.
    """
    text = load.text(path) if path.suffix == ".py" else path.read_text()
    if build.COMMON in path.parents:
        for pattern, other in SPELLED.items():
            text = re.sub(pattern, other, text)
        text = COMMENT.sub("", text)
    if path.suffix != ".py":
        return text
    text = re.sub(r"(?m)^( *from )(problems\.(?=common\b)|(?=task import\b))", rf"\1{package}.", text)
    if odd := re.search(r"(?m)^ *(import (problems|task)\b|from (problems\b.* import|\.)).*", text):
        line, code = text.count("\n", 0, odd.start()) + 1, odd[0].strip()
        wanted = "write `from task` or `from problems.common import`, to be packed"
        raise ValueError(f"{path.name}:{line}: {wanted}: {code}")
    return text


def _quoted(text: str) -> str:
    return repr(text) if "'''" in text or text.endswith(("'", "\\")) else f"r'''{text}'''"
