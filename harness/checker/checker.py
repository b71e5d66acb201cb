"""The process that holds the reference: `python -m harness.checker.checker FD`, FD a connected socket (runner/wire.py).
It makes inputs, fills buffers, times calls on a CPU and judges outputs. It never imports a submission.
"""

import dataclasses
import math
import os
import socket
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch

from harness.checker import foreign, forms, inputs, matmul, memory
from harness.checker.guards import Guards
from harness.problem import sources
from harness.runner import claims, failure, gate, objects, recorder, tree, wire
from harness.runner.buffers import Buffer, Page, Shared
from harness.sandbox import process
from harness.sandbox.process import RUNS_ON, Freezer
from problems.common import load

PAGE = 2 << 20  # by which memory of a GPU is made read-only (harness/player/player.py)
CANARY = b"DSV4-EXPECTED-VALUES-CANARY." * 147  # 4 KiB beside the expected values: a runner must never find them
READY_LIMIT_S = 10  # for a runner that has said that it is ready to wait for "go"


@dataclasses.dataclass
class Caught:
    """What a call on a CPU left. fault: what is wrong besides the outputs; outputs: their bytes, None if unreadable."""

    fault: str
    outputs: list[torch.Tensor | None]


class Checker:
    """The present content, all buffers, and the verdict. A public method handles the request of its name."""

    def __init__(self, start: dict) -> None:
        self.folder = Path(start["folder"])
        self.ours: bool = start["ours"]  # a folder of ours; else GPU MODE's format
        self.device: str = start["device"]
        if not self.ours:
            files = {name: Path(path) for name, path in start["files"].items()}
            load.bind(self.folder, helpers := sources.helpers(self.folder.resolve()) | files)
            self.hidden = frozenset(name[:-3].replace("/", ".") for name in helpers.keys() - files.keys())
        self.task: ModuleType | None = load.from_file(self.folder, self.folder / "task.py") if self.ours else None
        self.reference: ModuleType = load.from_file(self.folder, self.folder / "reference.py")
        missing = [name for name in objects.JUDGES if not callable(getattr(self.reference, name, None))]
        if missing and not self.ours:
            wanted = f"{', '.join(objects.JUDGES)}, found no {', '.join(missing)}"
            raise failure.RefusedError(f"reference.py must define {wanted}")
        self.split: bool = self.ours and hasattr(self.reference, "generate_weights")
        self.outputs_named: tuple[str, ...] = tuple(getattr(self.task, "OUTPUTS", ()))
        self.inout_named: tuple[str, ...] = tuple(getattr(self.task, "INOUT", ()))
        self.buffers: dict[str, list[Shared]] = {}
        self.held: dict[str, Shared] = {}  # the weights' memory, by runner
        self.guards: WeakKeyDictionary[Shared, Guards] = WeakKeyDictionary()
        self.pages: dict[str, Page] = {}  # by runner, on a CPU
        self.freezers: dict[str, Freezer] = {}
        self.caught: dict[str, Caught] = {}
        self.flush_bytes, self.flush = start.get("flush", 0), None  # what makes a CPU's caches cold; made when needed
        self.weights: Any = None  # NamedTuples that only task.py knows
        self.weights_spec: dict = {}
        self.pristine: Any = None
        self.want: Any = None
        self.spec: dict = {}
        self.answer: dict = {}  # how a folder's answer is put together: the claim of the reference's own
        self.nans: list[bool] = []  # of the leaves of a folder's answer, which have any
        self.values: dict | None = None  # the data's numbers and texts: "bytes" (uint8, flat) and where, "leaf"
        self.drawn_from: tuple[int, ...] = (0,)  # seeds of the present weights and content
        self.rows: list[int] | None = None  # that the present content has of its case; None: all
        self.got: list[Any] = []  # the outputs that were judged last
        self.bits_of: dict[tuple, list[torch.Tensor]] = {}  # by submission, seeds and row, the bytes of its elements
        self.outputs: list[int] = []
        self.inout: list[int] = []  # inputs that a call may overwrite, as tensors of what is delivered
        self.captures: list[dict] = []
        self.classes: dict[str, type] = {}  # of the reference's answer, in a GPU MODE folder
        canary = torch.frombuffer(bytearray(CANARY), dtype=torch.uint8)
        self.canaries = [canary.to(device) for device in {"cpu", self.device}]

    def new_weights(self, message: dict, _: list[int]) -> dict:
        """Make the weights of a case from a seed. Return "split": whether the problem has weights apart from inputs."""
        self.weights = self.pristine = self.want = None
        self.drawn_from = (message["seed"],)
        if self.split:
            case = {**message["case"], "seed": message["seed"], "device": self.device}
            self.weights = self.reference.generate_weights(**case)
            layout = tree.Layout()
            self.weights_spec = tree.describe(self.weights, layout)
            self.weights_bytes = layout.used
        nbytes = self.weights_bytes if self.split and self.device == "cuda" else 0
        return {"split": self.split, "bytes": -(-nbytes // PAGE) * PAGE}

    def hold(self, message: dict, _: list[int]) -> dict:
        """Copy the present weights into memory for one runner on a CPU, and free what it held before."""
        if old := self.held.pop(message["runner"], None):
            old.close()
        buffer = self.held[message["runner"]] = Buffer(self.weights_bytes)
        self._fill_weights(buffer)
        nbytes = sum(leaf["nbytes"] for leaf in tree.leaves(self.weights_spec))
        return {"nbytes": buffer.nbytes, "spec": self.weights_spec, "bytes": nbytes, "fds": buffer.fds()}

    def _fill_weights(self, buffer: Shared) -> None:
        leaves, names = tree.leaves(self.weights_spec), _fields(self.weights_spec)
        for leaf, source in zip(leaves, tree.tensors(self.weights), strict=True):
            memory.region(leaf, buffer).copy_(tree.raw(source))
        named = [(leaf, f"weights {name}") for leaf, name in zip(leaves, names, strict=True)]
        self.guards[buffer] = Guards(buffer, named)
        self._sync()

    def memory(self, message: dict, _: list[int]) -> dict:
        """Return "free": the bytes of free memory of the GPU, after this process gave back its caches."""
        torch.cuda.empty_cache()
        return {"free": torch.cuda.mem_get_info()[0]}

    def product(self, message: dict, _: list[int]) -> dict:
        """Return "us": times of the judge's matrix product on a GPU."""
        return {"us": matmul.times_us(message["count"])}

    def canary(self, message: dict, _: list[int]) -> dict:
        """Return whether the device still computes: a small sum with a known result, through memory and back."""
        values = torch.arange(1 << 16, device=self.device, dtype=torch.int64)
        return {"well": int(values.sum()) == (1 << 15) * ((1 << 16) - 1)}

    def content(self, message: dict, _: list[int]) -> dict:
        """Make the inputs of a case from a seed, and the reference's answer to them. Return how a buffer holds them."""
        self.pristine = self.want = None  # before the next ones are made: they may be large
        case, self.rows = {**message["case"], "seed": message["seed"]}, message.get("rows")
        self.pristine = inputs.make(self.reference, self.task, case, self.device, self.ours, self.weights)
        if self.rows:
            self.pristine = self.reference.rows(self.pristine, torch.tensor(self.rows, device=self.device))
        self.drawn_from, self.got = (*self.drawn_from[:1], message["seed"]), []
        # On a CPU a folder's numbers and texts are contents too: who got them with the layout could work ahead.
        layout = tree.Layout(values=None if self.ours or self.device == "cuda" else [])
        self.spec = tree.describe(self._delivered(), layout)
        self.values = None
        if layout.values:
            packed = torch.frombuffer(bytearray(tree.packed(layout.values)), dtype=torch.uint8)
            self.values = {"bytes": packed, "leaf": tree.describe(packed, layout)}
        if self.ours:
            self.inout = self._inout()
            self.want = self.reference.ref_kernel(self._for_reference())
            outputs = self.spec["items"][2] if self.split else self.spec
            names = outputs.get("keys", [])
            if not self.outputs_named or not set(self.outputs_named) <= set(names):
                raise failure.RefusedError(f"OUTPUTS must name fields of the NamedTuple of outputs, which has {names}")
            leaves = tree.leaves(self.spec)
            first = len(leaves) - len(tree.leaves(outputs))
            places = [tree.within(outputs, (name,)) for name in self.outputs_named]
            if any(len(part) != 1 for part in places):
                raise failure.RefusedError(f"each field of OUTPUTS must hold one tensor, got {list(map(len, places))}")
            self.outputs = [first + part[0] for part in places]
            self.captures = [leaves[i] for i in self.outputs]
            if any(tree.span(leaf["shape"], leaf["stride"]) > math.prod(leaf["shape"]) for leaf in self.captures):
                raise failure.RefusedError("outputs must have no gaps between their elements")
            memory.poison(tree.tensors(self._delivered()), self.outputs)
        else:
            # A call may overwrite every input, as the reference may, and return one of them.
            self.outputs, self.inout = [], list(range(len(tree.leaves(self.spec))))
            tensors = tree.tensors(self.pristine)
            answer = self.reference.ref_kernel(tree.clone(self.pristine))
            foreign.see_answer(answer, self.device)
            self.answer, parts = claims.told(answer)
            self.classes, self.nans = forms.classes_of(self.answer), foreign.nans(answer)
            self.captures = [memory.room_for(part, tensors) for part in parts]
        devices = {leaf["device"] for leaf in tree.leaves(self.spec)}
        if self.device == "cuda" in devices != {"cuda"}:
            raise failure.RefusedError("a call's data must be on one device: make all tensors on the GPU")
        parts = {"inputs": 0, "outputs": 0}
        # A folder's answer is copied to where the judge looks; on a CPU the checker fetches it.
        if self.device == "cuda":
            parts["inputs"], layout = tree.rearrange(self.spec, {*self.outputs, *self.inout}, PAGE)
            for spec in () if self.ours else self.captures:
                spec["offset"] = layout.place(spec["most"])
            parts["outputs"] = -(-layout.used // PAGE) * PAGE - parts["inputs"]
        return {
            "device": "cuda" if "cuda" in devices else "cpu",
            "host": layout.used if self.device == "cpu" else 0,
            "parts": parts,
            "bytes": self._bytes(case),
            "held": self._held(),
            "open": {
                "data": self.spec,
                "outputs": self.outputs,
                "inout": self.inout,
                "captures": self.captures,
                "ours": self.ours,
                "split": self.split,
                "values": self.values and self.values["leaf"],
                "definitions": {} if self.ours else objects.needed(self.reference, self.spec, self.hidden),
            },
        }

    def definitions(self, message: dict, _: list[int]) -> dict:
        """Return what a runner defines for the data of a folder's case, whose present content stays as it is."""
        data = inputs.of_folder(self.reference, {**message["case"], "seed": message["seed"]})
        return objects.needed(self.reference, tree.describe(data, tree.Layout()), self.hidden)

    def zeros(self, message: dict, _: list[int]) -> dict:
        """Make a folder's case the present content. Return whether its check "accepts" an answer of zeros."""
        self.content(message, _)
        return {"accepts": foreign.takes_zeros(self.reference, self.pristine)}

    def seeds(self, message: dict, _: list[int]) -> dict:
        """Return "bits": how many bits seeds may have (harness/checker/foreign.py)."""
        self.pristine = self.want = None
        return {"bits": foreign.seed_bits(self.reference, message["case"], message["seed"])}

    def _held(self) -> int:
        """Return the bytes of inputs and outputs, each once: a buffer for an answer is both."""
        delivered = [(leaf["shape"], leaf["dtype"]) for leaf in tree.leaves(self.spec)]
        fresh = [] if self.ours else self.captures
        fresh = [spec for spec in fresh if all((spec["shape"], dtype) not in delivered for dtype in spec["dtypes"])]
        return sum(leaf["nbytes"] for leaf in [*tree.leaves(self.spec), *fresh])

    def _bytes(self, case: dict) -> int | None:
        """Return the bytes that a call on the present content must move, where the task says that of contents."""
        kind = getattr(self.task, "Case", None)
        if not self.ours or not hasattr(kind, "bytes_of"):
            return None
        return int(kind(**case).bytes_of(self.pristine.inputs if self.split else self.pristine))

    def allocate(self, message: dict, _: list[int]) -> dict:
        """Make `count` buffers for a runner on a CPU, and the page of its calls, whose descriptor comes first."""
        runner = message["runner"]
        self.release(message, _)
        buffers = [Buffer(message["bytes"]) for _ in range(message["count"])]
        self.buffers[runner] = [*buffers]
        self.pages[runner] = Page()
        self.freezers[runner] = Freezer(message["reaper"], message["pid"])
        return {"fds": [fd for buffer in (self.pages[runner], *buffers) for fd in buffer.fds()]}

    def attach(self, message: dict, fds: list[int]) -> dict:
        """Map a GPU call's memory: `copies` of inputs and outputs, and weights, filled. Return their specification."""
        runner, sizes = message["runner"], message["sizes"]
        self.release({"op": "release", "runner": runner}, [])
        torch.cuda.empty_cache()
        self.buffers[runner] = []
        for _ in range(message["copies"]):
            parts = [(fds.pop(0) if sizes[name] else -1, sizes[name]) for name in ("inputs", "outputs")]
            self.buffers[runner].append(recorder.Mapped(parts))
        if sizes["weights"]:
            self.held[runner] = recorder.Mapped([(fds.pop(0), sizes["weights"])])
            self._fill_weights(self.held[runner])
        return {"weights": self.weights_spec or None}

    def release(self, message: dict, _: list[int]) -> dict:
        """Free the buffers of a runner, and what it held of weights if it is gone."""
        runner = message["runner"]
        for buffer in self.buffers.pop(runner, []):
            buffer.close()
        self.freezers.pop(runner, None)
        if runner in self.pages:
            self.pages.pop(runner).close()
        self.caught.pop(runner, None)
        if message["op"] == "release" and runner in self.held:
            self.held.pop(runner).close()
        return {}

    def fill(self, message: dict, _: list[int]) -> dict:
        """Copy the present content into a buffer, with poisoned outputs and captures, and secret bytes between them."""
        buffer = self.buffers[message["runner"]][message["buffer"]]
        for leaf, source in zip(tree.leaves(self.spec), tree.tensors(self._delivered()), strict=True):
            memory.region(leaf, buffer).copy_(tree.raw(source))
        if self.values:
            memory.region(self.values["leaf"], buffer).copy_(self.values["bytes"])
        if self.device == "cuda" and not self.ours:
            for spec in self.captures:  # of any dtype: NaN, and of integers -1
                memory.region({**spec, "nbytes": spec["most"]}, buffer).fill_(0xFF)
        self.guards[buffer] = Guards(buffer, self._named())
        self._sync()
        return {}

    def time_call(self, message: dict, _: list[int]) -> dict:
        """Let a runner on a CPU make call `number`, and time it. first: it has just said that it is ready; else it
        waits since its last call. last: it replies after this one. judges: the call is the judge's own, and nothing is
        taken. which: of the calls that it has prepared. Return the clock's reading; "before", "after": pids of what the
        runner started and did not end; "said": what it noted of the tensors that it returned, in a GPU MODE folder.
        """
        runner, number = message["runner"], message["number"]
        page, freezer, clock = self.pages[runner], self.freezers[runner], gate.bindings()
        self.caught.pop(runner, None)
        if message["first"] and (code := clock.await_ready(page.address, number, freezer.pid, READY_LIMIT_S)):
            return {"code": code, "waiting": False}
        ran = [] if message["first"] else [clock.ran_on(*freezer)]  # since the end of its last call
        if clock.stop(*freezer):
            return {"code": RUNS_ON, "waiting": True}
        before = freezer.processes()
        if message["fill"]:
            self.fill(message, [])
        buffer = self.buffers[runner][message["buffer"]]
        self._make_cold(buffer, message)
        outputs = [] if message["judges"] else self._written(buffer)
        reading, noted = clock.time(page.address, number, message["which"], freezer, message["limit_s"], outputs)
        if reading.code == 0 and not message["judges"]:
            self.caught[runner] = self._catch(runner, buffer, freezer.pid, noted)
        notes = "" if self.ours or message["judges"] else clock.noted().decode(errors="replace")
        if message["last"]:
            clock.leave(page.address, number)
        ran += [reading.ran_us, clock.ran_on(*freezer) if reading.code == 0 else 0.0]
        report = {**dataclasses.asdict(reading), "ran_us": max(ran), "waiting": True, "before": before, "said": notes}
        return {**report, "after": freezer.processes()}

    def leave(self, message: dict, _: list[int]) -> dict:
        """Mark call `number` of a runner on a CPU as its last one: the runner replies when it is continued."""
        if message["runner"] in self.pages:
            gate.bindings().leave(self.pages[message["runner"]].address, message["number"])
        return {}

    def _make_cold(self, buffer: Shared, message: dict) -> None:
        """Drop all that the call reads from all caches. What is in a runner's memory only a larger read evicts."""
        own_memory = self.split or message["baseline"] or (message["judges"] and message["bytes"] > buffer.nbytes)
        if own_memory or not gate.forget(buffer.memory):
            self.flush = torch.ones(self.flush_bytes, dtype=torch.uint8) if self.flush is None else self.flush
            gate.evict(self.flush)

    def _written(self, buffer: Shared) -> list[tuple[int, int]]:
        """Return (address, bytes) of what a call on the present content writes; address 0: in the runner's memory."""
        if not self.ours:
            return [(0, spec["most"]) for spec in self.captures]
        regions = [memory.region(tree.leaves(self.spec)[i], buffer) for i in self.outputs]
        # Of no bytes: torch gives it address 0, which would say that all are in the runner's memory.
        return [(region.data_ptr(), region.numel()) for region in regions if region.numel()]

    def _catch(self, runner: str, buffer: Shared, pid: int, noted: list[tuple[int, int]]) -> Caught:
        """Return what a call left. noted: (address, bytes) of outputs in the runner's memory, in a GPU MODE folder."""
        if self.ours:
            fault, leaves = self._changed(runner, buffer), tree.leaves(self.spec)
            return Caught(fault, [memory.region(leaves[i], buffer).clone() for i in self.outputs])
        outputs: list[torch.Tensor | None] = []
        for (address, nbytes), (_, most) in zip(noted, self._written(buffer), strict=True):
            try:
                outputs.append(memory.fetched(pid, address, nbytes) if nbytes <= most else None)
            except PermissionError as error:
                raise RuntimeError(
                    "this machine does not let the judge read a runner's memory (kernel.yama.ptrace_scope): run the "
                    "judge as root, or give the folder separate outputs"
                ) from error
            except OSError:
                outputs.append(None)
        return Caught(self._changed(runner, buffer), outputs)  # last: it puts inputs back, and one may be an output

    def judge(self, message: dict, _: list[int]) -> dict:
        """Return the verdict on a buffer's outputs. claims: of what came back, or None. fixed: inputs read-only."""
        runner, returned = message["runner"], message["claims"]
        buffer = self.buffers[runner][message["buffer"]]
        self._sync()
        caught = self.caught.pop(runner, None)
        if self.device == "cuda":
            caught = Caught(self._changed(runner, buffer, message["fixed"]), [])
        if caught is None:
            raise RuntimeError(f"{runner} has made no call that could be judged")
        if caught.fault:
            return _verdict("INCORRECT", caught.fault)
        if not self.ours:
            return self._judge_any(caught.outputs, returned[0] if returned else {"type": "nothing"}, buffer)
        if self.device == "cuda":
            got: list[torch.Tensor | None] = [tree.tensor(leaf, buffer.memory) for leaf in self.captures]
        else:
            taken, names = caught.outputs, _fields(self.spec)
            got = [memory.interpret(output, form) for output, form in zip(taken, self.captures, strict=True)]
            for i, leaf, output in zip(self.outputs, self.captures, taken, strict=True):
                if output is None or not memory.same(memory.region(leaf, buffer), output):
                    return _verdict("CHEAT_SUSPECTED", f"output {names[i]} changed after the call had ended")
        if returned is not None and (fault := forms.returned_fault(returned, self.captures, self.ours)):
            return _verdict("INCORRECT", fault)
        self.got, output = got, got[0] if len(got) == 1 else tuple(got)
        result = inputs.compared(self.reference, self.pristine, self.want, output, message["baseline"])
        error = {"rel": result.rel, "max": result.worst_abs, "tol": result.worst_tol}
        reason = result.message
        if not result.ok and (count := sum(memory.unwritten(part) for part in got if part is not None)):
            reason += f"\nnever written: {count} elements hold the NaN that was there before the call"
        return _verdict("PASSED" if result.ok else "INCORRECT", reason, error)

    def bits(self, message: dict, _: list[int]) -> dict:
        """Return "differ": (row, elements) with other bits than `name` first gave to these rows of the content."""
        rows, differ = {} if self.rows else {0: self.got}, []
        if self.rows:
            data, outputs = self.pristine, dict(zip(self.outputs_named, self.got, strict=True))
            data = data._replace(**{"outputs": data.outputs._replace(**outputs)} if self.split else outputs)
            for at, row in enumerate(self.rows):
                single = self.reference.rows(data, torch.tensor([at], device=self.device))
                rows[row] = [getattr(single.outputs if self.split else single, name) for name in self.outputs_named]
        for row, parts in rows.items():
            dense = [part.cpu().contiguous() for part in parts]
            elements = [tree.raw(part).view(part.numel(), part.element_size()) for part in dense]
            first = self.bits_of.setdefault((message["name"], *self.drawn_from, row), elements)
            pairs = zip(first, elements, strict=True)
            if many := sum(int((a != b).any(1).sum()) if a.shape == b.shape else len(b) for a, b in pairs):
                differ.append((row, many))
        return {"differ": differ}

    def _judge_any(self, taken: list[torch.Tensor | None], claim: dict, buffer: Shared) -> dict:
        """Return the verdict of a GPU MODE folder's own check. claim: of what came back; taken: its bytes on a CPU."""
        returned = tree.leaves(claim)
        if fault := forms.returned_fault(returned, self.captures, self.ours):
            kinds = [form["type"] for form in returned]
            unlike = forms.unlike(claim, self.answer) if kinds != ["Tensor"] * len(self.captures) else ""
            return _verdict("INCORRECT", unlike or fault)
        if self.device == "cuda":
            got = [memory.copied(spec, form, buffer) for spec, form in zip(self.captures, returned, strict=True)]
        else:
            got = [memory.interpret(part, form) for part, form in zip(taken, returned, strict=True)]
        if any(part is None for part in got):
            return _verdict("INCORRECT", "custom_kernel returned a tensor whose memory is not what it says")
        self.got = got
        try:
            answer = forms.answer(claim, map(tree.clone, got), self.classes)
        except Exception as error:  # nothing of the submission runs: what it said is no answer
            return _verdict("INCORRECT", f"custom_kernel's process said of its answer what none is: {error}")
        unlike = any(nan and not wanted for nan, wanted in zip(foreign.nans(answer), self.nans, strict=False))
        ok, text = foreign.said_of(self.reference, self.pristine, answer)
        if ok and unlike:  # comparisons with NaN are false, so a check of the kind `error > tolerance` takes it
            ok, text = False, "NaN, where the reference's answer has none: check_implementation does not see it"
        if not ok and (other := forms.unlike(claim, self.answer)):
            text = f"{other}; {text}"
        pairs = zip(returned, self.captures, strict=True)
        if odd := [form["dtype"] for form, want in pairs if form["dtype"] not in want["usual"]]:
            text = "; ".join([f"the reference does not answer in {odd[0]}, its check was asked", *filter(None, [text])])
        return _verdict("PASSED" if ok else "INCORRECT", text)

    def _changed(self, runner: str, buffer: Shared, fixed: bool = False) -> str:
        """Put INOUT's tensors back. Return what else a call changed, "" if nothing. fixed: all was read-only in it."""
        leaves, names = tree.leaves(self.spec), _fields(self.spec)
        for i, (leaf, source) in enumerate(zip(leaves, tree.tensors(self._delivered()), strict=True)):
            if i in self.inout:  # as before the call again: the next call to fetch code finds what a call does
                memory.region(leaf, buffer).copy_(tree.raw(source))
            elif i not in self.outputs and not fixed and not memory.same(memory.region(leaf, buffer), tree.raw(source)):
                return f"input {names[i]} was changed by the call"
        held = self.held.get(runner)
        if held and not fixed:
            pairs = zip(tree.leaves(self.weights_spec), tree.tensors(self.weights), strict=True)
            if not all(memory.same(memory.region(leaf, held), tree.raw(source)) for leaf, source in pairs):
                return "the weights were changed by the call"
        for memory_of in filter(None, (buffer, None if fixed else held)):
            if (guards := self.guards.get(memory_of)) and (fault := guards.fault(memory_of)):
                return fault
        return ""

    def _named(self) -> list[tuple[dict, str]]:
        """Return the specification and the name of all that lies in a buffer of the present content."""
        names = enumerate(_fields(self.spec))
        kinds = [f"output {name}" if i in self.outputs else f"input {name}" for i, name in names]
        named = list(zip(tree.leaves(self.spec), kinds, strict=True))
        if self.values:
            named.append((self.values["leaf"], "the data's numbers and texts"))
        if self.device == "cuda" and not self.ours:
            named += [(spec, "the judge's copy of an output") for spec in self.captures]
        return named

    def _inout(self) -> list[int]:
        """Return which of the delivered tensors are those of INOUT. failure.RefusedError: it names what is no input."""
        # The weights are not delivered, so inputs come first.
        inputs = self.spec["items"][1] if self.split else self.spec
        names = [name for name in inputs.get("keys", []) if self.split or name not in self.outputs_named]
        if not set(self.inout_named) <= set(names):
            known = f"fields of the NamedTuple of inputs that are no outputs, {names}"
            raise failure.RefusedError(f"INOUT must name {known}, got {list(self.inout_named)}")
        return tree.within(inputs, self.inout_named)

    def _for_reference(self) -> Any:
        """Return the data, with copies of what a call may overwrite, since the reference may too."""
        if not self.inout_named:
            return self.pristine
        inputs = self.pristine.inputs if self.split else self.pristine
        inputs = inputs._replace(**{name: tree.clone(getattr(inputs, name)) for name in self.inout_named})
        return self.pristine._replace(inputs=inputs) if self.split else inputs

    def _delivered(self) -> Any:
        """Return the data without its weights, which have separate memory."""
        return self.pristine._replace(weights=None) if self.split else self.pristine

    def _sync(self) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()


def _fields(spec: dict) -> list[str]:
    """Return the field of each tensor of a specification, for messages."""
    return [leaf["name"].rpartition(".")[2] or "0" for leaf in tree.leaves(spec)]


def _verdict(status: str, reason: str, error: dict | None = None) -> dict:
    return {"status": status, "reason": reason, "error": error}


def main(kind: type[Checker] = Checker) -> None:
    process.harden()
    checker: Checker | None = None
    start: dict = {}

    def answer(message: dict, fds: list[int]) -> dict:
        nonlocal checker, start
        try:
            if checker:
                return dict(getattr(checker, message["op"])(message, fds))
            start = message
            if not start["ours"]:  # whose code may open files by names from its folder
                os.chdir(start["folder"])
                sys.dont_write_bytecode = True  # nothing is written into it
            checker = kind(start)
            return {"ready": True}
        except Exception as error:
            text = failure.of_folder(error, Path(start["folder"], "reference.py"))
            if start["device"] == "cpu" and "cuda" in str(error).lower():
                text = f"the folder needs a GPU, and this run has none: {text.partition(chr(10))[0]}"
            return {"failed": type(error).__name__, "text": text}

    wire.serve(socket.socket(fileno=int(sys.argv[1])), answer)


if __name__ == "__main__":
    main()
