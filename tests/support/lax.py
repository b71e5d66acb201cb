"""Small problems for the linter's tests, of which a test spoils the check or the inputs.

`own` writes a problem of ours: y = W x + bias, and the largest of each row. `foreign` writes a folder in GPU MODE's
format that sorts a vector.
"""

from pathlib import Path

from harness.lint import linter
from harness.lint.trivial import Trivial
from harness.problem import folders

TASK = '''"""lax: y = W x + bias, and the column of the largest element of each row."""
from dataclasses import dataclass
from typing import NamedTuple
import torch

class Data(NamedTuple):
    """w: fp32 (m, k); x: fp32 (k, 4); bias: fp32 (m, 4); y: fp16 (m, 4) and top: int32 (m,) are written in place."""

    w: torch.Tensor
    x: torch.Tensor
    bias: torch.Tensor
    y: torch.Tensor
    top: torch.Tensor

OUTPUTS = ("y", "top")

@dataclass(frozen=True)
class Case:
    m: int
    k: int
    seed: int

    def bytes_moved(self) -> int:
        return 4 * self.m * self.k

TESTS = [Case(64, 32, 1), Case(100, 7, 2)]
BENCHMARKS = BENCHMARKS_CPU = [Case(40, 48, 3)]
'''
REFERENCE = """import torch
from task import Data
from problems.common import check

def generate_input(m, k, seed, device):
    gen = torch.Generator(device).manual_seed(SEED)
    w, x, bias = (torch.randn(*shape, generator=gen, device=device) for shape in ((m, k), (k, 4), (m, 4)))
    y = torch.full((m, 4), float("nan"), dtype=torch.float16, device=device)
    return Data(w * W, x, bias * BIAS, y, torch.zeros(m, dtype=torch.int32, device=device))

def ref_kernel(data):
    y = data.w.double() @ data.x.double() + data.bias.double()
    return y, y.argmax(1).int()

def near(y, want, rtol=2**-10):
    return bool(((y.double() - want).abs() <= rtol * want.abs() + 2**-20).all())

def compare(data, want, output, baseline=False):
    (y, top), (want_y, want_top) = output, want
    error = (y.double() - want_y).abs()
    right = (CHECK) and (TOP)
    return check.Result(bool(right), "" if right else "mismatch")
"""
SORTS = """import dataclasses, math
from typing import NamedTuple
import torch

class Pair(NamedTuple):
    y: torch.Tensor
    n: int

@dataclasses.dataclass
class Held:
    y: torch.Tensor
    loss: float

def generate_input(n, seed):
    return (INPUT,)

def ref_kernel(data):
    x = data[0]
    y = x.sort().values
    return ANSWER

def same(got, want):
    if isinstance(want, torch.Tensor):
        return got.shape == want.shape and torch.allclose(got, want, rtol=1e-6, atol=0)
    if dataclasses.is_dataclass(want):
        return same(vars(got), vars(want))
    if isinstance(want, dict):
        return set(got) == set(want) and all(same(got[key], want[key]) for key in want)
    if isinstance(want, tuple | list):
        return len(got) == len(want) and all(map(same, got, want))
    return math.isclose(got, want, rel_tol=1e-6) if isinstance(want, float) else got == want

def check_implementation(data, output):
    return CHECK, "differs"
"""


def own(path: Path, check: str = "near(y, want_y)", top: str = "torch.equal(top, want_top)", **changes: str) -> Path:
    """A problem of ours in `path`. changes: SEED of its inputs, and factors W and BIAS."""
    words = {"SEED": "seed", "W": "1", "BIAS": "1", **changes}
    path.mkdir()
    (path / "task.py").write_text(TASK)
    source = REFERENCE.replace("CHECK", check).replace("TOP", top)
    for word, text in words.items():
        source = source.replace(f"({word})", f"({text})").replace(f"* {word}", f"* {text}")
    (path / "reference.py").write_text(source)
    return path


def foreign(path: Path, answer: str, check: str = "same(output, ref_kernel(data))", given: str = "") -> Path:
    """A folder of other people in `path`. given: the one input."""
    given = given or "torch.randn(n, generator=torch.Generator().manual_seed(seed))"
    path.mkdir()
    (path / "task.yml").write_text("tests: [{n: 64, seed: 1}, {n: 99, seed: 2}]\n")
    (path / "reference.py").write_text(SORTS.replace("INPUT", given).replace("ANSWER", answer).replace("CHECK", check))
    return path


def surveyed(path: Path) -> tuple[dict[str, linter.Row], list[str]]:
    """The rows of the linter by name, and its holes: names of candidates, and in full what else is wrong."""
    found = folders.find(str(path))
    files = {name: str(path) for name, path in found.files.items()}
    helper = Trivial({"folder": str(found.folder), "ours": found.ours, "device": "cpu", "files": files})
    rows, faults = linter.survey(lambda message: helper.lint(message, []), linter.small(found))
    holes = [row.name for row in rows if row.hole()] + linter.left_out(rows) + faults
    return {row.name: row for row in rows}, holes
