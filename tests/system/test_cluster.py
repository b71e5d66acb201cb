"""Jobs on a Ray cluster of this machine, one of whose nodes is killed while it judges: no record is lost or doubled."""

import contextlib
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from harness.sandbox import reaper
from tests.support import comes, small_checkout, system
from tests.support.jails import gone

pytestmark = pytest.mark.system
LIMIT_S = 240
VARIANTS = ("cpu_a", "cpu_b", "cpu_plain")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    system.need_package("ray")
    here = small_checkout.make(tmp_path_factory.mktemp("driver"))
    plain = here / "problems" / "tiny" / "variants" / "cpu_plain.py"
    for name in VARIANTS[:2]:
        for suffix in (".py", ".cpp"):
            shutil.copy(plain.with_suffix(suffix), plain.with_name(name + suffix))
    return here


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A head without processors, and no node yet."""
    system.need_package("ray")
    from ray.cluster_utils import Cluster

    # Runs here wait for no other run on this machine.
    (tmp_path / "runtime").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("KERNEL_BUILD_DIR", str(tmp_path / "build"))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    quick = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 4}
    small = {"object_store_memory": 80 * 2**20, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "_system_config": quick, **small})
    try:
        yield made
    finally:
        made.shutdown()


def judges_of(node) -> list[int]:
    """The processes of harness/run.py that a node has started."""
    (raylet,) = node.all_processes["raylet"]
    found = []
    for pid in reaper.descendants(raylet.process.pid):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            found += [pid] if b"harness/run.py" in words else []
    return found


def test_killed_node_loses_and_doubles_no_record(checkout, cluster):
    command = [checkout / ".venv/bin/python", "-m", "harness", "cluster", cluster.address, "tiny", "--all"]
    pipes = {"cwd": checkout, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    alone = subprocess.run(command, timeout=LIMIT_S, **pipes)
    assert alone.returncode == 2 and "no worker with processors has joined" in alone.stderr, alone
    _, lost = (cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20) for _ in range(2))
    driver = subprocess.Popen([*command, "--device", "cpu", "--json", "-"], **pipes)
    comes(lambda: judges_of(lost) or driver.poll() is not None, LIMIT_S)
    assert (judging := judges_of(lost)), driver.communicate()
    cluster.remove_node(lost, allow_graceful=False)
    out, err = driver.communicate(timeout=LIMIT_S)
    assert driver.returncode in (0, 6), err  # 6: the machine was busy
    assert gone(judging, LIMIT_S), "a lost node's run goes on"
    records = [json.loads(line) for line in out.splitlines()]
    assert len({one["run_id"] for one in records}) == len(VARIANTS), err
    found = sorted((one["variant"], one["kind"], one["case"].get("m")) for one in records)
    cases = (("test", 16), ("test", 33), ("benchmark", 512), ("benchmark", 640))
    assert found == sorted((variant, *case) for variant in VARIANTS for case in cases), err
    files = checkout.glob("leaderboard/results/*/tiny/*.jsonl")
    assert {file.stem for file in files} == {one["run_id"] for one in records}, err
