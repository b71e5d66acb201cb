"""What the policy decides: environment, readable paths, measures, and what the probe says of a machine."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from harness.sandbox import confine, policy
from harness.sandbox.process import Child
from tests.support.jails import LIMIT_S, ROOT, SECRET, answer, jail_in


def test_the_environment_is_made_anew(tmp_path, monkeypatch):
    given = {"A_TOKEN": SECRET, "OMP_NUM_THREADS": "7", "CUDA_VISIBLE_DEVICES": "0", "CUDA_CACHE_PATH": "/elsewhere"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT), str(ROOT.parent), "/"]))
    jail = jail_in(tmp_path / "jail")
    child = Child("jailed", {"ADDED": "yes"}, jail)
    environment, path = answer(child, "import os, sys; answer = [dict(os.environ), sys.path]")
    child.close()
    assert environment["USER"] == environment["LOGNAME"] == policy.USER
    assert environment["TORCHINDUCTOR_COMPILE_THREADS"] == "1"
    assert SECRET not in str(environment) and "OMP_NUM_THREADS" not in environment
    assert environment["CUDA_VISIBLE_DEVICES"] == "0" and environment["ADDED"] == "yes"
    assert environment["PYTHONPATH"] == os.pathsep.join([str(jail.code), str(tmp_path)])
    private = [key for key, value in environment.items() if value.startswith(str(tmp_path / "jail"))]
    assert {"HOME", "TMPDIR", "KERNEL_BUILD_DIR", "CUDA_CACHE_PATH", "XDG_CACHE_HOME"} < set(private)
    assert all(environment[f"{of}_CACHE_DIR"].startswith(str(jail.cache)) for of in ("HUMMING", "DG_JIT"))  # compiled
    assert str(ROOT) not in path and "" not in path


def test_a_jail_that_cannot_be_made_is_the_judges_fault(tmp_path):
    """Not a verdict on the submission, and nothing runs half confined."""
    jail = jail_in(tmp_path)
    shutil.rmtree(jail.home)
    child = Child("jailed", jail=jail)
    with pytest.raises(policy.SandboxError, match="home"):
        child.request({"code": "answer = 1"}, LIMIT_S)
    child.kill()


def test_probe_says_on_or_why_not(monkeypatch):
    found = json.loads(subprocess.check_output([sys.executable, "-m", "harness.sandbox", "--probe"], cwd=ROOT))
    assert all(found[name].startswith(("on", "off: ")) and found[name] != "off: " for name in policy.MEASURES)
    for name in ("landlock_abi", "seccomp_available"):
        monkeypatch.setattr(confine, name, Mock(side_effect=OSError(errno.ENOSYS, "Function not implemented")))
    policy.offered.cache_clear()
    try:
        found = policy.probe()
    finally:
        policy.offered.cache_clear()
    assert all(found[name].startswith("off: ") for name in ("landlock", "tcp", "scope", "seccomp"))


def test_of_homes_only_the_folders_that_are_named_may_be_read(tmp_path, monkeypatch):
    """A variable that names a home folder, or one above it, opens neither."""
    home = tmp_path / "home" / "me"
    for folder in ("bin", "modules", ".ssh"):
        (home / folder).mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    above = [str(home), str(home.parent), "/", str(Path("~root").expanduser()), str(ROOT.parent)]
    monkeypatch.setenv("PATH", os.pathsep.join([*above, str(home / "bin"), os.environ["PATH"]]))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*above, str(home / "modules")]))
    monkeypatch.setenv("LD_LIBRARY_PATH", os.pathsep.join(above))
    monkeypatch.setattr(sys, "path", [*above, *sys.path])
    paths = [Path(path) for path in policy.read_paths()]
    assert policy.kept("PYTHONPATH") == [str(home / "modules")] and policy.kept("LD_LIBRARY_PATH") == []
    assert [path for path in paths if tmp_path in path.parents] == [home / "modules", home / "bin"]
    readable = [*above[:2], str(home / ".ssh"), str(ROOT.parent), str(Path("~root/.ssh").expanduser())]
    assert not [path for path in paths if any(path == Path(x) or path in Path(x).parents for x in readable)]


def test_a_folder_on_path_that_may_not_be_entered_is_skipped(tmp_path, monkeypatch):
    inner, exists = tmp_path / "closed" / "bin", Path.exists

    def entered(path):
        if path == inner:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return exists(path)

    monkeypatch.setenv("PATH", os.pathsep.join([str(inner), os.environ["PATH"]]))
    before = policy.read_paths()
    monkeypatch.setattr(Path, "exists", entered)
    assert policy.read_paths() == before and str(inner) not in before


def test_the_checkout_is_cut_out_of_what_may_be_read(monkeypatch):
    for path in (ROOT, ROOT.parent, ROOT / "harness", Path("/")):
        monkeypatch.setattr(sys, "path", [str(path), *sys.path])
    monkeypatch.setenv("PATH", os.pathsep.join([str(ROOT), str(ROOT.parent), os.environ["PATH"]]))
    paths = [Path(path) for path in policy.read_paths()]
    inside = [path for path in paths if ROOT in path.parents]
    assert not [path for path in paths if path == ROOT or path in ROOT.parents]
    assert not [path for path in inside if path.relative_to(ROOT).parts[0] in policy.SECRET]
    prefix = Path(sys.prefix).resolve()
    assert [path for path in paths if prefix == path or path in prefix.parents]
    assert not [path for path in paths if path.parent == ROOT.parent and path not in (prefix, *prefix.parents)]
