"""Text that a submission, a foreign problem or an old record may have written, made safe for the place that shows it.

Such text is data. On a terminal it must not move the cursor, in a table make no row, and in Markdown become no link.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

LIMIT = 20_000  # characters of a text that are kept: a compiler's report fits, a flood does not
LINE = 2_000  # characters of a text on one line
DEPTH = 12  # lists and objects within each other, in a record
INTEGERS = 2**63  # what every reader of a record can hold

# Terminal commands as a whole, so that no "[31m" stays behind: control sequences, titles and links, short commands.
_COMMANDS = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)?|[@-_])")
_BREAKS = re.compile("\r\n|[\r\v\f\x1c-\x1e\x85\u2028\u2029]")
_UNUSUAL = re.compile(r"[^\x20-\x7e\n\t]")


def clean(text: object, limit: float = LIMIT) -> str:
    """Return str(text) with printable characters, newlines and tabs only, and at most `limit` of them. Terminal
    commands, control characters, and invisible ones that join or reorder letters are removed; a line break is a
    newline, a lone surrogate U+FFFD, so it can be written as UTF-8. Of a longer text the middle is left out, with a
    mark: a compiler says what happened first, a traceback last.
    """
    return _cut(_UNUSUAL.sub(_printable, _BREAKS.sub("\n", _COMMANDS.sub("", str(text)))), limit)


def line(text: object, limit: float = LINE) -> str:
    """Return `clean` text on one line: newlines and tabs are spaces."""
    return _cut(clean(text, math.inf).replace("\n", " ").replace("\t", " "), limit)


def first_line(text: object, limit: float = LINE) -> str:
    """Return the first line of the clean text, "" if there is none."""
    return line(clean(text, math.inf).partition("\n")[0], limit)


def label(params: Mapping | None) -> str:
    """Return a case as words, "m=16 k=64". A seed is no part of it: each run draws its own."""
    return " ".join(f"{key}={value}" for key, value in (params or {}).items() if key != "seed")


def name(value: str) -> str:
    """`value`. ValueError unless it can be part of a file's name: of a picture, a folder, a source."""
    if not 0 < len(value) <= 200 or value[0] == "." or "/" in value or "\0" in value:
        raise ValueError("must be a name: 1 to 200 characters, no / or NUL, no dot in front")
    return value


def can_name(value: str) -> bool:
    """Whether a submission or a problem may have this name: it is shown as it is, and is part of files' names."""
    try:
        return name(value) == line(value)
    except ValueError:
        return False


def plain(value: Any, depth: int = DEPTH - 2) -> Any:
    """`value` as JSON that every reader takes: what JSON, or a reader, does not hold is None or text."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value) if abs(value) < INTEGERS else f"about 2**{value.bit_length()}"
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, dict) and depth:
        return {line(key): plain(item, depth - 1) for key, item in value.items()}
    if isinstance(value, list | tuple) and depth:
        return [plain(item, depth - 1) for item in value]
    return clean(value) if isinstance(value, str) else line(f"({type(value).__name__})")


def counted(many: int, noun: str) -> str:
    """Return "1 case" or "3 cases"."""
    return f"{many} {noun}{'' if many == 1 else 's'}"


def us(value: float) -> str:
    """Return a time in us for people: two decimals below 100, one below 1,000, none from there on; "" if not finite."""
    return f"{value:,.{2 if value < 99.995 else 1 if value < 999.95 else 0}f}" if math.isfinite(value) else ""


def _printable(match: re.Match) -> str:
    char = match[0]
    if char.isprintable():
        return char
    return "\ufffd" if "\ud800" <= char <= "\udfff" else " " if char.isspace() else ""


def _cut(text: str, limit: float) -> str:
    if len(text) <= limit:
        return text
    head, tail = math.ceil(limit * 2 / 3), math.floor(limit / 3)
    return f"{text[:head]} ... ({len(text) - head - tail} characters left out) ... {text[len(text) - tail :]}"
