"""Jailed children for the tests of the sandbox: each runs the code that it is sent (tests/support/jailed.py)."""

import contextlib
import errno
import os
import shutil
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.sandbox import policy, process, reaper
from harness.sandbox.policy import Jail
from harness.sandbox.process import Child
from tests.support import SUPPORT, comes

ROOT = process.ROOT
SECRET = "held by the judge"
LIMIT_S = 60
REFUSED = (errno.EPERM, errno.EACCES)


def jail_in(place: Path, **options: object) -> Jail:
    """A jail with folders in `place`, and the module `jailed` (tests/support/jailed.py) as its code."""
    folders = [place / name for name in ("code", "home", "tmp", "cache")]
    for folder in folders:
        folder.mkdir(parents=True)
    (folders[0] / "harness" / "runner").mkdir(parents=True)
    for name in ("harness/__init__.py", "harness/runner/wire.py"):
        shutil.copy(ROOT / name, folders[0] / name)
    shutil.copy(SUPPORT / "jailed.py", folders[0])
    return Jail(*folders, **options)


def ask(child: Child, code: str, limit_s: float = LIMIT_S) -> dict:
    return child.request({"code": textwrap.dedent(code)}, limit_s)[0]


def answer(child: Child, code: str) -> object:
    reply = ask(child, code)
    assert "answer" in reply, reply
    return reply["answer"]


@contextlib.contextmanager
def child_of_its_own_user(**options: object) -> Iterator[Child]:
    """A jailed child that no other process shares its user with."""
    if why := policy.offered()["uid"]:
        pytest.skip(f"no user of its own is to be had here: {why}")
    with policy.user() as uid, tempfile.TemporaryDirectory() as base:
        os.chmod(base, 0o711)
        jail = jail_in(Path(base), uid=uid, **options)
        for folder in (jail.home, jail.tmp, jail.cache):
            os.chown(folder, uid, uid)
        child = Child("jailed", jail=jail)
        try:
            yield child
        finally:
            child.close()


def needs(*measures: str) -> None:
    for name in measures:
        if why := policy.offered()[name]:
            pytest.skip(f"{name} is not to be had here: {why}")


DAEMON = """
import os, time
told, tell = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.setsid()
        os.write(tell, str(os.getpid()).encode())
        os.closerange(0, 64)
        while True:
            time.sleep(1)
    os._exit(0)
os.wait()
answer = int(os.read(told, 32))
"""


def alive(pid: int) -> bool:
    return reaper._state(pid) not in ("Z", "X", "")


def gone(pids: list[int], limit_s: float = 10) -> bool:
    return comes(lambda: not any(map(alive, pids)), limit_s)
