"""The scan of a submission's text for the reserved word of rule 1.

Every file of a submission's closure is read as it is written, comments and docstrings too: of a composition's also the
modules and the winners that it brings along. In a comment of a submission to a folder from elsewhere the word is only a
warning, since its authors did not know the rule. problems/common is exempt: it is the judge's. The scan finds
accidents, and nothing relies on it: on a GPU a call that uses another stream cannot be recorded.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from problems.common import build

# The identifier, or the plain word, that holds it. From its begin alone: else a long word is read from each letter on.
WORD = re.compile(r"(?<!\w)\w*stream\w*", re.IGNORECASE)
_COMMENT = re.compile(r"#|//|/\*")  # begins one in Python or C++, also where it stands in a string
_SHOWN = 60  # characters of a line, or of a word, in a message
MOST = 200  # findings in a file that are named


@dataclass(frozen=True)
class Finding:
    """What breaks the rule, or, with `warns`, only may."""

    file: Path
    line: int
    what: str
    warns: bool = False

    def __str__(self) -> str:
        return f"{self.file.name}:{self.line}: {self.what}"


def findings(files: Iterable[Path], ours: bool = True) -> list[Finding]:
    """At most MOST findings a file, of rule 1 first. ours: of the problem. OSError, BuildError: unreadable."""
    return [
        finding for file in files for finding in sorted(_findings(file, ours), key=lambda finding: finding.warns)[:MOST]
    ]


def _findings(file: Path, ours: bool) -> Iterator[Finding]:
    block = False  # within a C++ comment of several lines
    for number, line in enumerate(build.read(file).decode(errors="replace").split("\n"), 1):
        if match := WORD.search(line):
            warns = not ours and (block or bool(_COMMENT.search(line, 0, match.start())))
            yield Finding(file, number, _named(line.strip(), match[0]), warns)
        if "/*" in line or "*/" in line:
            block = line.rfind("/*") > line.rfind("*/")


def _named(line: str, word: str) -> str:
    holds = "is" if word.lower() == "stream" else "contains"
    rule = "rule 1: default stream only; it counts inside other words, comments and strings too"
    return f'"{_short(word)}" {holds} the reserved word "stream" ({rule}). Rename it, or leave it out: {_short(line)}'


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
