"""Every variant of every problem, in every test case, on this CPU and on a GPU; and what submission.py calls."""

import pytest
import torch

from harness.judge.session import kind
from harness.problem import folders
from problems.common import load
from tests.problems import cases
from tests.problems.cases import NAMES, made, made_for, outputs, prepared, skip_unless_it_runs
from tests.support.marks import first

TARGETS = ("cpu", "sm90", "sm100")
MOST_BYTES = 10 << 20  # of a case on a CPU: all but four of nvfp4_gemv
each_problem = pytest.mark.parametrize("name", NAMES)


def of_target(target, prefix=""):
    """(problem, file) of each variant for a target."""
    found = [(name, file) for name in NAMES for file in made_for(load.PROBLEMS / name, target)]
    found = [(name, file) for name, file in found if file.stem.startswith(prefix)]
    return pytest.mark.parametrize(("name", "file"), found, ids=lambda one: getattr(one, "stem", one))


def inputs_of(name: str, data: object) -> list[torch.Tensor]:
    """A copy of the bytes of each input."""
    tensors = [tensor for place, tensor in cases.leaves(data) if place.split(".")[-1] not in cases.task(name).OUTPUTS]
    return [torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).clone() for tensor in tensors]


@each_problem
def test_a_seed_draws_cases_of_its_own(name):
    problem = folders.find(name)
    first, again, other = ([*map(str, problem.drawn(seed, "cpu"))] for seed in (5, 5, 6))
    assert first == again != other and len(first) in (16, 18) and not {*first} <= {*map(str, problem.tests)}


@pytest.mark.parametrize("part", first(range(3)))
@each_problem
def test_every_variant_is_right_in_every_case_and_repeats_itself_bit_by_bit(name, part):
    """Every third case, from one of the first three."""
    task = cases.task(name)
    files = [file for file in made_for(load.PROBLEMS / name, "cpu") if not load.missing_cpu_flags(file)]
    assert {"cpu_portable"} < {file.stem for file in files}
    assert {kind(file) for file in files if file.stem.startswith("cpu_")} == {"compile_for"}
    for case in [case for case in task.TESTS if case.bytes_moved() < MOST_BYTES][part::3]:
        data, want = cases.solved(name, case)
        for output in outputs(name, data):
            assert bool((output.isnan() if output.is_floating_point() else output == -(2**31)).all()), "not poisoned"
        before = inputs_of(name, data)
        for file in files:
            if cases.serves(file, case):
                cases.check(name, file, case, "cpu", 2)
        assert all(map(torch.equal, inputs_of(name, data), before)), f"an input was changed: {case}"


@pytest.mark.gpu
@of_target("sm90")
def test_every_gpu_variant_is_right_in_every_case_and_repeats_itself_bit_by_bit(name, file):
    skip_unless_it_runs(file, "cuda")
    for case in cases.task(name).TESTS:
        if cases.serves(file, case):  # a peer need not repeat itself
            cases.check(name, file, case, "cuda", 1 if file.stem.startswith("peer_") else 21)


@of_target("cpu")
def test_a_variant_follows_other_weights_and_inputs_and_refuses_what_is_no_call(name, file):
    skip_unless_it_runs(file, "cpu")
    module, reference = load.variant(name, file.stem), cases.reference(name)
    for seed in (1, 2):
        data = made(name, seed=seed)
        assert reference.check_implementation(data, module.custom_kernel(*prepared(module, data))) == (True, "")
    *_, (place, _) = cases.leaves(data)
    with pytest.raises(ValueError, match=place.rpartition(".")[2]):
        module.custom_kernel(*prepared(module, cases.changed(data, place, lambda t: t[1:])))


# Calls of several tokens, sequences or batches.
TOGETHER = {
    "fmha_decode": ({"batch": 7, "content": "ragged", "heads": 20},),
    "fmha_prefill": ({"batch": 3, "content": "ragged", "heads": 20}, {"batch": 2, "lists": "all", "ratio": 1}),
    "indexer": ({"batch": 7, "content": "ragged", "entries": 90},),
    "linear_decode": tuple({"format": kind, "tokens": 11} for kind in cases.task("linear_decode").KINDS),
    "mhc_site": ({"tokens": 19, "hidden": 320, "addends": "bf16+fp32", "content": "magnitudes"},),
    "moe_gemm": ({"tokens": 64, "experts": 3, "hidden": 192, "inner": 320, "router": "part"},),
    "nvfp4_gemv": ({"m": 35, "l": 7},),
}


@of_target("cpu", "cpu_")
def test_a_tokens_bits_do_not_depend_on_the_others(name, file):
    """Those of each alone and of some together are those that it has among all; torch's products may differ."""
    skip_unless_it_runs(file, "cpu")
    for change in TOGETHER[name]:
        every = torch.arange(change.get("tokens", 7))
        indices = (*every.unsqueeze(1), every[3:], every[1:6].flip(0))
        cases.check_alone(name, load.variant(name, file.stem), made(name, **change), indices)


@each_problem
def test_every_target_has_winners_that_serve_it_and_every_cpu_one(name):
    folder = load.PROBLEMS / name
    for target in TARGETS:
        files = [folder / "variants" / f"{winner}.py" for winner in load.winners(folder)[target]]
        assert files and all(target in load.constants(file, "TARGETS")["TARGETS"] for file in files)
        assert not any(file.stem.startswith("peer_") for file in files)
    assert not load.constants(folder / "variants" / f"{load.winners(folder)['cpu'][-1]}.py", "CPU_FLAGS")


@each_problem
def test_the_submission_answers_with_its_winner(name):
    folder, data = load.PROBLEMS / name, made(name)
    seen = []
    for module in (load.variant(name, load.winner(folder, "cpu")), load.module(folder, "submission")):
        cases.poison(outputs(name, data))
        module.custom_kernel(*prepared(module, data))
        seen.append([output.clone() for output in outputs(name, data)])
    assert all(map(torch.equal, *seen))
