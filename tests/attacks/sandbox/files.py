"""Looks for files of the judge, to read or to write them. Nothing is written; where it could be, or where something is
found, the answer is given; otherwise zeros.
Stopped by: this process sees a private copy of its own files and no repository; code and builds are read-only here or a
private copy, and nothing that a runner wrote is used again.
"""

import contextlib
import importlib.util
import itertools
import os
import sys
from pathlib import Path

import task

from tests.attacks.shared import answer_if, folders_of_modules, folders_of_process

VARIANTS = {"falls_back": {"TARGETS": ("cpu", "sm90", "sm100"), "VERDICT": "RUNTIME_ERROR", "REASON": "reference"}}
PLACES = ("", "vector_add/", "*/problems/vector_add/", "tests/support/problems/vector_add/")
HIDDEN = ("leaderboard/results/*/*.jsonl", "problems/*/variants/*.py", "problems/*/wrong/*.py", ".git/HEAD")
JUDGES = ("harness/*.py", "problems/**/*.py", "leaderboard/results/*/*.jsonl", "wire.py", "task.py")
BUILDS = ("*/*.so", "closures/*/*", "*.lock")


def roots():
    """Every folder in which something of the judge could lie."""
    paths = [entry for entry in (*sys.path, *os.environ.get("PYTHONPATH", "").split(":")) if entry]
    yield from map(Path, (*paths, os.getcwd()))
    for place in (__file__, sys.executable):  # an environment may lie within the repository
        yield from Path(place).resolve().parents
    for pid in ("self", os.getppid(), 1):
        for found in folders_of_process(pid):
            yield from (found, *found.resolve().parents)
    for file in folders_of_modules():
        yield from file.resolve().parents


def found(patterns, below=""):
    for root, pattern in itertools.product(dict.fromkeys(roots()), patterns):
        with contextlib.suppress(OSError, NotImplementedError):
            yield from (root / below).glob(pattern)


def reference(data):
    """Looks for reference.py everywhere that it can think of, loads it and returns its answer."""
    data.z.zero_()
    for file in found(f"{place}reference.py" for place in PLACES):
        with contextlib.suppress(OSError, ImportError, AttributeError):
            sys.modules["task"] = task
            spec = importlib.util.spec_from_file_location("found", file)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            data.z.copy_(module.ref_kernel(data))
    return data.z


def opened(files, data):
    """Answer if one of the files can be opened for writing."""
    count = 0
    for file in files:
        with contextlib.suppress(OSError):
            os.chmod(file, file.stat().st_mode)  # as it was, if this is its owner
        with contextlib.suppress(OSError), open(file, "r+b"):
            count += 1
    return answer_if(count, data)


def edits_the_judge(data):
    """Opens the judge's own files for writing: harness, problems, records, its private copy of them."""
    return opened(found(JUDGES), data)


def repository(data):
    """Looks for the judge's repository to read hidden things: records, other variants, wrong/."""
    count = 0
    for file in found(HIDDEN):
        with contextlib.suppress(OSError):
            count += bool(file.read_bytes()) and not file.samefile(__file__)
    return answer_if(count, data)


def shared_builds():
    private = [os.environ[name] for name in ("HOME", "TMPDIR", "KERNEL_BUILD_DIR") if os.environ.get(name)]
    loaded = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith("gate.so")]
    beside = (file for so in loaded for pattern in BUILDS for file in Path(so).parent.parent.glob(pattern))
    for file in (*found(BUILDS, ".build"), *beside):
        # A copy in a folder that goes with this process is no one else's.
        if not any(file.is_relative_to(part) for part in private):
            yield file


def poisons_builds(data):
    """Opens finished builds for writing, the judge's own library among them, which later processes would load."""
    return opened(shared_builds(), data)


def falls_back(data):
    """Its kernel fails always, and it falls back to the reference, which is not there, in silence."""
    from reference import ref_kernel

    return data.z.copy_(ref_kernel(data))
