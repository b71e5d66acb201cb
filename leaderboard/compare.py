"""Compare records that were taken in different runs: .venv/bin/python leaderboard/compare.py A B

A and B are each a file of records (JSON lines, as harness/run.py --json writes them), a selection of the committed ones
("variant=sm90_dp4a machine=nvidia-h200"), or both in one argument. A is what is looked at, B what it is compared with.
The runs are not interleaved, so the ratio holds what differs between them too; for pairs use harness/run.py --against.
"""

from __future__ import annotations  # until `venv.enter`, Python 3.8 must do

import argparse
import math
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run as a script, from anywhere

from harness.results import output  # noqa: E402
from leaderboard import command  # noqa: E402

NAME = "leaderboard/compare.py"
HELP = """A and B: a file of records, or words that choose records: problem=, variant=, target=, machine=, run=, commit=
(its first digits), as in "old.jsonl variant=cpu_avx2". Without a file they choose from leaderboard/results."""


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0; 2 for bad use, unreadable files or nothing to compare; with --fail-on-regression 8 for one, and
    that of harness/run.py for a run of A that failed.
    """
    options = _options(arguments)
    return command.run(NAME, lambda: _compare(options))


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = output.Parser(NAME, description="Compare records of different runs, unpaired.", epilog=HELP)
    parser.add_argument("a", metavar="A", help="what is looked at")
    parser.add_argument("b", metavar="B", help="what it is compared with")
    parser.add_argument(
        "--fail-on-regression",
        type=output.Value(float, "0 or more, in percent"),
        metavar="PERCENT",
        help="exit code 8 if the 99 %% interval of a case, or of all together, is over 1 + PERCENT %%",
    )
    parser.add_argument("--results", type=Path, default=ROOT / "leaderboard" / "results", metavar="DIR")
    options = parser.parse_args(arguments)
    percent = options.fail_on_regression
    if percent is not None and not 0 <= percent < math.inf:
        parser.error(f"--fail-on-regression must be 0 or more, in percent, got {percent}")
    return options


def _compare(options: argparse.Namespace) -> int:
    from harness.judge import verdict
    from leaderboard import unpaired

    chosen = [unpaired.choose(name, words, options.results) for name, words in (("A", options.a), ("B", options.b))]
    for complaint in dict.fromkeys(said for one in chosen for said in one.complaints):
        output.complain(f"{NAME}: {complaint}")
    percent, found = options.fail_on_regression, []
    pairs = unpaired.pairs(*chosen)
    for pair in pairs:
        output.say("\n".join(pair.lines()) + "\n\n")
        found += pair.regressions(percent) if percent is not None else []
    if percent is None:
        return 0
    for said in found:
        output.say(f"regression of more than {percent:g} %: {said}")
    if not found:
        output.say(f"no regression of more than {percent:g} % is shown")
    failed = [status for pair in pairs for status in pair.failed]
    return (verdict.exit_code(failed, everything=True) if failed else 0) or (verdict.REGRESSION_EXIT if found else 0)


if __name__ == "__main__":
    sys.exit(output.script(main))
