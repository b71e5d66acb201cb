"""Load a packed folder with flashinfer-bench's own models, and run its solution and its reference as that package does.

python tests/support/flashinfer_check.py FOLDER MOST, with the package on PYTHONPATH. Prints a JSON line for each of at
most MOST workloads of each definition: its uuid, and each output's error relative to the reference's.
"""

import json
import sys
from pathlib import Path

import torch
from flashinfer_bench.bench.evaluators.utils import allocate_outputs
from flashinfer_bench.bench.utils import gen_inputs, load_safetensors
from flashinfer_bench.compile.builders import PythonBuilder
from flashinfer_bench.data import TraceSet


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The error in the Frobenius norm; infinities must be equal."""
    assert got.shape == want.shape and got.dtype == want.dtype
    got, want = got.double(), want.double()
    difference = torch.where(got == want, 0.0, got - want)
    return float(difference.norm() / torch.where(want.isfinite(), want, 0.0).norm().clamp_min(1e-30))


def main() -> None:
    root, most = Path(sys.argv[1]), int(sys.argv[2])
    found = TraceSet.from_path(str(root))
    assert found.definitions and set(found.definitions) == set(found.solutions) == set(found.workloads)
    for name, definition in found.definitions.items():
        (solution,) = found.solutions[name]
        built = PythonBuilder().build(definition, solution)
        space: dict = {}
        exec(compile(definition.reference, "reference", "exec"), space)
        for trace in found.workloads[name][:most]:
            inputs = gen_inputs(definition, trace.workload, "cpu", load_safetensors(definition, trace.workload, root))
            outputs = [output.fill_(float("nan")) for output in allocate_outputs(definition, inputs, "cpu")]
            built(*inputs, *outputs)
            want = space["run"](*inputs)
            want = want if isinstance(want, tuple) else (want,)
            errors = [error(*pair) for pair in zip(outputs, want, strict=True)]
            print(json.dumps({"uuid": trace.workload.uuid, "errors": errors}))


if __name__ == "__main__":
    main()
