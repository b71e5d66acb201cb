"""The fmha_prefill problem in the model's op fmha: equal to the reference on the lists of a model's pass."""

from types import SimpleNamespace

import pytest
import torch

from problems.common import load
from problems.dsv4_forward.cache import plan, random_state
from problems.dsv4_forward.cache.state import State
from problems.dsv4_forward.torch_ops import fmha
from problems.dsv4_forward.weights import config
from problems.dsv4_forward.weights.config import CSA, HCA, SWA
from tests.dsv4.test_fmha_decode import angles, close

CFG, HEADS, WIDTH = config.CONFIGS["tiny-512"], 2, 512
COUNTS = {300: 150, 0: 131}  # new tokens behind so many: windows reach into the past, or begin at position 0


@pytest.mark.parametrize(
    ("variant", "device"), [("torch_eager", "cpu"), pytest.param("sm90_wgmma", "cuda", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("ratio", [SWA, HCA, CSA, None], ids=str)  # None: CSA, each token has chosen of what it sees
def test_it_attends_as_the_reference_does(ratio, variant, device):
    state = State(CFG, "released", 2, 8, chunk=150, device=device)
    sequences = random_state.fill(state, list(COUNTS), seed=1)
    batch = state.plan({s: [1] * n for s, n in zip(sequences, COUNTS.values(), strict=True)})
    layer = next(one for one in state.layers if one.ratio == (CSA if ratio is None else ratio))
    index = None
    if ratio != SWA:
        entry = torch.arange(batch.plan.bound // layer.ratio, device=device).expand(len(batch.tokens), -1)
        index = plan.locate(batch.lists.rows, batch.plan.owner, entry, config.BLOCK_TOKENS // layer.ratio)
        index.masked_fill_(entry >= batch.lists.visible[layer.ratio].unsqueeze(1), -1)
    if ratio is None:
        index = index[:, torch.randperm(index.shape[1], generator=torch.Generator().manual_seed(2))[:40].to(device)]
    q = torch.randn(len(batch.tokens), 1, HEADS, WIDTH, generator=torch.Generator().manual_seed(3)).bfloat16()
    given = {
        "window": layer.window,
        "window_index": batch.lists.window_index.unsqueeze(1),
        "cache": None if index is None else layer.cache,
        "index": None if index is None else index.unsqueeze(1),
        "sink": torch.linspace(-3, 3, HEADS, device=device),
        "scale": WIDTH**-0.5,
        **dict(zip(("cos", "sin"), (one.to(device) for one in angles(len(q))), strict=True)),
    }
    weights = SimpleNamespace(format="released", config=CFG)
    module = load.module(load.PROBLEMS / "fmha_prefill", "in_model")
    op = module.fit(load.variant("fmha_prefill", variant), weights, ("fmha",)).functions["fmha"]
    chunk = batch.chunk(ratio or None)
    (want, lse), (got, total) = (
        (torch.full_like(one, torch.nan), torch.full(one.shape[:3], torch.nan, device=device))
        for one in (q.float().to(device), q.to(device))
    )
    assert op(**given, q=q.to(device), out=got, lse=total) is NotImplemented  # a few tokens have no chunk
    assert op(**given, q=q.to(device), out=got, lse=total, chunk=chunk) is None
    fmha.fmha(**given, q=q.float().to(device), out=want, lse=lse)
    close((got, total), (want, lse))


def test_few_tokens_of_a_sequence_are_no_chunk():
    state = State(CFG, "released", 5, 10, chunk=252)
    tokens = {state.open()[0]: [1] * count for count in (252, 1, 1, 1, 1)}
    assert state.plan(tokens).chunk(CSA) is None  # 256 tokens, but 51 a sequence
    assert state.plan({0: [1] * 252}).chunk(CSA) is None
