"""Answers that cost nothing: the candidates that a problem's check must refuse, and the process that tries them.

The process serves harness/lint/linter.py. It holds the reference and makes data by the checker's code; like the checker
it never imports a submission. It starts as `python -m harness.lint.trivial FD`, where FD is a connected socket, and
exchanges the messages of harness/runner/wire.py.

Each candidate finds a weakness of some check that no other candidate finds: tests/harness/lint has the weaknesses.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from harness.checker import checker, foreign, forms, inputs, values
from harness.checker.checker import Checker
from harness.lint import spoilt
from harness.lint.spoilt import AbsentError
from harness.runner import claims, tree
from harness.runner.failure import RefusedError

# What must become of a candidate of each kind: `exact` is accepted, all others are refused.
EXACT = "exact"
BLIND = "blind"  # knows nothing of the inputs
COPY = "copy"  # an input of the form of the answer; of another form it is blind
NEAR = "near"  # the right answer, spoilt
DERIVED = "derived"  # the right answer to other inputs
ALONE = "alone"  # the right answer to inputs of which one is other, or all are rounded
FORM = "form"  # the right answer in a wrong form
PART = (
    "part"  # of a folder from elsewhere: spoilt, or one part of several. It may leave the answer as it is in all cases
)
QUESTION = "question"  # spoilt in a way that some problems admit: what is let through is asked, and is no hole
UNCHANGED = "the inputs stay as they are"  # of a change that changes nothing, as of zeros in an input of zeros
BASELINE_KINDS = (BLIND, COPY, DERIVED)  # what PEER_TOL must tell from an answer too
BY_CHECK = ", by check_implementation"  # ends the names of candidates that go through it; own folders have compare too
ALL_PARTS = ", all parts"  # ends the names of candidates in which each of several parts is other
COPY_OF = "copy of "
CHANGES = ("zero", "shifted")  # of one input, after its name
AS_BASELINE = ", as a baseline"  # ends the names of candidates that get the tolerance of a baseline

ALONE_AT_MOST = 16  # tensors that are changed or copied one at a time in a case; of more, that many drawn by its seed
# Data up to this many bytes is made twice from one seed, has its inputs changed one at a time, and goes through
# check_implementation too: each costs another run of the reference, and none of them depends on size.
SMALL_BYTES = 2**24
OTHER_SEED = 1_000_003  # added to a case's seed for the call before
# Bits after the leading one of the formats that a kernel may compute in, widest first.
LADDER = {"fp64": 52, "fp32": 23, "tf32": 10, "fp16": 10, "bf16": 7, "e4m3": 3, "e2m1": 1}
# By bits, what a kernel that saves would compute in instead. An answer of 3 bits loses 2: with 1 less it would never be
# further off than the neighbour.
NARROWER_INPUT = {52: 23, 23: 10, 10: 7, 7: 3, 3: 2, 2: 1, 1: 0}
NARROWER_ANSWER = {**NARROWER_INPUT, 3: 1, 2: 0}
FORMATS = {52: "fp64", 23: "fp32", 10: "fp16 and tf32", 7: "bf16", 3: "e4m3", 2: "e5m2", 1: "e2m1", 0: "a power of two"}
LESS_ANSWER, LESS_INPUTS, ALL_NEGATED = "answer in less precision", "inputs in less precision", "all elements negated"
ONE_CHANGED = "one element changed"


@dataclass(frozen=True)
class Candidate:
    """make: returns what a call would, one item per output, or, with `several`, a list of such. by_check: it is put to
    check_implementation, as in GPU MODE. baseline: it is put to the check with the tolerance of a baseline. about:
    returns what to know of it if it is let through.
    """

    kind: str
    make: Callable[[], list]
    about: Callable[[], str] = lambda: ""
    by_check: bool = False
    baseline: bool = False
    several: bool = False


class Trivial(Checker):
    """A checker that makes up the answers itself.

    truth: what the reference returns, a tensor per output, as wide as it comes; exact: the same in the outputs' own
    types and layouts; before: the exact answer to the inputs of another seed; unweighted: to other weights, where the
    problem splits them off. In a folder from elsewhere an output is a tensor or plain value within the answer, whose
    structure is `claim`; a number is a tensor without axes, a text or None is as it is.
    """

    claim: dict

    def case(self, message: dict, _: list[int]) -> dict:
        """Make data and answer for {"case", "seed"}. Return the kinds of its candidates by name, and what is wrong with
        it. "baselines": whether the folder has baselines.
        """
        case, seed = message["case"], message["seed"]
        self._make(case, seed)
        self.unweighted: list[torch.Tensor] = []
        small = sum(tree.raw(t).numel() for t in tree.tensors(self.pristine)) <= SMALL_BYTES
        made = (self.pristine, self.truth) if small else None
        self._make(case, seed + OTHER_SEED, seed)
        self.before: list = self.exact
        if self.split:
            self._make(case, seed, seed + OTHER_SEED)
            self.unweighted = self.exact
        self._make(case, seed)
        fault = self._differs(*made) if made else ""
        self.seed = seed
        self.derived: dict[str, list | AbsentError] = {}
        self.opaque = self._opaque()
        self.candidates = self._candidates(small, message["baselines"])
        return {"candidates": {name: made.kind for name, made in self.candidates.items()}, "fault": fault}

    def attempt(self, message: dict, _: list[int]) -> dict:
        """Put {"candidate"} to the problem's check. Return {"status", "text"}; status: refused, accepted, right
        (accepted, and everywhere the exact answer or its neighbour in the output's type) or absent. text: why it is
        refused or absent, or what to know of it where it is accepted. "same", where it is right: it is the exact
        answer, bit for bit.
        """
        candidate = self.candidates[message["candidate"]]
        try:
            made = candidate.make()
        except AbsentError as absent:
            return {"status": "absent", "text": str(absent)}
        said: dict = {}
        for outputs in made if candidate.several else [made]:
            said = self._attempted(outputs, candidate)
            if said["status"] == "accepted":
                break
        return said

    def _attempted(self, outputs: list, candidate: Candidate) -> dict:
        try:
            ok, text = self._check(outputs, candidate)
        except Exception as error:
            if candidate.kind != FORM:
                raise
            ok, text = False, f"{type(error).__name__}: {error}"
        self._sync()
        if not ok:
            return {"status": "refused", "text": text.partition("\n")[0]}
        right = candidate.kind not in (EXACT, FORM) and _near(outputs, self.exact)
        if right:
            return {"status": "right", "text": "", "same": candidate.kind == COPY and _same(outputs, self.exact)}
        return {"status": "accepted", "text": candidate.about()}

    def _make(self, case: dict, seed: int, weights_seed: int | None = None) -> None:
        self.new_weights({"case": case, "seed": seed if weights_seed is None else weights_seed}, [])
        self.content({"case": case, "seed": seed}, [])
        answer = self.want if self.own else self._solve(self.pristine)
        self.truth: list = self._outputs_of(answer)
        data = tree.tensors(self.pristine)
        self.names = tree.names(tree.describe(self.pristine, tree.Layout()))
        # The checker counts what is delivered with a call, which the weights are not; they are the first of the data.
        self.written = [len(tree.tensors(self.weights)) + i for i in self.outputs]
        self.inputs = [i for i in range(len(data)) if i not in self.written]
        shapes = [data[i] for i in self.written] if self.own else self.truth
        if not _alike(self.truth, shapes):
            raise RefusedError(
                f"ref_kernel must return a tensor of the output's shape for each output, "
                f"{[tuple(t.shape) for t in shapes]}, got {[tuple(t.shape) for t in self.truth]}"
            )
        self.exact: list = self._formed(self.truth, shapes)
        if not self.own:
            self.claim = claims.structure(answer)
            self.paths = _paths(answer)

    def _outputs_of(self, answer: object) -> list:
        """Return the reference's answer, one item per output."""
        return tree.tensors(answer) if self.own else _leaves(claims.structure(answer), iter(tree.parts(answer)))

    @staticmethod
    def _formed(truth: list, shapes: list) -> list:
        """Return `truth` in the types and layouts of `shapes`."""
        return [
            values.like(form, values.converted(t, form)) if isinstance(t, torch.Tensor) else t
            for form, t in zip(shapes, truth, strict=True)
        ]

    def _opaque(self) -> set[int]:
        """Which tensors of the data stand in the fields that OPAQUE names. RefusedError: no inputs, or floats."""
        named = tuple(getattr(self.task, "OPAQUE", ())) if self.own else ()
        depth = 1 if self.split else 0  # of the fields below the three parts of the data
        fields = {i: (*self.names[i].split("."), "")[depth] for i in self.inputs}
        if not set(named) <= set(fields.values()):
            known = list(dict.fromkeys(fields.values()))
            raise RefusedError(f"OPAQUE must name fields of weights or inputs, {known}, got {list(named)}")
        found = {i for i, field in fields.items() if field in named}
        for i in sorted(found):
            dtype = tree.tensors(self.pristine)[i].dtype
            if dtype in values.BITS or dtype == values.FP4:
                raise RefusedError(f"OPAQUE is for integers and bytes, but {self.names[i]} is of {dtype}")
        return found

    def _solve(self, data: object) -> object:
        """The reference's answer to `data`, which it may overwrite."""
        answer = self.reference.ref_kernel(data if self.own else tree.clone(data))
        self._sync()
        return answer

    def _differs(self, data: object, truth: list) -> str:
        """What is different in the present data and answer from `data` and `truth`, "" for nothing."""
        # GPU MODE's data may hold an output that nobody has filled.
        for i, (one, two) in enumerate(zip(tree.tensors(data), tree.tensors(self.pristine), strict=True)):
            if self.own and i in self.inputs and not torch.equal(tree.raw(one), tree.raw(two)):
                return f"two contents from one seed differ in {self.names[i]}"
        # Sums on a GPU may be ordered anew in each call, so the answers are compared as outputs.
        if not _alike(truth, self.exact) or not _near(self._formed(truth, self.exact), self.exact):
            return "two answers to contents from one seed differ"
        return ""

    def _check(self, outputs: list, candidate: Candidate) -> tuple[bool, str]:
        if not self.own:
            ok, text = foreign.said_of(self.reference, self.pristine, self._put_together(outputs))
            return ok, "" if ok else text
        answer = outputs[0] if len(outputs) == 1 else tuple(outputs)
        if not candidate.by_check:
            result = inputs.compared(self.reference, self.pristine, self.want, answer, candidate.baseline)
            return result.ok, result.message
        ok, text = self.reference.check_implementation(tree.clone(self.pristine), tree.clone(answer))
        return bool(ok), str(text)

    def _put_together(self, outputs: list) -> object:
        """Return the outputs in the structure of the reference's answer, as a call's answer reaches the check."""
        tensors: list[torch.Tensor] = []
        rest = iter(outputs)

        def filled(claim: dict) -> dict:
            if "items" in claim:
                return {**claim, "items": [filled(item) for item in claim["items"]]}
            output = next(rest)
            if claim["type"] != "value":
                tensors.append(tree.clone(output))
                return claim
            plain = output.item() if isinstance(output, torch.Tensor) else output
            return {**claim, "value": json.dumps(plain)}

        return forms.answer(filled(self.claim), iter(tensors), self.classes)

    # ---------------------------------------------------------------- candidates

    def _candidates(self, small: bool, baselines: bool) -> dict[str, Candidate]:
        """Of several outputs each is spoilt beside the right others: one's check must not cover for another."""
        found = {"exact": Candidate(EXACT, lambda: self.exact)}
        judged = [j for j, output in enumerate(self.exact) if output is not None]
        for j in self._some(judged):
            of = f" [{self.names[self.written[j]] if self.own else self.paths[j]}]" if len(self.exact) > 1 else ""
            for name, (kind, make) in self._of_output(j, small).items():
                if not self.own and (kind == NEAR or (len(judged) > 1 and kind in (BLIND, COPY))):
                    kind = PART
                found[name + of] = Candidate(
                    kind,
                    lambda j=j, make=make: [make() if i == j else t for i, t in enumerate(self.exact)],
                    lambda j=j, name=name: self._about(name, j),
                )
            if small and _is_tensor(self.exact[j]):
                found[ONE_CHANGED + of] = Candidate(
                    QUESTION, lambda j=j: self._one_changed(j), lambda: self._about(ONE_CHANGED, 0), several=True
                )
        if not self.own and len(judged) > 1:
            found["zeros" + ALL_PARTS] = Candidate(
                BLIND, lambda: [self._constant(j, 0.0) if _is_tensor(t) else t for j, t in enumerate(self.exact)]
            )
            found["previous answer" + ALL_PARTS] = Candidate(
                BLIND, lambda: [self._before(j) for j in range(len(self.exact))]
            )
        for name, candidate in list(found.items()):
            if small and self.own and name.startswith(("exact", "zeros")):
                found[name + BY_CHECK] = replace(candidate, by_check=True)
            if baselines and candidate.kind in BASELINE_KINDS:
                found[name + AS_BASELINE] = replace(candidate, baseline=True)
        return found

    def _of_output(self, j: int, small: bool) -> dict[str, tuple[str, Callable[[], object]]]:
        exact, truth = self.exact[j], self.truth[j]
        if not _is_tensor(exact):  # a text, or a number beyond all types
            empty = {"empty text": (PART, lambda: _other("", exact))} if isinstance(exact, str) else {}
            return {**empty, "previous answer": (PART, lambda: self._before(j))}
        found: dict[str, tuple[str, Callable[[], object]]] = {
            "zeros": (BLIND, lambda: self._constant(j, 0.0)),
            "mean of the answer": (BLIND, lambda: self._constant(j, float(_several(values.numbers(truth)).mean()))),
            "previous answer": (BLIND, lambda: self._before(j)),
            "one NaN": (NEAR, lambda: _one_special(exact, float("nan"))),
            "one infinity": (NEAR, lambda: _one_special(exact, float("inf"))),
            "largest element zero": (NEAR, lambda: _largest_zeroed(exact)),
            "largest element negated": (NEAR, lambda: spoilt.negated(exact)),
            "largest element moved": (NEAR, lambda: spoilt.moved(exact)),
            LESS_ANSWER: (NEAR, lambda: self._narrowed_answer(j)),
            LESS_INPUTS: (ALONE, lambda: self._narrowed_inputs(j)),
            "answer to inputs x8": (DERIVED, lambda: self._answer_to("x8", self.inputs, values.eightfold)[j]),
        }
        if self.own:  # in other folders the judge checks forms
            found["wrong type of elements"] = (FORM, lambda: values.other_type(exact))
            found["one more axis"] = (FORM, lambda: exact.unsqueeze(0))
        if len(spoilt.axes(exact)) > 1:  # of one axis the order may be free
            found["two elements swapped"] = (NEAR, lambda: spoilt.swapped(exact))
        if small:
            found[ALL_NEGATED] = (QUESTION, lambda: spoilt.all_negated(exact))
            for axis in spoilt.axes(exact):
                found[f"two places of axis {axis} swapped"] = (
                    QUESTION,
                    lambda axis=axis: spoilt.swapped_along(exact, axis),
                )
        if self.unweighted:
            found["answer to other weights"] = (BLIND, lambda: self.unweighted[j])
        for i in self._some(self.inputs):
            name = self.names[i]
            found[f"{COPY_OF}{name}"] = (self._kind_of_copy(i, j), lambda i=i: self._copy(i, j))
            if small:
                found[f"{name} zero"] = (ALONE, lambda i=i: self._answer_to(f"{i} zero", [i], torch.zeros_like)[j])
                found[f"{name} shifted"] = (ALONE, lambda i=i: self._answer_to(f"{i} shifted", [i], values.shifted)[j])
        return found

    def _about(self, name: str, j: int) -> str:
        """Return what to know of a candidate for output j that the check lets through, "" for nothing."""
        if name == ALL_NEGATED:
            return "may its sign be either? If not, the check must compare it"
        if name.startswith("two places of axis"):
            return "may they come in any order? If not, the check must compare it"
        if name == ONE_CHANGED:
            return (
                f"of {spoilt.PLACES} places at least one: is every element compared? If not, the check must compare it"
            )
        if name == LESS_ANSWER:
            return self._said_of_precision("the answer", {NARROWER_ANSWER[self._admitted(self.exact[j].dtype)]})
        if name == LESS_INPUTS:
            types = [tree.tensors(self.pristine)[i].dtype for i in self.inputs if i not in self.opaque]
            out = self.exact[j].dtype
            kept = {NARROWER_INPUT[self._admitted(one, out)] for one in types if one in values.BITS}
            return self._said_of_precision("inputs", kept)
        return ""

    def _said_of_precision(self, what: str, kept: set[int]) -> str:
        """kept: the bits after the leading one of what was tried."""
        tried = ", or to ".join(f"the {bits} bits after the leading one that {FORMATS[bits]} has" for bits in kept)
        named = f"is {self.task.PRECISION!r}" if self.own and hasattr(self.task, "PRECISION") else "is not set"
        reads = f"PRECISION of task.py {named}" if self.own else "of a folder from elsewhere PRECISION is not read"
        return f"{what} rounded to {tried}; {reads}"

    def _one_changed(self, j: int) -> list[list]:
        changed = spoilt.one_changed(self.exact[j], self.seed)
        return [[*self.exact[:j], one, *self.exact[j + 1 :]] for one in changed]

    def _before(self, j: int) -> object:
        if not _alike(self.before, self.exact):
            raise AbsentError("the answer before it has another form")
        if _is_tensor(self.exact[j]):
            _filled(self.exact[j])  # an empty one says nothing
        return self.before[j]

    def _some(self, which: list[int]) -> list[int]:
        if len(which) <= ALONE_AT_MOST:
            return which
        return sorted(random.Random(self.seed).sample(which, ALONE_AT_MOST))

    def _constant(self, j: int, value: float) -> torch.Tensor:
        form = self.exact[j]
        full = torch.full(_filled(form).shape, value, dtype=torch.float64, device=form.device)
        return values.like(form, values.cast(full, form.dtype))

    def _admitted(self, *dtypes: torch.dtype) -> int:
        """Bits that a kernel must keep where values of these types meet: those of the narrowest, or of task.py's
        PRECISION if that is narrower.
        """
        # Of a folder from elsewhere the judge takes fp32 where the reference gives fp64.
        named = getattr(self.task, "PRECISION", "fp64") if self.own else "fp32"
        if named not in LADDER:
            raise RefusedError(f"PRECISION must be one of {', '.join(LADDER)}, got {named!r}")
        return min([LADDER[named], *(values.BITS[dtype] for dtype in dtypes if dtype in values.BITS)])

    def _narrowed_answer(self, j: int) -> torch.Tensor:
        """The true values rounded to the next narrower format, significand only, then to the output's type."""
        exact = _filled(_floating(self.exact[j]))
        kept = NARROWER_ANSWER[self._admitted(exact.dtype)]
        return values.like(exact, values.cast(values.rounded(values.numbers(self.truth[j]), kept), exact.dtype))

    def _narrowed_inputs(self, j: int) -> torch.Tensor:
        """The answer to inputs rounded to the format below their own and the output's."""
        out = self.exact[j].dtype

        def narrowed(tensor: torch.Tensor) -> torch.Tensor | None:
            if tensor.dtype not in values.BITS:
                return None
            kept = NARROWER_INPUT[self._admitted(tensor.dtype, out)]
            return values.cast(values.rounded(values.numbers(tensor), kept), tensor.dtype)

        return self._answer_to(f"narrowed for {out}", self.inputs, narrowed)[j]

    def _kind_of_copy(self, i: int, j: int) -> str:
        form, content = self.exact[j], tree.tensors(self.pristine)[i]
        return COPY if (form.dtype, form.shape) == (content.dtype, content.shape) else BLIND

    def _copy(self, i: int, j: int) -> torch.Tensor:
        """Input i in the form of output j."""
        form, content = self.exact[j], tree.tensors(self.pristine)[i]
        if content.numel() > form.numel() or content.dtype == values.FP4:
            # No more of it than is needed: as fp64 bytes are 8 times as large, packed values 16 times.
            content = values.bits(content).flatten()[: form.numel()].view(content.dtype)
        content = values.numbers(content)
        return values.like(form, values.cast(values.fitted(_filled(content), form.shape), form.dtype))

    def _answer_to(self, what: str, which: list[int], change: Callable[[torch.Tensor], torch.Tensor | None]) -> list:
        """The answer to the inputs of which those in `which` went through `change`, which gives None where it means
        nothing. What is OPAQUE stays as it is. Each output takes its part of one answer.
        """
        if what not in self.derived:
            self.derived[what] = self._derive(which, change)
        found = self.derived[what]
        if isinstance(found, AbsentError):
            raise found
        return found

    def _derive(self, which: list[int], change: Callable[[torch.Tensor], torch.Tensor | None]) -> list | AbsentError:
        if which and self.opaque.issuperset(which):
            return AbsentError(f"task.py says that {', '.join(self.names[i] for i in which)} is OPAQUE")
        data, changed, apt = tree.clone(self.pristine), False, False
        tensors = [values.held(tensor) for tensor in tree.tensors(data)]
        for i in which:
            new = None if i in self.opaque else change(values.plain(tensors[i]))
            apt |= new is not None
            if new is not None and not torch.equal(values.bits(new), values.bits(tensors[i])):
                values.bits(tensors[i]).copy_(values.bits(new))
                changed = True
        if not apt:
            return AbsentError("no input is of a floating-point type, and no others are scaled or rounded")
        if not changed:
            return AbsentError(UNCHANGED)
        try:
            truth = self._outputs_of(self._solve(data))
        except Exception as error:
            if "CUDA error" in str(error):
                raise SystemExit(1) from error  # the context is lost; the parent starts another process
            return AbsentError(f"the reference refuses such inputs: {type(error).__name__}: {error}")
        if not _alike(truth, self.exact):
            return AbsentError(
                "the answer to such inputs has another shape; a wrong file that ignores them would show that they count"
            )
        # Saturated: an infinity would be refused for being one.
        return [
            values.like(e, t if t.dtype == e.dtype else values.cast(values.numbers(t), e.dtype)) if _is_tensor(e) else t
            for e, t in zip(self.exact, truth, strict=True)
        ]


def _leaves(claim: dict, parts: Iterator[torch.Tensor]) -> list:
    """Return the tensors and plain values of an answer in order. parts: its tensors; numbers become tensors too."""
    if "items" in claim:
        return [leaf for item in claim["items"] for leaf in _leaves(item, parts)]
    if claim["type"] != "value":
        return [next(parts)]
    value = json.loads(claim["value"])
    if isinstance(value, float):
        return [torch.tensor(value, dtype=torch.float64)]
    whole = isinstance(value, int) and -(2**63) <= value < 2**63  # truth values too
    return [torch.tensor(value) if whole else value]


def _paths(answer: object, path: str = "") -> list[str]:
    """Return a name for each of the leaves: its keys, fields or positions, joined by dots."""
    inner = tree.within_answer(answer)
    if inner is None:
        return [path]
    named = zip(inner[0] or range(len(inner[1])), inner[1], strict=True)
    return [name for key, item in named for name in _paths(item, f"{path}.{key}" if path else str(key))]


def _is_tensor(output: object) -> bool:
    return isinstance(output, torch.Tensor)


def _alike(one: list, two: list) -> bool:
    """Return whether two answers have as many outputs, of the same shapes."""
    shapes = [[t.shape if isinstance(t, torch.Tensor) else type(t) for t in outputs] for outputs in (one, two)]
    return shapes[0] == shapes[1]


def _near(one: list, two: list) -> bool:
    """Return whether two answers of the same form are equal, or each output the other's neighbour."""
    return all(values.neighbours(a, b) if _is_tensor(b) else a == b for a, b in zip(one, two, strict=True))


def _same(one: list, two: list) -> bool:
    """Return whether two answers of the same form are equal bit for bit."""
    return all(
        torch.equal(values.bits(a), values.bits(b)) if _is_tensor(b) else a == b for a, b in zip(one, two, strict=True)
    )


def _other(made: str, exact: object) -> str:
    if made == exact:
        raise AbsentError("it is the answer")
    return made


def _filled(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.numel():
        raise AbsentError("it is empty")
    return tensor


def _several(tensor: torch.Tensor) -> torch.Tensor:
    if _filled(tensor).numel() == 1:
        raise AbsentError("one element is its own mean")
    return tensor


def _floating(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype not in values.BITS:
        raise AbsentError("not of a floating-point type")
    return tensor


def _one_special(exact: torch.Tensor, value: float) -> torch.Tensor:
    """The answer with `value` in the last element that is finite."""
    at = values.positions(torch.isfinite(values.numbers(_floating(exact))))
    if not len(at):
        raise AbsentError("no element is finite")
    return values.put(exact, at[-1:], value)


def _largest_zeroed(exact: torch.Tensor) -> torch.Tensor:
    size = values.numbers(_filled(exact)).abs().nan_to_num(0, 0, 0).flatten()
    if exact.dtype == values.FP4 or not bool(size.any()):
        raise AbsentError("no largest element")
    return values.put(exact, size.argmax().reshape(1), 0)


if __name__ == "__main__":
    checker.main(Trivial)
