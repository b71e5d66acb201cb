"""Pack a variant for another service: .venv/bin/python leaderboard/pack.py PROBLEM --variant NAME -o submission.py

One file for GPU MODE, with all that it needs in it; with --format flashinfer-bench a folder of JSON files for that
package. docs/packing.md says what is in them.
"""

from __future__ import annotations  # until `venv.enter`, Python 3.8 must do

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run as a script, from anywhere

from harness.results import output  # noqa: E402
from leaderboard import command  # noqa: E402

if TYPE_CHECKING:
    from harness.problem.folders import Submission

NAME = "leaderboard/pack.py"
FORMATS = GPU_MODE, FLASHINFER = "gpu-mode", "flashinfer-bench"


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0; 2 for bad use, what cannot be packed, or files that cannot be read or written."""
    options = _options(arguments)
    return command.run(NAME, lambda: _pack(options))


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = output.Parser(NAME, description="Pack a variant for GPU MODE or flashinfer-bench.")
    parser.add_argument("problem", metavar="PROBLEM", help="a name in problems/, or the folder of a problem")
    parser.add_argument("--variant", metavar="NAME", help="a file of variants/; default: the winner for --target")
    parser.add_argument("--target", choices=("cpu", "sm90", "sm100"), help="default: the variant's first")
    parser.add_argument("--format", choices=FORMATS, default=GPU_MODE)
    parser.add_argument("-o", dest="out", type=Path, required=True, metavar="PATH", help="the file, or the folder")
    parser.add_argument("--gpu", default="", metavar="NAME", help="gpu-mode: the service's name of the GPU")
    parser.add_argument("--case", default="", metavar="TEXT", help="flashinfer-bench: only cases with these words")
    parser.add_argument("--results", type=Path, default=ROOT / "leaderboard" / "results", metavar="DIR")
    options = parser.parse_args(arguments)
    for option, value, form in (("--gpu", options.gpu, GPU_MODE), ("--case", options.case, FLASHINFER)):
        if value and options.format != form:
            parser.error(f"{option} goes with --format {form}")
    return options


def _pack(options: argparse.Namespace) -> int:
    """ValueError: the problem is none of ours, no variant is named, or it is for other targets."""
    from harness.problem import folders
    from leaderboard import flashinfer_pack, gpu_mode_pack

    problem = folders.find(options.problem)
    if not problem.ours or problem.composition:
        kind = "a composition, made of the modules of its folder" if problem.ours else "already in GPU MODE's format"
        raise ValueError(f"PROBLEM must be one whose variants are single files, {problem.name} is {kind}")
    if not (options.variant or options.target):
        raise ValueError("give --variant NAME, or --target for its winner")
    variant = problem.variant(options.variant) if options.variant else problem.winner(options.target)
    target = options.target or variant.targets[0]
    if target not in variant.targets:
        raise ValueError(f"--target must be one of {variant.name}'s ({', '.join(variant.targets)}), got {target}")
    notes = _notes(problem.name, variant, target, options.results)
    text = gpu_mode_pack.pack(problem, variant, target, options.gpu, notes)
    if options.format == FLASHINFER:
        command.see_option("-o", options.out, output.see_place)
        if options.out.exists() and any(options.out.iterdir()):
            raise ValueError(f"-o must name a new or an empty folder, {options.out} has files")
        flashinfer_pack.write(problem, variant, target, text, options.out, options.case)
    else:
        command.see_option("-o", options.out, output.see_writable)
        if options.out.suffix != ".py":
            raise ValueError(f"-o must name a .py file for GPU MODE, got {options.out}")
        output.write_whole(options.out, text)
        output.say("\n".join([f"wrote {options.out}: {len(text.encode())} bytes", *notes[1:]]))
    return 0


def _notes(problem: str, variant: Submission, target: str, results: Path) -> list[str]:
    """Lines for the head of the file: what was packed, then a line for each machine where the variant was right for
    that target, or one that says that it never ran.
    """
    from harness.problem import sources
    from harness.results import environment, record

    commit, dirty = environment.commit()
    source = sources.source_hash(variant.file, variant.folder)
    where = f"{(commit or 'unknown')[:12]}{' with changes' if dirty else ''}"
    notes = [f"{variant.name} of {problem}, for {target}; source hash {source}, commit {where}"]
    for machine in sorted(folder.name for folder in results.glob("*")):
        of_variant = [entry for entry in record.read(machine, problem, results) if entry["variant"] == variant.name]
        if passed := [entry for entry in of_variant if (entry["target"], entry["status"]) == (target, "PASSED")]:
            last = passed[-1]
            which = "these sources" if last.get("source_hash") == source else "other sources than these"
            notes.append(f"It passed on {machine} ({last['time'][:10]}, run {last['run_id']}), with {which}.")
    if len(notes) == 1:
        notes.append(f"IT NEVER RAN ON ITS TARGET, {target}: no record says that it passed there.")
    return notes


if __name__ == "__main__":
    sys.exit(output.script(main))
