"""The judge's matrix product on a GPU, in bf16: its rate is the measured roofline of calls bound by computation."""

import torch

SIZE = 8192  # rows, columns and depth
FLOPS = 2 * SIZE**3
WARMUPS = 3
AHEAD_CYCLES = 500_000  # that the GPU waits while a product is enqueued


def times_us(count: int) -> list[float]:
    """Return times of `count` products, by events. Of random values: zeros take less power, and are quicker."""
    a = torch.randn(SIZE, SIZE, dtype=torch.bfloat16, device="cuda")
    b, c = torch.randn_like(a), torch.empty_like(a)
    times = []
    for _ in range(WARMUPS + count):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(AHEAD_CYCLES)
        start.record()
        torch.matmul(a, b, out=c)
        stop.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(stop))
    return times[WARMUPS:]
