"""Where records go, and folders for runners."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.problem import folders
from harness.results import record
from harness.sandbox import reaper
from harness.sandbox.workdir import Workdir

GEMV = folders.find("nvfp4_gemv")
CPU = GEMV.variant("cpu_portable").file


@pytest.fixture
def results(tmp_path, monkeypatch) -> Path:
    """Records go to a folder of the test's own."""
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results")
    return tmp_path / "results"


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that other users may pass through, as pytest's may not be: a runner may be one."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o711)
    yield folder
    reaper.remove_tree(str(folder))


@pytest.fixture
def make(place) -> Iterator[Callable[..., Workdir]]:
    """Makes folders for runners, of a CPU variant if no other file is named; they go at the end."""
    made = []

    def make(file=CPU, problem=GEMV, kept=None) -> Workdir:
        made.append(Workdir.make(file, problem, kept, base=place))
        return made[-1]

    yield make
    for box in made:
        box.remove()
