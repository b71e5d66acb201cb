"""--devices with two devices that are made up, both of them this machine's CPU: one run, whose records are whole."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.results import record
from tests.support import small_checkout

pytestmark = pytest.mark.system
LIMIT_S = 240
# The command line with two devices; a part on the one named in LOSE ends at its first group.
TWO = """
import os, sys
sys.path[0] = os.getcwd()
from harness import invocation, run
from harness.judge.spread import Place
invocation.Run.devices = [Place("cpu:a", "fake a"), Place("cpu:b", "fake b", {"LOSE": os.environ.get("LOSE_B", "")})]
sys.exit(run.main(sys.argv[1:]))
"""
LOSING = """    def _timed(self, group: Group) -> None:
        if os.environ.get("LOSE"):
            os.kill(os.getpid(), 9)
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    here = small_checkout.make(tmp_path_factory.mktemp("devices"))
    part = here / "harness" / "judge" / "part.py"
    before = part.read_text()
    part.write_text(before.replace(LOSING.splitlines(keepends=True)[0], LOSING))
    assert part.read_text() != before
    (here / "two.py").write_text(TWO)
    return here


@pytest.mark.parametrize(
    "lost", [pytest.param("", id="whole", marks=pytest.mark.slow), pytest.param("1", id="a-part-is-lost")]
)
def test_a_run_over_two_devices_is_one_run(checkout, tmp_path, lost):
    env = {**os.environ, "LOSE_B": lost, "XDG_RUNTIME_DIR": str(tmp_path)}
    command = [sys.executable, "two.py", "tiny", "--device", "cpu", "--json", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    found = [(line["variant"], line["kind"], line["case"]["m"]) for line in lines]
    wanted = (("test", 16), ("test", 33), ("benchmark", 512), ("benchmark", 640))
    assert found == [("cpu_plain", *one) for one in wanted]
    assert {line["status"] for line in lines} == {"PASSED"} and len({line["run_id"] for line in lines}) == 1
    for line in lines[2:]:
        assert line["n"] == 1 and any("spread over cpu:a, cpu:b" in said for said in line["clock"]["warnings"])
        assert line["clock"]["name"] and line["roofline_us"] > 0
    assert ("cpu:b: a part ended with exit code -9" in done.stdout) == bool(lost)
    results = checkout / "leaderboard" / "results"
    (file,) = results.glob("*/tiny.jsonl")
    assert [r for r in record.read(file.parent.name, "tiny", results) if r["run_id"] == lines[0]["run_id"]] == lines
    assert not list(results.rglob("*.partial.jsonl"))
