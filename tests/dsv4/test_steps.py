"""Decode steps one after the other: they stay near the unfused chain, repeat bit for bit, and rows are independent."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch

from harness.tools import latency as timing
from problems.common import load
from problems.dsv4_forward import ops, timed_steps
from problems.dsv4_forward.cache.state import Batch
from problems.dsv4_forward.generate.mtp import Speculative
from problems.dsv4_forward.model import Model
from problems.dsv4_forward.weights import config, tree
from problems.dsv4_forward.weights.config import FORMATS
from tests.dsv4 import models
from tests.support.marks import first

TASK = load.module(load.PROBLEMS / "dsv4_forward", "task")
CONTEXT = 130  # tokens of each sequence before the steps
ROOM = 4  # steps that a prepared case has room for, for each that it is made for


def each_format(strict: bool) -> list:
    """FORMATS; fp32, whose rows depend on a GPU on how many others there are, fails, or may fail if not strict."""
    fails = pytest.mark.xfail(reason="fp32 products are cuBLAS's", strict=strict)
    return [pytest.param(fmt, marks=[fails] * (fmt == "fp32")) for fmt in FORMATS]


@pytest.fixture(scope="module", autouse=True)
def for_graphs() -> Iterator[None]:
    """Every kernel runs where a graph records it."""
    with contextlib.ExitStack() as inside:
        if torch.cuda.is_available():
            inside.enter_context(torch.cuda.stream(torch.cuda.ExternalStream(timing.PER_THREAD)))
        yield


@dataclass
class Steps:
    """A decode step of several sequences, recorded in a graph on a GPU. run() does one."""

    made: timed_steps.Decode
    run: Callable[[], None]
    step: timed_steps.Step

    def logits(self, forced: torch.Tensor) -> torch.Tensor:
        """The logits, fp32 (steps, B, V), of steps that get the tokens `forced`, int64 (steps, B)."""
        self.made.reset()
        found = []
        for tokens in forced:
            self.made.tokens.copy_(tokens)
            self.run()
            found.append(self.step.logits.clone())
        return torch.stack(found)


def prepared(name: str, fmt: str, batch: int, steps: int, device: str) -> timed_steps.Decode:
    case = {"config": name, "format": fmt, "batch": batch, "context": CONTEXT}
    return timed_steps.prepare(case, -(-steps // ROOM), device)


def recorded(made: timed_steps.Decode, unfused: bool = False) -> Steps:
    """unfused: with the references of ops that span others and of those that this folder's kernels fill; on a CPU,
    where none does, of all.
    """
    made.reset()  # steps that are recorded are done a few times before
    chosen = made.choose()
    step = made.step(chosen, unfused_ops(chosen) if unfused else ())
    return Steps(made, step if made.tokens.device.type == "cpu" else timing._capture(step).replay, step)


def unfused_ops(chosen: ops.Chosen) -> list[str]:
    spanning = {*ops.FUSED, "start", "layer_rows", "choose", "fmha"}
    fused = [op for op, name in chosen.names.items() if op in spanning or name.startswith("dsv4_forward/")]
    filled = [op for op, name in chosen.names.items() if name != "reference"]
    return fused if any(op in spanning for op in filled) else filled


def drawn(steps: int, batch: int, vocab: int, device: str) -> torch.Tensor:
    return torch.randint(vocab, (steps, batch), generator=torch.Generator().manual_seed(3)).to(device)


ON_A_GPU = [pytest.param("tiny-k", fmt, 2000, "cuda", marks=pytest.mark.gpu) for fmt in ("released", "nvfp4")]


@pytest.mark.parametrize(("name", "fmt", "steps", "device"), [("tiny", "nvfp4", 12, "cpu"), *ON_A_GPU])
@torch.inference_mode()
def test_steps_stay_near_the_unfused_chain(name, fmt, steps, device):
    """Every step is within what honest kernels differ by, and the last ones differ no more than the first."""
    made = prepared(name, fmt, 2, steps, device)
    forced = drawn(steps, 2, made.made.config.vocab_size, device)
    fused, plain = (recorded(made, unfused).logits(forced) for unfused in (False, True))
    assert bool(fused.isfinite().all())
    error = (fused - plain).norm(dim=2) / plain.norm(dim=2)
    worst = int(error.amax(1).argmax())
    assert float(error.max()) <= TASK.logits_rtol(name, fmt), f"step {worst}: {error[worst].tolist()}"
    first, last = (float(part.median()) for part in (error[: steps // 4], error[-(steps // 4) :]))
    assert last <= 2 * first + 1e-5, f"the median error is {first:.3g} in the first quarter, {last:.3g} in the last"


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("fmt", ["bf16", "nvfp4"])
@torch.inference_mode()
def test_1000_replays_of_a_step_are_equal_bit_for_bit(fmt, batch):
    """Logits, the next tokens, and all that the step has written."""
    made = prepared("tiny-k", fmt, batch, ROOM, "cuda")
    steps = recorded(made)

    def once() -> tuple[torch.Tensor, ...]:
        made.reset()
        steps.run()
        return steps.step.logits.view(torch.int32), made.tokens, made.state.buffer

    first = [part.clone() for part in once()]
    other = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        for got, want in zip(once(), first, strict=True):
            other += (got != want).sum()
    assert int(other) == 0


def alone_and_together(made: timed_steps.Decode, table: ops.Ops, rows: Sequence[int], steps: int) -> list[int]:
    """The rows whose logits are others alone than in the batch, in one of so many steps."""
    model, batch = Model(made.made, table), len(made.sequences)
    forced = drawn(steps, batch, made.made.config.vocab_size, str(made.tokens.device))

    def logits(chosen: list[int]) -> torch.Tensor:
        made.reset()
        sequences, found = tuple(made.sequences[row] for row in chosen), []
        for tokens in forced[:, chosen]:
            pass_ = made.state.step(sequences, tokens.clone(), static=True, bound=made.bound)
            found.append(model.forward(pass_, made.state).logits.clone())
            made.state.length.index_add_(0, pass_.plan.sequence_ids, pass_.advance)
        return torch.stack(found, 1)

    together = logits(list(range(batch)))
    return [row for row in rows if not torch.equal(logits([row])[0], together[row])]


# By op that multiplies by a matrix: the arguments that have a row for each token.
ROWS = {
    "linear": ("x", "out"),
    "grouped_linear": ("x", "out"),
    "matmuls": ("x", "outs"),
    "mhc_pre": ("copies", "out", "post", "comb"),
    "route": ("u", "tokens", "out_ids", "out_weights"),
    "experts": ("x", "ids", "weights", "out"),
    "shared": ("x", "out"),
    "fmha": ("q", "window_index", "index", "cos", "sin", "out", "lse"),
    "choose": ("q", "weights", "table", "visible", "out"),
}


def by_row(table: ops.Ops) -> ops.Ops:
    """The same ops, these called for each token by itself, and no step of several."""

    def split(op: Callable[..., None], names: tuple[str, ...]) -> Callable[..., None]:
        def call(**given: object) -> None:
            for row in range(len(given[names[0]])):
                op(**given | {name: part(given[name], row) for name in names})

        return call

    def part(value: object, row: int) -> object:
        if isinstance(value, list):
            return [part(one, row) for one in value]
        return None if value is None else value[row : row + 1]

    rows = {name: split(getattr(table, name), of) for name, of in ROWS.items()}
    return dataclasses.replace(table, **rows, **dict.fromkeys(ops.FUSED, ops.apart))


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", each_format(strict=True))
@torch.inference_mode()
def test_a_row_alone_and_in_a_batch_of_eight_has_the_same_bits(fmt):
    made = prepared("tiny-k", fmt, 8, 12, "cuda")
    assert alone_and_together(made, made.choose().ops, (0, 3, 7), 5) == []


@pytest.mark.parametrize("fmt", first(reversed(FORMATS), 2))
@torch.inference_mode()
def test_nothing_but_the_products_of_a_cpu_mixes_rows(fmt):
    """With the references called a row at a time: of a CPU's matrix products the bits depend on the batch."""
    made = prepared("tiny", fmt, 8, 4, "cpu")
    assert alone_and_together(made, by_row(ops.REFERENCE), (0, 5), 3) == []


def drafting(name: str, fmt: str, device: str) -> tuple[Model, config.Config]:
    cfg = config.find(name)
    if not cfg.num_nextn_predict_layers:
        cfg = dataclasses.replace(cfg, compress_ratios=(*cfg.ratios, 0), num_nextn_predict_layers=1)
    weights = tree.quick(cfg, fmt, seed=5, device=device)
    return Model(weights, ops.choose("winners", load.device_target(device), weights).ops), cfg


# test_sequences.py has it for other prompts every day.
SLOW = pytest.param("tiny", "fp32", "cpu", 12, marks=pytest.mark.slow)
# A last bit seldom makes another token.
DRAFTED = [
    pytest.param("tiny-k", *one.values, "cuda", 10, marks=[pytest.mark.gpu, *one.marks])
    for one in each_format(strict=False)
]


@pytest.mark.parametrize(("name", "fmt", "device", "count"), [SLOW, *DRAFTED])
@torch.inference_mode()
def test_drafting_equals_greedy_for_20_prompts(name, fmt, device, count, monkeypatch):
    """With guesses that are right in half of the steps, by turns; the others are the prediction layer's own."""
    model, cfg = drafting(name, fmt, device)
    own, passes, gen = Speculative._draft, [], torch.Generator().manual_seed(9)

    def draft(self: Speculative, batch: Batch, copies: torch.Tensor, following: Sequence[int], row: int) -> None:
        own(self, batch, copies, following, row)
        place = int(batch.lists.position[row]) + 2 - len(prompt)  # of the token to guess, behind the prompt
        passes.append(place)
        if place > 0 and sum(one > 0 for one in passes) % 2:
            self._guess = want[place]

    monkeypatch.setattr(Speculative, "_draft", draft)
    prompts = [torch.randint(cfg.vocab_size, (3 + 7 * i,), generator=gen).tolist() for i in range(20)]
    for prompt in prompts:
        want = models.greedy(model, prompt, count + 2)
        passes.clear()
        speculative = Speculative(model, *models.opened(model))
        got, accepted, steps = [speculative.prefill(prompt)], [], speculative.steps()
        while len(got) < count:
            step = next(steps)
            got += step.tokens
            accepted.append(step.accepted)
        assert got[:count] == want[:count]
        assert all(accepted[::2]), "every other guess was the right one"
