"""The contracts about imports, in pyproject.toml; `make lint` checks them."""

import tomllib

from tests.support import ROOT


def test_contracts_name_every_folder_of_the_harness():
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    folders = {f"harness.{file.parent.name}" for file in (ROOT / "harness").glob("*/*.py")}
    layers = {module for layer in linter["contracts"][0]["layers"] for module in layer.split(" : ")}
    assert folders <= layers and folders <= {*linter["root_packages"]}
