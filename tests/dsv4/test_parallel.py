"""A model over several processes: parts of tensors, equal logits, and a process that does not come."""

import dataclasses
import os
import socket
import time

import pytest
import torch
from torch import multiprocessing

from problems.dsv4_forward.cache.state import State
from problems.dsv4_forward.checkpoint import checkpoint
from problems.dsv4_forward.generate.mtp import Speculative
from problems.dsv4_forward.model import Model, feed
from problems.dsv4_forward.parallel import exchange
from problems.dsv4_forward.weights import config, layout, partition, tree
from tests.dsv4.models import same

SMALL = dataclasses.replace(
    config.TINY,
    name="small",
    num_nextn_predict_layers=1,
    compress_ratios=(config.SWA, config.HCA, config.CSA, config.SWA),
    num_hash_layers=1,
)
FOUR = dataclasses.replace(SMALL, o_groups=4)
# Whole groups of FP8 in halves of the inner width, in two layers: one routes by token, one scores entries.
WIDE = dataclasses.replace(
    config.TINY_K,
    name="wide",
    vocab_size=64,
    hidden_size=256,
    n_routed_experts=6,
    num_hash_layers=1,
    num_nextn_predict_layers=0,
    compress_ratios=(config.SWA, config.CSA),
)


@pytest.mark.parametrize("fmt", config.FORMATS)
@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_parts_have_the_shapes_of_the_local_layout(fmt, gpus):
    cfg = config.FLASH.slice(4)
    specs = layout.layout(partition.local(cfg, fmt, gpus), fmt)
    for name, whole in layout.layout(cfg, fmt).items():
        tensor = torch.empty(whole.shape, dtype=whole.dtype, device="meta")
        assert tuple(partition.part(name, tensor, gpus, gpus - 1).shape) == specs[name].shape, name
    less = 1 - sum(s.nbytes for s in specs.values()) / sum(s.nbytes for s in layout.layout(cfg, fmt).values())
    assert less > 0.9 * (1 - 1 / gpus)  # experts are nearly all of it


@pytest.mark.parametrize("fmt", config.FORMATS)
def test_parts_dequantised_are_the_whole(fmt):
    """By values, so that a scale that went to another GPU than its codes would show."""
    whole = tree.random(WIDE, fmt, seed=3)
    parts = [tree.shard(whole, 2, rank) for rank in range(2)]
    for block, *others in zip(whole.layers, *(part.layers for part in parts), strict=True):
        pairs = [("wq_b", -2, 1), ("wo_a", -3, 1), ("wo_b", -1, 1), ("wq_a", None, 1), ("wkv", None, 1)]
        named = [("attn", *pair) for pair in pairs]
        named += [("ffn", f"{of}{w}", *cut) for of in ("", "shared_") for w, cut in (("w13", (-2, 2)), ("w2", (-1, 1)))]
        for section, name, axis, count in named:
            want, *got = (getattr(getattr(one, section), name).dequantise() for one in (block, *others))
            if axis is None:
                assert all(torch.equal(one, want) for one in got)
            else:
                joined = torch.cat([one.unflatten(axis, (count, -1)) for one in got], axis).flatten(axis - 1, axis)
                assert torch.equal(joined, want), name
        assert torch.equal(torch.cat([one.attn.sink for one in others]), block.attn.sink)
    assert torch.equal(torch.cat([part.head for part in parts]), whole.head)
    assert all(part.embed is whole.embed for part in parts)


@pytest.mark.parametrize("fmt", ["released", "nvfp4"])
def test_parts_are_made_and_loaded_as_they_are_cut(tmp_path, fmt):
    whole = tree.quick(WIDE, fmt, seed=3)
    checkpoint.save(whole, tmp_path, "released" if fmt == "released" else "nvfp4")
    for rank in range(2):
        want = tree.shard(whole, 2, rank).tensors
        loaded = checkpoint.load(tmp_path, WIDE, fmt, progress=False, gpus=2, rank=rank)
        for found in (tree.quick(WIDE, fmt, seed=3, gpus=2, rank=rank), loaded):
            assert found.config.num_attention_heads == WIDE.num_attention_heads // 2
            assert [name for name, tensor in want.items() if not same(found.tensors[name], tensor)] == []


def test_gpus_that_cannot_share_a_model_are_refused():
    odd = dataclasses.replace(config.FLASH, vocab_size=129281)
    narrow = dataclasses.replace(config.TINY, moe_intermediate_size=48)
    for cfg, fmt, gpus, named in (
        *((config.FLASH, "nvfp4", gpus, "o_groups") for gpus in (3, 16, 0)),
        (odd, "bf16", 2, "vocab_size"),
        (config.TINY, "released", 2, "ffn.shared_experts.w13"),
        (narrow, "nvfp4", 2, "ffn.experts.w2"),
    ):
        with pytest.raises(ValueError, match=rf"gpus must .*{named}.*got {gpus}"):
            partition.local(cfg, fmt, gpus)


def passes(model):
    """Logits of passes that use all of a state: ragged prompts in parts, steps, one that leaves, one that comes, one
    that goes back; and the tokens of a guess ahead.
    """
    state = State(model.config, "fp32", sequences=3, blocks=12, chunk=128)
    gen, (first, second) = torch.Generator().manual_seed(1), (state.open()[0] for _ in range(2))
    drawn = torch.randint(model.config.vocab_size, (200,), generator=gen).tolist()
    logits = [feed(model, state, {first: drawn[:150], second: drawn[150:188]})]
    for _ in range(2):
        tokens = logits[-1].argmax(-1).tolist()
        logits.append(feed(model, state, {first: tokens[:1], second: tokens[1:]}))
    state.close(first)
    third, _ = state.open()
    logits.append(feed(model, state, {third: drawn[60:130], second: drawn[:5]}))
    state.rewind(third, 60)
    logits.append(feed(model, state, {third: drawn[190:200]}))
    for sequence in (second, third):
        state.close(sequence)
    guesser = Speculative(model, state, state.open()[0])
    tokens, steps = [guesser.prefill(drawn[:9])], guesser.steps()
    while len(tokens) < 6:
        tokens += next(steps).tokens
    return torch.cat(logits), tokens[:6]


def rank_of(rank, ranks, port, folder, cfg, lost):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    exchange.LEAST_OWN = 8
    between = exchange.HostExchange.of_environment()
    if rank == lost:  # it is there, and never sends
        time.sleep(30)
    model = Model(tree.shard(tree.random(cfg, "fp32", seed=5), ranks, rank), exchange=between)
    start = time.monotonic()
    try:
        torch.save(passes(model), folder / f"{rank}.pt")
    except exchange.PeerLostError as error:
        (folder / f"{rank}.txt").write_text(f"{time.monotonic() - start:.3f} {error}")


def started(folder, ranks, cfg, lost=-1):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    # The server has torch loaded: tests/support/forked.py, which conftest.py imports.
    return multiprocessing.start_processes(
        rank_of, (ranks, port, folder, cfg, lost), ranks, join=False, start_method="forkserver"
    )


@pytest.mark.parametrize(
    ("ranks", "cfg"), [(2, SMALL), pytest.param(4, FOUR, marks=pytest.mark.slow)], ids=["two", "four"]
)
def test_several_processes_say_what_one_does(tmp_path, ranks, cfg):
    context = started(tmp_path, ranks, cfg)
    want, tokens = passes(Model(tree.random(cfg, "fp32", seed=5)))
    while not context.join():
        pass
    first, *others = (torch.load(tmp_path / f"{rank}.pt") for rank in range(ranks))
    assert float((first[0] - want).norm() / want.norm()) < 1e-5 and first[1] == tokens  # of guesses ahead
    assert all(torch.equal(first[0], other[0]) and first[1] == other[1] for other in others)


def test_a_process_that_does_not_send_is_named(tmp_path):
    context = started(tmp_path, 2, SMALL, lost=1)
    deadline = time.monotonic() + 60
    while not (tmp_path / "0.txt").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in context.processes:
        process.kill()
    seconds, said = (tmp_path / "0.txt").read_text().split(" ", 1)
    assert said.startswith("rank 0 waited 2.0 s for rank 1 at layers.0.attention") and float(seconds) < 3
