"""Runs on another machine, which here is this one behind an sshd of the test: what breaks loses and doubles nothing."""

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.results import record
from harness.sandbox import reaper
from tests.support import loopback, small_checkout

pytestmark = pytest.mark.system
LIMIT_S = 240  # of anything that is waited for; a machine under load may take a while


@dataclass(frozen=True)
class Place:
    """A checkout, a host to run on, and the folder there."""

    checkout: Path
    server: loopback.Server
    folder: Path

    def command(self, *words: str) -> tuple[list[str], dict]:
        env = {**os.environ, "KERNEL_SSH": self.server.ssh, "KERNEL_REMOTE_FOLDER": str(self.folder)}
        python = str(self.checkout / ".venv" / "bin" / "python")
        return [python, *words], {"cwd": self.checkout, "env": env, "text": True}

    def begin(self, *words: str) -> subprocess.Popen:
        command, how = self.command("harness/tools/remote.py", *words)
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **how)

    def run(self, *words: str) -> subprocess.CompletedProcess:
        command, how = self.command("harness/tools/remote.py", *words)
        return subprocess.run(command, capture_output=True, timeout=LIMIT_S, **how)

    def state(self) -> dict:
        """The state of the newest job there."""
        states = sorted((self.folder / "jobs").glob("*/state.json"))
        return json.loads(states[-1].read_text()) if states else {}

    def log(self) -> str:
        logs = sorted((self.folder / "jobs").glob("*/log"))
        return logs[-1].read_text() if logs else ""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    return small_checkout.make(tmp_path_factory.mktemp("client"))


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[loopback.Server]:
    with loopback.sshd(tmp_path_factory.mktemp("sshd")) as found:
        yield found


@pytest.fixture
def place(checkout, server, tmp_path) -> Iterator[Place]:
    yield Place(checkout, server, tmp_path / "a folder")
    for name in ("wait", "fail"):
        (checkout / name).unlink(missing_ok=True)


def until(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not what():
        assert time.monotonic() < deadline, f"{what} did not come about in {LIMIT_S} s"
        time.sleep(0.05)


def connected(server: loopback.Server) -> bool:
    return any(reaper.descendants(server.process.pid))


def lines_of(results: Path) -> list[str]:
    return [line for file in results.glob("*/*.jsonl") for line in file.read_text().splitlines()]


def test_a_run_survives_dropped_connections_and_a_killed_client(place, server, tmp_path):
    """Every record comes back once, in the form of records, with a submission in a folder of an awkward name."""
    awkward = tmp_path / 'it\'s "$HOME" `id` \\ *'
    awkward.mkdir()
    for suffix in ("py", "cpp"):
        shutil.copy(place.checkout / f"problems/tiny/variants/cpu_plain.{suffix}", awkward / f"mine.{suffix}")
    (place.checkout / "wait").touch()
    first = place.begin("there", "tiny", "--submission", str(awkward / "mine.py"), "--device", "cpu")
    until(lambda: "looking for packages" in place.log())
    until(lambda: server.drop_connections())
    said = ""
    while "trying again" not in said:
        said = first.stderr.readline()
        assert said, "the client gave up"
    until(lambda: connected(server))
    first.kill()
    first.communicate()
    until(lambda: not connected(server))

    both = [place.begin("there", "--attach") for _ in range(2)]
    begun = [client.stdout.readline() for client in both]
    assert server.drop_connections() >= 2
    (place.folder / "go").touch()
    results = place.checkout / "leaderboard" / "results"
    for client, line in zip(both, begun, strict=True):
        out, err = client.communicate(timeout=LIMIT_S)
        assert client.returncode == 0 and "trying again" in err, out + err
        out = line + out
        assert out.count("looking for packages") == 1 and out.count(" records of ") == 1, "each line of the log once"
    here, there = lines_of(results), lines_of(place.folder / "tree" / "leaderboard" / "results")
    assert sorted(here) == sorted(there) and len(set(here)) == len(here) == 4
    (file,) = results.glob("*/tiny.jsonl")
    records, complaints = record.reading(file.parent.name, "tiny", results)
    assert len(records) == 4 and not complaints and len({one["run_id"] for one in records}) == 1
    assert {(one["variant"], one["status"]) for one in records} == {("mine", "PASSED")}
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=place.checkout, capture_output=True, text=True).stdout
    assert {(one["commit"], one["dirty"]) for one in records} == {(head.strip(), True)}  # "wait" is not committed

    again = place.run("there", "--attach")
    assert again.returncode == 0 and "0 new records" in again.stdout
    assert lines_of(results) == here
    assert "exit code 0" in place.run("there", "--status").stdout


def test_a_stopped_run_leaves_no_process(place, tmp_path):
    """Neither the judge and its runners nor what had left the set-up; and the folder is free for the next run."""
    endless = tmp_path / "endless.py"
    endless.write_text('TARGETS = ("cpu",)\n\n\ndef custom_kernel(data):\n    while True:\n        pass\n')
    (place.checkout / "wait").touch()
    client = place.begin("there", "tiny", "--submission", str(endless), "--device", "cpu", "--timeout", "3000")
    until(lambda: "looking for packages" in place.log())
    (place.folder / "go").touch()
    until(lambda: place.state().get("state") == "running")
    supervisor = place.state()["pid"]
    until(lambda: len(reaper.descendants(supervisor)) >= 4)  # the sleeping one, the judge, its checker and a runner
    below = reaper.descendants(supervisor)
    busy = place.run("there", "tiny")
    assert busy.returncode == 2 and "is running in this folder" in busy.stderr
    stopped = place.run("there", "--stop")
    assert stopped.returncode == 0 and "stopped" in stopped.stdout, stopped.stderr
    assert client.wait(LIMIT_S) == 130
    client.communicate()
    for pid in below:
        until(lambda pid=pid: not Path(f"/proc/{pid}").exists() or reaper._state(pid) in ("Z", "X", ""))
    assert place.state()["state"] == "stopped"
    again = place.run("there", "--stop")
    assert again.returncode == 0, "what has ended stays as it is"


def test_a_set_up_that_fails_shows_its_last_lines(place):
    (place.checkout / "fail").touch()
    done = place.run("there", "tiny", "--device", "cpu")
    assert done.returncode == 2
    assert "set-up failed: make setup: exit code 2" in done.stderr
    assert "no matching distribution for a package" in done.stderr


@pytest.mark.parametrize(
    ("host", "said"), [("nowhere.invalid", "no such host"), ("refused", "no ssh server answers there")]
)
def test_a_host_that_cannot_be_reached(place, host, said):
    done = place.run(host, "tiny")
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1
    assert not (place.checkout / "leaderboard" / "out" / "remote" / host).exists()


def test_what_a_checkout_no_longer_has_does_not_run(place):
    """A second run there sends the present files; the output goes where --json and --events say."""
    variant = place.checkout / "problems" / "tiny" / "variants" / "cpu_other.py"
    shutil.copy(variant.with_name("cpu_plain.py"), variant)
    shutil.copy(variant.with_name("cpu_plain.cpp"), variant.with_suffix(".cpp"))
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: [variant.with_suffix(s).unlink(missing_ok=True) for s in (".py", ".cpp")])
        assert place.run("there", "tiny", "--lint", "--device", "gpu").returncode == 2
        listed = ["there", "tiny", "--mode", "test", "--device", "cpu", "--case", "m=16 k=64", "--all", "--quiet"]
        first = place.run(*listed, "--json", "-")
        assert first.returncode == 0, first.stderr
        assert {json.loads(line)["variant"] for line in first.stdout.splitlines()} >= {"cpu_plain", "cpu_other"}
    second = place.run(*listed, "--json", "-", "--events", str(place.folder / "events"))
    assert {json.loads(line)["variant"] for line in second.stdout.splitlines()} & {"cpu_plain", "cpu_other"} == {
        "cpu_plain"
    }
    assert "cpu_plain" in (place.folder / "events").read_text()
