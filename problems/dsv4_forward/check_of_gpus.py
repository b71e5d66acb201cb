"""The check of a model that GPUs share: it says what the whole one says, and all of them have equal bits."""

import torch
import torch.distributed as dist

from problems.dsv4_forward import ops
from problems.dsv4_forward.ops import Ops
from problems.dsv4_forward.parallel.launch import Mine
from problems.dsv4_forward.passes import Case, Count, Pass, follow, layers, say_layers, say_logits, say_recorded
from problems.dsv4_forward.trace import Follower, Recorder


def faults(case: Case, ops_of_one: Ops, several: Case, table: Ops, count: Count, mine: Mine) -> list[str]:
    """Hold a model that several GPUs share against the whole one on one of them, print the report. -> faults."""
    recorder = Recorder(ops.REFERENCE, torch.float32)
    oracle = case.run(recorder.ops(), torch.float32, recorder, None)
    count.done("the oracle, on one GPU")
    forced = oracle.logits.argmax(-1)
    alone, free = [], []
    for name, one, kernels in (("one GPU", case, ops_of_one), (f"{mine.gpus} GPUs", several, table)):
        mine.meet()
        alone.append(follow(one, Follower(kernels, recorder.decisions, recorder.residuals), forced))
        free.append(follow(one, Follower(kernels, recorder.decisions), forced))
        count.done(f"each layer on the oracle's copies, and a whole pass, on {name}")
    found = say_layers(layers(oracle, alone, free)) + say_logits(oracle, *free) + _say_bits(free[1], mine)
    if case.device != "cpu":
        found += say_recorded(several, table)
        count.done("recorded decode steps")
    mine.meet()
    return found


def _say_bits(one: Pass, mine: Mine) -> list[str]:
    """Compare sums over the bits of all GPUs' copies and logits. -> the first that differ."""
    sums = torch.stack([_sum_of_bits(copies) for copies in (*(copies for _, copies in one.copies), one.logits)]).cpu()
    every = [torch.empty_like(sums) for _ in range(mine.gpus)]
    dist.all_gather(every, sums)
    places = [*(f"the copies before {layer}" for layer, _ in one.copies), "the logits"]
    for place, here in zip(places, torch.stack(every, 1).tolist(), strict=True):
        if others := [rank for rank, value in enumerate(here) if value != here[0]]:
            return [f"bits: {place} are others on rank {', '.join(map(str, others))} than on rank 0"]
    print(f"  bits: {len(places)} tensors are equal on {mine.gpus} GPUs")
    return []


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """int64 (), of an fp32 tensor: a sum of its words, each times another odd number."""
    words = tensor.contiguous().view(-1).view(torch.int32).long()
    return (words * (2 * torch.arange(len(words), device=words.device) + 1)).sum()
