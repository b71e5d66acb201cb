"""Pack a variant for another service: .venv/bin/python leaderboard/pack.py PROBLEM --variant NAME -o submission.py

One file for GPU MODE, with all that it needs in it; for a problem that has no board there also a folder in its format.
With --format flashinfer-bench, a folder of JSON files for that package. docs/packing.md says what is in them.
"""

from __future__ import annotations  # until `venv.enter`, Python 3.8 must do

import argparse
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run as a script, from anywhere

from harness.results import output  # noqa: E402
from problems.common import venv  # noqa: E402

if TYPE_CHECKING:
    from harness.problem.folders import Problem, Submission

NAME = "leaderboard/pack.py"
FORMATS = ("gpu-mode", "flashinfer-bench")


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0; 2 for bad use, what cannot be packed, or files that cannot be read or written."""
    options = _options(arguments)
    venv.enter(NAME)
    from harness.problem import folders
    from harness.results import record, text

    try:
        problem = folders.find(options.problem)
        variant, target = _chosen(problem, options.variant, options.target)
        if options.format == "gpu-mode":
            said = _gpu_mode(problem, variant, target, options)
        else:
            said = _flashinfer(problem, variant, target, options)
        for line in said:
            output.say(line)
        output.flush()
        return 0
    except (BrokenPipeError, output.ClosedError):
        output.abandon()
        return output.CLOSED_EXIT
    except (ValueError, OSError, SyntaxError, folders.ProblemError, record.StorageError) as error:
        output.abandon()
        output.complain(f"{NAME}: {text.line(record.said_of(error) if isinstance(error, OSError) else error)}")
        return output.USAGE_EXIT


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = output.Parser(NAME, description="Pack a variant for GPU MODE or flashinfer-bench.")
    parser.add_argument("problem", metavar="PROBLEM", help="a name in problems/, or the folder of a problem")
    parser.add_argument("--variant", metavar="NAME", help="a file of variants/; default: the winner for --target")
    parser.add_argument("--target", choices=("cpu", "sm90", "sm100"), help="default: the variant's first")
    parser.add_argument("--format", choices=FORMATS, default=FORMATS[0])
    parser.add_argument(
        "-o",
        dest="out",
        type=Path,
        required=True,
        metavar="PATH",
        help="the file; with --format flashinfer-bench the folder",
    )
    parser.add_argument("--gpu", default="", metavar="NAME", help="the service's name of the GPU, in the directive")
    parser.add_argument("--case", default="", metavar="TEXT", help="flashinfer-bench: only cases with these words")
    parser.add_argument("--author", default="dsv4-kernels", metavar="NAME", help="flashinfer-bench: of the solution")
    parser.add_argument("--results", type=Path, default=ROOT / "leaderboard" / "results", metavar="DIR")
    options = parser.parse_args(arguments)
    if options.format != FORMATS[0] and options.gpu:
        parser.error("--gpu goes with --format gpu-mode")
    if options.gpu and not re.fullmatch(r"[\w.+-]+", options.gpu):
        parser.error(f"--gpu must be one word, a GPU's name as the service knows it, got {options.gpu!r}")
    if options.format == FORMATS[0] and options.case:
        parser.error("--case goes with --format flashinfer-bench")
    return options


def _chosen(problem: Problem, name: str | None, target: str | None) -> tuple[Submission, str]:
    """-> (the variant, the target). ValueError: the problem is none of ours, neither is named, or the variant is for
    other targets.
    """
    if not problem.ours or problem.composition:
        what = "a composition, made of the modules of its folder" if problem.ours else "already in GPU MODE's format"
        raise ValueError(f"PROBLEM must be one whose variants are single files, {problem.name} is {what}")
    if not (name or target):
        raise ValueError("give --variant NAME, or --target for its winner")
    variant = problem.variant(name) if name else problem.winner(target or "")
    if target and target not in variant.targets:
        raise ValueError(f"--target must be one of {variant.name}'s ({', '.join(variant.targets)}), got {target}")
    return variant, target or variant.targets[0]


def _gpu_mode(problem: Problem, variant: Submission, target: str, options: argparse.Namespace) -> list[str]:
    from leaderboard import gpu_mode_pack, provenance_notes

    if options.out.suffix != ".py":
        raise ValueError(f"-o must name a .py file for GPU MODE, got {options.out}")
    output.see_file("-o", options.out)
    notes = provenance_notes.of(problem.name, variant, target, options.results)
    packed = gpu_mode_pack.pack(problem, variant, target, options.gpu, notes)
    files = {} if packed.board else gpu_mode_pack.task_folder(problem)
    output.write_whole(options.out, packed.text)
    said = [f"wrote {options.out}: {len(packed.text.encode())} bytes", *notes[1:], *packed.warnings]
    if files:
        folder = options.out.parent / f"{problem.name}_gpu_mode"
        _write_folder(folder, files)
        said.append(f"wrote {folder}: GPU MODE has no board of {problem.name}; this is the problem in its format")
    return said


def _flashinfer(problem: Problem, variant: Submission, target: str, options: argparse.Namespace) -> list[str]:
    from leaderboard import flashinfer_pack

    output.see_folder("-o", options.out)
    found = flashinfer_pack.write(problem, variant, target, options)
    return [said if said.startswith("left out") else f"wrote {said}" for said in found]


def _write_folder(folder: Path, files: dict[str, str]) -> None:
    """Write a folder of these files alone. ValueError: it has others, which are not overwritten."""
    known = {*files, "__pycache__"}
    if folder.exists() and (others := sorted(path.name for path in folder.iterdir() if path.name not in known)):
        raise ValueError(f"{folder} must be new, or of an earlier call, found {others[0]} in it: move it away")
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        output.write_whole(folder / name, content)


if __name__ == "__main__":
    sys.exit(output.script(main))
