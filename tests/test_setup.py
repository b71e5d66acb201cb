"""tools/setup.py, run for real by a bare python3, with pip and a folder of empty wheels at the pinned versions."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.support import ROOT

FILES = ("pyproject.toml", "constraints.txt", "tools/setup.py", "problems/common/venv.py")
PINS = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text().lower(), re.MULTILINE))
BARE = os.path.realpath(sys.executable)  # the interpreter below this environment
TORCH = """__version__ = "2.11.0+cu130"
class cuda:
    is_available = staticmethod(lambda: True)
"""
SHARED = {"torch": "2.11.0+cu130", "rich": "14.9", "pyyaml": "6.1", "pydantic": "2.8"}
SHARED |= {"allpairspy": "2.5.0", "pandas": "1.5", "matplotlib": "3.9"}


def write_package(target: zipfile.ZipFile | Path, name: str, version: str, text: str = "") -> None:
    """Write a package of one module into a wheel or a folder of packages."""
    module = {"pyyaml": "yaml"}.get(name.lower(), name.replace("-", "_"))
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    files = {
        f"{module}.py": text,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    for path, content in files.items():
        if isinstance(target, zipfile.ZipFile):
            target.writestr(path, content)
        else:
            (target / path).parent.mkdir(exist_ok=True)
            (target / path).write_text(content)


class Checkout:
    """The files that setting up needs, and a folder of wheels in place of an index."""

    def __init__(self, tmp_path: Path) -> None:
        self.root, self.wheels = tmp_path / "checkout", tmp_path / "wheels"
        self.python = self.root / ".venv" / "bin" / "python"
        self.wheels.mkdir()
        for name in FILES:
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.root / name)

    def require(self, *requirements: str) -> None:
        optional = "optional-dependencies = {test = [], baselines = []}"
        (self.root / "pyproject.toml").write_text(f"[project]\ndependencies = {list(requirements)}\n{optional}\n")

    def add_wheel(self, name: str, version: str) -> None:
        path = self.wheels / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as wheel:
            write_package(wheel, name, version)

    def set_up(self, python: str | Path, *options: str) -> subprocess.CompletedProcess[str]:
        variables = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.wheels)}
        command, pipe = [str(python), *options, str(self.root / "tools/setup.py")], subprocess.PIPE
        variables |= {"PATH": os.defpath}
        return subprocess.run(command, env=variables, stdout=pipe, stderr=subprocess.STDOUT, text=True)

    def versions(self) -> dict[str, str]:
        code = "import importlib.metadata as m; print(*(f'{d.name.lower()}=={d.version}' for d in m.distributions()))"
        listed = subprocess.run([str(self.python), "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout
        return dict(reversed([word.split("==") for word in listed.split()]))  # the first of a name counts


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


@pytest.fixture
def python_with_torch(tmp_path: Path) -> Path:
    """A python3 whose torch sees a GPU and whose pandas is too old. It has no pip."""
    folder = tmp_path / "python3"
    subprocess.run([BARE, "-m", "venv", "--without-pip", folder], check=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    for name, version in SHARED.items():
        write_package(packages, name, version, TORCH if name == "torch" else "")
    return folder / "bin" / "python"


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="with a driver the baselines are installed too")
@pytest.mark.slow
def test_setup_shows_what_pip_says_without_packages_and_installs_the_pins_once(checkout):
    done = checkout.set_up(BARE)
    assert done.returncode == 1 and "ERROR: No matching distribution found" in done.stdout
    assert "PIP_FIND_LINKS=FOLDER" in done.stdout and "Traceback" not in done.stdout
    for name, version in PINS.items():
        checkout.add_wheel(name, version)
    checkout.add_wheel("torch", PINS["torch"] + "+cpu")
    done = checkout.set_up(BARE)
    assert done.returncode == 0, done.stdout
    versions = checkout.versions()
    assert versions["torch"] == PINS["torch"] + "+cpu"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for requirement in (*project["dependencies"], *project["optional-dependencies"]["test"]):
        name = re.match(r"[\w-]+", requirement)[0]
        assert name == "torch" or versions[name] == PINS[name]
    assert "installing" not in checkout.set_up(BARE).stdout
    constraints = checkout.root / "constraints.txt"
    constraints.write_text(constraints.read_text().replace(f"rich=={PINS['rich']}", "rich==99.0"))
    checkout.add_wheel("rich", "99.0")
    again = checkout.set_up(BARE)
    assert again.returncode == 0 and "making .venv" not in again.stdout and checkout.versions()["rich"] == "99.0"


@pytest.mark.slow
def test_setup_shares_a_torch_that_sees_a_gpu_and_without_ensurepip_uses_pip_of_python3(checkout, python_with_torch):
    checkout.require("torch>=2.10", "rich>=13.0", "pandas>=2.2", "ruff>=0.14", "shtab>=1.7")
    for name in ("torch", "rich", "pandas", "ruff"):
        checkout.add_wheel(name, PINS[name])
    packages = next(python_with_torch.parent.parent.glob("lib/python*/site-packages"))
    (packages / "sitecustomize.py").write_text("import sys; sys.modules['ensurepip'] = None\n")
    done = checkout.set_up(python_with_torch)
    assert done.returncode == 1 and "neither ensurepip nor pip 22.3 or later" in done.stdout
    assert "apt install python3-venv" in done.stdout and "make PYTHON=" in done.stdout
    bootstrap = "import sys; del sys.modules['ensurepip']; import ensurepip; ensurepip.bootstrap()"
    subprocess.run([python_with_torch, "-c", bootstrap], check=True, capture_output=True)
    done = checkout.set_up(python_with_torch)
    assert done.returncode == 0, done.stdout
    assert "python3's torch 2.11.0+cu130 is used" in done.stdout
    kept = {name: version for name, version in SHARED.items() if name != "pandas"}
    assert checkout.versions().items() >= {**kept, "ruff": PINS["ruff"], "pandas": PINS["pandas"]}.items()
    assert f"not installed: shtab=={PINS['shtab']};" in done.stdout
    assert f"not installed: shtab=={PINS['shtab']};" in checkout.set_up(python_with_torch).stdout
