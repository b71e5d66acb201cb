"""Run a GPU variant on the CPU in the model, and compare what it writes: the process of harness/run.py --device model,
`python -m ptx_model.tools.check FOLDER FILE TARGET CASES`, which writes a line of JSON for each case and order.

Each case runs under every order of asynchronous work that the model has, on new outputs (ptx_model/README.md).
"""

import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.checker import inputs, memory
from harness.judge.outcome import Outcome
from harness.runner import failure, tree
from problems.common import load
from problems.common.build import BuildError
from ptx_model import driver

FEW = 8  # multiprocessors: so few that blocks which persist take several turns in a small case


@dataclass(frozen=True)
class Order:
    """policy: the order of asynchronous work. poison: the byte that shared memory holds where nothing has written.
    multiprocessors: that the host side sees; 0: as many as the GPU has.
    """

    policy: str
    poison: int
    multiprocessors: int = FEW


ORDERS = (
    Order("eager", 0xFF, 0),
    Order("lazy", 0x5A),
    Order("late-tma", 0x00),
    Order("late-tensor-core", 0xFF),
    Order("random:1", 0x5A),
    Order("random:2", 0xFF),
)


def main(argv: list[str]) -> int:
    """Check one variant. argv: the problem's folder, the variant's file, the target, the cases as JSON."""
    folder, file, target, cases = Path(argv[0]), Path(argv[1]), argv[2], json.loads(argv[3])
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the variant prints is no reply
    model = driver.install(target)
    task, reference = load.module(folder, "task"), load.module(folder, "reference")
    module = load.from_file(folder, file)
    for number, case in enumerate(cases):
        pristine = make_inputs(task, reference, case)
        want = reference.ref_kernel(pristine)
        for order in ORDERS:
            set_order(model, order)
            found = check_call(model, module, task, reference, pristine, want)
            last = order == ORDERS[-1] or found.status != "MODEL_CHECKED"  # the first error of a case is enough
            reply = {"case": number, "order": order.policy, "status": found.status, "said": found.reason, "last": last}
            out.write(json.dumps(reply) + "\n")
            out.flush()
            if last:
                break
        if not model.launches:
            break  # no other case would be different
    return 0


def set_order(model: Any, order: Order) -> None:
    """Let the launches that follow run in this order. model: the driver that ptx_model.driver.install returned."""
    model.set_order(order.policy, order.poison, order.multiprocessors)


def make_inputs(task: Any, reference: Any, case: dict) -> Any:
    """Make the problem's Data of a case, on the CPU. task, reference: the problem's modules."""
    return inputs.make(reference, task, case, "cpu", True)


def check_call(model: Any, module: Any, task: Any, reference: Any, pristine: Any, want: Any) -> Outcome:
    """Call a submission, `module`, once on a copy of `pristine`, the problem's Data, to which `want` is the reference's
    answer. Return MODEL_CHECKED with what ran, or what went wrong.
    """
    data = tree.clone(pristine)
    before = model.launches, model.executed
    model.clear()
    try:
        if hasattr(module, "prepare"):
            data = data._replace(weights=module.prepare(data.weights))
        output = module.custom_kernel(data)
        model.check()
    except BuildError as error:
        return Outcome("COMPILE_ERROR", f"{failure.compiler_said(str(error))}\n{error}".lstrip())
    except Exception as error:
        fault = model.faults[0] if model.faults else error
        if named := re.search(r"undefined symbol: (\w+)", str(fault)):
            words = f"the model has no {named[1]}: ptx_model/README.md says what host code may call"
            return Outcome("RUNTIME_ERROR", words)
        return Outcome("RUNTIME_ERROR", f"{type(fault).__name__}: {fault}")
    if changed := changed_input(task, pristine, data):
        return Outcome("INCORRECT", f"input {changed} was changed by the call")
    result = inputs.compared(reference, pristine, want, output, False)
    launches, executed = model.launches - before[0], model.executed - before[1]
    if not launches:
        return Outcome("RUNTIME_ERROR", "it launched no kernel of CUDA C++ or CuTe DSL, so the model checked nothing")
    if not result.ok:
        return Outcome("INCORRECT", result.message)
    ran = f"{launches} launch{'es' if launches > 1 else ''}, {executed} group instructions"
    return Outcome("MODEL_CHECKED", ran)


def changed_input(task: Any, before: Any, after: Any) -> str:
    """Return which input a call changed that is no output and not INOUT, "" if none."""
    if "inputs" in before._fields:
        before, after = before.inputs, after.inputs
    for name in set(before._fields) - {*task.OUTPUTS, *getattr(task, "INOUT", ())}:
        pairs = zip(tree.tensors(getattr(before, name)), tree.tensors(getattr(after, name)), strict=True)
        if not all(memory.same(tree.raw(was), tree.raw(now)) for was, now in pairs):
            return name
    return ""


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
