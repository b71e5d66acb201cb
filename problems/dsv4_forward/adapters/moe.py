"""moe_gemm in the slots experts and shared; and its plain product for NVFP4 linears that nvfp4_gemv does not take.

The model has gate and up rows in one matrix, in that order, with one scale_2 and one input_scale an expert, so that the
problem's Weights are views of its tensors. (Loading refuses a checkpoint whose w1 and w3 differ in these two.) What a
variant's prepare lays out anew comes on top; the report says how much.

A variant of the problem may define two more functions, for one matrix of (n, k) weights, both multiples of 64:

    prepare_linear(packed, scales, g, in_scale) -> state
        packed: uint8 (n, k / 2), low nibble first; scales: e4m3 (n, k / 16), bytes 0x00 to 0x7E; both contiguous, at a
        multiple of 256 bytes (64 on a CPU). g: fp32 (). A weight is code * scale * g.
        in_scale: fp32 (), positive: inputs are quantised with it, as task.Data says of x; None: they are not.
        Bound as prepare's: state may keep 1.05 times the bytes of packed and scales, and what all states share.
        ValueError: a matrix that it cannot take, say one that is too wide; the reference does, and the report says why.
    linear(state, x, out)
        out = x w^T, summed in fp32, rounded once. x: bf16 (T, k), finite; out: bf16 (T, n); T >= 1; both contiguous, at
        a multiple of 64 bytes. Like custom_kernel it never waits for a GPU.

Of a variant without them nothing but the two slots is used.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol

import torch

from problems.common import load, nvfp4
from problems.dsv4_forward.adapters import gemv
from problems.dsv4_forward.weights.linear import Linear
from problems.dsv4_forward.weights.tree import BlockWeights, ModelWeights

PROBLEM = "moe_gemm"
UNIT = 64  # H, I, n and k are multiples of it
ALIGNMENT = {"cpu": 64, "cuda": 256}  # bytes; what the problem promises, on a CPU what torch's own tensors have
LINEAR_ALIGNMENT = 64  # bytes, of x and out of a plain product
ROOM = 4096  # tokens; for more, the shared expert's ids and weights are made in each call, which is long then


class Slots(Protocol):
    """What is taken for calls and weights that the variant does not serve."""

    experts: Callable[..., None]
    shared: Callable[..., None]
    linear: Callable[..., None]
    grouped_linear: Callable[..., None]


@dataclass(frozen=True)
class Bank:
    """The experts of a layer, routed or shared. state: what the variant's calls get as their weights, None where
    `reason` says why there are none.
    """

    w13: Linear
    w2: Linear
    reason: str
    state: object = None

    @property
    def name(self) -> str:
        return self.w13.name.removesuffix(".w13")


@dataclass(frozen=True)
class Experts:
    """The two slots. task: the problem's; kernel: a custom_kernel of it; banks: by id() of w13, which they keep alive.
    ids, weights: int32 zeros and fp32 ones (ROOM, 1), the routing of a shared expert.
    """

    task: ModuleType
    kernel: Callable[..., object]
    banks: dict[int, Bank]
    reference: Slots
    ids: torch.Tensor
    weights: torch.Tensor

    def experts(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, w13: Linear, w2: Linear, limit: float,
        out: torch.Tensor,
    ) -> None:  # fmt: skip
        """As experts.experts, for bf16 x and out; others, and other kinds of weights, go to the reference. No expert
        may be twice in a row of ids.

        ValueError: NVFP4 weights that were not prepared, another limit than the problem's, task.unpack_call; on the
        CPU alone ids as task.validate says.
        """
        bank = self._bank(x, w13, w2, out)
        if bank is None:
            self.reference.experts(x, ids, weights, w13, w2, limit, out)
        else:
            self._run(bank, limit, x, ids, weights, out)

    def shared(self, x: torch.Tensor, w13: Linear, w2: Linear, limit: float, out: torch.Tensor) -> None:
        """As experts.shared: every token's one expert, with weight 1. Else as experts."""
        bank = self._bank(x, w13, w2, out)
        if bank is None:
            self.reference.shared(x, w13, w2, limit, out)
        else:
            self._run(bank, limit, x, *self._everyone(len(x)), out)

    def _everyone(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        if tokens <= ROOM:
            return self.ids[:tokens], self.weights[:tokens]
        return self.ids.new_zeros(tokens, 1), self.weights.new_ones(tokens, 1)

    def _bank(self, x: torch.Tensor, w13: Linear, w2: Linear, out: torch.Tensor) -> Bank | None:
        if w13.kind != "nvfp4" or {x.dtype, out.dtype} != {torch.bfloat16}:
            return None
        bank = self.banks.get(id(w13))
        if bank is None or bank.w2 is not w2:
            raise ValueError(f"w13 ({w13.name}) and w2 must be of the weights that the kernels were chosen for")
        return None if bank.reason else bank

    def _run(
        self, bank: Bank, limit: float, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
    ) -> None:
        if limit != self.task.LIMIT:
            raise ValueError(f"limit must be {self.task.LIMIT}, got {limit}")
        if not len(x):
            return
        alignment = ALIGNMENT[x.device.type]
        inputs = self.task.Inputs(*(_placed(tensor, alignment) for tensor in (x, ids, weights)))
        room = out if _fits(out, alignment) else torch.empty(out.shape, dtype=out.dtype, device=out.device)
        outputs = self.task.Outputs(room)
        if x.device.type == "cpu":  # elsewhere to look at ids would wait for the device
            self.task.unpack_call(inputs, outputs, bank.w13.k)
            self.task.validate(inputs, len(bank.w13.weight))
        self.kernel(self.task.Data(bank.state, inputs, outputs))
        if room is not out:
            out.copy_(room)


@dataclass(frozen=True)
class Matrix:
    """One NVFP4 Linear. state: what prepare_linear made of each group, () where `reason` says why not."""

    linear: Linear
    reason: str
    state: tuple[object, ...] = ()

    @property
    def name(self) -> str:
        return self.linear.name


@dataclass(frozen=True)
class Linears:
    """What stands behind nvfp4_gemv in its slots: gemv.Slots. name: of the variant; product: its `linear`; matrices:
    by id() of the Linear, which they keep alive.
    """

    name: str
    product: Callable[[object, torch.Tensor, torch.Tensor], object]
    matrices: dict[int, Matrix]
    reference: gemv.Slots

    def linear(self, x: torch.Tensor, w: Linear, out: torch.Tensor) -> None:
        """out = x w^T, as linear.linear, for bf16 x (N, k) and out (N, n); others, and other kinds of w, go to the
        reference. ValueError: a shape, or an NVFP4 matrix that was not prepared.
        """
        matrix = self._matrix(x, w, out)
        if matrix is None:
            self.reference.linear(x, w, out)
            return
        _check_shapes(x, (len(x), w.k), out, (len(x), w.n), w.name)
        if not len(x):
            return
        room = out if _fits(out, LINEAR_ALIGNMENT) else torch.empty(out.shape, dtype=out.dtype, device=out.device)
        self.product(matrix.state[0], _placed(x, LINEAR_ALIGNMENT), room)
        if room is not out:
            out.copy_(room)

    def grouped_linear(self, x: torch.Tensor, w: Linear, out: torch.Tensor) -> None:
        """out[:, g] = x[:, g] w[g]^T, as linear.grouped_linear. x: (N, G, k); out: (N, G, n). Else as linear."""
        matrix = self._matrix(x, w, out)
        if matrix is None:
            self.reference.grouped_linear(x, w, out)
            return
        groups = len(matrix.state)
        _check_shapes(x, (len(x), groups, w.k), out, (len(x), groups, w.n), w.name)
        if not len(x):
            return
        # Rows of 64 values or a multiple keep every group aligned as the first is.
        given = x.transpose(0, 1).contiguous()
        room = torch.empty(groups, len(x), w.n, dtype=out.dtype, device=out.device)
        for state, part, result in zip(matrix.state, _placed(given, LINEAR_ALIGNMENT), room, strict=True):
            self.product(state, part, result)
        out.copy_(room.transpose(0, 1))

    def _matrix(self, x: torch.Tensor, w: Linear, out: torch.Tensor) -> Matrix | None:
        if w.kind != "nvfp4" or {x.dtype, out.dtype} != {torch.bfloat16}:
            return None
        if id(w) not in self.matrices:
            raise ValueError(f"w ({w.name}) must be one of the weights that the kernels were chosen for")
        matrix = self.matrices[id(w)]
        return None if matrix.reason else matrix


# ---------------------------------------------------------------- adapters


def adapt_experts(
    module: ModuleType, weights: ModelWeights, reference: Slots
) -> tuple[dict[str, Callable], tuple[str, ...]]:
    """-> the slot experts on `module`, a variant of the problem, and lines on what it keeps and does not serve.

    Reads the weights, waits for the device. ValueError, naming the layer: weights that the problem has not, or what the
    variant's prepare refuses.
    """
    banks = [
        make_bank(module, block.ffn.w13, block.ffn.w2, block.ffn.router.table)
        for block in _blocks(weights) if block.ffn.w13.kind == "nvfp4"
    ]  # fmt: skip
    slots = _slots(module, weights, banks, reference)
    return {"experts": slots.experts}, _report(f"{_label(module)}, routed experts", "layers", banks, weights)


def adapt_shared(
    module: ModuleType, weights: ModelWeights, reference: Slots
) -> tuple[dict[str, Callable], tuple[str, ...]]:
    """-> the slot shared on `module`. Else as adapt_experts."""
    banks = [
        make_bank(module, block.ffn.shared_w13, block.ffn.shared_w2)
        for block in _blocks(weights) if block.ffn.shared_w13.kind == "nvfp4"
    ]  # fmt: skip
    slots = _slots(module, weights, banks, reference)
    return {"shared": slots.shared}, _report(f"{_label(module)}, shared experts", "layers", banks, weights)


def adapt_linears(
    module: ModuleType, weights: ModelWeights, reference: gemv.Slots
) -> tuple[dict[str, Callable], tuple[str, ...]]:
    """-> linear and grouped_linear on `module`, to stand behind nvfp4_gemv, {} if it has no plain product; and lines.
    ValueError as make_matrix.
    """
    name = _label(module)
    if not (hasattr(module, "prepare_linear") and hasattr(module, "linear")):
        return {}, (f"{name} has no plain product: linears that {gemv.PROBLEM} does not take are the reference's",)
    matrices = [make_matrix(module, w) for w in gemv.linears(weights) if w.kind == "nvfp4"]
    slots = Linears(name, module.linear, {id(matrix.linear): matrix for matrix in matrices}, reference)
    lines = _report(f"{name}, behind {gemv.PROBLEM}", "NVFP4 matrices", matrices, weights)
    return {"linear": slots.linear, "grouped_linear": slots.grouped_linear}, lines


def limit() -> float:
    """Of the clamp that the problem has."""
    return load.module(load.PROBLEMS / PROBLEM, "task").LIMIT


def _blocks(weights: ModelWeights) -> Iterator[BlockWeights]:
    yield from weights.layers
    if weights.mtp:
        yield weights.mtp.block


def _label(module: ModuleType) -> str:
    return f"{PROBLEM}/{module.__name__.rpartition('.')[2]}"


@torch.inference_mode(False)  # what is made in inference mode could not be used everywhere outside it
def _slots(module: ModuleType, weights: ModelWeights, banks: list[Bank], reference: Slots) -> Experts:
    task, device = load.module(load.PROBLEMS / PROBLEM, "task"), weights.embed.device
    ids = torch.zeros(ROOM, 1, dtype=torch.int32, device=device)
    ones = torch.ones(ROOM, 1, dtype=torch.float32, device=device)
    return Experts(task, module.custom_kernel, {id(bank.w13): bank for bank in banks}, reference, ids, ones)


def _report(what: str, unit: str, made: list[Bank] | list[Matrix], weights: ModelWeights) -> tuple[str, ...]:
    """How many are served and what was laid out anew for them; then each that is not, with the reason."""
    left = [one for one in made if one.reason]
    size = kept([one.state for one in made], weights.tensors.values()) / 2**20
    return (
        f"{what}: {len(made) - len(left)} of {len(made)} {unit}, {size:.1f} MiB kept beside the weights",
        *(f"{one.name}: reference ({one.reason})" for one in left),
    )


def kept(states: object, own: Iterable[torch.Tensor]) -> int:
    """Bytes of memory of the tensors in `states` (tuples, lists, dicts, dataclasses, nested), without that of `own`."""
    known = {tensor.untyped_storage().data_ptr() for tensor in own}
    sizes: dict[int, int] = {}
    todo = [states]
    while todo:
        one = todo.pop()
        if isinstance(one, torch.Tensor):
            storage = one.untyped_storage()
            if storage.data_ptr() not in known:
                sizes[storage.data_ptr()] = storage.nbytes()
        elif isinstance(one, dict):
            todo += one.values()
        elif isinstance(one, tuple | list):
            todo += one
        elif dataclasses.is_dataclass(one) and not isinstance(one, type):
            todo += vars(one).values()
    return sum(sizes.values())


# ---------------------------------------------------------------- weights


@torch.inference_mode(False)  # buffers made in inference mode could not be written outside it
def make_bank(module: ModuleType, w13: Linear, w2: Linear, table: torch.Tensor | None = None) -> Bank:
    """w13 (E, 2 I, H), nvfp4; w2 (E, H, I). table: int64 (V, K), the experts of a token, where the router has one.
    ValueError as adapt_experts.
    """
    bank = Bank(w13, w2, _refusal(w13, w2, table))
    if bank.reason:
        return bank
    task = load.module(load.PROBLEMS / PROBLEM, "task")
    in_scales = [torch.ones_like(w.scale_2) if w.input_scale is None else w.input_scale for w in (w13, w2)]
    weights = task.Weights(
        w13.weight, w13.scale, w13.scale_2, w2.weight, w2.scale, w2.scale_2, *in_scales,
        activation="nvfp4" if w13.quantise_input else "bf16",
    )  # fmt: skip
    for w in (w13, w2):
        _check_values(w)
    try:
        task.unpack_weights(weights)
        state = module.prepare(weights) if hasattr(module, "prepare") else weights
    except ValueError as error:
        raise ValueError(f"{bank.name}: {error}") from error
    return dataclasses.replace(bank, state=state)


@torch.inference_mode(False)
def make_matrix(module: ModuleType, w: Linear) -> Matrix:
    """w: nvfp4, with or without a leading axis of groups. ValueError: scales that are none, naming the matrix."""
    if reason := _unplaced(w) or _uneven(n=w.n, k=w.k):
        return Matrix(w, reason)
    _check_values(w)
    groups = [w] if w.weight.dim() == 2 else [w.select(g) for g in range(len(w.weight))]
    try:
        states = tuple(
            module.prepare_linear(g.weight, g.scale, g.scale_2, g.input_scale if g.quantise_input else None)
            for g in groups
        )
    except ValueError as error:
        return Matrix(w, str(error))
    return Matrix(w, "", states)


def _refusal(w13: Linear, w2: Linear, table: torch.Tensor | None) -> str:
    """Why the problem has no such weights, "" if it has."""
    if w2.kind != "nvfp4":
        return f"its w2 is {w2.kind}"
    if w13.quantise_input != w2.quantise_input:
        return "the input of one of w13 and w2 is quantised, that of the other is not"
    if table is not None and _repeats(table):
        return "its table names an expert twice for a token"
    return _uneven(H=w13.k, I=w2.k) or _unplaced(w13) or _unplaced(w2)


def _repeats(table: torch.Tensor) -> bool:
    ordered = table.sort(1).values
    return bool((ordered[:, 1:] == ordered[:, :-1]).any())


def _uneven(**sizes: int) -> str:
    names, values = " and ".join(sizes), " and ".join(map(str, sizes.values()))
    return f"{names} must be multiples of {UNIT}, are {values}" if any(s % UNIT for s in sizes.values()) else ""


def _unplaced(w: Linear) -> str:
    alignment = ALIGNMENT[w.weight.device.type]
    if not (w.weight.is_contiguous() and w.scale.is_contiguous()):
        return f"codes or scales of {w.name} are not contiguous"
    if w.weight.data_ptr() % alignment or w.scale.data_ptr() % alignment:
        return f"codes or scales of {w.name} do not start at a multiple of {alignment} bytes"
    return ""


def _check_values(w: Linear) -> None:
    """ValueError, naming the matrix: a scale that is NaN or negative, or an input scale that is not positive."""
    try:
        nvfp4.check_scales(w.scale)
    except ValueError as error:
        raise ValueError(f"{w.name}: {error}") from error
    if w.quantise_input:
        bad = ~((w.input_scale > 0) & w.input_scale.isfinite())
        if bool(bad.any()):
            raise ValueError(f"{w.name}: input_scale must be positive and finite, got {float(w.input_scale[bad][0])}")


def _check_shapes(
    x: torch.Tensor, inner: tuple[int, ...], out: torch.Tensor, outer: tuple[int, ...], name: str
) -> None:
    if x.shape != inner or out.shape != outer:
        raise ValueError(f"x, out do not fit {name}: got {tuple(x.shape)}, {tuple(out.shape)}")


def _fits(tensor: torch.Tensor, alignment: int) -> bool:
    return tensor.is_contiguous() and tensor.data_ptr() % alignment == 0


def _placed(tensor: torch.Tensor, alignment: int) -> torch.Tensor:
    """`tensor` where a kernel can take it, else a copy that it can."""
    return tensor if _fits(tensor, alignment) else tensor.clone(memory_format=torch.contiguous_format)
