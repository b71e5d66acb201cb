"""The judge on a GPU: shared slots, the clock, and submissions that fault, hang or write late there."""

import os
import socket
import subprocess
import sys

import pytest
import torch

from harness import clock, native, problem, slots, wire
from harness.phases import run_tests
from harness.process import ROOT
from harness.session import Entrant, Session

pytestmark = pytest.mark.gpu

HEAD = '''"""{name}."""
import torch
from task import unpack
from problems.common import load, nvfp4

TARGETS = ("sm90", "sm100")


def right(data):
    m, k, l = unpack(data)
    for i in range(l):
        w = nvfp4.dequantise(data.a[:, :, i], data.sfa[:, :, i])
        data.c[:, 0, i] = (w @ nvfp4.dequantise(data.b[0, :, i], data.sfb[0, :, i])).half()
    return data.c

'''
# name -> (body, verdict, piece of the reason)
SUBMISSIONS = {
    "honest": ("def custom_kernel(data):\n    return right(data)\n", "PASSED", ""),
    "faults": (
        "def custom_kernel(data):\n"
        "    index = torch.full((4,), 2**40, device='cuda')\n    data.c[:4, 0, 0] = data.c.flatten()[index]\n"
        "    torch.cuda.synchronize()\n    return data.c\n",
        "RUNTIME_ERROR", "",
    ),
    "hangs": (
        "def custom_kernel(data):\n"
        "    torch.cuda._sleep(2**50)\n    torch.cuda.synchronize()\n    return data.c\n",
        "TIMEOUT", "no answer within",
    ),
    "returns_unwritten": (
        "def custom_kernel(data):\n    return data.c\n", "INCORRECT", "Number of mismatched elements",
    ),
    "takes_too_much": (
        "def custom_kernel(data):\n    return torch.empty(2**40, dtype=torch.uint8, device='cuda')\n",
        "RUNTIME_ERROR", "out of memory",
    ),
}  # fmt: skip


def test_a_slot_is_one_memory_for_two_processes():
    """What another process writes into a mapped slot is seen by its owner, at the same offset, and nothing beside."""
    slot = slots.Slot({"device": 4096, "host": 4096})
    slot.buffers["device"].zero_()
    slot.buffers["host"].zero_()
    code = (
        "import socket, sys, torch\nfrom harness import slots, wire\n"
        "sock = socket.socket(fileno=int(sys.argv[1]))\nmessage, fds = wire.receive(sock)\n"
        "mapped = slots.MappedSlot(message, fds)\nmapped.attach(message['handle'])\n"
        "mapped.buffers['device'][100:104] = 7\nmapped.buffers['host'][200] = 9\ntorch.cuda.synchronize()\n"
        "mapped.detach()\nassert 'device' not in mapped.buffers\nwire.send(sock, {})\n"
    )
    ours, theirs = socket.socketpair()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(theirs.fileno())], pass_fds=(theirs.fileno(),), env=environment
    )
    sizes, handle, fds = slot.message()
    wire.send(ours, {**sizes, "handle": handle}, fds)
    wire.receive(ours, 120)
    assert child.wait(30) == 0
    device = slot.buffers["device"].cpu()
    assert device[100:104].tolist() == [7] * 4 and int(device.sum()) == 28
    assert int(slot.buffers["host"][200]) == 9
    slot.close()


def test_the_clock_reads_what_a_kernel_takes():
    """A kernel that spins for 300 us on the device's own timer reads as 300 us and the cost of an empty call."""
    ticking = clock.CudaClock()
    for _ in range(3):
        empty = ticking.time(lambda: None, lambda _: None, None)
    assert 0 < empty.us < 30
    sample = ticking.time(lambda: native.spin(300_000), lambda _: None, None)
    assert 300 <= sample.us <= 300 + 30 and not sample.host_bound


def test_a_call_that_waits_for_the_device_is_host_bound():
    ticking = clock.CudaClock()
    ticking.time(lambda: None, lambda _: None, None)
    assert ticking.time(torch.cuda.synchronize, lambda _: None, None).host_bound


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    gemv = problem.find("nvfp4_gemv")
    folder = tmp_path_factory.mktemp("gpu")
    entrants = []
    for name, (body, *_) in SUBMISSIONS.items():
        file = folder / f"{name}.py"
        file.write_text(HEAD.format(name=name) + body)
        entrants.append(Entrant(name, problem.entry(gemv, file), "sm90"))
    with Session(gemv, "cuda", timeout_s=20) as session:
        return run_tests(session, entrants, list(gemv.tests[:2]), lambda *_: None, lambda _: None)


@pytest.mark.parametrize("name", SUBMISSIONS)
def test_verdict(outcomes, name):
    """Both cases get a verdict; a fault or a hang in one process harms neither its next case nor its neighbours."""
    _, status, reason = SUBMISSIONS[name]
    for outcome in outcomes[name]:
        assert outcome.status == status and reason in outcome.reason, outcome
    assert len(outcomes[name]) == 2
