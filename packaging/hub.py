"""Write the wheel's content as a repository of Hugging Face's `kernels`: python packaging/hub.py FOLDER [cuda] [cpu]

FOLDER gets build/torch-cuda, which takes nvcc and five minutes on two cores, and build/torch-cpu; either word: that one
only. kernels.get_local_kernel(FOLDER) loads the one for the torch that is installed. Nothing is uploaded.
"""

import json
import re
import shutil
import sys
import tomllib
from pathlib import Path

import staging

PROJECT = tomllib.loads((staging.HERE / "pyproject.toml").read_text())["project"]
VERSION = staging.load.constants(staging.HERE / "dsv4_kernels/__init__.py", "__version__")["__version__"]
# What kernels asks of a build. Compiled for sm_90a and sm_100a: no other GPUs.
BACKENDS = {"cuda": {"type": "cuda", "archs": ["9.0a", "10.0a"]}, "cpu": {"type": "cpu"}}
# The Hub's cache holds links to files with other names, and problems.common.build follows none.
INIT = """
import pathlib, shutil, tempfile
if pathlib.Path(__file__).is_symlink():
    _plain = tempfile.TemporaryDirectory(prefix=__name__)
    __path__[:] = [shutil.copytree(pathlib.Path(__file__).parent, _plain.name, dirs_exist_ok=True)]
"""


def write(folder: Path, backends: list[str]) -> None:
    """Write the variants for `backends`, of BACKENDS, anew. Errors: see staging.add_shared_objects."""
    for backend in backends:
        package = folder / "build" / f"torch-{backend}"
        # kernels imports it by this name, and may load several versions in a process.
        name = re.sub(r"\W", "_", f"_{PROJECT['name']}_{backend}_{VERSION}")
        shutil.rmtree(package, ignore_errors=True)
        shutil.copytree(staging.HERE / "dsv4_kernels", package, ignore=shutil.ignore_patterns("__pycache__", "vllm.py"))
        staging.complete(package, name)
        for file in (package / "operators.py", package / "compat.py"):
            file.write_text(file.read_text().replace('"dsv4::', f'"{name}::'))
        first = package / "__init__.py"
        first.write_text(first.read_text().replace('"""\n', f'"""\n{INIT}', 1))  # behind the docstring
        if backend == "cuda":
            staging.add_shared_objects(package)
        (package / staging.build.PREBUILT.name / "README.md").write_text("Shared objects for GPUs, if any.\n")
        metadata = {"id": name, "name": PROJECT["name"], "version": 1, "license": PROJECT["license"]}
        metadata |= {"python-depends": [], "backend": BACKENDS[backend]}
        (package / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-") or not set(sys.argv[2:]) <= set(BACKENDS):
        sys.exit("usage: python packaging/hub.py FOLDER [cuda] [cpu]")
    write(Path(sys.argv[1]), sys.argv[2:] or list(BACKENDS))
