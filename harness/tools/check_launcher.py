"""The process of a problem's end-to-end check: it calls the check's main, and tells the judge how that ended.

    python harness/tools/check_launcher.py FD NAME WORDS...

FD: a socket to harness/tools/endtoend.py. One secret word comes from it, before any code of the problem runs. When
`main(WORDS)` of the module NAME has returned, the word is sent back with ` returned STATUS`; where main lets a
SystemExit through, as argparse does of wrong arguments, with ` left STATUS`. A process that ends in another way sends
nothing, whatever its exit status is: a kernel that calls exit(0) gives no verdict. Standard library only.
"""

import importlib
import os
import sys

STOPPED = 141  # exit status where the reader of standard output is gone


def main(descriptor: int, name: str, words: list[str]) -> int:
    """Call the check. Return its exit status. What it raises comes through, SystemExit too."""
    os.set_inheritable(descriptor, False)
    secret, pid = os.read(descriptor, 64), os.getpid()

    def tell(how: str, status: int) -> None:
        if os.getpid() == pid:  # and no fork of it
            os.write(descriptor, secret + f" {how} {status}".encode())

    sys.argv[:] = [f"{name.rpartition('.')[2]}.py", *words]
    try:
        status = importlib.import_module(name).main(words)
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            tell("left", stop.code or 0)
        raise
    if not isinstance(status, int):
        raise TypeError(f"{name}.main must return its exit status, an int, got {status!r}")
    tell("returned", int(status))
    return int(status)


def _without_reader() -> int:
    """Lead standard output, which takes nothing any more, to nowhere. Return the exit status."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    return STOPPED


if __name__ == "__main__":
    sys.path[0] = os.getcwd()  # as with -m, and not this folder
    try:
        sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
    except BrokenPipeError:
        sys.exit(_without_reader())
