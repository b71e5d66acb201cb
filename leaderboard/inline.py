"""One text of a C++ or CUDA source and all headers of ours that it includes, without the word that services refuse."""

import re
from pathlib import Path

from problems.common import load

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"[^\n]*$', re.MULTILINE)
ONCE = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once[^\n]*\n?", re.MULTILINE)
WORD = re.compile("stream", re.IGNORECASE)
# Programmatic dependent launch is on the default queue, but cuda_runtime_api.h names it with the word. The number of
# the attribute, and its value, which is an int at the front of a union, say the same.
SPELLED = (
    (re.compile(r"\bcudaLaunchAttributeProgrammaticStreamSerialization\b"), "static_cast<cudaLaunchAttributeID>(6)"),
    (
        re.compile(r"\b(\w+(?:\[\d+\])?)\.val\.programmaticStreamSerializationAllowed\b"),
        r"*reinterpret_cast<int*>(&\1.val)",
    ),
)
SPELLED_NOTE = (
    "// Attribute 6 is programmatic dependent launch, on the default queue; its name has a word that is refused.\n"
)


class InlineError(ValueError):
    """A header is missing, or the word cannot be avoided. The message names file and line."""


def text_of(source: Path) -> str:
    """The text of `source` with its headers in the place of their includes; those of problems/common too."""
    return _expanded(source.resolve(), {}, ())


def _expanded(file: Path, seen: dict[Path, bool], above: tuple[Path, ...]) -> str:
    if file in above:
        raise InlineError(f"{file.name} includes itself")
    text = file.read_text()
    once = bool(ONCE.search(text))
    if seen.get(file):
        return ""
    seen[file] = once
    text = _without_word(ONCE.sub("", text), file)

    def included(found: re.Match) -> str:
        header = _header(file, found[1])
        body = _expanded(header, seen, (*above, file))
        return f"// ---- {header.name}\n{body.rstrip()}\n// ---- end of {header.name}" if body else ""

    return INCLUDE.sub(included, text)


def _header(file: Path, name: str) -> Path:
    for place in (file.parent, load.PROBLEMS / "common"):
        if (place / name).is_file():
            return (place / name).resolve()
    raise InlineError(f'{file.name}: there is no "{name}" beside it or in problems/common')


def _without_word(text: str, file: Path) -> str:
    """`text` with another spelling for what problems/common may name. InlineError: the word is elsewhere."""
    if load.PROBLEMS / "common" in file.parents:
        kept = [line for line in text.split("\n") if not (line.lstrip().startswith("//") and WORD.search(line))]
        text = "\n".join(kept)
        for name, other in SPELLED:
            text = name.sub(other, text)
        if text != "\n".join(kept):
            text = SPELLED_NOTE + text
    for number, line in enumerate(text.split("\n"), 1):
        if WORD.search(line):
            raise InlineError(
                f'{file.name}:{number}: contains the word "stream", which is refused: {line.strip()[:60]}'
            )
    return text


def quoted(text: str) -> str:
    """`text` as a raw Python string of several lines. InlineError: it holds both kinds of triple quotes."""
    for quotes in ("'''", '"""'):
        if quotes not in text and not text.endswith((quotes[0], "\\")):
            return f"r{quotes}{text}{quotes}"
    raise InlineError("a source holds both ''' and \"\"\"")
