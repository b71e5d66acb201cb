"""The linter on bytes, FP8, packed codes, integers and buffers that mean something only as a whole."""

from pathlib import Path

import pytest

from harness.lint import trivial
from harness.problem import folders
from tests.support.affine import folder, surveyed

QUANTISER = (
    '''"""quantise: fp32 (n,) to NVFP4 codes, scales and the number of codes that are not zero."""
from typing import NamedTuple
import torch
from dataclasses import dataclass


class Data(NamedTuple):
    """x: fp32 (n,); codes: uint8 (n // 2,), scales: e4m3 (n // 16,), count: int64 (1,) are written in place."""

    x: torch.Tensor
    codes: torch.Tensor
    scales: torch.Tensor
    count: torch.Tensor


OUTPUTS = ("codes", "scales", "count")


@dataclass(frozen=True)
class Case:
    n: int
    seed: int

    def bytes_moved(self) -> int:
        return 5 * self.n


TESTS = [Case(64, 1), Case(4096, 2)]
BENCHMARKS = BENCHMARKS_CPU = []
''',
    '''"""Inputs, oracle and checker for quantise: bits must be equal."""
import torch
from task import Data

from problems.common import check, nvfp4


def generate_input(n, seed, device):
    gen = torch.Generator(device).manual_seed(seed)
    x = torch.randn(n, generator=gen, device=device) * torch.rand(n, generator=gen, device=device).mul(8).exp2()
    bytes, scales = (torch.zeros(k, dtype=torch.uint8, device=device) for k in (n // 2, n // 16))
    return Data(x, bytes, scales.view(torch.float8_e4m3fn), torch.zeros(1, dtype=torch.int64, device=device))


def ref_kernel(data):
    codes, scales = nvfp4.quantise(data.x.double())
    return codes, scales, (nvfp4.unpack(codes) & 7).count_nonzero().reshape(1)


def check_implementation(data, output):
    result = compare(data, ref_kernel(data), output)
    return result.ok, result.message


def compare(data, want, output, baseline=False):
    if not isinstance(output, tuple) or len(output) != len(want):
        return check.Result(False, f"mismatch found! want {len(want)} tensors")
    for got, right in zip(output, want):
        if problem := check.form_error(got, right.shape, right.dtype):
            return check.Result(False, problem)
        if not torch.equal(got.view(torch.uint8), right.view(torch.uint8)):
            return check.Result(False, "mismatch found! bits differ")
    return check.Result(True)
''',
)


def test_bytes_fp8_and_integers_are_linted_like_floats(tmp_path):
    path = tmp_path / "quantise"
    path.mkdir()
    for name, text in zip(("task.py", "reference.py"), QUANTISER, strict=True):
        (path / name).write_text(text)
    rows, holes = surveyed(path)
    assert holes == []
    for output in ("codes", "scales", "count"):
        for name in ("zeros", "previous answer", "copy of x"):
            assert rows[f"{name} [{output}]"].refused == 2, (name, output)
    assert rows["answer in less precision [scales]"].refused == 2
    assert rows["one NaN [scales]"].refused == 2
    assert "one element" in rows["mean of the answer [count]"].note()
    # A value of 2^8 and more, eightfold, is past the largest scale: what the reference says of it is said here.
    said = rows["answer to inputs x8 [codes]"].note()
    assert "the reference refuses such inputs: ValueError: x needs a block scale" in said


# Token ids look rows up in packed codes, and a byte buffer with a head of its own is added; nothing is of a
# floating-point type.
BAG = (
    '''"""bag: the sum of the rows of e2m1 codes that the tokens name, and a value from the state."""
from dataclasses import dataclass
from typing import NamedTuple

import torch


class Data(NamedTuple):
    """tokens: int64 (n,), below 32; codes: uint8 (32, k // 2); state: uint8 (8 + 4 k,); y: fp32 (k,)."""

    tokens: torch.Tensor
    codes: torch.Tensor
    state: torch.Tensor
    y: torch.Tensor


OUTPUTS = ("y",)
INOUT = ("state",)
OPAQUE = ("state",)


@dataclass(frozen=True)
class Case:
    n: int
    k: int
    seed: int

    def bytes_moved(self) -> int:
        return self.n * self.k


TESTS = [Case(3, 16, 1), Case(50, 64, 2)]
BENCHMARKS = BENCHMARKS_CPU = []
''',
    '''"""Inputs, oracle and checker for bag."""
import torch
from task import Data

from problems.common import check, nvfp4

HEAD = 0x5AFE


def generate_input(n, k, seed, device):
    gen = torch.Generator(device).manual_seed(seed)
    tokens = torch.randint(0, 32, (n,), generator=gen, device=device)
    codes = torch.randint(0, 256, (32, k // 2), dtype=torch.uint8, generator=gen, device=device)
    state = torch.empty(8 + 4 * k, dtype=torch.uint8, device=device)
    state[:8].view(torch.int64).fill_(HEAD)
    state[8:].view(torch.float32).copy_(torch.randn(k, generator=gen, device=device))
    return Data(tokens, codes, state, torch.full((k,), float("nan"), device=device))


def ref_kernel(data):
    if int(data.state[:8].view(torch.int64)) != HEAD:
        raise ValueError("this is no state")
    table = torch.tensor(nvfp4.E2M1, dtype=torch.float64, device=data.y.device)
    rows = table[nvfp4.unpack(data.codes).int()][data.tokens]
    weights = 0.5 ** torch.arange(len(rows), dtype=torch.float64, device=data.y.device)
    sums = data.state[8:].view(torch.float32)
    sums += (weights @ rows).float()
    return sums.double()


def check_implementation(data, output):
    result = compare(data, ref_kernel(data), output)
    return result.ok, result.message


def compare(data, want, output, baseline=False):
    return check.elementwise(output, want, 2**-21 * want.abs() + 2**-22, torch.float32)
''',
)
SCALED = "no input is of a floating-point type, and no others are scaled or rounded"


def bag(path: Path, *changes: tuple[str, str]) -> Path:
    path.mkdir()
    for name, text in zip(("task.py", "reference.py"), BAG, strict=True):
        for old, new in changes:
            text = text.replace(old, new)
        (path / name).write_text(text)
    return path


def test_token_ids_and_byte_buffers_are_linted_and_what_does_not_apply_is_said(tmp_path):
    rows, holes = surveyed(bag(tmp_path / "bag"))
    assert holes == []
    not_applicable = {
        "answer to inputs x8": SCALED,
        "answer to inputs x8, as a baseline": SCALED,
        "inputs in less precision": SCALED,
        "state zero": "task.py says that state is OPAQUE",
        "state shifted": "task.py says that state is OPAQUE",
    }
    for name, row in rows.items():
        if name in not_applicable:
            assert not row.formed and row.note() == f"not applicable: {not_applicable[name]}", row
        else:
            assert row.formed == 2 and not row.absent, row
            assert row.refused == (0 if row.kind == trivial.EXACT else 2), row
    # Other tokens are tokens, and the reference takes the state that stayed as it is.
    assert {"tokens zero", "tokens shifted", "codes shifted", "copy of state"} <= set(rows)


def test_bytes_that_are_not_called_opaque_are_changed(tmp_path):
    rows, _ = surveyed(bag(tmp_path / "bag", ('OPAQUE = ("state",)\n', "")))
    assert rows["state zero"].note() == (
        "not applicable: the reference refuses such inputs: ValueError: this is no state"
    )


def test_ordinary_inputs_are_not_skipped(tmp_path):
    """Whatever is of a floating-point type is scaled, shifted and zeroed, alone and with the others."""
    rows, _ = surveyed(folder(tmp_path / "affine"))
    derived = [row for row in rows.values() if row.kind in (trivial.DERIVED, trivial.ALONE)]
    assert len(derived) == 2 * (2 + 1 + 2 * 3)  # outputs; x8 (twice), less precision, three inputs alone
    assert all(row.formed == 3 and not row.absent for row in derived)
    assert not [row for row in rows.values() for reason in row.absent if "OPAQUE" in reason or reason == SCALED]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ('("w",)', "OPAQUE is for integers and bytes, but w is of torch.float32"),
        ('("y",)', r"OPAQUE must name fields of weights or inputs, \['w', 'x', 'bias'\], got \['y'\]"),
        ('("wide",)', r"OPAQUE must name fields .*, got \['wide'\]"),
    ],
)
def test_opaque_cannot_hide_an_ordinary_input(tmp_path, names, message):
    with pytest.raises(ValueError, match=message):
        surveyed(folder(tmp_path / "affine", ("OUTPUTS =", f"OPAQUE = {names}\nOUTPUTS =")))


def test_opaque_of_another_form_is_bad_use(tmp_path):
    with pytest.raises(folders.UsageError, match=r"task\.py: OPAQUE must be a tuple of fields' names, got 'state'"):
        folders.find(str(bag(tmp_path / "bag", ('OPAQUE = ("state",)', 'OPAQUE = "state"'))))
