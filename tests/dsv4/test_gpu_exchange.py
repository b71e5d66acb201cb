"""The exchange on one GPU: ranks are queues of one process over boxes in one memory, which meet in any order."""

import random
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from problems.dsv4_forward.parallel.exchange import PeerLostError
from problems.dsv4_forward.parallel.gpu_exchange import BOXES, GpuExchange

pytestmark = pytest.mark.gpu
CAPACITY = 2**16
THREADS = [ThreadPoolExecutor(1) for _ in range(8)]  # of each rank, whose per-thread queue is what its kernel goes to


def ranks_of(count, limit_s=2.0):
    memory = torch.full((count, BOXES * count * CAPACITY), -0.0, device="cuda")
    places = [row.data_ptr() for row in memory]
    alone, part = torch.full((BOXES * CAPACITY,), -0.0, device="cuda"), torch.ones(1, 4, device="cuda")
    for thread in THREADS[:count]:  # a kernel is loaded at its first launch, which may wait for all that runs
        thread.submit(GpuExchange(0, [alone.data_ptr()], CAPACITY).add, part, "first").result()
    torch.cuda.synchronize()
    return [GpuExchange(rank, places, CAPACITY, limit_s) for rank in range(count)], memory


def together(calls):
    """Make calls, (rank, what to call). -> what came, by rank."""
    waiting = {rank: THREADS[rank].submit(call) for rank, call in calls}
    came = {rank: one.result() for rank, one in waiting.items()}
    torch.cuda.synchronize()
    return [came[rank] for rank in range(len(calls))]


@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_of_all_sizes_are_added_in_the_order_of_ranks(count, dtype):
    ranks, _memory = ranks_of(count)
    draw = random.Random(count)
    for epoch in range(300):
        tokens, width = draw.choice([(1, 4), (1, 4096), (3, 64), (8, 8192), (2, 1020), (1, 65536), (16, 4096)])
        parts = [torch.randn(tokens, width, device="cuda").to(dtype) for _ in ranks]
        for part in parts:
            part.view(-1)[:2] = torch.tensor([-0.0, float("nan") if epoch % 7 == 0 else 1.0])
        torch.cuda.synchronize()
        joined = epoch % 5 == 4 and dtype == torch.float32
        way = "join" if joined else "add"
        ways = [getattr(one, way) for one in ranks]
        calls = [(i, partial(ways[i], parts[i], f"place {epoch}")) for i in range(count)]
        outs = together(draw.sample(calls, count))
        want = torch.cat(parts, -1)
        if not joined:
            want = parts[0].float()
            for part in parts[1:]:
                want = want + part.float()
            want = want.to(dtype)
        for out in outs:
            assert torch.equal(out.nan_to_num(nan=7.0), want.nan_to_num(nan=7.0)), (epoch, tokens, width)
            assert torch.equal(out.view(torch.uint8), outs[0].view(torch.uint8))
    for one in ranks:
        one.see()


def test_a_join_of_more_than_a_box_goes_in_parts():
    ranks, _memory = ranks_of(2)
    parts = [torch.randn(7, CAPACITY // 2 - 4, device="cuda") for _ in ranks]
    torch.cuda.synchronize()
    for out in together([(i, partial(ranks[i].join, parts[i], "head")) for i in range(2)]):
        assert torch.equal(out, torch.cat(parts, -1))


@pytest.mark.parametrize("part", [torch.zeros(1, 6), torch.zeros(2, 8, dtype=torch.float16), torch.zeros(8, 2).T])
def test_a_part_that_it_cannot_take_is_refused(part):
    (first, _), _memory = ranks_of(2)
    with pytest.raises(ValueError, match="a part must be"):
        first.add(part.cuda(), "layers.0.attention")


def test_a_rank_that_does_not_come_is_named_and_later_exchanges_do_not_wait():
    (first, _), _memory = ranks_of(2, limit_s=0.2)
    part = torch.ones(4, 64, device="cuda")
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for number in range(100):
        first.add(part, f"layers.{number}")
    stop.record()
    torch.cuda.synchronize()
    assert 150 < start.elapsed_time(stop) < 400
    with pytest.raises(PeerLostError, match=r"rank 0 waited 0.2 s for rank 1 at layers.0$"):
        first.see()


def test_recorded_exchanges_are_equal_in_every_replay():
    """86 of a token, on two ranks, each a graph of its own."""
    ranks, _memory = ranks_of(2)
    parts = [torch.randn(8, 4096, device="cuda", dtype=torch.bfloat16) for _ in ranks]
    graphs, outs = [], []
    for rank, part in zip(ranks, parts, strict=True):
        queue, graph = torch.cuda.ExternalStream(2), torch.cuda.CUDAGraph()  # cudaStreamPerThread
        with torch.cuda.stream(queue):
            graph.capture_begin(capture_error_mode="thread_local")
            for number in range(86):
                out = rank.add(part, f"layers.{number}")
            graph.capture_end()
        graphs.append(graph)
        outs.append(out)
    want = (parts[0].float() + parts[1].float()).bfloat16()
    queues = [torch.cuda.Stream() for _ in ranks]
    for _ in range(1000):
        for queue, graph in zip(queues, graphs, strict=True):
            with torch.cuda.stream(queue):
                graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(out, want) for out in outs)
    for rank in ranks:
        rank.see()
