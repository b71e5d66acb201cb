#!/usr/bin/env python3
"""The leaderboard's command line: print, write or check the boards that the records give.

This file has the options; leaderboard/pages.py does the rest.
"""

from __future__ import annotations  # until `venv.enter`, Python 3.8 must do

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run as a script, from anywhere

from harness.results import output  # noqa: E402
from leaderboard import command  # noqa: E402

RESULTS = ROOT / "leaderboard" / "results"
MACHINES = ROOT / "leaderboard" / "machines.txt"


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0, 1 if --check finds the README stale, 2 for bad use or files that cannot be read or written."""
    options = _options(arguments)

    def action() -> int:
        from leaderboard import pages

        if options.html:
            command.see_option("--html", options.html, output.see_place)
        return pages.readme(options) if options.readme else pages.report(options)

    return command.run("leaderboard/report.py", action)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = output.Parser("leaderboard/report.py", description="Show the leaderboard, from the records.")
    parser.add_argument("problems", nargs="*", metavar="PROBLEM", help="name or folder; default: all that have records")
    parser.add_argument("--machine", metavar="SLUG", help="a folder of leaderboard/results; default: all")
    parser.add_argument("--here", action="store_true", help="PROBLEM's board on this machine, in at most 15 lines")
    parser.add_argument("--all", action="store_true", help="print all boards whole")
    parser.add_argument("--cases", action="store_true", help="also the times by case; of a model by op")
    parser.add_argument("--format", choices=("terminal", "markdown", "csv"), default="terminal")
    parser.add_argument("--html", type=Path, metavar="DIR", help="write the page there: boards, pictures, sources")
    parser.add_argument("--readme", type=Path, metavar="FILE", help="fill in FILE and leaderboard/README.md beside it")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a table is stale")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="default: leaderboard/results")
    parser.add_argument("--machines", type=Path, default=MACHINES, metavar="FILE", help="default: machines.txt")
    options = parser.parse_args(arguments)
    if options.check and not options.readme:
        options.readme = ROOT / "README.md"
    shown = options.html or options.format != "terminal" or options.here or options.all
    if options.readme and (options.problems or options.machine or shown):
        parser.error("--readme and --check show all that machines.txt lists: leave the other options out")
    if options.here and (len(options.problems) != 1 or options.machine or options.all):
        parser.error("--here takes one PROBLEM, without --machine and --all")
    return options


if __name__ == "__main__":
    sys.exit(output.script(main))
