"""Batches on a GPU: what a call takes at least, by a clock outside its process."""

import ctypes

import pytest
import torch

from harness.judge import batch, phases
from harness.judge.call import CallRequest
from harness.judge.handle import RunnerHandle
from harness.judge.outcome import Batch
from harness.judge.session import Session
from harness.problem import folders
from harness.runner import batch as runner_batch
from harness.runner import native
from tests.harness.judge.test_gpu_judge import HEAD

pytestmark = pytest.mark.gpu

# name -> (body, whether each call has a separate batch; None: it depends on the driver's queue). All are right.
SUBMISSIONS = {
    "plain": ("def custom_kernel(data):\n    return right(data)\n", None),
    "waits": (
        "def custom_kernel(data):\n    out = right(data)\n    torch.cuda.synchronize()\n    return out\n",
        True,
    ),
    "reads": (
        "def custom_kernel(data):\n    out = right(data)\n    float(out[0, 0, 0])\n    return out\n",
        True,
    ),
    "many": (
        "kept = torch.zeros(1, device='cuda')\n\n\ndef custom_kernel(data):\n    for _ in range(300):\n"
        "        kept.add_(1)\n    return right(data)\n",
        None,
    ),
}


@pytest.fixture(scope="module")
def session():
    with Session(folders.find("nvfp4_gemv"), "cuda", timeout_s=60) as made:
        yield made


def handle(folder, name: str, body: str) -> RunnerHandle:
    file = folder / f"{name}.py"
    file.write_text(HEAD.format(name=name) + body)
    return RunnerHandle(name, folders.submission(folders.find("nvfp4_gemv"), file), "sm90")


@pytest.mark.parametrize("name", SUBMISSIONS)
def test_a_right_submission_has_a_reading(session, tmp_path, name):
    body, alone = SUBMISSIONS[name]
    mine, judge, case = handle(tmp_path, name, body), RunnerHandle("(judge)", None, "cuda"), session.problem.tests[0]
    session.start(judge)
    for _ in range(3):
        session.content(case)
        outcome = session.call(mine, CallRequest(3))
        assert outcome.status == "PASSED", outcome
    contents = batch.make(session, case)
    assert len(contents.seeds) == batch.CALLS
    found = batch.read(session, mine, judge, contents, outcome.us, 1)
    batch.drop(session)
    assert isinstance(found, Batch), found
    assert alone in (None, found.alone) and 0 < found.empty_us < found.us and found.least_us < 1.2 * outcome.us, found
    session.content(case)
    assert session.call(mine, CallRequest(3)).status == "PASSED"  # as before the batch
    session.stop(mine, judge)


def test_the_calls_of_a_winner_have_one_batch_and_take_there_what_they_claim(session):
    winner = RunnerHandle("winner", session.problem.winner("sm90"), "sm90")
    how = phases.Counts(processes=1, samples=6, warmups=2, buffers=2, audits=0)
    for case in session.problem.benchmarks["cuda"][:2]:
        times, _ = phases.run_benchmarks(session, [winner], [case], lambda _: None, how)
        (timing,) = times[winner.name]
        assert timing.failure is None, timing.failure
        (found,) = timing.batches
        assert not found.alone and found.calls == batch.CALLS
        assert 0.5 * timing.median_us < found.least_us <= timing.median_us, (found, timing.median_us)
    session.stop(winner)


def test_a_benchmark_has_one_batch_of_a_submission_whose_times_it_does_not_contradict(session):
    winner = RunnerHandle("twice", session.problem.winner("sm90"), "sm90")
    how = phases.Counts(processes=2, samples=6, warmups=2, buffers=2, audits=0, together=2)
    times, _ = phases.run_benchmarks(session, [winner], [session.problem.tests[0]], lambda _: None, how)
    (timing,) = times[winner.name]
    assert timing.failure is None, timing.failure
    assert len(timing.batches) == 1 and timing.least_us <= timing.median_us


def test_the_digest_depends_on_every_byte_and_on_its_place():
    data = torch.randint(0, 256, (1003,), dtype=torch.uint8, device="cuda")

    def word(values: torch.Tensor, nbytes: int = 1003) -> int:
        found = torch.zeros(1, dtype=torch.int64, device="cuda")
        native.digest([(values.data_ptr(), nbytes)], found)
        return native.word_of(found)

    first = word(data)
    for place in (0, 7, 8, 500, 1002):
        other = data.clone()
        other[place] ^= 4
        assert word(other) != first
    swapped = data.clone()
    swapped[:8], swapped[8:16] = data[8:16], data[:8]
    assert word(swapped) != first and word(data, 1002) != first and word(data.clone()) == first


def test_a_gate_holds_the_queue_until_it_is_opened():
    value, found = torch.zeros(1, device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")
    page = runner_batch.GatePage()
    value.add_(0)  # a kernel is loaded in its first call, and that may wait for the queue
    native.digest([(value.data_ptr(), 4)], found)
    native.stamp(found, page.seen)
    torch.cuda.synchronize()
    page.close()
    page = runner_batch.GatePage()
    found.zero_()
    torch.cuda.synchronize()
    native.await_gate(page.seen)
    value.add_(1)
    native.digest([(value.data_ptr(), 4)], found)
    native.stamp(found, page.seen)
    done = torch.cuda.Event()
    done.record()
    assert not done.query() and page.done == 0
    ctypes.c_uint32.from_address(page.address).value = 1  # in the judge, the checker's device writes it
    torch.cuda.synchronize()
    assert page.done == native.word_of(found) and float(value) == 1
    page.close()
