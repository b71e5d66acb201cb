"""`python -m harness.sandbox --probe` prints what this machine's sandbox offers, as JSON."""

import json
import sys

from harness.sandbox import policy
from problems.common import terminal


def main() -> int:
    parser = terminal.Parser(prog=".venv/bin/python -m harness.sandbox", description=__doc__)
    parser.add_argument("--probe", action="store_true", required=True, help="print what this machine offers")
    parser.parse_args()
    print(json.dumps(policy.probe(), indent=2), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
