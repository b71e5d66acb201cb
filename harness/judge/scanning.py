"""The scan of submissions' texts in a jailed child (harness/problem/scan.py), which ends none but itself.

One child serves all submissions of a process. After a text that it could not scan the next one gets a new child.
"""

import functools
import hashlib
import os
import time
from pathlib import Path

from harness.judge import handle, limits, replies
from harness.problem import scan
from harness.sandbox import workdir
from harness.sandbox.policy import Jail
from harness.sandbox.process import Child, Died
from problems.common import build

_FILES = ("harness/__init__.py", "harness/problem/scan.py", "harness/runner/wire.py")  # of the child
_found: dict[tuple, list[replies.Found]] = {}  # by content, and what else it depends on


def findings(files: list[Path], baseline: bool = False, ours: bool = True) -> list[scan.Finding]:
    """Return what breaks the rules in these files, in order. Died: one of them cannot be scanned, or all together take
    longer than limits.SCAN_LIMIT_S. baseline: it may not name the word either; what it calls may. ours: the problem has
    our format; in a comment of a submission to another the word is a warning.
    """
    deadline = time.monotonic() + limits.SCAN_LIMIT_S
    return [
        scan.Finding(file, found.line, found.what, found.warns)
        for file in files
        for found in _scanned(file, baseline, ours, deadline)
    ]


def _scanned(file: Path, baseline: bool, ours: bool, deadline: float) -> list[replies.Found]:
    content = build.read(file)
    key = (hashlib.sha256(content).digest(), file.suffix, baseline, ours)
    if key not in _found:
        message = {"name": file.name, "baseline": baseline, "ours": ours}
        with open(os.memfd_create("text"), "r+b") as memory:
            memory.write(content)
            memory.seek(0)
            try:
                child = _child(os.getpid())
                child.send(message, (memory.fileno(),))
                reply = replies.read(replies.Scanned, child.receive(max(1.0, deadline - time.monotonic()))[0])
                _found[key] = handle.admitted(reply).findings
            except Died:
                _child.cache_clear()
                raise
    return _found[key]


@functools.cache
def _child(_: int) -> Child:
    """The child of the process of this number, this one: a fork must not share its parent's."""
    code, home = workdir.scratch(), workdir.scratch()
    for name in _FILES:
        (code / name).parent.mkdir(parents=True, exist_ok=True)
        (code / name).write_bytes((workdir.ROOT / name).read_bytes())
    return Child(scan.__name__, jail=Jail(code, home, home, home))
