"""The submissions that the suite judges: one file for each variant of each source in the folders of the topics.

`files` writes them into one folder, with the C++ or CUDA and all headers. README.md says how a source is written.
"""

import ast
import functools
import os
import re
from collections.abc import Iterable
from pathlib import Path

from problems.common import build

FOLDER = Path(__file__).parent
TOPICS = ("answers", "caching", "clock", "early", "graph", "honest", "host", "late", "memory", "replies", "sandbox")
SHARED = "tests.attacks.shared"
# What the judged file says to the suite; any other literal of a variant is also a macro of its C++ or CUDA.
LIMITS = ("LIMIT_S", "IMPORT_LIMIT_S", "TAKES_US")
JUDGED = ("PROBLEM", "TARGETS", "VERDICT", "REASON", "MARKERS", "HONEST", "FLAGS", *LIMITS)
CALLED = {"data": "custom_kernel", "weights": "prepare"}  # what a variant's function is, by its argument
IMPORTS = ast.Import | ast.ImportFrom
TARGETS = {".py": ("cpu",), ".cpp": ("cpu",), ".cu": ("sm90", "sm100")}
WRONG = {"VERDICT": "INCORRECT", "REASON": "Number of mismatched elements"}  # of a submission that says no verdict


@functools.cache
def files() -> list[Path]:
    """Return the Python file of each submission, written anew where it changed."""
    place = build.directory() / "attacks"
    place.mkdir(parents=True, exist_ok=True)
    for header in (FOLDER / "include").iterdir():
        _write(place / header.name, header.read_text())
    stems = {(topic, file.stem) for topic in TOPICS for file in (FOLDER / topic).iterdir() if file.suffix in TARGETS}
    return [place / f"{name}.py" for topic, stem in sorted(stems) for name in _written(topic, stem, place)]


def topic_of(file: Path) -> str:
    return file.stem.partition("_")[0]


def _written(topic: str, stem: str, place: Path) -> Iterable[str]:
    """Write all variants of a source. Return their names."""
    sources = [file for suffix in TARGETS if (file := FOLDER / topic / f"{stem}{suffix}").exists()]
    text = sources[0].read_text() if sources[0].suffix == ".py" else _python(sources[0])
    for variant, changes in _variants(ast.parse(text)).items():
        name = "_".join(filter(None, (topic, stem, variant)))
        _write(place / f"{name}.py", _judged(text, variant, changes, TARGETS[sources[0].suffix]))
        macros = {"VARIANT": variant} | {key: value for key, value in changes.items() if key not in (*JUDGED, "ABOUT")}
        defined = "".join(f"#define {key} {value}\n" for key, value in macros.items()) if variant else ""
        for source in sources:
            if source.suffix != ".py":
                _write(place / f"{name}{source.suffix}", defined + source.read_text())
        yield name


def _python(source: Path) -> str:
    """What the Python file beside a C++ or CUDA source would be: its first comment ends with the literals. TOLD: of the
    functions behind a comment of three slashes.
    """
    text = source.read_text()
    comment = re.sub(r"^// ?", "", re.match(r"(//.*\n)+", text)[0], flags=re.MULTILINE)
    prose, *literals = re.split(r"^(?=[A-Z_]+ = )", comment, maxsplit=1, flags=re.MULTILINE)
    literals = "".join(literals)
    caller = "call_rounds" if " rounds(" in text else "call_attack"
    if source.suffix == ".cu":
        caller = "call_linear" if 'PROBLEM = "linear"' in literals else "call_add"
    problem = "" if source.suffix == ".cu" else 'PROBLEM = "rounds"\n'
    found = re.findall(r"^((?:///.*\n)+).*?(\w+)\(", text, re.MULTILINE)
    told = {name: " ".join(doc.replace("///", "").split()) for doc, name in found}
    body = f"{problem}{literals}\nTOLD = {told!r}\ncustom_kernel = {caller}\n"
    return f'"""{prose.strip()}\n"""\nfrom {SHARED} import {caller}\n\n{body}'


def _variants(tree: ast.Module) -> dict[str, dict]:
    """The literals of each variant, by name: of functions in CALLED that have a docstring, and of what VARIANTS or TOLD
    names, where a text alone is ABOUT.
    """
    variants = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) and _argument(node) in CALLED:
            variants.setdefault(node.name, {})
        elif _names(node) & {"VARIANTS", "TOLD"}:
            for name, said in ast.literal_eval(node.value).items():
                variants[name] = variants.get(name, {}) | ({"ABOUT": said} if isinstance(said, str) else said)
    for name in CALLED.values():
        variants.pop(name, None)
    return variants or {"": {}}


def _judged(text: str, variant: str, changes: dict, targets: tuple[str, ...]) -> str:
    """The text of one submission: docstring, literals, and what it uses of the source and of what that imports from
    shared.py. The function of the variant's name, if there is one, is custom_kernel or prepare.
    """
    tree, body, functions = ast.parse(text), [], {}
    said = {"PROBLEM": "vector_add", "TARGETS": targets}
    about, _, more = (ast.get_docstring(tree) or "").partition("Stopped by: ")
    defined = {name for node in tree.body if not _is_shared(node) for name in _names(node)} | {"VARIANT", *changes}
    for node in tree.body[1:]:
        names = _names(node)
        functions |= dict.fromkeys(names, node)
        if _is_shared(node):
            body += _shared(defined)
        elif names & {*JUDGED}:
            said |= {names.pop(): ast.literal_eval(node.value)}
        elif not names & {"VARIANTS", "TOLD", *changes}:
            body.append((node, text))
    if variant in functions:
        told = ast.get_docstring(functions[variant]) if isinstance(functions[variant], ast.FunctionDef) else None
        about, _, own = (told or about).partition("Stopped by: ")
        more, name = own or more, CALLED.get(_argument(functions[variant]), "custom_kernel")
        last = f"{name} = {variant}\n"
        body.append((ast.parse(last).body[0], last))
    said |= {"VARIANT": variant} | changes
    said = said if "VERDICT" in said else WRONG | said
    for name, value in changes.items():
        about = about.replace(f"{{{name}}}", f"{value}")
    about, _, own = said.pop("ABOUT", about).partition("Stopped by: ")
    stopped = f"\n\nStopped by: {own or more}".rstrip() if own or more else ""
    doc = " ".join(about.split()) + stopped
    literals = "\n".join(f"{name} = {value!r}" for name, value in said.items())
    return "\n\n".join([f'"""{doc}\n"""', literals, *(_lines(*one) for one in _used(body))]) + "\n"


def _is_shared(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == SHARED


def _shared(defined: set[str]) -> list[tuple[ast.stmt, str]]:
    """The statements of shared.py, but for what the source defines itself."""
    text = (FOLDER / "shared.py").read_text()
    return [
        (node, text) for node in ast.parse(text).body[1:] if isinstance(node, IMPORTS) or not _names(node) & defined
    ]


def _used(body: list[tuple[ast.stmt, str]]) -> list[tuple[ast.stmt, str]]:
    """The statements that do something, and definitions that these, or the judge, use."""
    kept, used = [], {"custom_kernel", "prepare"}
    while new := [one for one in body if one not in kept and (_names(one[0]) & used or not _names(one[0]))]:
        kept += new
        used |= {name.id for node, _ in new for name in ast.walk(node) if isinstance(name, ast.Name)}
    return [one for one in body if one in kept]


def _lines(node: ast.stmt, text: str) -> str:
    first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])
    return "\n".join(text.splitlines()[first - 1 : node.end_lineno])


def _argument(node: ast.stmt) -> str:
    """The name of a function's only argument, "" of anything else."""
    arguments = node.args.args if isinstance(node, ast.FunctionDef) else []
    return arguments[0].arg if len(arguments) == 1 else ""


def _names(node: ast.stmt) -> set[str]:
    """What a statement of a module defines; nothing if it does anything else."""
    if isinstance(node, ast.Assign):
        targets = [one for target in node.targets for one in getattr(target, "elts", [target])]
        return {one.id for one in targets} if all(isinstance(one, ast.Name) for one in targets) else set()
    if isinstance(node, IMPORTS):
        return {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return {node.name} if isinstance(node, ast.FunctionDef | ast.ClassDef) else set()


def _write(file: Path, text: str) -> None:
    if not file.exists() or file.read_text() != text:
        part = file.with_suffix(f".{os.getpid()}")  # several processes of tests write at once
        part.write_text(text)
        part.replace(file)
