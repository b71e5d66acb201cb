"""harness/run.py as a process of its own, with fewer processes and calls than a real run, and records elsewhere.

python tests/support/short_run.py RESULTS PROCESSES ARGUMENT...
"""

import dataclasses
import os
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent.parent)

from tests.support import warm  # noqa: E402

if __name__ == "__main__":
    os.environ.update(warm.WAITING)
    warm.fork_server()  # before the judge's modules are here: torch is loaded once, for the judge and its children

from harness import run  # noqa: E402
from harness.judge import phases  # noqa: E402
from harness.results import record  # noqa: E402
from harness.runner import gate  # noqa: E402
from harness.sandbox import process  # noqa: E402

if __name__ == "__main__":
    record.RESULTS = Path(sys.argv[1])
    for key, counts in phases.COUNTS.items():
        if not counts.paired:
            phases.COUNTS[key] = dataclasses.replace(counts, processes=int(sys.argv[2]), samples=2)
    gate.last_level_cache = lambda: 2**23
    process.harden()
    with warm.installed():
        sys.exit(run.main(sys.argv[3:]))
