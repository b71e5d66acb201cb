"""What a node of a Ray cluster does with one job: unpack the files, run harness/run.py, return what it made.

harness/tools/cluster.py sends `job` by value, with this module, so it uses the standard library only and nothing of the
checkout. The interpreter is the one that runs Ray there: that of the node's .venv.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

LOG_BYTES = 400_000  # of a run's output that are returned
_DIES_WITH_PARENT = 1  # of prctl
RESULTS = "leaderboard/results"


def job(packed: bytes, words: list[str], env: dict[str, str]) -> dict:
    """Run harness/run.py with `words` in a folder with the files of the archive `packed`.

    Return {"node", "code", "log", "json": the lines of --json, "records": by path in results/ the file of a run}. env:
    more of its environment.
    """
    place = Path(tempfile.mkdtemp(prefix="kernel-job-"))
    try:
        tree = place / "tree"
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(place, filter="data")
        before = set(tree.glob(f"{RESULTS}/*/*/*.jsonl"))
        with open(place / "log", "wb") as log:
            code = _run([sys.executable, "harness/run.py", *words, f"--json={place / 'json'}"], tree, log, env)
        made = set(tree.glob(f"{RESULTS}/*/*/*.jsonl")) - before
        found = {str(file.relative_to(tree / RESULTS)): file.read_bytes() for file in made}
        return {
            "node": socket.gethostname(),
            "code": code,
            "log": _tail(place / "log"),
            "json": (place / "json").read_bytes() if (place / "json").is_file() else b"",
            "records": found,
        }
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _run(command: list[str], tree: Path, log: io.BufferedWriter, env: dict[str, str]) -> int:
    """Run a command that dies with this process: a lost node's job runs elsewhere, and must not go on here."""

    def begin() -> None:
        ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL, 0, 0, 0)

    # What compiles once serves the next job of this node too.
    builds = Path(os.environ.get("KERNEL_BUILD_DIR") or Path.home() / ".cache" / "dsv4-kernels" / "build")
    with contextlib.suppress(OSError):
        builds.mkdir(parents=True, exist_ok=True)
    own = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}  # which Ray sets
    more = {**own, "KERNEL_BUILD_DIR": str(builds), **env}
    done = subprocess.run(
        command, cwd=tree, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=more, preexec_fn=begin
    )
    return done.returncode


def _tail(file: Path) -> str:
    data = file.read_bytes()
    cut = "... (the beginning is left out)\n" if len(data) > LOG_BYTES else ""
    return cut + data[-LOG_BYTES:].decode(errors="replace")
