"""The judge on a GPU: shared buffers, the clock, and submissions that fault, hang or write late there."""

import ctypes
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from harness.judge.call import CallRequest
from harness.judge.handle import RunnerHandle
from harness.judge.phases import run_tests
from harness.judge.session import Session
from harness.problem import folders
from harness.results.datasheet import RATES
from harness.runner import buffers, clock, matmul, native, wire
from harness.sandbox.process import ROOT
from problems.common import build, load

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
SPIN = """
#include <cuda_runtime.h>
__global__ void spin(unsigned long long ns) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    while (now - start < ns);
}
extern "C" int spin_for(unsigned long long ns) {
    spin<<<1, 1>>>(ns);
    return cudaGetLastError();
}
"""
# name -> (body, verdict, piece of the reason)
SUBMISSIONS = {
    "honest": ("def custom_kernel(data):\n    return right(data)\n", "PASSED", ""),
    "faults": (
        "def custom_kernel(data):\n"
        "    index = torch.full((4,), 2**40, device='cuda')\n    data.c[:4, 0, 0] = data.c.flatten()[index]\n"
        "    torch.cuda.synchronize()\n    return data.c\n",
        "RUNTIME_ERROR",
        "",
    ),
    "hangs": (
        "def custom_kernel(data):\n    torch.cuda._sleep(2**50)\n    torch.cuda.synchronize()\n    return data.c\n",
        "TIMEOUT",
        "no answer within",
    ),
    "returns_unwritten": (
        "def custom_kernel(data):\n    return data.c\n",
        "INCORRECT",
        "Number of mismatched elements",
    ),
    "takes_too_much": (
        "def custom_kernel(data):\n    return torch.empty(2**40, dtype=torch.uint8, device='cuda')\n",
        "RUNTIME_ERROR",
        "out of memory",
    ),
}


def test_a_slot_is_one_memory_for_two_processes():
    """What another process writes into a mapped buffer is seen by its owner, at the same offset, and nothing beside."""
    buffer = buffers.Buffer({"device": 4096, "host": 4096})
    buffer.memory["device"].zero_()
    buffer.memory["host"].zero_()
    code = (
        "import socket, sys, torch\nfrom harness.runner import buffers, wire\n"
        "sock = socket.socket(fileno=int(sys.argv[1]))\nmessage, fds = wire.receive(sock)\n"
        "mapped = buffers.MappedBuffer(message, fds)\n"
        "mapped.memory['device'][100:104] = 7\nmapped.memory['host'][200] = 9\ntorch.cuda.synchronize()\n"
        "mapped.close()\nassert 'device' not in mapped.memory\nwire.send(sock, {})\n"
    )
    ours, theirs = socket.socketpair()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(theirs.fileno())], pass_fds=(theirs.fileno(),), env=environment
    )
    message, fds = buffer.message()
    wire.send(ours, message, fds)
    wire.receive(ours, 120)
    assert child.wait(30) == 0
    device = buffer.memory["device"].cpu()
    assert device[100:104].tolist() == [7] * 4 and int(device.sum()) == 28
    assert int(buffer.memory["host"][200]) == 9
    buffer.close()


@pytest.mark.parametrize("nbytes", [1, native.PAGE, native.PAGE + 1])
def test_memory_for_two_processes_takes_whole_pages(nbytes):
    """Else another process maps it in small ones."""
    made = native.DeviceBuffer(nbytes)
    base, size = ctypes.c_void_p(), ctypes.c_size_t()
    driver = ctypes.CDLL("libcuda.so.1")
    found = driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_void_p(made.address))
    assert (found, base.value, made.bytes.numel()) == (0, made.address, nbytes)
    assert size.value == -(-nbytes // native.PAGE) * native.PAGE
    made.close()


def timed(ticking: clock.CudaClock, kernel: Callable[[], object], delivery: clock.Delivery) -> clock.Sample:
    """The clock's reading of a call that returns nothing to copy."""
    return ticking.time(native.Call(kernel), lambda _: None, delivery)[0]


def test_the_clock_reads_what_a_kernel_takes(tmp_path):
    """A kernel that spins for 300 us on the device's own timer reads as 300 us and the cost of an empty call."""
    ticking = clock.CudaClock()
    delivery = clock.Delivery(spin_us=1000)
    for _ in range(3):
        empty = timed(ticking, lambda: None, delivery)
    assert 0 < empty.us < 30
    (tmp_path / "spin.cu").write_text(SPIN)
    spin = build.cuda(tmp_path / "spin.cu", load.device_target("cuda")).function("spin_for", ctypes.c_uint64)
    timed(ticking, lambda: spin(1000), delivery)  # loads it
    sample = timed(ticking, lambda: spin(300_000), delivery)
    assert 300 <= sample.us <= 300 + 30 and not sample.host_bound


def test_what_a_call_returns_and_raises_comes_through_and_its_copies_are_made():
    ticking, one = clock.CudaClock(), torch.arange(5, device="cuda")
    copy = torch.zeros_like(one)
    copies = ((copy.data_ptr(), one.data_ptr(), one.numel() * one.element_size()),)
    call = native.Call(lambda a, b: one.add_(a + b), (2, 3), copies)
    sample, result = ticking.time(call, lambda _: None, clock.Delivery(spin_us=1000))
    assert result is one and torch.equal(copy, torch.arange(5, device="cuda") + 5) and sample.host_us > 0

    def fails() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        timed(ticking, fails, clock.Delivery(spin_us=1000))
    assert timed(ticking, lambda: None, clock.Delivery(spin_us=1000)).us > 0


def test_a_call_that_waits_for_the_device_is_host_bound():
    ticking = clock.CudaClock()
    assert timed(ticking, torch.cuda.synchronize, clock.Delivery(spin_us=1000)).host_bound


def test_nothing_else_runs_during_the_spin():
    """Work that a submission puts on a queue of its own during the spin does not get an SM before the start event."""
    ticking = clock.CudaClock()
    values = torch.ones(2**20, device="cuda")
    side = torch.cuda.Stream()
    done = torch.cuda.Event()
    with torch.cuda.stream(side):
        values.mul_(1)  # loaded
    torch.cuda.synchronize()

    def call() -> None:
        with torch.cuda.stream(side):
            values.mul_(2)
            done.record()
        time.sleep(0.002)
        early.append(done.query())

    early: list[bool] = []
    timed(ticking, call, clock.Delivery(spin_us=10_000))
    assert early == [False]
    torch.cuda.synchronize()
    assert done.query()


def _chacha8(key: bytes, line: int) -> bytes:
    """64 bytes of the keystream, as RFC 8439 defines it but with 8 rounds, a 64-bit counter and no nonce."""
    state = list(struct.unpack("<4I", b"expand 32-byte k")) + list(struct.unpack("<8I", key))
    state += [line & 0xFFFFFFFF, line >> 32, 0, 0]
    x = list(state)

    def quarter(a: int, b: int, c: int, d: int) -> None:
        for i, j, k, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            x[i] = (x[i] + x[j]) & 0xFFFFFFFF
            x[k] ^= x[i]
            x[k] = (x[k] << bits | x[k] >> (32 - bits)) & 0xFFFFFFFF

    for _ in range(4):
        for i in range(4):
            quarter(i, 4 + i, 8 + i, 12 + i)
        for i in range(4):
            quarter(i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4)
    return struct.pack("<16I", *((a + b) & 0xFFFFFFFF for a, b in zip(x, state, strict=True)))


def test_the_mask_is_the_cipher_and_masking_twice_restores():
    key = bytes(range(32))
    lines = 5 * 132 * 8 * 256 // 4 + 3  # more than one round of the grid
    buffer = torch.zeros(64 * lines, dtype=torch.uint8, device="cuda")
    native.mask(buffer, key)
    got = buffer.cpu().numpy().tobytes()
    for line in (0, 1, 77, lines - 1):
        assert got[64 * line : 64 * line + 64] == _chacha8(key, line)
    native.mask(buffer, key)
    assert not buffer.any()
    with pytest.raises(RuntimeError):
        native.mask(buffer[:-1], key)


def test_cleaning_leaves_nothing_of_what_was_written():
    """A buffer that was just written reads as slowly as one that was not: none of it is left in L2."""
    ticking = clock.CudaClock()
    buffer = torch.zeros(2**24, dtype=torch.uint8, device="cuda")
    times: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(60):
        delivery = clock.Delivery(buffer, bytes(32) if turn % 2 else None, 300)
        sample = timed(ticking, lambda: native.read(buffer, buffer.numel(), 4), delivery)
        times[turn % 2 == 1].append(sample.us)
    written, resting = (sorted(times[kind])[15] for kind in (True, False))
    assert written > 0.9 * resting


def test_the_matrix_product_runs_at_a_rate_of_this_device():
    """Under its data sheet's rate, and over half of it."""
    ticking, product = clock.CudaClock(), matmul.Product("cuda")
    product()
    us = sorted(timed(ticking, product, clock.Delivery(spin_us=500)).us for _ in range(9))[4]
    name = torch.cuda.get_device_name()
    sheet = next((rates[1] for known, rates in RATES.items() if known in name), None)
    if sheet is None:
        pytest.skip(f"{name} is not in the table")
    assert 0.5 < matmul.flops("cuda") / us * 1e6 / sheet < 1


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    gemv = folders.find("nvfp4_gemv")
    folder = tmp_path_factory.mktemp("gpu")
    handles = []
    for name, (body, *_) in SUBMISSIONS.items():
        file = folder / f"{name}.py"
        file.write_text(HEAD.format(name=name) + body)
        handles.append(RunnerHandle(name, folders.submission(gemv, file), "sm90"))
    with Session(gemv, "cuda", timeout_s=20) as session:
        return run_tests(session, handles, list(gemv.tests[:2]), lambda *_: None, lambda _: None)


@pytest.mark.parametrize("name", SUBMISSIONS)
def test_verdict(outcomes, name):
    """Both cases get a verdict; a fault or a hang in one process harms neither its next case nor its neighbours."""
    _, status, reason = SUBMISSIONS[name]
    for outcome in outcomes[name]:
        assert outcome.status == status and reason in outcome.reason, outcome
    assert len(outcomes[name]) == 2


PREPARES = """
kept = []


def prepare(weights):
    kept.append(type(weights)(*(x.clone() if hasattr(x, "clone") else x for x in weights)))
    del kept[:-{states}]
    return kept[-1]
"""


@pytest.mark.parametrize(("states", "verdicts"), [(1, ["PASSED"] * 4), (2, ["PASSED", "PASSED", "RULE_BROKEN"])])
def test_what_prepare_keeps_is_counted_again_with_each_weights(tmp_path, states, verdicts):
    """One copy is admitted each time, also where a small one follows a large one; the copy of the weights before is
    not, although these were as large.
    """
    moe = folders.find("moe_gemm")
    file = tmp_path / "prepares.py"
    grouped = moe.folder / "variants" / "torch_grouped.py"
    file.write_text(grouped.read_text() + PREPARES.format(states=states))
    small = moe.tests[0]
    wide = {"topk": 1, "hidden": 4096, "inner": 2048}
    one, many = (replace(small, params={**small.params, **wide, "experts": e}) for e in (1, 64))
    handle = RunnerHandle("prepares", folders.submission(moe, file), "sm90")
    found = []
    with Session(moe, "cuda", timeout_s=60) as session:
        session.weights(small)
        session.content(small)
        session.count_kept(handle, CallRequest(1))
        assert handle.process and not handle.broken
        for case in (one, many, many, one)[: len(verdicts)]:
            session.weights(case)
            session.content(case)
            found.append(session.call(handle, CallRequest(1)))
    assert [outcome.status for outcome in found] == verdicts, found
    nbytes = 64 * 3 * 4096 * 2048 * 9 // 16
    assert states * nbytes <= handle.audit.kept_bytes <= states * nbytes + 2**28
