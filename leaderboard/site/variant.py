"""What a variant's page shows: its records on each board, its source in this checkout, its profiles, its files."""

import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from markupsafe import Markup
from pygments import highlight
from pygments.formatters.html import HtmlFormatter
from pygments.lexers.c_cpp import CppLexer
from pygments.lexers.c_like import CudaLexer
from pygments.lexers.python import PythonLexer

from harness.problem import sources
from harness.results import output, ranking, text
from harness.tools import modes
from leaderboard.board import Board, rows_of
from leaderboard.provenance import ERRORS
from problems.common import load

LEXERS = {".py": PythonLexer, ".cu": CudaLexer, ".cuh": CudaLexer}  # others: C++
DIGEST = ".txt"  # of a profile, to read; the other files are for a tool
Links = list[tuple[str, str]]
FACTS = (  # of a record: where and how it ran
    *("run_id", "time", "commit", "dirty", "environment", "clock", "clocks_mhz", "throttle", "sandbox", "audit"),
    *("source_hash", "code_hash", "problem_hash", "harness_hash"),
)


def section(board: Board, name: str, records: Iterable[dict]) -> dict[str, Any]:
    """What is shown of a variant on a board. judged: the test and benchmark records of the run that its row shows;
    timed: of these the passed benchmarks; facts: (name, text) of where and how; resources: lines about its kernels.
    """
    row = next(one for one in rows_of(board.standing) if one.variant == name)
    mine = [one for one in records if (one["problem"], one["variant"]) == (board.problem, name)]
    run = [one for one in mine if one["run_id"] == row.run_id and not one.get("superseded")]
    of_target = [one for one in run if one["target"] == board.target]
    last = {(one["kind"], ranking.case_label(one["case"])): one for one in of_target if one["kind"] in ranking.JUDGED}
    judged = sorted(last.values(), key=lambda one: one["kind"] != "benchmark")
    timed = [one for one in judged if one["kind"] == "benchmark" and one["status"] == "PASSED"]
    compiled = [one for one in mine if one["kind"] == "compile" and one.get("resources")]
    kernels = compiled[-1]["resources"] if compiled else []
    kernels = [one for one in kernels if (one.get("target") or compiled[-1]["target"]) == board.target]
    last_one = (timed or judged or run or mine)[-1]
    facts = [(key.replace("_", " "), _words(last_one.get(key))) for key in FACTS]
    facts.append(("secret seeds", str(sum(len(one.get("seeds") or ()) for one in timed))))
    rank = "A baseline" if row.baseline else "Not ranked" if pd.isna(row.rank) else f"Rank {row.rank}"
    found = {"board": board, "row": row, "place": rank, "judged": judged, "timed": timed, "facts": facts}
    return found | {"resources": [_resource(one) for one in kernels]}


def _resource(one: dict) -> str:
    numbers = {key: value for key, value in one.items() if key not in ("name", "target") and value is not None}
    return f"{text.line(one.get('name') or 'kernel', 200)}: {_words(numbers)}"


def _words(value: object) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{key.replace('_', ' ')}: {_words(one)}" for key, one in value.items())
    if isinstance(value, list):
        return ", ".join(map(_words, value)) or "none"
    return "not recorded" if value in (None, "") else text.line(value, 400)


def source(problem: str, name: str) -> tuple[str, list[tuple[Path, int, Markup]]]:
    """-> (the first line of the docstring, (file, lines, highlighted) of each of the variant's files). Those of this
    checkout; none where it has no such variant.
    """
    file = load.PROBLEMS / problem / "variants" / f"{name}.py"
    if not file.is_file():
        return "", []
    try:
        files, summary = sources.files_of(file), load.summary(file)
    except ERRORS:
        files, summary = [file], ""
    shown = []
    for one in files:
        said, lexer = one.read_text(encoding="utf-8", errors="replace"), LEXERS.get(one.suffix, CppLexer)
        shown.append((one, said.count("\n"), Markup(highlight(said, lexer(), HtmlFormatter(nowrap=True)))))
    return text.line(summary), shown


def profiles(variants: Sequence[tuple[str, str]]) -> dict[tuple[str, str], list[Path]]:
    """By variant the files that its profiles left in leaderboard/out/profile: PROBLEM-VARIANT-CASE.SUFFIX."""
    found: dict[tuple[str, str], list[Path]] = {}
    files = sorted(path for path in modes.OUT.glob("*") if path.is_file())
    longest = sorted(variants, key=lambda names: -len("-".join(names)))  # "a-b" before "a", whose files begin alike
    for file in files:
        mine = next((names for names in longest if file.name.startswith(f"{'-'.join(names)}-")), None)
        if mine:
            found.setdefault(mine, []).append(file)
    return found


def digests(files: Iterable[Path]) -> list[tuple[str, str]]:
    """(name, text) of the profiles that are to be read; others are for a tool."""
    shown = [file for file in files if file.suffix == DIGEST]
    return [(file.name, text.clean(file.read_text(encoding="utf-8", errors="replace"))) for file in shown]


def downloads(page: Path, found: Sequence[dict], copied: Iterable[Path]) -> Links:
    """Write the variant's records, which have its samples, beside its page, and copy files there. Return (name,
    address) of each.
    """
    folder, stem, written = page.parent, page.stem, []
    folder.mkdir(parents=True, exist_ok=True)
    if records := [one for section in found for one in section["judged"]]:
        output.write_whole(folder / f"{stem}.jsonl", "".join(json.dumps(one) + "\n" for one in records))
        written.append(("records with all samples, JSON lines", f"{stem}.jsonl"))
    for file in copied:
        (folder / f"{stem}.files").mkdir(exist_ok=True)
        shutil.copyfile(file, folder / f"{stem}.files" / file.name)
        written.append((file.name, f"{stem}.files/{file.name}"))
    return written
