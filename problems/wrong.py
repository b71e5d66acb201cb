"""Wrong kernels that a problem's check must refuse: wrong.py of the problem has them, `write` makes files of them.

Such a file has WRONG, a Mistake by name. `python -m harness wrong PROBLEM` writes them to the problem's folder wrong/,
which git ignores, as everything does that judges them or puts one into the model.
"""

import contextlib
import functools
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from problems.common import load

NOTE = "# Made from the problem's wrong.py, which is the place to change it.\n"


@dataclass(frozen=True)
class Mistake:
    """says: what is wrong, in a sentence. case: the test case, as its name has it, in which that is INCORRECT with
    most seeds. carrier: a right kernel, whose text has each `old` of the edits once; it is replaced by `new`.
    """

    says: str
    case: str
    carrier: str
    edits: tuple[tuple[str, str], ...]

    def text(self) -> str:
        """Return the whole file. ValueError: an edit does not apply once."""
        text = self.carrier
        for old, new in self.edits:
            if text.count(old) != 1:
                raise ValueError(f"{self.says!r}: {old!r} is {text.count(old)} times in the carrier, wanted once")
            text = text.replace(old, new)
        return f'"""Wrong: {self.says}"""\n{NOTE}\n{text.strip()}\n'


def mistake(says: str, case: str, carrier: str, *edits: tuple[str, str]) -> Mistake:
    """Return a Mistake of these edits."""
    return Mistake(says, case, carrier, edits)


def instead(line: str, *lines: str, depth: int = 1) -> tuple[str, str]:
    """Return the edit that puts lines, at this depth of indentation, in place of one."""
    return line, f"\n{'    ' * depth}".join(lines)


def behind(line: str, *lines: str, depth: int = 1) -> tuple[str, str]:
    """Return the edit that puts lines, at this depth of indentation, behind one."""
    return instead(line, line, *lines, depth=depth)


def read(folder: Path) -> dict[str, Mistake]:
    """Return the mistakes of the problem in `folder` by name, none where it has no wrong.py."""
    return dict(sorted(load.module(folder, "wrong").WRONG.items())) if (folder / "wrong.py").is_file() else {}


def load_kernel(folder: Path, name: str) -> Callable:
    """Return custom_kernel of a mistake."""
    write(folder)
    return load.module(folder, f"wrong/{name}").custom_kernel


@functools.cache
def write(folder: Path) -> list[Path]:
    """Write the kernels of a problem to its folder wrong/, and return all files there by name."""
    place, texts = folder / "wrong", {f"{name}.py": one.text() for name, one in read(folder).items()}
    if texts:
        place.mkdir(exist_ok=True)
        for file in place.glob("*.py"):
            if file.name not in texts and NOTE in file.read_text():
                file.unlink(missing_ok=True)
    for name, text in texts.items():
        with contextlib.suppress(FileNotFoundError):
            if (place / name).read_text() == text:
                continue
        with tempfile.NamedTemporaryFile("w", dir=place, suffix=".tmp", delete=False) as file:  # others may read it
            file.write(text)
        os.chmod(file.name, 0o644)
        os.replace(file.name, place / name)
    return sorted(place.glob("*.py"))
