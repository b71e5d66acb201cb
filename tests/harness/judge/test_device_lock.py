"""The lock on a device: one at a time, told once who has it, gone with its holder; and who else is on a GPU."""

import os
import signal
import subprocess
import sys

import pytest

from harness.judge import machine
from harness.sandbox.process import ROOT

HOLD = (
    "import sys, time, subprocess\nfrom harness.judge import machine\n"
    "with machine.hold({device!r}):\n    {then}\n    print('held', flush=True)\n    sys.stdin.read()"
)


@pytest.fixture
def device(tmp_path, monkeypatch):
    """A device of this test's own, its lock in a folder of its own."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return "GPU-0000"


def holder(device: str, then: str = "pass") -> subprocess.Popen:
    command, pipe = [sys.executable, "-c", HOLD.format(device=device, then=then)], subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT)
    assert process.stdout.readline() == "held\n"
    return process


def told(device: str) -> list[str]:
    """What is said to who holds it next."""
    said: list[str] = []
    with machine.hold(device, said.append):
        return said


def end(process: subprocess.Popen) -> None:
    process.stdin.close()
    process.stdout.close()
    process.wait(timeout=60)


def test_a_second_one_waits_and_is_told_once_for_whom(device):
    first = holder(device)
    said = []

    def say(text: str) -> None:
        said.append(text)
        first.stdin.close()  # it ends now: whoever waits goes on

    with machine.hold(device, say):
        assert first.wait(timeout=60) == 0
    first.stdout.close()
    assert said == [f"waiting for process {first.pid}, which is timing on {device}"]


def test_other_devices_are_free(device):
    first = holder(device)
    assert told("cpu") == []
    end(first)


def test_it_goes_with_its_holder_however_that_ends(device):
    first = holder(device)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    end(first)
    assert told(device) == []


def test_children_do_not_inherit_it(device):
    """One that outlives the holder would keep the device locked."""
    end(holder(device, "subprocess.Popen(['sleep', '5'], close_fds=False)"))
    assert told(device) == []


def test_a_folder_of_somebody_elses_is_refused(device, tmp_path):
    """In a temporary folder that all may write, another user could have made it first."""
    folder = tmp_path / f"kernel-locks-{os.geteuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(RuntimeError, match="not this user's own"), machine.hold(device):
        pass


SMI = """\
GPU-aaaa, 4242, /usr/bin/python3, 512
GPU-aaaa, 4243, /opt/a, strange, name, [N/A]
GPU-bbbb, 4244, train, 1024
No running processes found
"""


def test_other_users_of_a_gpu_are_named(monkeypatch, tmp_path):
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\ncat <<'EOF'\n{SMI}EOF\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    named = ["process 4242 (/usr/bin/python3), 512 MiB", "process 4243 (/opt/a,strange,name)"]
    assert machine.users("GPU-aaaa") == named
    smi.write_text("#!/bin/sh\necho no driver; exit 9\n")
    with pytest.raises(RuntimeError, match="nvidia-smi failed with 9: no driver"):
        machine.users("GPU-aaaa")
