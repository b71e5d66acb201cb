"""Call a submission once per case in this process, for ncu and compute-sanitizer: `python -m harness.tools.single
FOLDER FILE DEVICE CASES`, CASES a JSON list of arguments with seeds. It makes the inputs in the submission's process,
so it gives no verdict. The last line on standard error is DONE: a submission may end the process before.
"""

import json
import sys
from pathlib import Path

import torch

from harness.checker import inputs
from harness.problem import folders
from harness.runner import tree
from problems.common import load

DONE = "every case was called"


def main() -> None:
    folder, file, device, cases = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
    problem = folders.find(str(folder))
    if not problem.ours:
        load.bind(problem.folder, problem.files)
    reference = load.from_file(folder, folder / "reference.py")
    module = load.from_file(folder, file)
    task = load.from_file(folder, folder / "task.py") if problem.ours else None
    split = problem.ours and hasattr(reference, "generate_weights")
    for case in cases:
        # No byte behind a tensor belongs to another, or to one that it is a part of.
        data = tree.clone(inputs.make(reference, task, case, device, problem.ours))
        if split and hasattr(module, "prepare"):
            data = data._replace(weights=module.prepare(data.weights))
        state = (module.setup(data),) if hasattr(module, "setup") else ()
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
        module.custom_kernel(data, *state)
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
    print(DONE, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
