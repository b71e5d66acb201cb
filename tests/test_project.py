"""The project's own order: contracts about imports, promises, and parts of a run on a GPU."""

import re
import tomllib

import pytest

from tests import manifest
from tests.support import ROOT
from tools import on_gpu


def test_manifest_equals_the_tree():
    """A deliberate change is written with `python -m tests.manifest --write` and shows in the commit."""
    assert not manifest.differences()


def test_contracts_name_every_folder_of_the_harness():
    """Those about imports, in pyproject.toml; `make lint` checks them."""
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    folders = {f"harness.{file.parent.name}" for file in (ROOT / "harness").glob("*/*.py")}
    layers = {module for layer in linter["contracts"][0]["layers"] for module in layer.split(" : ")}
    assert folders <= layers and folders <= {*linter["root_packages"]}


WORDS = [word for part in on_gpu.PARTS.values() for command in part.commands for word in command.split()]


def test_parts_name_files_that_exist_and_every_gpu_test():
    places = [ROOT / word for word in WORDS if "/" in word]
    assert all(place.exists() for place in places)
    files = [file for folder in ("tests", "ptx_model") for file in (ROOT / folder).rglob("test_*.py")]
    marked = [file for file in files if re.search(r"pytest\.mark\.gpu\b", file.read_text())]
    assert len(marked) > 20
    assert [file for file in marked if not any(file.is_relative_to(place) for place in places)] == []


@pytest.mark.slow
def test_run_returns_the_exit_code_of_each_command_and_interrupts_what_takes_too_long(tmp_path, capsys):
    commands = ("-c print(1)", "-c raise(SystemExit(3))", "-c import(nothing)", "-c __import__('time').sleep(600)")
    assert on_gpu.run("some", on_gpu.Part(commands, 8, ""), 8, tmp_path) == [0, 3, 1, 124]
    assert (tmp_path / "some.0.log").read_text() == "1\n"
    assert "== some.1: exit 3" in (said := capsys.readouterr().out) and "SyntaxError" in said
