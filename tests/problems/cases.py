"""The problems for their tests: modules, data of cases, answers, and calls of variants."""

import functools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from harness.checker import inputs
from problems.common import load

NAMES = ("fmha_decode", "fmha_prefill", "indexer", "linear_decode", "mhc_site", "moe_gemm", "nvfp4_gemv")


def task(name: str) -> ModuleType:
    return load.module(load.PROBLEMS / name, "task")


def reference(name: str) -> ModuleType:
    return load.module(load.PROBLEMS / name, "reference")


# A small case of each, of which tests change a field.
SMALL = {
    name: task(name).Case(*sizes)
    for name, sizes in {
        "fmha_decode": (2, 2, 3, 5, 4, 2, 4, 8, "random", "plain", 5),
        "fmha_prefill": (7, 2, 3, 126, "chosen", 5, 2, 4, 8, "heads", "plain", 5),
        "indexer": (2, 2, 32, 37, 5, "mxfp4", 16, "exact", 3),
        "linear_decode": ("fp8", 2, "64x192+128x192_64x64", "plain", 5),
        "mhc_site": (2, 64, "bf16", "plain", 5),
        "moe_gemm": (3, 4, 2, 64, 128, "bf16", "uniform", "plain", 5),
        "nvfp4_gemv": (130, 128, 2, 5),
    }.items()
}


def named(case: object) -> str:
    """A test's id."""
    return "-".join(str(value) for field, value in vars(case).items() if field != "seed")


def made(name: str, device: str = "cpu", **changes: object) -> object:
    """Data of the small case with these changes."""
    return inputs.make(reference(name), task(name), {**vars(SMALL[name]), **changes}, device, True)


@functools.lru_cache(maxsize=200)
def solved(name: str, case: object, device: str = "cpu") -> tuple[object, object]:
    """Data and answer of a case, for all to read: whoever writes to outputs takes poisoned() first."""
    data = made(name, device, **vars(case))
    return data, reference(name).ref_kernel(data)


def outputs(name: str, data: object) -> list[torch.Tensor]:
    return [getattr(getattr(data, "outputs", data), field) for field in task(name).OUTPUTS]


def poison(tensors: list[torch.Tensor]) -> None:
    """Fill outputs with what no kernel writes."""
    for tensor in tensors:
        tensor.fill_(torch.nan if tensor.is_floating_point() else -(2**31))


def poisoned(name: str, data: object) -> object:
    """The same call, with poisoned outputs of its own."""
    fresh = [torch.empty_like(output) for output in outputs(name, data)]
    poison(fresh)
    fields = dict(zip(task(name).OUTPUTS, fresh, strict=True))
    return data._replace(**({"outputs": data.outputs._replace(**fields)} if hasattr(data, "outputs") else fields))


def rounded(name: str, data: object, want: object) -> object:
    """An answer in the outputs' types, as a kernel returns it."""
    dtypes = [output.dtype for output in outputs(name, data)]
    if isinstance(want, tuple):
        return tuple(w.to(dtype, copy=True) for w, dtype in zip(want, dtypes, strict=True))
    return want.to(dtypes[0], copy=True)


def prepared(module: ModuleType, data: object) -> tuple:
    """What custom_kernel of a variant takes: weights as it prepares them; of a peer, its own preparation too."""
    if hasattr(module, "prepare"):
        data = data._replace(weights=module.prepare(data.weights))
    return (data, module.setup(data)) if hasattr(module, "setup") else (data,)


def check(name: str, file: Path, case: object, device: str = "cpu", calls: int = 1) -> None:
    """The variant is right in this case, and has the same bits in each of so many calls."""
    data, want = solved(name, case, device)
    data, peer = poisoned(name, data), file.stem.startswith("peer_")
    module = load.variant(name, file.stem)
    arguments, first = prepared(module, data), None
    for _ in range(calls):
        poison(outputs(name, data))
        answer = module.custom_kernel(*arguments)
        made_by_it = answer if isinstance(answer, tuple) else (answer,)
        assert all(got is wanted for got, wanted in zip(made_by_it, outputs(name, data), strict=True))
        result = reference(name).compare(data, want, answer, peer) if first is None else None
        assert result is None or result.ok, f"{file.stem}, {case}: {result.message}"
        first = first or [output.clone() for output in made_by_it]
        assert all(map(torch.equal, made_by_it, first)), f"{file.stem}, {case}: other bits"


def check_alone(name: str, module: ModuleType, data: object, indices: Iterable[torch.Tensor]) -> None:
    """Tokens, sequences or batches have the bits in calls of some, as many as an index names, that they have in all."""
    module.custom_kernel(*prepared(module, data))
    for index in indices:
        want = reference(name).rows(data, index)
        part = poisoned(name, want)
        module.custom_kernel(*prepared(module, part))
        got = reference(name).rows(part, torch.arange(len(index), device=index.device))  # sorts what has no order
        assert all(map(torch.equal, outputs(name, got), outputs(name, want))), index


def check_expert(fmt: str, tokens: int, shapes: tuple[str, str], device: str = "cpu") -> None:
    """An expert of sm90_mma, whose matrices have these shapes, is both products, with SwiGLU in the first launch's
    epilogue, and a token's bits are those that it has by itself.
    """
    mma, oracle = load.variant("linear_decode", "sm90_mma"), reference("linear_decode")
    make = functools.partial(made, "linear_decode", device, format=fmt, tokens=tokens)
    first, second = (make(shape=shape, seed=seed) for seed, shape in enumerate(shapes))
    gate, up = oracle.ref_kernel(first).view(tokens, -1).chunk(2, 1)
    v = torch.nn.functional.silu(gate.clamp(max=1.0)) * up.clamp(-1.0, 1.0)
    want, _ = oracle.products(first.weights.format, second.weights.links[0][0], v.bfloat16())
    state, found = mma.prepare_expert(first.weights, second.weights), []
    for x in (first.inputs.x, first.inputs.x[-1:].clone()):
        found.append(torch.full((len(x), want.shape[1]), torch.nan, dtype=torch.bfloat16, device=device))
        mma.expert(state, 1.0, x, found[-1])
    # Here and there a value between the two is on the other side of a rounding.
    assert float((found[0].double() - want).norm() / want.norm()) < 1e-2
    assert torch.equal(found[0][-1], found[1][0])


def serves(file: Path, case: object) -> bool:
    """Whether the variant's ONLY, if it has one, admits the case."""
    only = load.constants(file, "ONLY").get("ONLY", {})
    return all(getattr(case, field) in (some if isinstance(some, tuple) else (some,)) for field, some in only.items())


def leaves(value: tuple, above: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor of a call's tuples, with the names and numbers that lead to it: "weights.links.0.0.codes"."""
    for name, part in zip(getattr(value, "_fields", range(len(value))), value, strict=True):
        if isinstance(part, torch.Tensor):
            yield f"{above}{name}", part
        elif isinstance(part, tuple):
            yield from leaves(part, f"{above}{name}.")


def changed(value: tuple, place: str, change: Callable) -> tuple:
    """The same tuples, with what `change` makes of the field at a place that `leaves` names."""
    first, _, rest = place.partition(".")
    at = value._fields.index(first) if hasattr(value, "_fields") else int(first)
    parts = list(value)
    parts[at] = changed(parts[at], rest, change) if rest else change(parts[at])
    return value._make(parts) if hasattr(value, "_make") else tuple(parts)


def made_for(folder: Path, target: str) -> list[Path]:
    """Files of variants/ that serve `target`, by name."""
    return [file for file, targets in _targets(folder) if target in targets]


@functools.cache
def _targets(folder: Path) -> list[tuple[Path, tuple[str, ...]]]:
    files = sorted((folder / "variants").glob("*.py"))
    return [(file, load.constants(file, "TARGETS")["TARGETS"]) for file in files]


def skip_unless_it_runs(file: Path, device: str) -> None:
    """Skip the test, with the reason, unless this machine's `device` ("cpu" or "cuda") runs the variant."""
    said = load.constants(file, "TARGETS", "REQUIRES")
    target = load.device_target(device)
    if target not in said["TARGETS"]:
        pytest.skip(f"made for {said['TARGETS']}, this is {target}")
    if missing := load.missing_cpu_flags(file):
        pytest.skip(f"needs a CPU with {missing}")
    for package in said.get("REQUIRES", ()):
        pytest.importorskip(package)
