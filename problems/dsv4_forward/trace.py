"""Watch a forward pass op by op: `Recorder` compares each call with the reference, `Follower` repeats its decisions.

Both wrap the ops of a model. Two kinds of step are discontinuous: which experts a token is routed to, and which entries
the indexer selects. A rounding error there changes everything after it without being wrong. So the composed pass
follows the oracle's decisions, and where it would have decided otherwise the oracle's margin between the two must be
small.
"""

import contextlib
import dataclasses
import sysconfig
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from problems.common import load
from problems.dsv4_forward import ops
from problems.dsv4_forward.cache.pages import Pages
from problems.dsv4_forward.edges import edges, together
from problems.dsv4_forward.layers import Pending, write_copies
from problems.dsv4_forward.model import no_memory
from problems.dsv4_forward.ops import Ops
from problems.dsv4_forward.torch_ops import indexer, mhc, norm, router, rows


@dataclass(frozen=True)
class OpCheck:
    """How the calls of an op are compared.

    activations, outputs: names of its arguments; working: outputs of the model's dtype.
    budget: admitted relative error of a row (its last axis). A row is measured against its norm, but not below a
    thousandth of the call's typical row. quantised: the same, and that of all rows as one, where the kernel quantises
    to NVFP4 what it has summed itself (to FP8: MOE_FP8). exact: fp32 outputs without a rounding, of budget EXACT.
    """

    activations: tuple[str, ...]
    outputs: tuple[str, ...]
    working: tuple[str, ...]
    budget: float
    quantised: tuple[float, float] | None = None
    exact: tuple[str, ...] = ()

    def budgets(self, given: dict) -> tuple[float, float | None]:
        """Of a row of a call with these arguments, and of all as one where that has a separate budget."""
        if "pages" in given and given["pages"].kind in STORED:
            return STORED[given["pages"].kind]
        if given.get("quantise"):
            return STORED["index"]
        if any(w.kind != "plain" and w.quantise_input for w in given.get("matrices", ())):
            return NORMED
        if self.quantised and given["w2"].kind != "plain" and given["w2"].quantise_input:
            return self.quantised if given["w2"].kind == "nvfp4" else MOE_FP8
        return self.budget, None


# bf16 rounds by at most 2^-9 of a value, so a kernel that computes in fp32 and rounds once is off by at most that.
ONE = 2.0**-8  # one rounding at the end and one of a product's terms that were rounded before
SUM = 1e-5  # fp32 sums in another order
EXACT = 1e-5  # those, and 40 normalisations of three roundings each
# An op that another problem's variants fill is judged as that problem judges.
_fmha, _moe = (load.module(load.PROBLEMS / name, "task") for name in ("fmha_decode", "moe_gemm"))
ATTENTION = _fmha.ROW_RTOL  # bf16 probabilities and one rounding of the output
MOE = _moe.ROW_RTOL  # bf16 intermediate and output
# Sums that differ in the last bits put a code of the intermediate on the other side of a rounding now and then: that
# shows in a row, and not in the whole.
MOE_QUANTISED = _moe.NVFP4_ROW_RTOL, _moe.NVFP4_RTOL
MOE_FP8 = 2.0**-5, MOE  # a largest value on the other side of a power of two puts all codes of a group a step off
# Of rows in pages that quantise: kernel and reference round to the model's dtype alike before, so that sums in another
# order move few values across a rounding; then a code differs by a step, or all codes of a group with their scale.
STORED = {"entry": (2.0**-5, 2.0**-6), "index": (0.15, 0.08)}
# Of products whose input is normed, then quantised: a sum in another order moves few values across a rounding, and then
# few codes by a step.
NORMED = 2.0**-5, 2.0**-6
CHECKS = {
    "start": OpCheck((), ("numbers", "lists", "copies", "cos", "sin"), ("copies",), SUM),
    "embed": OpCheck((), ("copies", "cos", "sin"), ("copies",), SUM),
    "rms_norm": OpCheck(("x",), ("out",), ("out",), ONE),
    "mhc_pre": OpCheck(("copies",), ("out", "post", "comb"), ("out",), ONE, exact=("post", "comb")),
    "mhc_post": OpCheck(("y", "second", "copies"), ("out",), ("out",), 2 * ONE),  # rounds the sum as well
    "mhc_site": OpCheck(
        ("y", "second", "copies"),
        ("new_copies", "out", "new_post", "new_comb"),
        ("new_copies", "out"),
        2 * ONE,
        exact=("new_post", "new_comb"),
    ),
    "matmuls": OpCheck(("x",), ("outs",), (), SUM),
    "linear": OpCheck(("x",), ("out",), ("out",), ONE),
    "grouped_linear": OpCheck(("x",), ("out",), ("out",), ONE),
    "two_linears": OpCheck(("x",), ("first_out", "second_out"), ("first_out", "second_out"), ONE),
    "norm_linears": OpCheck(("x",), ("outs",), ("outs",), 2 * ONE),  # rounds behind the norm as well
    "layer_rows": OpCheck((), (), (), 2 * ONE),  # its parts are compared, with the budgets of ROWS
    "choose": OpCheck(("q",), ("out",), (), 0.0),
    "fmha": OpCheck(("q",), ("out", "lse"), ("out",), ATTENTION + ONE),  # rounds behind the rotation as well
    "route": OpCheck(("u",), ("out_ids", "out_weights"), (), 1e-4),
    "experts": OpCheck(("x",), ("out",), ("out",), MOE, MOE_QUANTISED),
    "shared": OpCheck(("x",), ("out",), ("out",), MOE, MOE_QUANTISED),
    "all_experts": OpCheck(("x",), ("out",), ("out",), MOE, MOE_QUANTISED),
}
# The parts of layer_rows, functions of torch_ops/rows.py, and what is behind its name in their lines.
ROWS = {
    "norm_rotate": ("", OpCheck(("x",), ("out",), ("out",), 2 * ONE)),  # rounds behind the norm as well
    "write_key": (", keys", OpCheck(("x",), ("pages",), (), 2 * ONE)),
    "write_entry": (", entries", OpCheck((), ("pages",), (), 2 * ONE)),
    "index_query": (", index", OpCheck(("x",), ("out",), ("out",), ONE)),
}
DECIDING = {"route": "out_ids", "choose": "out"}  # ops that decide, and the output that says what
STARTING = ("start", "embed")  # ops that come before any layer
WHOLE = ", as one"  # behind an op's name: of all rows
OTHERS = "a row of pages that it must not write"  # an output that must stay as it was
UNWRITTEN = 255  # the bytes of NaN, in every kind of pages
OFTEN = 3  # calls of equal shapes in one layer that are compared
NO_BLOCK = 2**20  # beyond any sequence's
MARGIN = 1e-4  # of the largest score: closer ones may be chosen differently by fp32 sums in another order


class BrokenKernelError(RuntimeError):
    """A kernel of the composition did not come back from a call: it raised, or would have ended the process."""


@dataclass
class Worst:
    """The worst comparison of one kernel in one layer. error, cosine: of its worst row, or of what `of` says;
    calls: how many there were.
    """

    layer: str
    op: str
    budget: float
    error: float = 0.0
    cosine: float = 1.0
    calls: int = 0
    output: str = ""
    of: str = "its row"

    @property
    def ok(self) -> bool:
        return self.error <= self.budget  # NaN is not

    def take(self, error: float, cosine: float, output: str) -> None:
        self.calls += 1
        if not error <= self.error:
            self.error, self.cosine, self.output = error, cosine, output


@dataclass
class Decision:
    """ids int32: what was chosen, rows of k. scores: fp32, what it was chosen by, rows of candidates."""

    layer: str
    op: str
    ids: torch.Tensor
    scores: torch.Tensor


@dataclass
class Recorder:
    """Wraps the reference ops, for the oracle's pass, and records copies and decisions.

    composed: the ops that are compared with the reference, on the oracle's inputs rounded to `dtype`, at OFTEN calls of
    equal shapes in a layer; None: nothing is compared. edges: compare the first of these with the
    inputs of edges.py as well, where the op's constants matter. copies: (layer, fp32 (N, n, d)), the hc copies
    before each layer.
    """

    composed: Ops | None
    dtype: torch.dtype
    edges: bool = False
    layer: str = ""
    copies: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    residuals: list[torch.Tensor | Pending] = field(default_factory=list)  # those that the copies were written of
    decisions: list[Decision] = field(default_factory=list)
    worst: dict[tuple[str, str], Worst] = field(default_factory=dict)  # by layer, and by op or op + WHOLE
    _seen: Counter = field(default_factory=Counter)  # calls by layer, op and shapes
    _apart: set[tuple] = field(default_factory=set)  # those that the composed kernel does not serve

    def enter(self, layer: str, residual: torch.Tensor | Pending) -> None:
        self.layer = layer
        self.copies.append((layer, written(residual)))
        self.residuals.append(_kept(residual))

    def ops(self) -> Ops:
        return Ops(**{name: self._wrapped(name, vars(ops.REFERENCE)[name]) for name in CHECKS})

    def _wrapped(self, name: str, reference: Callable) -> Callable:
        def call(**given: object) -> object:
            if self.composed is not None and self._compare(name, given) is NotImplemented:
                return NotImplemented  # so that its steps are called, and compared
            reference(**given)
            if name == "start" and self.composed is not None:  # embed is called for drafts only
                lists = given["given"].views(given["numbers"], given["lists"])
                more = {one: given[one] for one in ("tokens", "weight", "freqs", "copies", "cos", "sin")}
                self._compare("embed", {**more, "position": lists.position})
            if name in DECIDING:
                ids = given[DECIDING[name]]
                ids = ids.clone() if name == "route" else _entries(ids, given)
                self.decisions.append(Decision(self.layer, name, ids, _decided_by(name, given)))
            return None

        return call

    def _compare(self, name: str, given: dict) -> object:
        """NotImplemented: the composed kernel does not serve the call."""
        if name == "layer_rows":
            return self._compare_rows(given)
        layer = "embedding" if name in STARTING else self.layer
        key, count = self._number(layer, name, given)
        if count <= OFTEN:
            if self._compare_one(layer, name, given) is NotImplemented:
                self._apart.add(key)
            elif self.edges and count == 1:
                for said, other in edges(name, given):
                    self._compare_one(layer, name, other, said)
        return NotImplemented if key in self._apart else None

    def _number(self, layer: str, name: str, *calls: dict) -> tuple[tuple, int]:
        """Count calls of these shapes. -> what names them, and their number."""
        values = [value for given in calls for value in given.values()]
        values = [one for value in values for one in (value if isinstance(value, list) else [value])]
        key = layer, name, tuple(value.shape for value in values if isinstance(value, torch.Tensor))
        self._seen[key] += 1
        return key, self._seen[key]

    def _compare_one(self, layer: str, name: str, given: dict, said: str = "") -> object:
        """Compare one call. said: what is unusual in its inputs. NotImplemented: it is not served."""
        check = CHECKS[name]
        with _blamed(layer, name):
            got = _rerun(vars(self.composed)[name], check, given, self.dtype, self.dtype)
        if got is NotImplemented:
            return NotImplemented
        want = _rerun(vars(ops.REFERENCE)[name], check, given, self.dtype, torch.float32)
        if name == "mhc_site":
            want |= _behind(got["new_copies"], given)
        if ids := DECIDING.get(name):
            chosen = (_entries(each[ids], given) if name == "choose" else each[ids] for each in (want, got))
            margin = margins(*chosen, _decided_by(name, given))
            worst = self.worst.setdefault((layer, name), Worst(layer, name, check.budget))
            worst.take(float(margin > MARGIN) if margin == margin else margin, 1.0, ids)
            same = want[ids] == got[ids]
            want, got = (
                {k: v.where(same, 0) if k in check.outputs else v for k, v in each.items() if k != ids}
                for each in (want, got)
            )
        self._take(layer, name, check.budgets(given), want, got, said)
        return None

    def _compare_rows(self, given: dict) -> None:
        """All calls of layer_rows at once, each with the budget that it has by itself."""
        given = {"index": None} | given
        compressed = [("write_entry", one) for one in given["compressed"]]
        index = [("index_query", given["index"])] if given["index"] else []
        every = [("norm_rotate", given["queries"]), ("write_key", given["key"]), *compressed, *index]
        names = [name for name, _ in every]
        calls = [one for _, one in every]
        _, count = self._number(self.layer, "layer_rows", *calls)
        if count > OFTEN:
            return
        self._compare_calls(names, calls)
        if self.edges and count == 1:
            for said, others in together(list(zip(names, calls, strict=True))):
                self._compare_calls(names, others, said)

    def _compare_calls(self, names: Sequence[str], calls: Sequence[dict], said: str = "") -> None:
        """Compare one call of layer_rows, which does these. said: as in _compare_one."""
        mine = [_copies(ROWS[name][1], one, self.dtype, self.dtype) for name, one in zip(names, calls, strict=True)]
        queries, key, *rest = mine
        compressed = names.count("write_entry")
        with _blamed(self.layer, "layer_rows"):
            index = rest[compressed] if compressed < len(rest) else None
            self.composed.layer_rows(queries=queries, key=key, compressed=rest[:compressed], index=index)
        for name, one, got in zip(names, calls, mine, strict=True):
            what, check = ROWS[name]
            want = _rerun(vars(rows)[name], check, one, self.dtype, torch.float32)
            self._take(self.layer, "layer_rows" + what, check.budgets(one), want, _outputs(check, got), said)

    def _take(
        self, layer: str, name: str, budgets: tuple[float, float | None], want: dict, got: dict, said: str = ""
    ) -> None:
        """Compare the outputs of a call by name. budgets: of OpCheck.budgets; said: as in _compare_one."""
        budget, budget_of_all = budgets
        worst = self.worst.setdefault((layer, name), Worst(layer, name, budget))
        for output, value in want.items():
            where = f"{output} (with {said})" if said else output
            if name in CHECKS and output in CHECKS[name].exact:
                key = layer, f"{name}, {output}"
                self.worst.setdefault(key, Worst(layer, name, EXACT)).take(*_apart(got[output], value), where)
                continue
            worst.take(*_apart(got[output], value), where)
            if budget_of_all is not None:
                key = layer, name + WHOLE
                whole = self.worst.setdefault(key, Worst(*key, budget_of_all, of="all rows"))
                whole.take(*_apart(got[output].reshape(1, -1), value.reshape(1, -1)), where)


@dataclass
class Follower:
    """Wraps composed ops so that their decisions are those that a Recorder saw; records this pass's hc copies.

    again: the Recorder's residuals. With them each layer starts from these, so that the copies after it show what this
    one layer makes of them. Without them errors go on from layer to layer.
    """

    composed: Ops
    decisions: list[Decision]
    again: list[torch.Tensor | Pending] | None = None
    layer: str = ""
    copies: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    other: list[tuple[str, str, float]] = field(default_factory=list)  # layer, op, margin of another choice
    done: int = 0

    def enter(self, layer: str, residual: torch.Tensor | Pending) -> None:
        self.layer = layer
        self.copies.append((layer, written(residual)))
        if self.again is not None:
            _start_again(residual, self.again[len(self.copies) - 1])

    def ops(self) -> Ops:
        return dataclasses.replace(self.composed, route=self._route, choose=self._choose)

    def _next(self, op: str) -> Decision:
        decision = self.decisions[self.done]
        if (decision.layer, decision.op) != (self.layer, op):
            raise ValueError(f"the pass decides {op} in {self.layer}, the oracle {decision.op} in {decision.layer}")
        self.done += 1
        return decision

    def _choose(self, **given: object) -> None:
        self.composed.choose(**given)
        decision = self._next("choose")
        self._note("choose", decision, _entries(given["out"], given))
        indexer.locate(decision.ids, given["table"], given["keys"].per_page, given["out"])

    def _route(self, **given: object) -> None:
        self.composed.route(**given)
        decision = self._next("route")
        ids, gates = given["out_ids"], given["out_weights"]
        self._note("route", decision, ids)
        score = router.scores(given["u"], given["weight"]).gather(1, decision.ids.long())
        # Where the choice is the same the weights that the kernel computed stay.
        same = (ids == decision.ids).all(1, keepdim=True)
        forced = score / score.sum(1, keepdim=True) * given["cfg"].routed_scaling_factor
        gates.copy_(torch.where(same, gates, forced))
        ids.copy_(decision.ids)

    def _note(self, op: str, decision: Decision, ids: torch.Tensor) -> None:
        margin = margins(decision.ids, ids, decision.scores)
        if margin:
            self.other.append((self.layer, op, margin))


def written(residual: torch.Tensor | Pending) -> torch.Tensor:
    """The hc copies with what is pending written to them, by the reference, in fp32 (N, n, d). Nothing is changed."""
    copies = write_copies(residual, ops.REFERENCE) if isinstance(residual, Pending) else residual.clone()
    return copies.float()


def _kept(residual: torch.Tensor | Pending) -> torch.Tensor | Pending:
    """A copy of it."""
    if not isinstance(residual, Pending):
        return residual.clone()
    return Pending(*(None if part is None else part.clone() for part in vars(residual).values()))


def _start_again(mine: torch.Tensor | Pending, theirs: torch.Tensor | Pending) -> None:
    """Give `mine` the values of `theirs`, which another table of ops may have left as one addend or as two."""
    if not isinstance(mine, Pending):
        mine.copy_(theirs)
        return
    for name in ("copies", "post", "comb"):
        getattr(mine, name).copy_(getattr(theirs, name))
    if mine.second is not None:
        mine.second.copy_(torch.zeros_like(theirs.y) if theirs.second is None else theirs.second)
        mine.y.copy_(theirs.y)
    else:
        mine.y.copy_(theirs.y if theirs.second is None else theirs.y + theirs.second)


@contextlib.contextmanager
def _blamed(layer: str, op: str) -> Iterator[None]:
    """Within: what a kernel raises becomes a BrokenKernelError that names layer, op and the line that raised."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if no_memory(error):
            raise
        raise BrokenKernelError(f"{layer} {op}: {blame(error)}") from error


def blame(error: BaseException) -> str:
    """One line: the file and line nearest to where `error` was raised that are neither torch's, Python's nor those of
    the call here, and what it was.
    """
    frames = [(one.filename, one.lineno) for one in traceback.extract_tb(error.__traceback__)]
    own = [(file, line) for file, line in frames if Path(file).is_file() and not _of_a_library(file)]
    where = f"{own[-1][0]}:{own[-1][1]}: " if own else ""
    said = str(error).strip().partition("\n")[0]
    what = "it would have ended the process" if isinstance(error, SystemExit) else type(error).__name__
    return where + what + (f": {said}" if said else "")


def _of_a_library(file: str) -> bool:
    return file in (__file__, ops.__file__) or "site-packages" in file or file.startswith(sysconfig.get_path("stdlib"))


def margins(want: torch.Tensor, got: torch.Tensor, scores: torch.Tensor) -> float:
    """By how much of the largest score the worst id in `got` falls short of the worst in `want`; 0.0: the same sets.

    want, got: int32 (..., k), -1 for none; scores: fp32 (..., candidates), by which `want` was chosen. inf: an id that
    is no candidate, one that is there twice, or another number of them.
    """
    want, got = want.flatten(0, -2).long(), got.flatten(0, -2).long()
    scores = scores.flatten(0, -2)
    a, b = want.sort(1).values, got.sort(1).values
    if torch.equal(a, b):
        return 0.0
    if bool((b >= scores.shape[1]).any()) or bool(((b[:, 1:] == b[:, :-1]) & (b[:, 1:] >= 0)).any()):
        return float("inf")
    if not torch.equal((a >= 0).sum(1), (b >= 0).sum(1)):
        return float("inf")
    worst = 0.0
    for row in (a != b).any(1).nonzero().flatten().tolist():
        line = scores[row]
        mine, theirs = ({i for i in part[row].tolist() if i >= 0} for part in (a, b))
        kept = min(float(line[i]) for i in mine - theirs)
        chosen = min(float(line[i]) for i in theirs - mine)
        finite = line[torch.isfinite(line)]
        worst = max(worst, (kept - chosen) / max(float(finite.abs().max()), 1e-30))
    return max(worst, 1e-30)


def _behind(copies: torch.Tensor, given: dict) -> dict:
    """What mhc_site, called with these arguments, makes of the copies that it wrote, so that a value on the other side
    of a rounding does not count twice.
    """
    u, post, comb = (torch.empty_like(given[name], dtype=torch.float32) for name in ("out", "new_post", "new_comb"))
    mhc.pre(copies, given["fn"], given["base"], given["scale"], given["cfg"], u, post, comb)
    norm.rms_norm(u, given["weight"], given["cfg"].rms_norm_eps, u)
    return {"out": u, "new_post": post, "new_comb": comb}


def _decided_by(name: str, given: dict) -> torch.Tensor:
    """What decides, larger wins: fp32 (..., candidates). A hash layer has no choice, nothing is near."""
    if name != "route":
        scores = _scored(given)
        hidden = torch.arange(scores.shape[-1], device=scores.device) >= given["visible"].unsqueeze(-1)
        return scores.masked_fill(hidden, -torch.inf)
    if given["bias"] is None:
        chosen = given["table"][given["tokens"]]
        score = torch.full((len(chosen), len(given["weight"])), -1.0, device=chosen.device)
        return score.scatter(1, chosen, 1.0)
    return router.scores(given["u"], given["weight"]) + given["bias"]


def _scored(given: dict) -> torch.Tensor:
    """The scores of what the op choose was given, fp32 (B, S, entries), by the reference."""
    scores = torch.empty(*given["out"].shape[:2], given["entries"], device=given["out"].device)
    of = (given[name] for name in ("weights", "scale", "keys", "table", "entries"))
    indexer.index_scores(given["q"].float(), *of, scores)
    return scores


def _entries(places: torch.Tensor, given: dict) -> torch.Tensor:
    """places: int32 (B, S, k), what the op choose wrote -> the entries there, int32; -1 stays, and a place that is not
    the sequence's becomes a number that is no entry's.
    """
    per_page, table = given["keys"].per_page, given["table"]
    block = torch.full((len(table), len(given["keys"].data)), NO_BLOCK, dtype=torch.int64, device=places.device)
    used = -(-given["entries"] // per_page)
    numbers = torch.arange(used, device=places.device).expand(len(table), used)
    # A shorter sequence's row may name pages again behind its end.
    block.scatter_reduce_(1, table[:, :used].long(), numbers, "amin")
    page = places.clamp(min=0).div(per_page, rounding_mode="floor").long().flatten(1)
    found = block.gather(1, page).view(places.shape) * per_page + places % per_page
    return torch.where(places < 0, -1, found).int()


def _rerun(kernel: Callable, check: OpCheck, given: dict, dtype: torch.dtype, out_dtype: torch.dtype) -> dict:
    """Run a kernel on copies. The reference's outputs are fp32: it rounds where the format does, in between, but not at
    the end. -> the outputs; NotImplemented where the kernel does not serve the call.
    """
    mine = _copies(check, given, dtype, out_dtype)
    return NotImplemented if kernel(**mine) is NotImplemented else _outputs(check, mine)


def _copies(check: OpCheck, given: dict, dtype: torch.dtype, out_dtype: torch.dtype) -> dict:
    """The arguments of a call with activations rounded to `dtype`, and fresh outputs."""
    mine = dict(given)
    for name in check.activations:
        mine[name] = None if given[name] is None else given[name].to(dtype, copy=True)
    for name in check.outputs:
        if name == "pages":
            mine[name] = _unwritten(given[name])
            continue
        if name == "outs":
            mine[name] = [_fresh(one, out_dtype if name in check.working else one.dtype) for one in given[name]]
            continue
        mine[name] = _fresh(given[name], out_dtype if name in check.working else given[name].dtype)
    if "tail" in mine:
        mine["tail"] = given["tail"].clone()
        # What is quantised behind is compared as it is after equal roundings.
        mine["dtype"] = dtype if "pages" in mine else out_dtype
    return mine


def _outputs(check: OpCheck, mine: dict) -> dict:
    """What a call with these arguments has written, by name, and what it had to leave alone."""
    found = {f"{name}, its input,": mine[name] for name in check.activations if mine[name] is not None}
    if "outs" in mine:
        return found | {f"outs[{i}]": one for i, one in enumerate(mine["outs"])}
    if "pages" in check.outputs:
        found[OTHERS] = _others(mine)
    return found | {name: _written(mine) if name == "pages" else mine[name] for name in check.outputs}


def _fresh(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """One of this shape that nothing has written."""
    return torch.full_like(tensor, float("nan") if dtype.is_floating_point else -7, dtype=dtype)


def _unwritten(pages: Pages) -> Pages:
    """Pages of the same form, every value of which is NaN."""
    data = torch.empty_like(pages.data)
    data.view(torch.uint8).fill_(UNWRITTEN)
    return dataclasses.replace(pages, data=data)


def _written(given: dict) -> torch.Tensor:
    """The rows that a call with these arguments has written, fp32 (E, D): of entries those that end a window."""
    index = given["index"]
    if "emit" in given:
        index = index[(given["position"][given["emit"]] + 1) % given["ratio"] == 0]
    return given["pages"].read(index)


def _others(given: dict) -> torch.Tensor:
    """Whether all other rows of each page are as _unwritten left them, byte by byte, fp32 (n_pages, 1): 1, 0 where the
    call spoilt one. (A code behind a scale that is NaN has no value that would show it.)
    """
    pages, index = given["pages"], given["index"]
    both = dataclasses.replace(pages, data=pages.data.clone()), _unwritten(pages)
    for each in both:  # the rows that it may write become equal
        each.write(index, torch.zeros(len(index), pages.width, device=index.device))
    mine, untouched = (each.data.view(torch.uint8).flatten(1) for each in both)
    return (mine == untouched).all(1, keepdim=True).float()


def _apart(got: torch.Tensor, want: torch.Tensor) -> tuple[float, float]:
    """(relative error, cosine) of the worst row. NaN and infinities that are not in both are errors of inf, and so is
    a difference between integers.
    """
    if not want.numel():
        return 0.0, 1.0
    if not want.is_floating_point():
        return (0.0, 1.0) if torch.equal(got, want) else (float("inf"), 0.0)
    got, want = got.float(), want.float()
    got, want = (x.reshape(-1, x.shape[-1]) for x in (got, want))
    same = (got == want) | (got.isnan() & want.isnan())
    finite = got.isfinite() & want.isfinite()
    if not bool((finite | same).all()):
        return float("inf"), 0.0
    got, want = got.where(finite, 0), want.where(finite, 0)
    size = want.norm(dim=1)
    floor = 1e-3 * size.square().mean().sqrt() + 1e-30
    error = (got - want).norm(dim=1) / size.clamp(min=floor)
    row = int(error.argmax())
    cosine = torch.nn.functional.cosine_similarity(got[row], want[row], dim=0)
    return float(error[row]), float(cosine)
