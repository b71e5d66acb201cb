"""Answers that cost nothing: the candidates that a problem's check must refuse, and the process that tries them for
harness/lint/linter.py. It holds the reference and makes data by the checker's code; it never imports a submission. It
starts as `python -m harness.lint.trivial FD`, FD a connected socket (harness/runner/wire.py).
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from harness.checker import checker, foreign, inputs, values
from harness.checker.checker import Checker
from harness.runner import objects, tree
from harness.runner.failure import RefusedError

# What must become of a candidate of each kind: `exact` is accepted, all others are refused.
EXACT = "exact"
WRONG = "wrong"  # knows nothing of the inputs, or is the right answer spoilt
PART = "part"  # may be the answer: one input is another, one of several parts, or an input in an identity's folder
QUESTION = "question"  # spoilt in a way that some problems admit: what is let through is asked, and is no hole
UNCHANGED = "the inputs stay as they are"  # of a change that changes nothing, as of zeros in an input of zeros
ALONE_AT_MOST = 16  # tensors that are changed or copied one at a time in a case; of more, that many drawn by its seed
OTHER_SEED = 1_000_003  # added to a case's seed for the call before
OTHER_SEEDS = 8  # what gets through is tried with so many, and is no luck if it does with OFTEN of them
OFTEN = {"accepted": 4, "right": 7}  # a truth value is right with half of all seeds
# Bits after the leading one of the formats that a kernel may compute in, widest first.
LADDER = {"fp64": 52, "fp32": 23, "tf32": 10, "fp16": 10, "bf16": 7, "e4m3": 3, "e2m1": 1}
# By bits, what a kernel that saves would compute in instead. An answer of 3 bits loses 2: with 1 less it would never be
# further off than the neighbour.
NARROWER_INPUT = {52: 23, 23: 10, 10: 7, 7: 3, 3: 2, 2: 1, 1: 0}
NARROWER_ANSWER = {**NARROWER_INPUT, 3: 1, 2: 0}

KNOWN = 0.125  # of the largest element: a smaller one counts as zero
PLACES = 8  # elements that are changed one at a time in a case

Candidates = dict[str, tuple[str, Callable[[], Any]]]  # name -> kind, what makes it, or several to try in turn


class AbsentError(Exception):
    """A candidate that does not apply to this case; the message says why."""


@dataclass(frozen=True)
class Tried:
    """Of a candidate in a case. status: refused, accepted, right, luck (another seed refuses it), absent. text: why."""

    name: str
    kind: str
    status: str
    text: str = ""


class Trivial(Checker):
    """A checker that makes up the answers itself. truth: what the reference returns, an item per output; exact: the
    same in the outputs' types and layouts; before: the exact answer to another seed; unweighted: to other weights. In a
    folder from elsewhere an output is a leaf of the answer, in containers `form`; a number is a tensor without axes.
    """

    def lint(self, message: dict, _: list[int]) -> dict:
        """Put every candidate to the check in {"case", "seed"}. Return "tried", and what is wrong with the case."""
        case, seed = message["case"], message["seed"]
        self._make(case, seed)
        first = self.pristine
        candidates = self._candidates(case, seed)
        pairs = enumerate(zip(tree.tensors(first), tree.tensors(self.pristine), strict=True))
        differ = [i for i, pair in pairs if i in self.inputs and not torch.equal(*map(tree.raw, pair))]
        # GPU MODE's data may hold an output that is not filled yet.
        fault = f"two contents from one seed differ in {self.names[differ[0]]}" if self.ours and differ else ""
        tried = {name: self._tried(name, *candidate) for name, candidate in candidates.items()}
        statuses = {EXACT: (), WRONG: ("accepted", "right")}
        often = {name: 0 for name, trial in tried.items() if trial.status in statuses.get(trial.kind, ("accepted",))}
        for more in range(1, OTHER_SEEDS + 1 if often else 1):
            others = self._candidates(case, seed + more)
            for name in often.keys() & others.keys():
                often[name] += self._tried(name, *others[name]).status in ("accepted", "right")
        for name, many in often.items():
            status = tried[name].status if many >= OFTEN[tried[name].status] else "luck"
            tried[name] = Tried(name, tried[name].kind, status, f"{many} of {OTHER_SEEDS} other seeds")
        return {"tried": [vars(trial) for trial in tried.values()], "fault": fault}

    def _tried(self, name: str, kind: str, make: Callable[[], list[list]]) -> Tried:
        result = Tried(name, kind, "absent")
        try:
            for outputs in make():
                ok, text = self._check(outputs)
                self._sync()
                right = "right" if kind != EXACT and _near(outputs, self.exact) else "accepted"
                result = Tried(name, kind, right if ok else "refused", "" if ok else text.partition("\n")[0])
                if result.status == "accepted":
                    break
        except AbsentError as absent:
            return Tried(name, kind, "absent", str(absent).partition("\n")[0])
        return result

    def _check(self, outputs: list) -> tuple[bool, str]:
        if self.ours:
            answer = outputs[0] if len(outputs) == 1 else tuple(outputs)
            result = inputs.compared(self.reference, self.pristine, self.want, answer, False)
            return result.ok, result.message
        rest = iter(outputs)

        def leaf(spec: dict) -> object:
            return next(rest).item() if spec["type"] == "number" else tree.clone(next(rest))

        return foreign.said_of(self.reference, self.pristine, tree.made(self.form, leaf, objects.find))

    # ---------------------------------------------------------------- data and its answer

    def _make(self, case: dict, seed: int, weights_seed: int | None = None) -> None:
        self.new_weights({"case": case, "seed": seed if weights_seed is None else weights_seed}, [])
        self.content({"case": case, "seed": seed}, [])
        answer = self.want if self.ours else self.reference.ref_kernel(tree.clone(self.pristine))
        self.form, self.paths, self.truth = self._outputs_of(answer)
        data = tree.tensors(self.pristine)
        self.names = [leaf["name"] or "0" for leaf in tree.leaves(tree.describe(self.pristine, tree.Layout()))]
        # The checker counts what is delivered with a call, which the weights are not; they are the first of the data.
        written = [len(tree.tensors(self.weights)) + i for i in self.outputs]
        self.inputs = [i for i in range(len(data)) if i not in written]
        self.exact = _formed(self.truth, [data[i] for i in written] if self.ours else self.truth)
        self.paths = [self.names[i] for i in written] if self.ours else self.paths

    def _outputs_of(self, answer: object) -> tuple[dict, list[str], list]:
        """Return the containers of the reference's answer, and the name and content of each output."""
        names: list[str] = []
        outputs: list = []

        def leaf(value: Any, name: str) -> dict:
            number = isinstance(value, float) or (isinstance(value, int) and -(2**63) <= value < 2**63)
            names.append(name)
            dtype = torch.float64 if type(value) is float else None
            outputs.append(torch.tensor(value, dtype=dtype) if number else value)
            return {"type": "number" if number else "other"}

        return tree.walk(answer, leaf, answer=not self.ours), names, outputs

    def _opaque(self) -> set[int]:
        """Which tensors of the data stand in the fields that OPAQUE names. RefusedError: it names others."""
        named = tuple(getattr(self.task, "OPAQUE", ())) if self.ours else ()
        dtypes, depth = [t.dtype for t in tree.tensors(self.pristine)], 1 if self.split else 0  # below the three parts
        whole = [i for i in self.inputs if dtypes[i] not in values.BITS and dtypes[i] != values.FP4]
        fields = {i: (*self.names[i].split("."), "")[depth] for i in whole}
        if not set(named) <= set(fields.values()):
            known = list(dict.fromkeys(fields.values()))
            raise RefusedError(f"OPAQUE must name inputs of integers or bytes, {known}, got {list(named)}")
        return {i for i, field in fields.items() if field in named}

    # ---------------------------------------------------------------- candidates

    def _candidates(self, case: dict, seed: int) -> Candidates:
        """Make a case the present one, and return its candidates: each output spoilt beside the right other ones."""
        self._make(case, seed + OTHER_SEED, seed)
        self.before, self.unweighted = self.exact, []
        if self.split:
            self._make(case, seed, seed + OTHER_SEED)
            self.unweighted = self.exact
        self._make(case, seed)
        self.seed, self.opaque = seed, self._opaque()
        self.derived: dict[str, list] = {}
        candidates: Candidates = {"exact": (EXACT, lambda: [self.exact])}
        judged = [j for j, output in enumerate(self.exact) if output is not None]
        for j in self._some(judged):
            of = f" [{self.paths[j]}]" if len(self.exact) > 1 else ""
            for name, (kind, make) in self._of_output(j).items():
                kind = PART if kind == WRONG and len(judged) > 1 and not self.ours else kind
                candidates[name + of] = kind, lambda j=j, make=make: self._beside(j, make())
        return candidates

    def _beside(self, j: int, outs: Any) -> list[list]:
        """Return whole answers: `outs` for output j, one or a list, each beside the right other outputs."""
        return [[*self.exact[:j], out, *self.exact[j + 1 :]] for out in (outs if isinstance(outs, list) else [outs])]

    def _of_output(self, j: int) -> Candidates:
        exact, truth = self.exact[j], self.truth[j]
        if isinstance(exact, torch.Tensor) and not exact.numel():
            return {}
        candidates: Candidates = {"zeros": (WRONG, lambda: self._constant(j, 0.0))}
        if _alike(self.before, self.exact):
            candidates["previous answer"] = (WRONG, lambda: self.before[j])
        if not isinstance(exact, torch.Tensor):  # a text, or a number beyond all types
            return candidates
        axes = [axis for axis, size in enumerate(exact.shape) if size > 1 and exact.dtype != values.FP4]
        candidates |= {
            "second half zero": (WRONG, lambda: half_zero(exact)),
            "one infinity": (WRONG, lambda: special(exact, float("inf"))),
            "largest element zero": (WRONG, lambda: largest_zero(exact)),
            "one element changed": (QUESTION, lambda: one_changed(exact, self.seed)),
            "answer doubled": (WRONG, lambda: scaled(exact, 2)),
            "answer negated": (WRONG if self.ours else QUESTION, lambda: scaled(exact, -1)),
            "answer in less precision": (WRONG, lambda: self._narrowed_answer(j)),
            "inputs in less precision": (PART, lambda: self._narrowed_inputs(j)),
        }
        if self.ours:  # in other folders the judge refuses it
            candidates["one NaN"] = (WRONG, lambda: special(exact, float("nan")))
        if truth.numel() > 1:  # one element is its own mean
            candidates["mean of the answer"] = (WRONG, lambda: self._constant(j, float(values.numbers(truth).mean())))
        for axis in axes:
            candidates[f"axis {axis} rolled by one"] = (QUESTION, lambda axis=axis: rolled(exact, axis))
        if len(axes) > 1:  # of one axis the order may be free
            candidates["elements rolled by one"] = (WRONG, lambda: rolled(exact))
        if self.unweighted:
            candidates["answer to other weights"] = (WRONG, lambda: self.unweighted[j])
        for i in self._some(self.inputs):
            name, content = self.names[i], values.plain(tree.tensors(self.pristine)[i])
            if content.numel() == exact.numel() and exact.dtype != values.FP4:
                same = not self.ours and (exact.dtype, exact.shape) == (content.dtype, content.shape)
                copied = values.like(exact, values.cast(values.numbers(content).reshape(exact.shape), exact.dtype))
                candidates[f"copy of {name}"] = (PART if same else WRONG, lambda copied=copied: copied)
            candidates[f"{name} zero"] = (PART, lambda i=i: self._answer_to(f"{i} zero", [i], torch.zeros_like)[j])
            candidates[f"{name} shifted"] = (PART, lambda i=i: self._answer_to(f"{i} shifted", [i], values.shifted)[j])
        return candidates

    def _some(self, which: list[int]) -> list[int]:
        return sorted(random.Random(self.seed).sample(which, min(len(which), ALONE_AT_MOST)))

    def _constant(self, j: int, value: float) -> object:
        form = self.exact[j]
        if not isinstance(form, torch.Tensor):
            return ""
        full = torch.full(form.shape, value, dtype=torch.float64, device=form.device)
        return values.like(form, values.cast(full, form.dtype))

    def _admitted(self, *dtypes: torch.dtype) -> int:
        """Bits that a kernel must keep where values of these types meet: the narrowest's, or PRECISION's if fewer."""
        # Of a folder from elsewhere the judge takes fp32 where the reference gives fp64.
        named = getattr(self.task, "PRECISION", "fp64") if self.ours else "fp32"
        if named not in LADDER:
            raise RefusedError(f"PRECISION must be one of {', '.join(LADDER)}, got {named!r}")
        return min([LADDER[named], *(values.BITS[dtype] for dtype in dtypes if dtype in values.BITS)])

    def _narrowed_answer(self, j: int) -> torch.Tensor:
        """The true values rounded to the next narrower format, significand only, then to the output's type."""
        exact = floating(self.exact[j])
        kept = NARROWER_ANSWER[self._admitted(exact.dtype)]
        return values.like(exact, values.cast(values.rounded(values.numbers(self.truth[j]), kept), exact.dtype))

    def _narrowed_inputs(self, j: int) -> torch.Tensor:
        """The answer to inputs rounded to the format below their own and the output's."""
        out = self.exact[j].dtype

        def narrowed(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dtype not in values.BITS:
                return tensor
            kept = NARROWER_INPUT[self._admitted(tensor.dtype, out)]
            return values.cast(values.rounded(values.numbers(tensor), kept), tensor.dtype)

        return self._answer_to(f"narrowed for {out}", self.inputs, narrowed)[j]

    def _answer_to(self, key: str, which: list[int], change: Callable[[torch.Tensor], torch.Tensor]) -> list:
        """The answer to inputs of which those in `which` went through `change`, but OPAQUE ones. It is made once."""
        if key in self.derived:
            return self.derived[key]
        data = tree.clone(self.pristine)
        tensors = [values.held(tensor) for tensor in tree.tensors(data)]
        changed = [(tensors[i], change(values.plain(tensors[i]))) for i in which if i not in self.opaque]
        pairs = [(values.bits(old), values.bits(new)) for old, new in changed]
        if all(torch.equal(old, new) for old, new in pairs):
            raise AbsentError(UNCHANGED)
        for old, new in pairs:
            old.copy_(new)
        try:
            truth = self._outputs_of(self.reference.ref_kernel(data))[2]
        except Exception as error:
            raise AbsentError(f"the reference refuses such inputs: {type(error).__name__}: {error}") from error
        if not _alike(truth, self.exact):
            raise AbsentError("the answer to such inputs has another shape; a wrong file can show that they count")
        self.derived[key] = _formed(truth, self.exact)
        return self.derived[key]


def _formed(truth: list, shapes: list) -> list:
    """Return `truth` in the types and layouts of `shapes`."""
    return [
        values.like(form, values.converted(t, form)) if isinstance(t, torch.Tensor) else t
        for form, t in zip(shapes, truth, strict=True)
    ]


def _alike(first: list, second: list) -> bool:
    """Return whether two answers have as many outputs, of the same shapes."""
    shapes = [[t.shape if isinstance(t, torch.Tensor) else type(t) for t in outputs] for outputs in (first, second)]
    return shapes[0] == shapes[1]


def _near(first: list, second: list) -> bool:
    """Return whether two answers of the same form are equal, or each output the other's neighbour."""
    pairs = zip(first, second, strict=True)
    return all(values.neighbours(a, b) if isinstance(b, torch.Tensor) else a == b for a, b in pairs)


# --- the right answer spoilt, in ways that a check lets through which sees no sign, no order or not every element


def special(exact: torch.Tensor, value: float) -> torch.Tensor:
    """Return the answer with NaN or infinity in the last element that is finite."""
    at = values.positions(torch.isfinite(values.numbers(floating(exact))))
    if not len(at):
        raise AbsentError("no element is finite")
    return values.put(exact, at[-1:], value)


def largest_zero(exact: torch.Tensor) -> torch.Tensor:
    at = int(_sizes(exact).argmax())
    return _zeroed(exact, slice(at, at + 1))


def half_zero(exact: torch.Tensor) -> torch.Tensor:
    """Return the answer with the second half of its elements zero."""
    return _zeroed(exact, slice(exact.numel() // 2, None))


def one_changed(exact: torch.Tensor, seed: int) -> list[torch.Tensor]:
    """Return up to PLACES answers with one element, drawn by `seed` among large ones, changed into the farthest."""
    size, x = _sizes(exact), values.numbers(exact).flatten()
    places = values.positions(size >= KNOWN * size.max()).tolist()
    drawn = random.Random(seed).sample(places, min(PLACES, len(places)))
    far = {at: int((x - x[at]).abs().nan_to_num(0, 0, 0).argmax()) for at in drawn}
    return [values.put(exact, torch.tensor([at]), float(x[other])) for at, other in far.items()]


def scaled(exact: torch.Tensor, factor: float) -> torch.Tensor:
    """Return the answer times `factor`, saturated."""
    if exact.dtype not in values.BITS and not exact.dtype.is_signed:
        raise AbsentError("its type has no sign")
    _sizes(exact)
    return values.like(exact, values.cast(values.numbers(exact) * factor, exact.dtype))


def rolled(exact: torch.Tensor, axis: int | None = None) -> torch.Tensor:
    """Return the answer with each element one place further along an axis; None: in the order of all elements."""
    bits = values.bits(exact).contiguous()
    turned = bits.roll(1) if axis is None else bits.roll(1, axis)
    same = [bits.sort(a).values.equal(turned.sort(a).values) for a in range(bits.dim() if axis is None else 0)]
    if any(same) and not turned.equal(bits):
        raise AbsentError("its rows or columns hold the same, in another order")
    return _of_bits(exact, turned)


def floating(exact: torch.Tensor) -> torch.Tensor:
    if exact.dtype not in values.BITS:
        raise AbsentError("not of a floating-point type")
    return exact


def _sizes(exact: torch.Tensor) -> torch.Tensor:
    """Return the magnitudes in fp64, 0 for what is not finite."""
    if exact.dtype == values.FP4:
        raise AbsentError("of packed values")
    size = values.numbers(exact).abs().nan_to_num(0, 0, 0)
    if not float(size.max()):
        raise AbsentError("all of it is zero")
    return size


def _zeroed(exact: torch.Tensor, where: slice) -> torch.Tensor:
    flat = values.bits(exact).flatten().clone()
    flat[where] = 0
    return _of_bits(exact, flat)


def _of_bits(exact: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    return values.like(exact, bits.view(exact.shape).view(exact.dtype))


if __name__ == "__main__":
    checker.main(Trivial)
