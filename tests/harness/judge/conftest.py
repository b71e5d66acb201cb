"""Recorded runs on made-up sessions: where their records go, and the problem that they judge."""

from pathlib import Path

import pytest

from harness.judge import invariance, judging, phases
from harness.results import record
from tests.support.recorded import SOURCE, TASK, FakeSession, World


@pytest.fixture
def world(monkeypatch, tmp_path) -> World:
    made = World()
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(judging, "Session", FakeSession)
    monkeypatch.setattr(invariance, "run", lambda *_: {})
    monkeypatch.setattr(phases, "run_tests", made.run_tests)
    monkeypatch.setattr(phases, "run_benchmarks", made.run_benchmarks)
    return made


@pytest.fixture
def folder(tmp_path) -> Path:
    """A problem of our own kind with the variants good and other, and better.py outside."""
    place = tmp_path / "made_up"
    (place / "variants").mkdir(parents=True)
    (place / "task.py").write_text(TASK)
    (place / "reference.py").write_text("")
    for name in ("good", "other"):
        (place / "variants" / f"{name}.py").write_text(SOURCE.format(name=name))
    (tmp_path / "better.py").write_text(SOURCE.format(name="better"))
    return place
