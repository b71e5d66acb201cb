"""Every variant of every problem that this CPU runs, in every test case; and what submission.py calls."""

import pytest
import torch

from harness.judge.session import kind
from harness.problem import folders
from problems.common import load
from tests.problems.variants import made_for

PROBLEMS = ("fmha_decode", "indexer", "linear_decode", "mhc_site", "moe_gemm", "nvfp4_gemv")
TARGETS = ("cpu", "sm90", "sm100")
MOST_BYTES = 10 << 20  # of a case: all but four of nvfp4_gemv


def generated(name: str, case: object) -> object:
    """task.Data of a case, with its weights if the problem has such."""
    reference = load.module(load.PROBLEMS / name, "reference")
    data = reference.generate_input(**vars(case), device="cpu")
    if not hasattr(reference, "generate_weights"):
        return data
    weights = reference.generate_weights(**vars(case), device="cpu")
    return load.module(load.PROBLEMS / name, "task").Data(weights, *data)


def outputs_of(name: str, data: object) -> list[torch.Tensor]:
    holder = getattr(data, "outputs", data)
    return [getattr(holder, field) for field in load.constants(load.PROBLEMS / name / "task.py", "OUTPUTS")["OUTPUTS"]]


def inputs_of(name: str, data: object) -> list[torch.Tensor]:
    """A copy of the bytes of each input."""
    outputs = {id(output) for output in outputs_of(name, data)}
    tensors = [tensor for tensor in getattr(data, "inputs", data) if id(tensor) not in outputs]
    return [torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).clone() for tensor in tensors]


def called(name: str, module: object, data: object) -> object:
    """What custom_kernel returns, with its weights prepared and the outputs poisoned."""
    for output in outputs_of(name, data):
        output.fill_(torch.nan if output.is_floating_point() else -(2**31))
    if hasattr(module, "prepare"):
        data = data._replace(weights=module.prepare(data.weights))
    return module.custom_kernel(data)


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_seed_draws_cases_of_its_own(name):
    problem = folders.find(name)
    first, again, other = ([*map(str, problem.drawn(seed, "cpu"))] for seed in (5, 5, 6))
    assert first == again != other and len(first) in (16, 18) and not {*first} <= {*map(str, problem.tests)}


@pytest.mark.parametrize("name", PROBLEMS)
def test_every_variant_is_right_in_every_case_and_repeats_itself_bit_by_bit(name):
    folder = load.PROBLEMS / name
    task, reference = load.module(folder, "task"), load.module(folder, "reference")
    files = [file for file in made_for(folder, "cpu") if not load.missing_cpu_flags(file)]
    assert {"cpu_portable"} < {file.stem for file in files}
    assert {kind(file) for file in files if file.stem.startswith("cpu_")} == {"compile_for"}
    for case in (case for case in task.TESTS if case.bytes_moved() < MOST_BYTES):
        data = generated(name, case)
        want, before = reference.ref_kernel(data), inputs_of(name, data)
        for file in files:
            module, seen = load.variant(name, file.stem), []
            for _ in range(2):
                result = reference.compare(data, want, called(name, module, data))
                assert result.ok, f"{file.stem}, {case}: {result.message}"
                seen.append([output.clone() for output in outputs_of(name, data)])
            assert all(torch.equal(*both) for both in zip(*seen, strict=True)), f"{file.stem}, {case}"
        assert all(map(torch.equal, inputs_of(name, data), before)), f"an input was changed: {case}"


@pytest.mark.parametrize("name", PROBLEMS)
def test_every_target_has_winners_that_serve_it_and_every_cpu_one(name):
    folder = load.PROBLEMS / name
    for target in TARGETS:
        files = [folder / "variants" / f"{winner}.py" for winner in load.winners(folder)[target]]
        assert files and all(target in load.constants(file, "TARGETS")["TARGETS"] for file in files)
        assert not any(file.stem.startswith("peer_") for file in files)
    assert not load.constants(folder / "variants" / f"{load.winners(folder)['cpu'][-1]}.py", "CPU_FLAGS")


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_submission_answers_with_its_winner(name, monkeypatch):
    folder = load.PROBLEMS / name
    submission, data = load.module(folder, "submission"), generated(name, load.module(folder, "task").TESTS[0])
    called(name, load.variant(name, load.winner(folder, "cpu")), data)
    want = [output.clone() for output in outputs_of(name, data)]
    called(name, submission, data)
    assert all(map(torch.equal, want, outputs_of(name, data)))
    winner = submission.custom_kernel.__self__
    winner.name.cache_clear()
    monkeypatch.setattr(load, "winners", lambda _: {"sm90": ("sm90_dp4a",)})
    with pytest.raises(ValueError, match=r"one of \['sm90'\], for which there is a winner, got 'cpu'"):
        winner.custom_kernel(data)
    winner.name.cache_clear()
