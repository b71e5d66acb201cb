"""Make weights and inputs, and check outputs. The oracle is the model itself: reference ops, activations in fp32."""

from dataclasses import dataclass, field

import torch
from task import (
    CHUNK,
    HEAD_RTOL,
    NORM_TOL,
    Inputs,
    Outputs,
    Weights,
    blocks,
    input_t,
    lengths,
    logits_rtol,
    output_t,
)

from problems.common import check
from problems.dsv4_forward.cache.state import State
from problems.dsv4_forward.cache.state_layout import CACHES
from problems.dsv4_forward.model import Model, feed
from problems.dsv4_forward.weights import layout, tree
from problems.dsv4_forward.weights.config import find

FRESH = 4  # tokens of a sequence that are drawn for each call; those before them are drawn with the weights
UNWRITTEN = 0xFF  # of bytes of the state that no token wrote


@dataclass
class _Oracle:
    """The model over the weights of a case; states prefilled with it, by shape; a factor of its head, once needed."""

    weights: Weights
    seed: int
    model: Model
    prefilled: dict[tuple[int, int, int], torch.Tensor] = field(default_factory=dict)
    head_factor: torch.Tensor | None = None

    def start(self, batch: int, context: int, new: int) -> torch.Tensor:
        """uint8 (n,): the state of `batch` sequences that hold all but the FRESH last of their tokens."""
        key = batch, context, new
        if key not in self.prefilled:
            state = _state(self.weights, batch, blocks(context, new))
            for _ in range(batch):
                state.open()
            gen = torch.Generator().manual_seed(self.seed)
            _feed(self.model, state, [max(0, n - FRESH) for n in lengths(context, batch)], gen)
            self.prefilled[key] = state.buffer
        return self.prefilled[key]


# generate_input is not handed the weights, but needs them to prefill, which takes longer than all else. So
# generate_weights leaves them here, only the latest: the inputs that are made after them are for them.
_latest: _Oracle | None = None


def generate_weights(
    config: str, format: str, batch: int, context: int, phase: str, new: int, seed: int, device: str
) -> Weights:
    """Random weights under which every part of the model matters (random_weights.py), all in one buffer."""
    global _latest
    _latest = None  # before the next ones are made: they may be large
    specs = layout.layout(find(config), format)
    made = Weights(config, format, torch.zeros(layout.nbytes(specs), dtype=torch.uint8, device=device))
    tree.random(find(config), format, seed, device, layout.views(made.bytes, specs))
    _latest = _Oracle(made, seed, _model(made))
    return made


@torch.no_grad()
def generate_input(
    config: str, format: str, batch: int, context: int, phase: str, new: int, seed: int, device: str
) -> tuple[Inputs, Outputs]:
    """Make new tokens, and a state with a context of `context` tokens, of which the last FRESH are new in each call.

    Blocks are drawn for each call, and what no token wrote is NaN. ValueError: the latest generate_weights was for
    another model.
    """
    made = _latest.weights if _latest else None
    if made is None or (made.config, made.format, made.bytes.device.type) != (config, format, device):
        raise ValueError(f"weights of {config} in {format} on {device} must be generated first")
    gen = torch.Generator().manual_seed(seed)
    state = _restored(made, batch, blocks(context, new), _latest.start(batch, context, new))
    _feed(_latest.model, state, [min(FRESH, n) for n in lengths(context, batch)], gen)
    state.reserve(dict.fromkeys(range(batch), new))
    _scatter(state, gen)
    vocab = find(config).vocab_size
    tokens = torch.randint(vocab, (batch, new), generator=gen).to(device)
    table = state.table[:, : blocks(context, new)].cpu().long()
    inputs = Inputs(tokens, state.buffer, state.length.cpu(), table, CHUNK)
    logits = torch.full((batch, vocab), float("nan"), device=device)
    return inputs, Outputs(logits, torch.full((batch,), -1, dtype=torch.int64, device=device))


@torch.no_grad()
def ref_kernel(data: input_t) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits fp32 (B, vocab), next int64 (B,)) by the oracle, on a copy of the state."""
    logits = _logits(data, torch.float32)
    return logits, logits.argmax(1)


def check_implementation(data: input_t, output: output_t) -> tuple[bool, str]:
    """(True, "") if `output` follows from `data` as it was before the call, else (False, report)."""
    result = compare(data, ref_kernel(data), output)
    return result.ok, result.message


@torch.no_grad()
def compare(data: input_t, want: output_t, output: output_t, peer: bool = False) -> check.Result:
    """`output` against `want` = ref_kernel(data): logits within the format's bound of an honest answer, in the norm of
    each sequence, made by the head from a normed vector, and `next` where they are largest.

    Honest answers are two: the oracle's, and what the same kernels say with activations in bf16, as released. So `next`
    can differ from both only where two of an answer's logits are closer than sqrt(2) times what the bound admits.
    """
    if type(output) is not tuple or len(output) != 2:
        return check.Result(False, "mismatch found! want two tensors, logits and next")
    logits, chosen = output
    result = _near(data, want[0], logits)
    fault = result.message or check.form_error(chosen, want[1].shape, torch.int64)
    fault = fault or _head_fault(data.weights, logits.double())
    if not fault and not torch.equal(chosen, largest := logits.argmax(1)):
        fault = f"mismatch found! next must be where the logits are largest, {largest.tolist()}, got {chosen.tolist()}"
    return check.Result(not fault, fault, result.rel, result.worst_abs, result.worst_tol)


def _near(data: input_t, want: torch.Tensor, logits: torch.Tensor) -> check.Result:
    """Whether each sequence's logits are near either answer; the second is only made where it can matter."""
    limit = logits_rtol(data.weights.config, data.weights.format)
    result = check.norm(logits, want, limit, torch.float32, batch=0)
    if data.weights.format == "fp32" or not limit < result.rel < float("inf"):
        return result
    other = _logits(data, torch.bfloat16)
    nearer = (logits - other).norm(dim=1, keepdim=True) < (logits - want).norm(dim=1, keepdim=True)
    return check.norm(logits, torch.where(nearer, other, want), limit, torch.float32, batch=0)


def _head_fault(weights: Weights, logits: torch.Tensor) -> str:
    """What is wrong unless logits, fp64 (B, vocab), are head @ h with h = norm.weight * x, x of mean square 1; else "".

    h is the least-squares solution. What the model does before its last norm spreads rounding errors far, so that the
    bound on the logits is wide; this part is not, whatever h is.
    """
    tensors = layout.views(weights.bytes, layout.layout(find(weights.config), weights.format))
    head, norm = tensors["head.weight"].double(), tensors["norm.weight"].double()
    factor = _factor(weights, head)
    hidden = torch.cholesky_solve(head.T @ logits.T, factor).T
    rest = logits - hidden @ head.T
    off = float((rest.norm(dim=1) / logits.norm(dim=1)).max())
    square = (hidden / norm).square().mean(1)
    if not off <= HEAD_RTOL:
        return f"mismatch found! logits must be head @ h for some h, to {HEAD_RTOL:g} of their norm: off by {off:.3g}"
    if not float((square - 1).abs().max()) <= NORM_TOL:
        return f"mismatch found! behind the logits there must be a normed vector, got mean squares {square.tolist()}"
    return ""


def _factor(weights: Weights, head: torch.Tensor) -> torch.Tensor:
    """Cholesky factor of head^T head, fp64 (d, d); kept with the latest weights."""
    known = _latest if _latest and _latest.weights.bytes is weights.bytes else None
    if known is None or known.head_factor is None:
        factor = torch.linalg.cholesky(head.T @ head)
        if known is None:
            return factor
        known.head_factor = factor
    return known.head_factor


def _logits(data: input_t, dtype: torch.dtype) -> torch.Tensor:
    """fp32 (B, vocab), by the reference kernels with activations in `dtype`, on a copy of the state."""
    tokens, before, *_ = data.inputs
    state = _restored(data.weights, len(tokens), data.inputs.blocks.shape[1], before)
    batch = state.plan(dict(enumerate(tokens)))
    return _model(data.weights, dtype).forward(batch, state).logits


def _model(weights: Weights, dtype: torch.dtype = torch.float32) -> Model:
    """The reference kernels over these weights, with activations in `dtype`."""
    cfg = find(weights.config)
    tensors = layout.views(weights.bytes, layout.layout(cfg, weights.format))
    return Model(tree.assemble(cfg, weights.format, tensors), dtype=dtype)


def _state(weights: Weights, batch: int, width: int) -> State:
    """Of `batch` sequences with `width` blocks each; what is not a table is UNWRITTEN."""
    sizes = find(weights.config), weights.format, batch, batch * width, CHUNK
    buffer = torch.full((State.nbytes(*sizes, snapshots=0),), UNWRITTEN, dtype=torch.uint8, device=weights.bytes.device)
    return State(*sizes, buffer=buffer, snapshots=0)


def _restored(weights: Weights, batch: int, width: int, buffer: torch.Tensor) -> State:
    """Return a state in new memory that continues from the contents of `buffer`."""
    state = _state(weights, batch, width)
    state.buffer.copy_(buffer)
    state.reload()
    return state


def _feed(model: Model, state: State, counts: list[int], gen: torch.Generator) -> None:
    """Give each sequence that many random tokens."""
    vocab = model.config.vocab_size
    tokens = {sequence: torch.randint(vocab, (n,), generator=gen).tolist() for sequence, n in enumerate(counts) if n}
    if tokens:
        feed(model, state, tokens)


def _scatter(state: State, gen: torch.Generator) -> None:
    """Move the blocks to other places, so that no sequence's are in order or where they were in the call before."""
    place = torch.randperm(state.blocks, generator=gen).to(state.table.device)
    regions = state.layout.views(state.buffer)
    for name in CACHES:
        if name in regions:
            regions[name][:, place] = regions[name][:, :-1].clone()
    place = torch.cat([place, place.new_tensor([state.blocks])])  # of no block: stays
    state.table.copy_(place[state.table.long()])
