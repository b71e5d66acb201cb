"""Recorded runs on made-up sessions, and the problem that they judge."""

from pathlib import Path

import pytest

from harness.judge import invariance, judging, phases
from tests.support import write_files
from tests.support.recorded import SOURCE, TASK, FakeSession, World


@pytest.fixture
def world(monkeypatch, results, tmp_path) -> World:
    made = World()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # nothing is timed, so it waits for no other test that times
    monkeypatch.setattr(judging, "Session", FakeSession)
    monkeypatch.setattr(invariance, "run", lambda *_: {})
    monkeypatch.setattr(phases, "run_tests", made.run_tests)
    monkeypatch.setattr(phases, "run_benchmarks", made.run_benchmarks)
    return made


@pytest.fixture
def folder(tmp_path) -> Path:
    """A problem of our own kind with the variants good and other, and better.py outside."""
    variants = {f"made_up/variants/{name}.py": SOURCE.format(name=name) for name in ("good", "other")}
    files = {"made_up/task.py": TASK, "made_up/reference.py": "", "better.py": SOURCE.format(name="better")}
    return write_files(tmp_path, files | variants) / "made_up"
