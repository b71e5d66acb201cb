"""Pack a variant for flashinfer-bench 0.1.2: Definition, Workloads, Solution and Traces in that package's folders.

That package has no uint8, no packed fp4 in safetensors and no strides. So bytes are int8, every tensor is contiguous
with its axes in the order of memory, and a wrapper gives the variant its own dtypes and strides back. It has no texts
among inputs either: a text, such as moe_gemm's activation, makes a separate definition.
"""

import argparse
import ast
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from harness.problem import commits
from harness.problem.folders import Case, Problem, Submission, has_words
from harness.results import output, ranking, record
from leaderboard import gpu_mode_pack, provenance_notes
from leaderboard.bundle import Bundle
from problems.common import load

MOST_BYTES = 256 * 2**20  # of the tensors that a workload stores; larger cases are left out
# Inputs that may be random bytes: codes, of which every pattern is a value. Everything else is stored.
CODES = {"moe_gemm": ("w13", "w2")}
DTYPES = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.int64: "int64",
    torch.float8_e4m3fn: "float8_e4m3fn",
    torch.float8_e5m2: "float8_e5m2",
    torch.int32: "int32",
    torch.int16: "int16",
    torch.int8: "int8",
    torch.bool: "bool",
}
BYTES = (torch.uint8, torch.float4_e2m1fn_x2)  # which become int8
FACTORS = (1, 2, 3, 4, 8, 16, 32, 64, 128)  # by which a size may be a parameter's multiple or part

ENTRY = "_packed_run"  # of the solution
RUN = '''

def {name}({arguments}):
    """{about}"""
{body}
'''


@dataclass(frozen=True)
class Leaf:
    """A value of a call's data. path: of field names; order: of a tensor's axes from the slowest in memory on."""

    path: tuple[str, ...]
    is_output: bool
    dtype: torch.dtype | None  # None: a number or a text
    order: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return self.path[-1]

    @property
    def stored(self) -> str:
        """The package's word for the dtype."""
        return "int8" if self.dtype in BYTES else DTYPES[self.dtype] if self.dtype else ""

    def flat(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as the package has it. ValueError: it has gaps, or axes in another order than elsewhere."""
        found = tensor.permute(self.order)
        if not found.is_contiguous():
            raise ValueError(
                f"{self.name} must be dense with its axes in one order in all cases, got {tensor.stride()}"
            )
        return found.view(torch.int8) if tensor.dtype in BYTES else found

    def restored(self) -> str:
        """The expression that gives the variant's tensor back."""
        view = f".view({self.dtype})" if self.dtype in BYTES else ""
        inverse = [self.order.index(axis) for axis in range(len(self.order))]
        return self.name + view + (f".permute({', '.join(map(str, inverse))})" if inverse != sorted(inverse) else "")


@dataclass
class Call:
    """A case with its data by path; `key` tells definitions apart: its texts."""

    case: Case
    data: Any
    values: dict[tuple[str, ...], Any]

    @property
    def key(self) -> tuple[str, ...]:
        return tuple(value for value in self.values.values() if isinstance(value, str))


def write(problem: Problem, variant: Submission, target: str, options: argparse.Namespace) -> list[str]:
    """Write the folder options.out, with cases that have the words of options.case. Return what was written and left
    out, in words. ValueError: it has other files, no case is left, or something has no form in that package.
    """
    folder: Path = options.out
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"-o must name a new or an empty folder, {folder} has files")
    task = load.module(problem.folder, "task")
    outputs = task.OUTPUTS
    said, groups = [], {}
    for case in _cases(problem, target, options.case):
        if max(case.bytes or 0, case.weight_bytes) > MOST_BYTES:
            said.append(f"left out, since it takes more than {MOST_BYTES // 2**20} MiB: {case}")
            continue
        data = _data(problem, case)
        call = Call(case, data, dict(_walk(data, ())))
        groups.setdefault(call.key, []).append(call)
    if not groups:
        raise ValueError(
            f"no case of {problem.name} is left to be written{f' with {options.case!r}' if options.case else ''}"
        )
    notes = provenance_notes.of(problem.name, variant, target, options.results)
    packed = gpu_mode_pack.pack(problem, variant, target, "", notes).text
    records = _records(problem.name, variant.name, target, options.results)
    for key, calls in groups.items():
        name = "_".join([problem.name, *key])
        leaves = _leaves(calls, outputs)
        axes = _axes(leaves, calls)
        definition = _definition(problem, name, leaves, calls, axes)
        solution = _solution(problem, variant, target, name, leaves, calls[0], packed, notes, options.author)
        workloads = [_workload(folder, problem, name, leaves, call, axes) for call in calls]
        traces = [
            {"definition": name, "workload": workload, "solution": solution["name"], "evaluation": _evaluation(one)}
            for call, workload in zip(calls, workloads, strict=True)
            if (one := records.get(ranking.case_label(call.case.params)))
        ]
        blank = [{"definition": name, "workload": one, "solution": None, "evaluation": None} for one in workloads]
        said += _files(folder, problem.name, name, definition, solution, blank, traces)
        if not traces:
            said.append(f"no traces of {name}: there is no passed record of {variant.name} in these cases")
    return said


def _cases(problem: Problem, target: str, words: str) -> Iterator[Case]:
    """Every test and benchmark case once."""
    seen = set()
    for case in (*problem.timed(target), *problem.tests):
        label = str(case)
        if label not in seen and has_words(label, words):
            seen.add(label)
            yield case


def _data(problem: Problem, case: Case) -> Any:
    """A case's data on the CPU, as the judge makes them."""
    reference, task = (load.module(problem.folder, name) for name in ("reference", "task"))
    arguments = {**case.params, "seed": case.seed, "device": "cpu"}
    made = reference.generate_input(**arguments)
    if hasattr(reference, "generate_weights"):
        return task.input_t(reference.generate_weights(**arguments), *made)
    return made


def _walk(data: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if hasattr(data, "_fields"):
        for name, value in zip(data._fields, data, strict=True):
            yield from _walk(value, (*path, name))
    else:
        yield path, data


def _leaves(calls: list[Call], outputs: tuple[str, ...]) -> list[Leaf]:
    """The values of these calls' data, with an order of axes that holds in all of them."""
    found = []
    for path, value in calls[0].values.items():
        if not isinstance(value, torch.Tensor):
            found.append(Leaf(path, False, None))
            continue
        # Strides of axes of length 1 mean nothing: the case that has the fewest of them shows the order.
        shown = max((call.values[path] for call in calls), key=lambda t: (sum(n > 1 for n in t.shape), t.numel()))
        order = sorted(range(shown.dim()), key=lambda axis: -shown.stride(axis))
        leaf = Leaf(path, path[-1] in outputs, value.dtype, tuple(order))
        if value.dtype not in DTYPES and value.dtype not in BYTES:
            raise ValueError(f"{leaf.name}: flashinfer-bench has no {value.dtype}")
        for call in calls:
            leaf.flat(call.values[path])
        found.append(leaf)
    names = [leaf.name for leaf in found]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"fields of the data must have different names, {sorted(twice)[0]} is there twice")
    return found


def _axes(leaves: list[Leaf], calls: list[Call]) -> dict[tuple[str, int], str]:
    """By (leaf, axis of its stored tensor), the axis' name: equal sizes in all cases have one."""
    found: dict[tuple[str, int], str] = {}
    names: dict[tuple[int, ...], str] = {}
    for leaf in leaves:
        if leaf.dtype is None:
            continue
        shapes = [leaf.flat(call.values[leaf.path]).shape for call in calls]
        for axis, sizes in enumerate(zip(*shapes, strict=True)):
            if sizes not in names:
                names[sizes] = _axis_name(sizes, calls, f"{leaf.name}_axis_{axis}", set(names.values()))
            found[leaf.name, axis] = names[sizes]
    return found


def _axis_name(sizes: tuple[int, ...], calls: list[Call], otherwise: str, taken: set[str]) -> str:
    if len(set(sizes)) == 1 and len(calls) > 1:
        return f"size_{sizes[0]}"
    for factor in FACTORS:
        for word, up, down in (("over", 1, factor), ("times", factor, 1)):
            for param, first in calls[0].case.params.items():
                same = (
                    isinstance(first, int)
                    and not isinstance(first, bool)
                    and all(
                        size * down == call.case.params[param] * up for size, call in zip(sizes, calls, strict=True)
                    )
                )
                name = param if factor == 1 else f"{param}_{word}_{factor}"
                if same and name not in taken:
                    return name
    return otherwise


def _definition(problem: Problem, name: str, leaves: list[Leaf], calls: list[Call], axes: dict) -> dict:
    sizes: dict[str, set[int]] = {}
    for leaf in leaves:
        for call in calls if leaf.dtype else []:
            for axis, size in enumerate(leaf.flat(call.values[leaf.path]).shape):
                sizes.setdefault(axes[leaf.name, axis], set()).add(size)
    fixed = {axis for axis, found in sizes.items() if axis.startswith("size_") and len(found) == 1}
    specs = {leaf.name: _spec(leaf, calls[0], axes) for leaf in leaves if leaf.dtype or not _is_text(leaf, calls[0])}
    about = load.summary(problem.folder / "task.py")
    return {
        "name": name,
        "op_type": problem.name,
        "tags": ["dsv4-kernels"],
        "description": about,
        "constraints": [],
        "axes": {
            axis: {"type": "const", "value": next(iter(found))} if axis in fixed else {"type": "var"}
            for axis, found in sizes.items()
        },
        "inputs": {leaf.name: specs[leaf.name] for leaf in leaves if leaf.name in specs and not leaf.is_output},
        "outputs": {leaf.name: specs[leaf.name] for leaf in leaves if leaf.is_output},
        "reference": _reference(problem, leaves, calls[0], axes, {axis: next(iter(sizes[axis])) for axis in fixed}),
    }


def _spec(leaf: Leaf, call: Call, axes: dict) -> dict:
    value = call.values[leaf.path]
    if leaf.dtype is None:
        kind = "bool" if isinstance(value, bool) else "int64" if isinstance(value, int) else "float32"
        return {"shape": None, "dtype": kind}
    shape = [axes[leaf.name, axis] for axis in range(len(leaf.order))]
    spec: dict[str, Any] = {"shape": shape or None, "dtype": leaf.stored}
    if leaf.restored() != leaf.name:
        spec["description"] = f"{leaf.restored()} is the tensor that task.py describes"
    return spec


def _is_text(leaf: Leaf, call: Call) -> bool:
    return isinstance(call.values[leaf.path], str)


def _built(leaves: list[Leaf], call: Call, spell: dict[str, str]) -> str:
    """The expression that makes a call's data of the package's arguments. spell: names of the classes."""
    by_path = {leaf.path: leaf for leaf in leaves}

    def build(data: Any, path: tuple[str, ...]) -> str:
        if path in by_path:
            leaf = by_path[path]
            return leaf.restored() if leaf.dtype else repr(data) if isinstance(data, str) else leaf.name
        parts = (build(value, (*path, name)) for name, value in zip(data._fields, data, strict=True))
        return f"{spell[type(data).__name__]}({', '.join(parts)})"

    return build(call.data, ())


def _reference(problem: Problem, leaves: list[Leaf], call: Call, axes: dict, fixed: dict[str, int]) -> str:
    """Code with run(inputs) -> outputs, rounded to their dtypes, from reference.py. fixed: sizes of constant axes."""
    task = problem.folder / "task.py"
    linked = Bundle(problem.folder / "reference.py", {"task": task})
    linked.module_of("task")
    classes = list(commits.data_classes(task))
    roots = [("task", name) for name in classes] + [(linked.main.key, "ref_kernel")]
    inputs = [leaf for leaf in leaves if not leaf.is_output and not _is_text(leaf, call)]
    first = next(leaf.name for leaf in inputs if leaf.dtype)
    results = [leaf for leaf in leaves if leaf.is_output]
    spell = {name: linked.linked("task", name) for name in classes}
    sizes = {axes[leaf.name, i]: f"{leaf.name}.shape[{i}]" for leaf in reversed(inputs) for i in range(len(leaf.order))}
    sizes |= {axis: str(size) for axis, size in fixed.items()}
    lines = []
    for leaf in results:  # memory for outputs is part of a call's data, though the reference returns new tensors
        shape = "".join(f"{sizes[axes[leaf.name, axis]]}, " for axis in range(len(leaf.order)))
        lines.append(f"    {leaf.name} = torch.empty(({shape}), dtype=torch.{leaf.stored}, device={first}.device)")
    lines += [
        f"    found = ref_kernel({_built(leaves, call, spell)})",
        "    found = found if isinstance(found, tuple) else (found,)",
    ]
    parts = [
        f"found[{i}].to({first}.device, {leaf.dtype}).permute({', '.join(map(str, leaf.order))}).contiguous()"
        for i, leaf in enumerate(results)
    ]
    lines.append(f"    return {', '.join(parts)}")
    head = "\n".join(sorted({*linked.import_lines(roots, whole=False), "import torch"}))
    text = f"{head}\n\n\n{linked.text(roots, whole=False)}\n"
    about = "Return the outputs, contiguous, their axes in the order of memory."
    if "\ndef run(" in text:
        raise ValueError(f"{problem.name}/reference.py: `run` is that package's name for the reference: rename it")
    return text + RUN.format(
        name="run", arguments=", ".join(leaf.name for leaf in inputs), about=about, body="\n".join(lines)
    )


def _solution(
    problem: Problem,
    variant: Submission,
    target: str,
    name: str,
    leaves: list[Leaf],
    call: Call,
    packed: str,
    notes: list[str],
    author: str,
) -> dict:
    spell = {kind: kind for kind in commits.data_classes(problem.folder / "task.py")}
    arguments = [leaf.name for leaf in leaves if not _is_text(leaf, call)]
    ordered = [one for one in arguments if not _named(leaves, one).is_output]
    ordered += [one for one in arguments if _named(leaves, one).is_output]
    wrapper = RUN.format(
        name=ENTRY,
        arguments=", ".join(ordered),
        about="Call the kernel; outputs are written in place.",
        body=f"    custom_kernel({_built(leaves, call, spell)})",
    )
    content = "\n".join(line for line in packed.split("\n") if not line.startswith("#!POPCORN")) + wrapper
    ast.parse(content)
    return {
        "name": f"{name}_{variant.name}_{target}",
        "definition": name,
        "author": author,
        "description": f"{variant.summary} {' '.join(notes)}",
        "spec": {
            "language": "python",
            "target_hardware": ["cpu" if target == "cpu" else "cuda"],
            "entry_point": f"main.py::{ENTRY}",
            "dependencies": [],
            "destination_passing_style": True,
        },
        "sources": [{"path": "main.py", "content": content}],
    }


def _named(leaves: list[Leaf], name: str) -> Leaf:
    return next(leaf for leaf in leaves if leaf.name == name)


def _workload(folder: Path, problem: Problem, name: str, leaves: list[Leaf], call: Call, axes: dict) -> dict:
    """Store the tensors of a case, and return its Workload. What may be random is not stored."""
    uuid = "-".join([name, *(f"{key}={value}" for key, value in call.case.params.items()), f"seed={call.case.seed}"])
    path = Path("blob") / "workloads" / problem.name / name / f"{uuid}.safetensors"
    inputs: dict[str, dict] = {}
    tensors: dict[str, torch.Tensor] = {}
    sizes: dict[str, int] = {}
    for leaf in leaves:
        value = call.values[leaf.path]
        if leaf.dtype is None:
            if not isinstance(value, str):
                inputs[leaf.name] = {"type": "scalar", "value": value}
            continue
        flat = leaf.flat(value)
        sizes |= {axes[leaf.name, axis]: size for axis, size in enumerate(flat.shape)}
        if leaf.is_output:
            continue
        if value.dtype == torch.float4_e2m1fn_x2 or leaf.name in CODES.get(problem.name, ()):
            inputs[leaf.name] = {"type": "random"}
        else:
            inputs[leaf.name] = {"type": "safetensors", "path": path.as_posix(), "tensor_key": leaf.name}
            tensors[leaf.name] = flat.clone()
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_file(tensors, folder / path)
    variable = {axis: size for axis, size in sizes.items() if not axis.startswith("size_")}
    return {"axes": variable, "inputs": inputs, "uuid": uuid}


def _records(problem: str, variant: str, target: str, results: Path) -> dict[str, dict]:
    """The newest passed record of each case, by its label."""
    found = []
    for machine in sorted(results.glob("*")):
        found += record.read(machine.name, problem, results)
    wanted = (variant, target, "PASSED")
    timed = [one for one in ranking.timed(found) if (one["variant"], one["target"], one["status"]) == wanted]
    return {ranking.case_label(one["case"]): one for one in timed}


def _evaluation(one: dict) -> dict:
    """A record as the package's Evaluation. It timed no reference, so that time and the speed-up are 0: not known."""
    environment, error = one.get("environment") or {}, one.get("error") or {}
    kind = environment.get("cpu" if one["target"] == "cpu" else "gpu") or "unknown"
    libs = {key: str(environment[key]) for key in ("torch", "cuda", "driver") if environment.get(key)}
    said = {
        "relative_error_is": "of the Frobenius norm",
        "run_id": one["run_id"],
        "source_hash": one.get("source_hash"),
    }
    return {
        "status": "PASSED",
        "environment": {"hardware": kind, "libs": libs},
        "timestamp": one["time"],
        "log": "measured by another judge: one call on cold caches",
        "correctness": {
            "max_relative_error": _number(error.get("rel")),
            "max_absolute_error": _number(error.get("max")),
            "extra": said,
        },
        "performance": {"latency_ms": one["median_us"] / 1e3, "reference_latency_ms": 0.0, "speedup_factor": 0.0},
    }


def _number(value: float | None) -> float | str:
    """A number, or that package's text for one that is not known."""
    return value if value is not None and math.isfinite(value) else "NaN"


def _files(
    folder: Path, op: str, name: str, definition: dict, solution: dict, workloads: list[dict], traces: list[dict]
) -> list[str]:
    files = {
        Path("definitions") / op / f"{name}.json": [definition],
        Path("solutions") / op / name / f"{solution['name']}.json": [solution],
        Path("workloads") / op / f"{name}.jsonl": workloads,
        Path("traces") / op / f"{name}.jsonl": traces,
    }
    said = []
    for path, parts in files.items():
        if parts:
            indent = 2 if path.suffix == ".json" else None
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            text = "".join(json.dumps(part, indent=indent, allow_nan=False) + "\n" for part in parts)
            output.write_whole(folder / path, text)
            said.append(f"{folder / path}{f': {len(parts)}' if indent is None else ''}")
    return said
