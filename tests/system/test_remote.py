"""Runs on another machine, which here is this one behind an sshd of the test: what breaks loses and doubles nothing."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.results import record
from harness.sandbox import reaper
from tests.support import comes, loopback, small_checkout
from tests.support.jails import alive

pytestmark = pytest.mark.system
LIMIT_S = 240  # of anything that is waited for; a machine under load may take a while
TINY = ("tiny", "--device", "cpu")


@dataclass(frozen=True)
class Place:
    """A checkout, a host to run on, and the folder there."""

    checkout: Path
    server: loopback.Server
    folder: Path

    @property
    def tree(self) -> Path:
        return Path(f"{self.folder}/root{self.checkout}")

    def begin(self, *words: str) -> subprocess.Popen:
        env = {**os.environ, "KERNEL_SSH": self.server.ssh, "KERNEL_REMOTE_FOLDER": str(self.folder)}
        pipe, command = subprocess.PIPE, [".venv/bin/python", *words]
        return subprocess.Popen(command, cwd=self.checkout, env=env, stdout=pipe, stderr=pipe, text=True)

    def judging(self, *words: str) -> subprocess.Popen:
        return self.begin("-m", "harness", "remote", "there", *words)

    def stopping(self) -> subprocess.Popen:
        return self.begin("-m", "harness", "remote", "there", "--stop")

    def log(self) -> str:
        return (self.folder / "job" / "log").read_text() if (self.folder / "job" / "log").exists() else ""


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
    for name in ("wait", "stray", "fail"):
        (checkout / name).unlink(missing_ok=True)
    shutil.rmtree(checkout / "leaderboard" / "results", ignore_errors=True)


def until(what: Callable[[], object]) -> None:
    assert comes(what, LIMIT_S), f"{what} did not come about in {LIMIT_S} s"


def ended(client: subprocess.Popen) -> tuple[int, str, str]:
    """Return exit code, standard output, standard error."""
    out, err = client.communicate(timeout=LIMIT_S)
    return client.returncode, out, err


def test_run_survives_dropped_connection_killed_client_and_ctrl_c(place, server, tmp_path):
    """Its records come back once, with a submission in a folder of an awkward name. Exit code 6: a busy machine."""
    awkward = tmp_path / 'it\'s "$HOME" `id` \\ *'
    awkward.mkdir()
    for suffix in ("py", "cpp"):
        shutil.copy(place.checkout / f"problems/tiny/variants/cpu_plain.{suffix}", awkward / f"mine.{suffix}")
    (place.checkout / "wait").touch()
    words = ("tiny", "--submission", str(awkward / "mine.py"), "--device", "cpu", "--json", "-")
    first = place.judging(*words)
    until(lambda: "looking for packages" in place.log())
    until(server.drop_connections)
    code, _, err = ended(first)
    assert code == 2 and "the same command follows it" in err

    for end in (signal.SIGKILL, signal.SIGINT):
        client = place.judging(*words)
        assert "which has begun on there before" in client.stderr.readline()
        until(lambda client=client: "looking for packages" in client.stderr.readline())
        client.send_signal(end)
        assert client.wait(LIMIT_S) == (130 if end == signal.SIGINT else -end)

    both = [place.judging(*words) for _ in range(2)]
    for client in both:
        until(lambda client=client: "looking for packages" in client.stderr.readline())
    (place.tree / "wait").unlink()
    for client in both:
        code, out, err = ended(client)
        assert code in (0, 6) and err.count("saved as run ") == 1, out + err
    records = [json.loads(line) for line in out.splitlines()]
    assert {(one["variant"], one["status"]) for one in records} == {("mine", "PASSED")} and len(records) == 4
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=place.checkout, capture_output=True, text=True).stdout
    assert {(one["commit"], one["dirty"]) for one in records} == {(head.strip(), True)}  # "wait" is not committed
    results = place.checkout / "leaderboard" / "results"
    (machine,) = {file.relative_to(results).parts[0] for file in results.rglob("*.jsonl")}
    assert record.read(machine, "tiny", results) == records


def test_stop_ends_a_hung_run_with_all_its_processes(place, tmp_path):
    """Neither the judge and its runners are left, nor what had left the set-up; the next command begins anew."""
    endless = tmp_path / "endless.py"
    endless.write_text('TARGETS = ("cpu",)\n\n\ndef custom_kernel(data):\n    while True:\n        pass\n')
    for name in ("wait", "stray"):
        (place.checkout / name).touch()
    client = place.judging("tiny", "--submission", str(endless), "--device", "cpu", "--timeout", "3000")
    until(lambda: "looking for packages" in place.log())
    (place.tree / "wait").unlink()
    pid = int((place.folder / "job" / "pid").read_text())
    until(lambda: len(reaper.descendants(pid)) >= 4)  # make or the judge, its checker, the reaper and a runner
    below = reaper.descendants(pid)
    code, _, err = ended(place.judging("tiny"))
    assert code == 2 and "runs `run tiny --submission=" in err and "--stop" in err
    for process in (below[0], pid):  # a judge that does not answer to SIGINT
        os.kill(process, signal.SIGSTOP)
    code, _, err = ended(place.stopping())
    assert code == 0, err
    assert ended(client)[0] == 130
    strays = subprocess.run(
        ["grep", "-lF", f"KERNEL_JOB={place.folder}", *map(str, Path("/proc").glob("[0-9]*/environ"))]
    )
    assert strays.returncode != 0
    for pid in below:
        until(lambda pid=pid: not alive(pid))
    assert ended(place.judging("nowhere"))[0] == 2


def test_mirror_has_no_deleted_variant_and_outputs_go_where_they_are_asked_for(place):
    variant = place.checkout / "problems" / "tiny" / "variants" / "cpu_other.py"
    shutil.copy(variant.with_name("cpu_plain.py"), variant)
    shutil.copy(variant.with_name("cpu_plain.cpp"), variant.with_suffix(".cpp"))
    events = place.folder / "events"
    words = (*TINY, "--mode", "test", "--case", "m=16 k=64", "--all", "--quiet", "--json", "-", "--events", str(events))
    for variants in ({"cpu_plain", "cpu_other"}, {"cpu_plain"}):
        code, out, err = ended(place.judging(*words))
        assert code == 0, err
        assert {json.loads(line)["variant"] for line in out.splitlines()} & {"cpu_plain", "cpu_other"} == variants
        for suffix in (".py", ".cpp"):
            variant.with_suffix(suffix).unlink(missing_ok=True)
    assert {line["event"] for line in map(json.loads, events.read_text().splitlines())} >= {"start", "verdict", "end"}


def test_stopped_run_is_resumed_there(place, tmp_path):
    """Its file comes back unfinished, and once more when it is complete."""
    for suffix in (".py", ".cpp"):
        shutil.copy(place.checkout / f"problems/tiny/variants/cpu_plain{suffix}", tmp_path / f"slow{suffix}")
    slow = tmp_path / "slow.py"
    slow.write_text(slow.read_text().replace("    m, k = unpack(data)", "    time.sleep(1)\n    m, k = unpack(data)"))
    slow.write_text(slow.read_text().replace("\nfrom", "\nimport time\nfrom", 1))
    client = place.judging("tiny", "--submission", str(slow), "--device", "cpu")
    files = "leaderboard/results/*/tiny/*.jsonl"
    until(lambda: [file for file in place.tree.glob(files) if file.read_bytes().count(b"\n") > 2])
    assert ended(place.stopping())[0] == 0 and ended(client)[0] == 130
    (file,) = place.checkout.glob(files)
    assert b'"kind": "end"' not in file.read_bytes()
    code, out, err = ended(place.judging("tiny", "--device", "cpu", "--resume", file.stem, "--json", "-"))
    assert code in (0, 6) and len(out.splitlines()) == 4, err
    assert json.loads(file.read_text().splitlines()[-1])["kind"] == "end"


def test_set_up_that_fails_ends_with_its_last_lines_and_exit_code_2(place):
    (place.checkout / "fail").touch()
    code, out, _ = ended(place.judging(*TINY))
    assert code == 2 and "no matching distribution for a package" in out


@pytest.mark.parametrize(("host", "reason"), [("nowhere.invalid", "resolve"), ("refused", "Connection refused")])
def test_unreachable_host_is_named_in_one_line(place, host, reason):
    code, _, err = ended(place.begin("-m", "harness", "remote", host, "tiny"))
    assert code == 2 and f"`ssh {host}` must work" in err and reason in err and err.count("\n") == 1
