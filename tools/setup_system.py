#!/usr/bin/env python3
"""Install what `make test-system` needs and pip's first set-up does not bring: programs with apt, Ray with pip.

Only what is missing is installed. Exit status: 0 all is there, 1 not (a line for each thing says why and what to do).
The standard library only; `make setup` has made .venv before.
"""

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from tools import setup  # noqa: E402

# Program -> Debian's package. ssh is listed too: a minimal machine lacks it.
PROGRAMS = {"ssh": "openssh-client", "sshd": "openssh-server", "rsync": "rsync", "chromium": "chromium"}
SBIN = "/usr/sbin:/sbin:/usr/local/sbin"  # where sshd is, and where not every user's PATH leads
LOCK_S = 600  # how long apt waits for another apt
APT = ("apt-get", "-o", f"DPkg::Lock::Timeout={LOCK_S}", "-q")


def missing(which: Callable[[str], object] | None = None) -> list[str]:
    """Debian's packages of the programs that are not there."""
    which = which or (lambda name: shutil.which(name) or shutil.which(name, path=SBIN))
    return [package for program, package in PROGRAMS.items() if not which(program)]


def why_not(packages: Sequence[str], root: bool, apt: bool) -> str:
    """Why apt cannot install `packages` here, and what to do; "" if it can."""
    if not apt:
        return f"no apt-get here: install {', '.join(packages)} with the package manager of this system"
    return "" if root else f"not root: sudo apt-get install {' '.join(packages)}"


def programs() -> bool:
    """Install the programs that are missing. -> whether all are there."""
    packages = missing()
    if not packages:
        return True
    if said := why_not(packages, os.geteuid() == 0, bool(shutil.which("apt-get"))):
        setup.say(said)
        return False
    setup.say(f"apt-get install {' '.join(packages)}")
    if "openssh-server" in packages:
        setup.say("Debian starts openssh-server's service; the tests do not use it (systemctl disable --now ssh)")
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    commands = ([*APT, "update"], [*APT, "install", "-y", "--no-install-recommends", *packages])
    for command in commands:
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            print("".join(done.stdout.splitlines(keepends=True)[-setup.TAIL :]), end="", flush=True)
    if left := missing():
        setup.say(f"apt-get did not install {', '.join(left)}; its last lines, above, say why")
    return not left


def packages() -> bool:
    """Install the extra [cluster] into .venv. -> whether it is there."""
    requirements = tomllib.loads((setup.ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = requirements["cluster"]
    have = setup.installed(setup.PYTHON)
    if all(setup.satisfied(one, have) for one in wanted):
        return True
    pins = setup.read_pins((setup.ROOT / "constraints.txt").read_text())
    # torch is not asked for, so what .venv has of it, and what it shares with python3, stays.
    plan = setup.Plan(with_pip="pip" in have, pins={**pins, **{n: v for n, v in have.items() if n in pins}})
    setup.say(f"installing {', '.join(wanted)} into .venv; what pip says is in {setup.LOG.relative_to(setup.ROOT)}")
    if not setup.run_pip(plan, [], wanted):
        setup.say(f"pip cannot get {', '.join(wanted)}: --ray does not run, and its tests are skipped or fail")
        return False
    return True


def main() -> int:
    both = [programs(), packages()]
    return 0 if all(both) else 1


if __name__ == "__main__":
    sys.exit(main())
