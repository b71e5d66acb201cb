"""affine: a sound problem of which the linter's tests spoil a line, and the linter's answers within this process.

It computes y = W x + bias and the column of the largest term of each row.
"""

import dataclasses
from pathlib import Path

from harness.lint import linter
from harness.lint.trivial import Trivial
from harness.problem import folders
from tests.support import SUPPORT

TASK = '''"""affine: y = W x + bias, and the column of the largest term of each row."""
from dataclasses import dataclass
from typing import NamedTuple

import torch


class Data(NamedTuple):
    """w: fp32 (m, k); x: fp32 (k,); bias: fp32 (m,); y: fp16 (m,) and top: int32 (m,) are written in place."""

    w: torch.Tensor
    x: torch.Tensor
    bias: torch.Tensor
    y: torch.Tensor
    top: torch.Tensor


input_t = Data
OUTPUTS = ("y", "top")
PEER_TOL = 1e-2
RTOL, ATOL = 2**-11 * (1 + 2**-10), 2**-20


@dataclass(frozen=True)
class Case:
    m: int
    k: int
    seed: int

    def bytes_moved(self) -> int:
        return 4 * self.m * self.k


TESTS = [Case(64, 32, 1), Case(100, 7, 2)]
BENCHMARKS = [Case(40, 48, 3)]
BENCHMARKS_CPU = BENCHMARKS
'''
REFERENCE = '''"""Inputs, oracle and checker for affine."""
import torch
from task import ATOL, PEER_TOL, RTOL, Data

from problems.common import check


def generate_input(m, k, seed, device):
    gen = torch.Generator(device).manual_seed(seed)
    w = torch.randn(m, k, generator=gen, device=device)
    x = torch.randn(k, generator=gen, device=device)
    bias = torch.randn(m, generator=gen, device=device)
    y = torch.full((m,), float("nan"), dtype=torch.float16, device=device)
    return Data(w, x, bias, y, torch.zeros(m, dtype=torch.int32, device=device))


def ref_kernel(data):
    terms = data.w.double() * data.x.double()
    return terms.sum(1) + data.bias.double(), terms.argmax(1).int()


def compare_y(y, want, data, baseline):
    if baseline:
        return check.norm(y.unsqueeze(0), want.unsqueeze(0), PEER_TOL, torch.float16, batch=0)
    size = (data.w.abs().double() @ data.x.abs().double())
    return check.elementwise(y, want, RTOL * want.abs() + 2**-20 * size + ATOL, torch.float16)


def compare(data, want, output, baseline=False):
    if not isinstance(output, tuple) or len(output) != 2:
        return check.Result(False, "mismatch found! want two tensors")
    result = compare_y(output[0], want[0], data, baseline)
    if not result.ok:
        return result
    if problem := check.form_error(output[1], want[1].shape, torch.int32):
        return check.Result(False, problem)
    return result if torch.equal(output[1], want[1]) else check.Result(False, "mismatch found! top")


def check_implementation(data, output):
    result = compare(data, ref_kernel(data), output)
    return result.ok, result.message
'''


def folder(path: Path, *changes: tuple[str, str]) -> Path:
    """The sound problem in `path` with (text, replacement) pairs applied to its two files; each text occurs once."""
    path.mkdir()
    files = {"task.py": TASK, "reference.py": REFERENCE}
    for old, new in changes:
        assert sum(text.count(old) for text in files.values()) == 1, old
        files = {name: text.replace(old, new) for name, text in files.items()}
    for name, text in files.items():
        (path / name).write_text(text)
    return path


def asked(found: folders.Problem) -> linter.Ask:
    """The linter's helper within this process."""
    files = {name: str(path) for name, path in found.files.items()}
    helper = Trivial({"folder": str(found.folder), "own": found.own, "device": "cpu", "files": files})
    return lambda message: getattr(helper, message["op"])(message, [])


def short(found: folders.Problem) -> folders.Problem:
    """`found` with its small test cases only."""
    return dataclasses.replace(found, tests=tuple(linter.small(found)), benchmarks={"cpu": ()})


def surveyed(path: Path, baselines: bool = True) -> tuple[dict[str, linter.Row], list[str]]:
    """-> (rows by name, holes: names of candidates, and in full what else was found)."""
    found = folders.find(str(path))
    if SUPPORT in path.parents:
        found = short(found)
    rows, faults = linter.survey(asked(found), linter.chosen(found, "cpu"), baselines and found.own)
    holes = [row.name for row in rows if row.hole()] + linter.left_out(rows) + faults
    return {row.name: row for row in rows}, holes
