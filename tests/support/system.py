"""What the tests marked system need of the machine: programs that pip does not install."""

import importlib.util
import os
import shutil

import pytest

SBIN = "/usr/sbin:/sbin:/usr/local/sbin"  # where sshd is, and where not every user's PATH leads


def need(program: str) -> str:
    """Return the path of `program`. Without it the test is skipped, with the reason; with REQUIRE_SYSTEM=1 it fails."""
    found = shutil.which(program) or shutil.which(program, path=SBIN)
    if found is None:
        _lacks(program)
    return str(found)


def need_package(name: str) -> None:
    """The same for a Python package, by the name of its import."""
    if importlib.util.find_spec(name) is None:
        _lacks(f"the Python package {name}")


def _lacks(what: str) -> None:
    reason = f"needs {what}: `make setup-system` installs it"
    if os.environ.get("REQUIRE_SYSTEM") == "1":
        pytest.fail(reason)
    pytest.skip(reason)
