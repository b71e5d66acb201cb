"""The forward pass in fp32 against transformers' model with the same weights, and that each feature matters."""

import dataclasses
import functools

import pytest
import torch

from problems.dsv4_forward import ops
from problems.dsv4_forward.cache.state import State
from problems.dsv4_forward.model import Model, feed
from problems.dsv4_forward.weights import tree
from problems.dsv4_forward.weights.config import CSA, FORMATS, PLAIN, TINY
from tests.dsv4 import oracle
from tests.dsv4.oracle import CONFIGS
from tests.support.marks import first

TOLERANCE = 2e-5  # of logits with a standard deviation of about 1
LENGTHS = (1, 3, 4, 5, 127, 128, 129, 255, 256, 300)  # around every boundary: windows of 4 and 128, the ring, YaRN
LONGEST = max(LENGTHS)
FEATURED = 160  # tokens after which every feature has had an effect
CHUNKS = (37, 1, 91, 5, 130, 3, 33)


@functools.cache
def ids(name: str) -> torch.Tensor:
    gen = torch.Generator().manual_seed(17)
    return torch.randint(CONFIGS[name].vocab_size, (LONGEST,), generator=gen)


@functools.cache
def wanted(name: str) -> torch.Tensor:
    """transformers' logits of all positions, one uncached pass: causal, so every shorter prompt's are in it."""
    with torch.no_grad():
        return oracle.hf_model(name)(input_ids=ids(name)[None], use_cache=False).logits[0]


def run(name: str, chunks: tuple[int, ...], model: Model | None = None, chunk: int = 128) -> torch.Tensor:
    """Logits of every token when they are fed in these chunks."""
    model = model or Model(oracle.weights_of(name))
    state = State(model.config, "fp32", sequences=1, blocks=4, chunk=chunk)
    sequence, _ = state.open()
    found, done = [], 0
    for count in chunks:
        batch = state.plan({sequence: ids(name)[done : done + count]})
        found.append(model.forward(batch, state, every=True).logits)
        state.commit(batch)
        done += count
    return torch.cat(found)


def worst(name: str, got: torch.Tensor) -> float:
    return float((got - wanted(name)[: len(got)]).abs().max())


@pytest.mark.parametrize("name", CONFIGS)
def test_the_logits_are_of_size_one(name):
    assert 0.5 < float(wanted(name).std()) < 2
    assert len(wanted(name).argmax(-1).unique()) > 20, "a model that says the same everywhere shows nothing"
    assert CSA in CONFIGS[name].ratios and 2 * CONFIGS[name].index_topk < LONGEST // CSA, "the indexer has to choose"


# Calls of so many tokens, and the most that one may have.
WAYS = {str(length): ((length,), LONGEST) for length in LENGTHS} | {"chunks": (CHUNKS, 130)}
WAYS |= {"forty": ((1,) * 40, 1), "one by one": ((1,) * LONGEST, 1), "a hundred steps": ((128, 72, *[1] * 100), 128)}
DAILY = [("tiny", way) for way in ("3", "128", "129", "forty")]
DAILY += [(name, way) for name in CONFIGS for way in (str(LONGEST), "chunks")]
LONG = [(name, way) for name in CONFIGS for way in WAYS if (name, way) not in DAILY]


@pytest.mark.parametrize(("name", "way"), first(DAILY + LONG, len(DAILY)))
def test_logits_are_transformers_whatever_calls_the_tokens_come_in(name, way):
    chunks, most = WAYS[way]
    assert worst(name, run(name, chunks, chunk=most)) <= TOLERANCE


@pytest.mark.parametrize("table", [ops.REFERENCE, dataclasses.replace(ops.REFERENCE, all_experts=ops.apart)])
def test_feed_splits_a_prompt_by_the_chunk(table):
    """Beside a sequence of others, which ends earlier, behind a smaller part."""
    state = State(TINY, "fp32", sequences=2, blocks=8, chunk=50)
    other, sequence = state.open()[0], state.open()[0]
    prompts = {other: ids("tiny").flip(0)[:170].tolist(), sequence: ids("tiny").tolist()}
    got = feed(Model(oracle.weights_of("tiny"), table), state, prompts)
    assert float((got[1] - wanted("tiny")[-1]).abs().max()) <= TOLERANCE and state.lengths[sequence] == LONGEST


# What the comparison would not see if a feature had no effect: each of these must break it by far. Behind each, the
# position up to which the model must still agree.
def changed(**fields: object):
    def edit(model: Model) -> None:
        cfg = dataclasses.replace(model.config, **fields)
        fresh = Model(dataclasses.replace(model.weights, config=cfg), model.ops)
        model.__dict__.update(fresh.__dict__)

    return edit


def edited(ending: str, value):
    """Tensors whose names end so replaced by value(it)."""

    def edit(model: Model) -> None:
        tensors = {n: value(t) if n.endswith(ending) else t for n, t in model.weights.tensors.items()}
        model.weights = tree.assemble(model.config, "fp32", tensors)

    return edit


def without_tables(model: Model) -> None:
    """Beside a table biases are 0."""
    cfg, tensors = dataclasses.replace(model.config, num_hash_layers=0), dict(model.weights.tensors)
    for name in [name for name in tensors if name.endswith("tid2eid")]:
        tensors[name.replace("tid2eid", "bias")] = torch.zeros(cfg.n_routed_experts)
        del tensors[name]
    model.__dict__.update(Model(tree.assemble(cfg, "fp32", tensors), model.ops).__dict__)


def transposed(base: torch.Tensor) -> torch.Tensor:
    return torch.cat([base[:8], base[8:].view(4, 4).t().reshape(-1)])


def narrow_window(model: Model) -> None:
    """127 keys in place of 128."""
    fmha = model.ops.fmha

    def less(window_index, **rest):
        index = window_index.clone()
        index[..., 0] = -1
        fmha(window_index=index, **rest)

    model.ops = dataclasses.replace(model.ops, fmha=less)


FEATURES = {
    "sink": (edited("attn_sink", lambda sink: torch.full_like(sink, -torch.inf)), 0),
    "ape": (edited("attn.compressor.ape", torch.zeros_like), 3),
    "router bias": (edited("gate.bias", torch.zeros_like), 0),
    "mHC orientation": (edited("hc_attn_base", transposed), 0),
    "SwiGLU clamp": (changed(swiglu_limit=10.0), 0),
    "top-k": (changed(index_topk=64), 66),
    "theta of compressed layers": (changed(compress_rope_theta=40000.0), 1),
    "YaRN": (changed(rope_factor=1.0), 1),
    "window": (narrow_window, 126),
    "Sinkhorn": (changed(hc_sinkhorn_iters=3), 0),
    "route scale": (changed(routed_scaling_factor=1.0), 0),
    "hash layers": (without_tables, 0),
}


@pytest.mark.parametrize("feature", FEATURES)
def test_each_feature_matters(feature):
    edit, agreeing = FEATURES[feature]
    model = Model(oracle.weights_of("tiny"))
    edit(model)
    got = run("tiny", (FEATURED,), model, chunk=FEATURED)
    off = (got - wanted("tiny")[:FEATURED]).abs().amax(-1)
    assert float(off.max()) > 0.1, f"{feature} does not matter: {float(off.max()):.2g}"
    assert float(off[:agreeing].max() if agreeing else 0) <= TOLERANCE, f"{feature} acts too early"


@pytest.mark.parametrize("fmt", FORMATS)
def test_index_queries_are_quantised_where_keys_are(fmt):
    assert Model(tree.random(TINY, fmt, seed=1))._context(None).quantised_index == (fmt not in PLAIN)
