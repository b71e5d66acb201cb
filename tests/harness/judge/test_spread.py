"""--devices: which GPUs are meant, how work is divided, and that a device has one part at a time."""

import sys
from types import SimpleNamespace

import pytest

from harness import run
from harness.judge import spread
from harness.judge.spread import Place, Share
from harness.problem.folders import UsageError
from harness.results import gpu

# A part that says when it began and ended on its device; the case with number 3 fails on device b.
PART = """
import json, os, sys, time
order = json.load(sys.stdin)
place, numbers = os.environ["PLACE"], [number for number, _ in order["cases"]]
held = os.path.join(sys.argv[1], place)
os.mkdir(held)
time.sleep(0.02)
os.rmdir(held)
if 3 in numbers and place == "b":
    sys.exit("the device is gone")
outcome = {"status": "PASSED", "reason": place}
for number in numbers:
    print(json.dumps({"kind": "test", "submission": "x", "case": number, "outcome": outcome}))
print(json.dumps({"kind": "done", "audits": {"x": {"calls": 1}}, "clock": "a clock", "notes": ["a note"]}))
"""


def gpus(monkeypatch, *names):
    found = tuple(gpu.Gpu(i, f"GPU-{i}", name, "1", "9.0") for i, name in enumerate(names))
    monkeypatch.setattr(gpu, "visible", lambda: found)


def test_devices_are_named_by_number(monkeypatch):
    gpus(monkeypatch, "H200", "H200", "H200")
    assert [place.lock for place in spread.places("all")] == ["GPU-0", "GPU-1", "GPU-2"]
    assert [place.name for place in spread.places("2, cuda:0")] == ["cuda:2", "cuda:0"]
    assert spread.places("1")[0].env == {gpu.VARIABLE: "GPU-1"}


@pytest.mark.parametrize(
    ("wanted", "said"), [("3", "got 'cuda:3'"), ("x", "got 'x'"), ("0,0", "twice"), ("0,1", "of one kind"), ("", "all")]
)
def test_what_are_no_devices(monkeypatch, wanted, said):
    gpus(monkeypatch, "H200", "B200")
    with pytest.raises(UsageError, match=said):
        spread.places(wanted)


@pytest.mark.parametrize("devices", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [0, 1, 3, 7])
def test_every_part_of_the_work_is_in_one_share(count, devices):
    shares = spread.timed_shares(range(count), 6, devices)
    cells = [(case, process) for share in shares for case in share.cases for process in range(*share.processes)]
    assert sorted(cells) == [(case, process) for case in range(count) for process in range(6)]
    assert len(shares) >= min(devices, count) and len(shares) <= devices
    tests = spread.test_shares(range(count), devices)
    assert sorted(case for share in tests for case in share.cases) == [*range(count)]


def test_a_device_has_one_part_at_a_time_and_a_lost_part_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(spread, "COMMAND", (sys.executable, "-c", PART, str(tmp_path)))
    places = [Place(name, name, {"PLACE": name}) for name in "ab"]
    work = SimpleNamespace(order=lambda share: {"cases": [[case, {}] for case in share.cases]})
    said, shares = [], [Share((case,)) for case in range(7)]
    found = spread.run(work, shares, places, lambda step: None, said.append)
    assert found.clock == "a clock" and found.notes == ["a note"]
    done = {case for _, case in found.tests}
    assert done == {*range(7)} if not said else done == {*range(7)} - {3}
    assert all("b: a part ended with exit code 1: the device is gone" in line for line in said)
    assert {outcome.reason for outcome in found.tests.values()} == {"a", "b"}
    assert len(found.audits) == len(done)


def test_on_a_cpu_it_is_said_what_is_done(capsys, monkeypatch):
    gpus(monkeypatch)
    words = ["nvfp4_gemv", "--mode", "test", "--case", "m=16 k=64", "--device", "cpu"]
    assert run.main([*words, "--devices", "0,1"]) == 2
    assert "names GPUs, and this run is on the CPU" in capsys.readouterr().err
    assert run.main([*words, "--devices", "all"]) == 0
    assert "the CPU is one device, so its cases are judged one after the other" in capsys.readouterr().out
