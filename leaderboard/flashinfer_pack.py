"""Pack a variant for flashinfer-bench 0.1.2: Definition, Workloads and Solution in that package's folders.

That package has no uint8, no packed fp4 in safetensors, no strides and no texts among inputs. So bytes are int8, every
tensor is contiguous with its axes in the order of memory, code around the variant gives it its own dtypes and strides
back, and a text, such as moe_gemm's activation, makes a separate definition.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from harness.problem.folders import Case, Problem, Submission, has_words
from harness.results import output
from leaderboard.gpu_mode_pack import NAMED, embedded
from problems.common import load

MOST_BYTES = 256 * 2**20  # of the tensors that a workload stores; larger cases are left out
BYTES = (torch.uint8, torch.float4_e2m1fn_x2)  # which become int8
RUN = '''

def {name}({arguments}):
    """Return the outputs, contiguous, their axes in the order of memory."""
{made}    custom_kernel({data})
    return {outputs}
'''
REFERENCE = '''

def custom_kernel(data):
    """Write the exact answer into the outputs, rounded to their dtypes."""
    data = _packed_named(_packed_task.input_t, data)
    exact = ref_kernel(data)
    for name, one in zip(_packed_task.OUTPUTS, exact if isinstance(exact, tuple) else (exact,), strict=True):
        getattr(getattr(data, "outputs", data), name).copy_(one)
'''


@dataclass(frozen=True)
class Leaf:
    """A tensor of a call's data. order: of its axes from the slowest in memory on; axes: their names, in this order."""

    name: str
    dtype: torch.dtype
    order: tuple[int, ...]
    axes: list[str]

    @property
    def spec(self) -> dict:
        """The tensor as the package's TensorSpec."""
        return {"shape": self.axes, "dtype": "int8" if self.dtype in BYTES else str(self.dtype).removeprefix("torch.")}

    @property
    def restored(self) -> str:
        """The expression that gives the variant's tensor back."""
        view = f".view({self.dtype})" if self.dtype in BYTES else ""
        inverse = [self.order.index(axis) for axis in range(len(self.order))]
        return self.name + view + (f".permute({inverse})" if inverse != sorted(inverse) else "")

    def flat(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as the package has it. ValueError: it has gaps, or is of another form than in other cases."""
        ordered = tensor.permute(self.order)
        if tensor.dtype != self.dtype or not ordered.is_contiguous():
            form = f"{tensor.dtype} of strides {tensor.stride()}"
            raise ValueError(f"{self.name} must be dense, of one dtype and order of axes in all cases, got {form}")
        return ordered.view(torch.int8) if tensor.dtype in BYTES else ordered


@dataclass(frozen=True)
class Call:
    """A case with its data, and the tensors and texts in it by name."""

    case: Case
    data: Any
    values: dict[str, Any]


@dataclass(frozen=True)
class Form:
    """What a definition and its solution have in common: calls that differ in sizes and contents only."""

    name: str
    calls: list[Call]
    inputs: list[Leaf]
    outputs: list[Leaf]

    def run(self, name: str, arguments: list[Leaf], head: str = "") -> str:
        """A function that calls custom_kernel with task.py's data of the package's tensors. head: its first lines."""
        leaves = {leaf.name: leaf.restored for leaf in (*self.inputs, *self.outputs)}

        def built(data: Any) -> str:
            parts = [
                built(value) if hasattr(value, "_fields") else leaves.get(field, repr(value))
                for field, value in zip(data._fields, data, strict=True)
            ]
            return f"({', '.join(parts)},)"

        passed, outputs = (", ".join(leaf.name for leaf in some) for some in (arguments, self.outputs))
        return RUN.format(name=name, arguments=passed, made=head, data=built(self.calls[0].data), outputs=outputs)

    def definition(self, problem: Problem) -> dict:
        """ValueError: an output has a size that no input has."""
        sizes = {axis: f"{leaf.name}.shape[{i}]" for leaf in self.inputs for i, axis in enumerate(leaf.axes)}
        head = ""
        for leaf in self.outputs:
            if unknown := [axis for axis in leaf.axes if axis not in sizes]:
                raise ValueError(f"flashinfer-bench sizes outputs by inputs, and none has {unknown[0]} of {leaf.name}")
            shape, dtype = ", ".join(sizes[axis] for axis in leaf.axes), f"torch.{leaf.spec['dtype']}"
            head += f"    {leaf.name} = torch.empty([{shape}], dtype={dtype}, device={self.inputs[0].name}.device)\n"
        reference = embedded(problem.folder / "reference.py", problem.folder / "task.py")
        return {
            "name": self.name,
            "op_type": problem.name,
            "description": load.summary(problem.folder / "task.py"),
            "axes": {axis: {"type": "var"} for axis in sizes},
            "inputs": {leaf.name: leaf.spec for leaf in self.inputs},
            "outputs": {leaf.name: leaf.spec for leaf in self.outputs},
            "reference": reference + NAMED + REFERENCE + self.run("run", self.inputs, head),
        }

    def solution(self, variant: Submission, target: str, packed: str) -> dict:
        """packed: the variant as a file for GPU MODE."""
        hardware = ["cpu" if target == "cpu" else "cuda"]
        return {
            "name": f"{self.name}_{variant.name}_{target}",
            "definition": self.name,
            "author": "dsv4-kernels",
            "description": variant.summary,
            "spec": {"language": "python", "target_hardware": hardware, "entry_point": "main.py::_packed_run"},
            "sources": [{"path": "main.py", "content": packed + self.run("_packed_run", self.inputs + self.outputs)}],
        }

    def workload(self, call: Call, folder: Path, op: str) -> dict:
        """Store the inputs of a call in `folder`, and return its workload."""
        uuid = "-".join([self.name, *str(call.case).split(), f"seed={call.case.seed}"])
        path = Path("blob", "workloads", op, self.name, f"{uuid}.safetensors")
        tensors = {leaf.name: leaf.flat(call.values[leaf.name]).clone() for leaf in self.inputs}
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        safetensors.torch.save_file(tensors, folder / path)
        inputs = {name: {"type": "safetensors", "path": str(path), "tensor_key": name} for name in tensors}
        axes = {axis: tensors[leaf.name].shape[i] for leaf in self.inputs for i, axis in enumerate(leaf.axes)}
        workload = {"axes": axes, "inputs": inputs, "uuid": uuid}
        return {"definition": self.name, "workload": workload, "solution": None, "evaluation": None}


def write(problem: Problem, variant: Submission, target: str, packed: str, folder: Path, words: str) -> None:
    """Write the folder, with the cases that have the words, and say what was written and left out. packed: the variant
    as a file for GPU MODE. ValueError: no case is left, or something has no form in that package.
    """
    groups: dict[str, list[Call]] = {}
    cases = {str(case): case for case in (*problem.tests, *problem.timed(target)) if has_words(str(case), words)}
    for case in cases.values():
        is_large = max(case.bytes or 0, case.weight_bytes) > MOST_BYTES
        if is_large or not variant.serves(case):
            why = f"it takes more than {MOST_BYTES // 2**20} MiB" if is_large else f"{variant.name} {variant.limits}"
            output.say(f"left out, since {why}: {case}")
            continue
        call = _call(problem, case)
        texts = [value for value in call.values.values() if isinstance(value, str)]
        groups.setdefault("_".join([problem.name, *texts]), []).append(call)
    if not groups:
        raise ValueError(f"no case of {problem.name} is left to be written{f' with {words!r}' if words else ''}")
    for name, calls in groups.items():
        form = _form(problem, name, calls)
        solution = form.solution(variant, target, packed)
        files = {
            f"definitions/{problem.name}/{name}.json": [form.definition(problem)],
            f"solutions/{problem.name}/{name}/{solution['name']}.json": [solution],
            f"workloads/{problem.name}/{name}.jsonl": [form.workload(item, folder, problem.name) for item in calls],
        }
        for path, parts in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            output.write_whole(folder / path, "".join(json.dumps(part) + "\n" for part in parts))
            output.say(f"wrote {folder / path}")


def _call(problem: Problem, case: Case) -> Call:
    """A case with its data on the CPU, as the judge makes them."""
    reference, task = (load.module(problem.folder, name) for name in ("reference", "task"))
    arguments = {**case.params, "seed": case.seed, "device": "cpu"}
    data = reference.generate_input(**arguments)
    if hasattr(reference, "generate_weights"):
        data = task.input_t(reference.generate_weights(**arguments), *data)
    return Call(case, data, dict(_fields(data)))


def _fields(data: Any) -> Iterator[tuple[str, Any]]:
    for name, value in zip(data._fields, data, strict=True):
        if hasattr(value, "_fields"):
            yield from _fields(value)
        elif isinstance(value, torch.Tensor | str):
            yield name, value
        else:
            raise ValueError(f"flashinfer-bench has no {type(value).__name__} among inputs, which {name} is")


def _form(problem: Problem, name: str, calls: list[Call]) -> Form:
    """Axes whose sizes are equal in all calls have one name: of a parameter with these values, or of their tensor."""
    names: dict[tuple[int, ...], str] = {}
    leaves = []
    for key in (key for key, value in calls[0].values.items() if not isinstance(value, str)):
        tensors = [call.values[key] for call in calls]
        # Strides of axes of length 1 mean nothing: the call that has the fewest of them shows the order.
        shown = max(tensors, key=lambda tensor: (sum(size > 1 for size in tensor.shape), tensor.numel()))
        order = tuple(sorted(range(shown.dim()), key=lambda axis: -shown.stride(axis)))
        leaf = Leaf(key, shown.dtype, order, [])
        for axis, sizes in enumerate(zip(*(leaf.flat(tensor).shape for tensor in tensors), strict=True)):
            params = [p for p in calls[0].case.params if sizes == tuple(call.case.params[p] for call in calls)]
            free = [label for label in (*params, f"{key}_axis_{axis}") if label not in names.values()]
            leaf.axes.append(names.setdefault(sizes, free[0]))
        leaves.append(leaf)
    outputs = load.module(problem.folder, "task").OUTPUTS
    inputs = [leaf for leaf in leaves if leaf.name not in outputs]
    return Form(name, calls, inputs, [leaf for leaf in leaves if leaf.name in outputs])
