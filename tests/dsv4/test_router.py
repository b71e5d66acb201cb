"""The router against fp64: torch_ops/router.py, and kernels/router.cu on a GPU and in the model of one."""

import dataclasses
import math

import pytest
import torch

from problems.dsv4_forward.kernels import router as module
from problems.dsv4_forward.kernels.router import Router as kernel
from problems.dsv4_forward.torch_ops import router
from problems.dsv4_forward.weights.config import TINY, Config
from tests.dsv4 import in_model
from tests.dsv4.in_model import draw

DEVICE = "cuda"
BF16, FP32 = torch.bfloat16, torch.float32
# Tokens, experts, chosen, hidden. The first are one launch in bf16.
ONE = [(1, 256, 6, 4096), (32, 256, 6, 4096), (7, 384, 6, 7168), (1, 32, 6, 4096), (16, 33, 32, 64), (19, 16, 6, 1096)]
SHAPES = [*ONE, (2, 7, 1, 8), (33, 256, 6, 512), (5, 1024, 8, 64), (3, 12, 4, 60)]


def config(experts: int, chosen: int) -> Config:
    return dataclasses.replace(TINY, n_routed_experts=experts, num_experts_per_tok=chosen, routed_scaling_factor=2.5)


def outputs(tokens: int, chosen: int) -> tuple[torch.Tensor, torch.Tensor]:
    kinds = ((-7, torch.int32), (float("nan"), FP32))
    return tuple(torch.full((tokens, chosen), value, dtype=dtype, device=DEVICE) for value, dtype in kinds)


def exact(u, weight, bias, table, tokens, cfg) -> tuple[torch.Tensor, torch.Tensor]:
    """ids, best first, and gates in fp64. A bias selects and does not weigh."""
    score = torch.nn.functional.softplus(u.double() @ weight.double().T, threshold=100).sqrt()
    if table is None:
        ids = (score + bias.double()).sort(descending=True, stable=True).indices[:, : cfg.num_experts_per_tok]
    else:
        ids = table[tokens.clamp(0, len(table) - 1)]
    gates = score.gather(1, ids)
    return ids, gates / gates.sum(1, keepdim=True) * cfg.routed_scaling_factor


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(("tokens", "experts", "chosen", "hidden"), SHAPES)
def test_route(either, tokens, experts, chosen, hidden, dtype):
    cfg, u = config(experts, chosen), draw(tokens, hidden, dtype=dtype)
    weight = (draw(experts, hidden, seed=1) * hidden**-0.5).to(dtype)
    numbers = torch.arange(tokens, device=DEVICE) * 3 % 11
    table = torch.stack([torch.randperm(experts)[:chosen] for _ in range(11)]).to(DEVICE)
    for bias, hashed in ((draw(experts, seed=2), None), (None, table)):
        got, want, one = outputs(tokens, chosen), exact(u, weight, bias, hashed, numbers, cfg), outputs(1, chosen)
        either["route"](u, weight, bias, hashed, numbers, cfg, *got)
        assert torch.equal(got[0].long(), want[0])  # best first; draws are not that near one another
        assert torch.allclose(got[1].double(), want[1], rtol=2e-5, atol=1e-7)
        if set(either) != set(kernel.OPS):
            continue
        assert all(int(held[0]) >> 32 == 0 for held in either["route"].__self__._exchanges.values())
        if dtype == BF16 and tokens <= module.FEW_TOKENS and experts <= module.FEW_EXPERTS and hidden % 8 == 0:
            either["route"](u[-1:].clone(), weight, bias, hashed, numbers[-1:].clone(), cfg, *one)  # a token by itself
            assert all(torch.equal(a, b[-1:]) for a, b in zip(one, got, strict=True))


@pytest.mark.gpu
def test_the_last_of_many_experts_may_be_the_best(ops):
    u, weight = torch.ones(1, 8, device=DEVICE, dtype=BF16), torch.ones(264, 8, device=DEVICE, dtype=BF16)
    weight[263] = 2
    ids, gates = outputs(1, 2)
    bias, tokens = torch.zeros(264, device=DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    ops["route"](u, weight, bias, None, tokens, config(264, 2), ids, gates)
    assert ids.tolist() == [[263, 0]]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_of_equal_scores_the_lower_expert_is_chosen(ops, dtype):
    cfg, (ids, gates) = config(40, 4), outputs(2, 4)
    u, weight = torch.ones(2, 8, device=DEVICE, dtype=dtype), torch.ones(40, 8, device=DEVICE, dtype=dtype)
    weight[37] = 2
    tokens = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    bias = torch.zeros(40, device=DEVICE)
    bias[20], bias[:19] = -torch.inf, -3
    ops["route"](u, weight, bias, None, tokens, cfg, ids, gates)
    assert ids.tolist() == [[37, 19, 21, 22]] * 2 and bool(gates.isfinite().all())
    weight[5] = float("nan")  # ids stay experts, so that what reads them does not leave its memory
    ops["route"](u, weight, torch.zeros(40, device=DEVICE), None, tokens, cfg, ids, gates)
    assert ids.tolist() == [[5, 37, 0, 1]] * 2 and bool(gates.isnan().all())


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_beside_the_table_nothing_is_read(either, dtype):
    """Of ids that the vocabulary has not; the other tokens get what they would get."""
    room = torch.full((13, 4), 2**40 - 1, device=DEVICE)
    table = room[1:12]
    table.copy_(torch.rand(11, 12, generator=torch.Generator().manual_seed(3)).argsort(1)[:, :4])
    u, weight = draw(5, 64, dtype=dtype), draw(12, 64, seed=1, dtype=dtype)
    numbers, got = torch.tensor([3, 11, -1, 2**62, 10], device=DEVICE), outputs(5, 4)
    either["route"](u, weight, None, table, numbers, config(12, 4), *got)
    want = exact(u, weight, None, table, numbers, config(12, 4))
    assert torch.equal(got[0].long(), want[0]) and torch.equal(want[0], table[[3, 10, 0, 10, 10]])
    assert torch.allclose(got[1].double(), want[1], rtol=2e-5, atol=1e-7)


def test_scores_of_large_logits():
    u = torch.tensor([[1.0]])
    logits = torch.tensor([-80.0, -20, -1, 0, 1, 19.99, 20.01, 500])
    got = router.scores(u, logits.unsqueeze(1))[0].tolist()
    want = [math.sqrt(math.log1p(math.exp(v)) if v < 20 else v) for v in logits.tolist()]
    assert got == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("run", [router.route, lambda *given: kernel.route(None, *given)], ids=["reference", "kernel"])
def test_wrong_arguments_are_named(run):
    u, weight, tokens, outs = torch.zeros(2, 4), torch.zeros(8, 4), torch.zeros(2).long(), (2, 3)
    table = torch.zeros(5, 3).long()
    good = u, weight, torch.zeros(8), None, tokens, config(8, 3), torch.zeros(outs).int(), torch.zeros(outs)
    own = run is not router.route
    for at, value, wanted in (
        (2, None, "got neither"),
        (3, table, "got both"),
        (6, torch.zeros(outs).long(), "out_ids must be torch.int32"),
        *(((0, torch.zeros(2, 5), r"got \(2, 5\) and \(8, 4\)"), (2, torch.zeros(7), "bias must be")) if own else ()),
        *(((4, torch.zeros(2), "tokens must be torch.int64"),) if own else ()),
    ):
        with pytest.raises(ValueError, match=wanted):
            run(*good[:at], value, *good[at + 1 :])
    if not own:
        with pytest.raises(ValueError, match="table must name 3"):
            run(u, weight, None, table[:, :2], *good[4:])
    for cfg, experts in ((config(9, 9), weight), (config(8, 3), torch.zeros(1025, 4)), (config(40, 33), weight)):
        assert not own or run(u, experts, *good[2:5], cfg, *good[6:]) is NotImplemented


B16 = {"dtype": BF16}
# Tokens in two tiles, more than the blocks that choose, and columns for all parts of a sum; the third way.
SUMS = [("test_route", {"tokens": 9, "experts": 13, "chosen": 3, "hidden": 3112, **B16})]
SUMS.append(("test_route", {"tokens": 5, "experts": 43, "chosen": 32, "hidden": 60, **B16}))
EQUAL, TABLE = "test_of_equal_scores_the_lower_expert_is_chosen", "test_beside_the_table_nothing_is_read"
CHOICES = [(test, {"dtype": dtype}) for test in (EQUAL, TABLE) for dtype in (BF16, FP32)]
CHOICES.append(("test_the_last_of_many_experts_may_be_the_best", {}))
MODEL = [(test, B16) for test in (EQUAL, TABLE)]
MODEL.append(("test_route", {"tokens": 3, "experts": 13, "chosen": 3, "hidden": 264, **B16}))
test_in_the_model_of_a_gpu = in_model.test_of(__name__, MODEL, CHOICES + SUMS)
