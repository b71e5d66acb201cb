"""Write the outputs of a variant in the model, and compare them later with those of a GPU, bit by bit.

    .venv/bin/python -m harness.tools.model_outputs write nvfp4_gemv sm90_dp4a "m=33" outputs.pt
    .venv/bin/python -m harness.tools.model_outputs write moe_gemm sm90_grouped "tokens=1" outputs.pt sm90
    .venv/bin/python -m harness.tools.model_outputs compare outputs.pt          # on a machine with the GPU

`write` runs the test cases with those words in the model, for the target at the end if there is one; `compare` makes
the same inputs on the CPU, runs the variant on the GPU, and prints for each case how many elements have equal bits. It
exits with 1 unless all have.
"""

import sys
from typing import Any

from harness.problem import folders
from harness.tools import model_check
from problems.common import load


def main(argv: list[str]) -> int:
    """See the top of this file. Return the exit code: 2 for a wrong command."""
    if len(argv) in (5, 6) and argv[0] == "write":
        return _write(*argv[1:])
    if len(argv) == 2 and argv[0] == "compare":
        return _compare(argv[1])
    print(__doc__, file=sys.stderr)
    return 2


def _write(problem_name: str, variant: str, words: str, path: str, target: str = "") -> int:
    import torch

    from problems.common.ptx_model import driver

    problem = folders.find(problem_name)
    cases = [{**c.params, "seed": c.seed} for c in problem.tests if folders.has_words(str(c), words)]
    if not cases:
        print(f"no test case of {problem_name} has the words {words!r}", file=sys.stderr)
        return 2
    chosen = problem.variant(variant)
    if target and target not in chosen.targets:
        print(f"target must be one of {chosen.targets}, got {target!r}", file=sys.stderr)
        return 2
    model = driver.install(target or model_check.target_of(chosen))
    outputs = []
    for case in cases:
        outputs.append(_run(problem_name, variant, case, "cpu"))
        model.check()
    torch.save({"problem": problem_name, "variant": variant, "cases": cases, "outputs": outputs}, path)
    print(f"{path}: {len(cases)} cases of {problem_name}, {variant}")
    return 0


def _compare(path: str) -> int:
    import torch

    kept = torch.load(path, weights_only=True)
    same = True
    for case, wanted in zip(kept["cases"], kept["outputs"], strict=True):
        for i, (got, want) in enumerate(zip(_run(kept["problem"], kept["variant"], case, "cuda"), wanted, strict=True)):
            equal = int((got == want).all(dim=-1).sum())
            same &= equal == len(want)
            print(f"{case}: output {i}: {equal} of {len(want)} elements have equal bits")
    return 0 if same else 1


def _run(problem: str, variant: str, case: dict, device: str) -> list[Any]:
    """The bytes of each output: uint8 (elements, bytes of one). Inputs are made on the CPU."""
    import torch

    from harness.runner import tree

    folder = load.PROBLEMS / problem
    task, reference = load.module(folder, "task"), load.module(folder, "reference")
    module = load.module(folder, f"variants/{variant}")
    data = tree.clone(model_check._inputs(task, reference, case))
    if device != "cpu":
        data = _moved(data, device)
    if hasattr(module, "prepare"):
        data = data._replace(weights=module.prepare(data.weights))
    output = module.custom_kernel(data)
    outputs = output if isinstance(output, tuple) else (output,)
    return [o.detach().cpu().contiguous().view(torch.uint8).reshape(o.numel(), o.element_size()) for o in outputs]


def _moved(data: Any, device: str) -> Any:
    """A NamedTuple of tensors on another device, strides kept."""
    import torch

    if isinstance(data, torch.Tensor):
        made = torch.empty_strided(data.shape, data.stride(), dtype=data.dtype, device=device)
        made.copy_(data)
        return made
    if isinstance(data, tuple):
        parts = [_moved(part, device) for part in data]
        return type(data)(*parts) if hasattr(data, "_fields") else tuple(parts)
    return data


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
