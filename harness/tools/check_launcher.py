"""The process of a problem's end-to-end check: python harness/tools/check_launcher.py NAME WORDS... Where `main(WORDS)`
of the module NAME has returned 0 or 2, or let argparse's SystemExit(2) through, the exit status is that of RETURNED,
which nothing else has: a kernel that calls exit(0) gives no verdict. Another is passed on. Standard library only.
"""

import importlib
import os
import sys

RETURNED = {0: 173, 2: 172}  # what main has returned -> exit status, which nothing else uses
STOPPED = 141  # exit status where the reader of standard output is gone


def main(name: str, words: list[str]) -> int:
    """Call the check. Return the exit status. What it raises comes through, but for SystemExit(2)."""
    sys.argv[:] = [f"{name.rpartition('.')[2]}.py", *words]
    try:
        status = importlib.import_module(name).main(words)
    except SystemExit as stop:
        if stop.code != 2:
            raise
        status = 2
    if not isinstance(status, int) or not 0 <= status < 128:
        raise TypeError(f"{name}.main must return its exit status, an int from 0 to 127, got {status!r}")
    return RETURNED.get(status, status)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1], sys.argv[2:]))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what is still buffered
        sys.exit(STOPPED)
