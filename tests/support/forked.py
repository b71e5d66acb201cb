"""Run Python programs in forks of a process that has torch loaded: in 20 ms, where the start of another takes 2 s.

`run` is subprocess.run with the output captured as text. Tests of a start itself, and of what a program does before it
imports torch, start their processes as a user does.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

from tests.support import ROOT
from tests.support.warm import WAITING, end_with

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "pytest", "numpy"])  # nothing of this checkout, which a test may replace


def run(
    arguments: list[object],
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    input: str = "",
    timeout: float | None = None,
) -> subprocess.CompletedProcess:
    """What `python ARGUMENTS`, which begin with -c, -m or a file, says, and its exit code. subprocess.TimeoutExpired:
    it took longer and was killed.
    """
    words = [str(one) for one in arguments]
    with tempfile.TemporaryDirectory() as place:
        streams = [Path(place, name) for name in ("in", "out", "err")]
        streams[0].write_text(input)
        environment = dict(os.environ if env is None else env)
        child = _context.Process(target=_be, args=(words, str(cwd), environment, [*map(str, streams)]))
        with mock.patch.dict(os.environ, WAITING):  # for the server, which the first start of a child starts
            child.start()
        child.join(timeout)
        if child.exitcode is None:
            child.kill()
            child.join()
            raise subprocess.TimeoutExpired(words, timeout)
        out, err = (file.read_text() if file.exists() else "" for file in streams[1:])
        return subprocess.CompletedProcess(words, child.exitcode, out, err)


def _be(words: list[str], folder: str, environment: dict[str, str], streams: list[str]) -> None:
    """In the child: become `python WORDS`."""
    for number, file in enumerate(streams):
        fd = os.open(file, os.O_RDWR | os.O_CREAT)
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for name in [
        one for one in sys.modules if one.partition(".")[0] in ("harness", "leaderboard", "problems", "tests")
    ]:
        del sys.modules[name]
    kind, *rest = words
    packages = [one for one in sys.path if "site-packages" in one or one.startswith(sys.base_prefix)]
    first = "" if kind in ("-c", "-m") else str(Path(kind).resolve().parent)
    sys.path[:] = [first, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), *packages]
    if kind == "-c":
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        end_with(["-c", *rest[1:]], lambda: exec(compile(rest[0], "<string>", "exec"), main.__dict__))
    elif kind == "-m":
        end_with(rest, lambda: runpy.run_module(rest[0], run_name="__main__", alter_sys=True))
    else:
        end_with(words, lambda: runpy.run_path(kind, run_name="__main__"))
