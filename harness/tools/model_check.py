"""`--device model`: run GPU variants on the CPU in a model that executes their PTX, and compare what they write.

Each case runs under every order of asynchronous work that the model has, on new outputs. docs/blackwell.md says what
the model checks and what it cannot see. It takes no time, so nothing of it ranks.

It runs as a separate process, `python -m harness.tools.model_check PROBLEM VARIANT TARGET`, with the cases as JSON on
standard input and a line of JSON on standard output for each case and order.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.problem.folders import Case, Problem, Submission, UsageError
from harness.sandbox import process

TARGETS = ("sm100", "sm90")  # a variant for both is checked as the first
# order of asynchronous work -> the byte that shared memory holds where nothing has written
ORDERS = {"eager": 0xFF, "lazy": 0x5A, "late-tma": 0x00, "late-tensor-core": 0xFF, "random:1": 0x5A, "random:2": 0xFF}
_VERDICTS = ("RUNTIME_ERROR", "COMPILE_ERROR", "INCORRECT", "MODEL_CHECKED")  # gravest first


def target_of(submission: Submission) -> str:
    """Return the target that the model stands for. UsageError: `submission` is for no GPU, or no variant of ours."""
    if not submission.own:
        raise UsageError(f"--device model runs variants of this checkout only, got {submission.name}: move it there")
    found = next((target for target in TARGETS if target in submission.targets), "")
    if not found:
        raise UsageError(f"--device model needs a variant for {' or '.join(TARGETS)}, got one for {submission.targets}")
    return found


def run(
    problem: Problem, submission: Submission, cases: list[Case], say: Callable[[str], None], timeout_s: float | None
) -> tuple[str, str]:
    """Check `submission` on `cases`. Return its verdict, MODEL_CHECKED if nothing is wrong, and the first reason."""
    target = target_of(submission)
    argv = [sys.executable, "-m", "harness.tools.model_check", str(problem.folder), str(submission.file), target]
    asked = json.dumps([{**case.params, "seed": case.seed} for case in cases])
    environment = {**os.environ, "PYTHONPATH": str(process.ROOT), "PYTHONUNBUFFERED": "1"}
    verdict, reason = "MODEL_CHECKED", ""
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(
            argv, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        assert child.stdin and child.stdout  # they are pipes
        try:
            child.stdin.write(asked)
            child.stdin.close()
            for line in child.stdout:
                found = json.loads(line)
                case = cases[found["case"]]
                say(f"{submission.name:20} model  {case}  {found['order']:16}  {found['status']}  {found['said']}")
                if _VERDICTS.index(found["status"]) < _VERDICTS.index(verdict):
                    verdict, reason = found["status"], f"{case}, {found['order']}: {found['said']}"
            status = child.wait(timeout_s)
        finally:
            child.kill()
            child.wait()
        if status:
            errors.seek(0)
            last = errors.read().strip().splitlines()[-1:] or [f"exit status {status}"]
            return "RUNTIME_ERROR", reason or last[0]
    return verdict, reason


def main(argv: list[str]) -> int:
    """Check one variant. argv: the problem's folder, the variant's file, the target."""
    from problems.common.ptx_model import driver

    folder, file, target = Path(argv[0]), Path(argv[1]), argv[2]
    cases = json.loads(sys.stdin.read())
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the variant prints is no reply
    model = driver.install(target)
    from problems.common import load

    task, reference = load.module(folder, "task"), load.module(folder, "reference")
    module = load.from_file(folder, file)
    for number, case in enumerate(cases):
        pristine = _inputs(task, reference, case)
        want = reference.ref_kernel(pristine)
        for order, poison in ORDERS.items():
            model.policy, model.poison = order, poison
            status, said = _checked(model, module, reference, pristine, want)
            out.write(json.dumps({"case": number, "order": order, "status": status, "said": said}) + "\n")
            out.flush()
    return 0


def _inputs(task: Any, reference: Any, case: dict) -> Any:
    import inspect

    from harness.checker import inputs

    weights = None
    if hasattr(reference, "generate_weights"):
        names = inspect.signature(reference.generate_weights).parameters
        known = {**case, "device": "cpu"}
        weights = reference.generate_weights(**{name: known[name] for name in names if name in known})
    return inputs.make(reference, task, case, "cpu", True, weights)


def _checked(model: Any, module: Any, reference: Any, pristine: Any, want: Any) -> tuple[str, str]:
    """-> (status, what there is to say) of one call on a copy of the inputs."""
    from harness.runner import tree
    from problems.common.build import BuildError

    data = tree.clone(pristine)
    before = model.launches, model.executed
    model.clear()
    try:
        if hasattr(module, "prepare"):
            data = data._replace(weights=module.prepare(data.weights))
        output = module.custom_kernel(data)
        model.check()
    except BuildError as error:
        return "COMPILE_ERROR", str(error)
    except Exception as error:
        fault = model.faults[0] if model.faults else error
        return "RUNTIME_ERROR", f"{type(fault).__name__}: {fault}"
    result = reference.compare(pristine, want, output, False)
    launches, executed = model.launches - before[0], model.executed - before[1]
    if not launches:
        return "RUNTIME_ERROR", "it launched no kernel of CUDA C++ or CuTe DSL, so the model checked nothing"
    if not result.ok:
        return "INCORRECT", result.message
    return "MODEL_CHECKED", f"{launches} launch{'es' if launches > 1 else ''}, {executed} group instructions"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
