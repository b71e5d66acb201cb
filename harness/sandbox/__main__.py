"""Say what this machine's sandbox offers, or run a command in it.

`python -m harness.sandbox --probe` prints what this machine offers; `python -m harness.sandbox --try COMMAND...` runs a
command jailed in folders of its own (`--without MEASURE,...` leaves measures out, to find the one that breaks a tool).
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from harness.sandbox import policy, process
from problems.common import terminal


def _try(command: list[str], without: frozenset[str], network: bool) -> int:
    """Run `command` in a jail with folders of its own. -> its exit status."""
    with policy.user(without) as uid, tempfile.TemporaryDirectory(prefix="jail-") as base:
        os.chmod(base, 0o711)
        folders = [Path(base, name) for name in ("code", "home", "tmp", "cache")]
        for folder in folders:
            folder.mkdir()
            if uid is not None:
                os.chown(folder, uid, uid)
        return process.run_jailed(command, policy.Jail(*folders, uid=uid, network=network, without=without))


def main() -> int:
    parser = terminal.Parser(prog=".venv/bin/python -m harness.sandbox", description=__doc__.partition("\n")[0])
    parser.add_argument("--probe", action="store_true", help="print what this machine offers")
    parser.add_argument("--without", default="", help=f"measures to leave out of --try: {', '.join(policy.MEASURES)}")
    parser.add_argument("--network", action="store_true", help="leave the network to --try")
    parser.add_argument("--try", dest="command", nargs=argparse.REMAINDER, help="a command to run jailed")
    arguments = parser.parse_args()
    without = frozenset(filter(None, arguments.without.split(",")))
    if unknown := without - set(policy.MEASURES):
        parser.error(f"--without must name some of {', '.join(policy.MEASURES)}, got {', '.join(sorted(unknown))}")
    if arguments.probe or not arguments.command:
        print(json.dumps(policy.probe(), indent=2), flush=True)
    return _try(arguments.command, without, arguments.network) if arguments.command else 0


if __name__ == "__main__":
    sys.exit(main())
