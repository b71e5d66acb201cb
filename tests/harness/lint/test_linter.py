"""The whole linter, through processes: what it says of a problem with holes, and that our problems have none."""

import dataclasses
import shutil

import pytest

from harness.lint import linter
from harness.problem import folders
from problems import wrong
from tests.support import write_files
from tests.support.lax import own

KERNEL = """import torch

def custom_kernel(data):
    y = data.w.double() @ data.x.double() + data.bias
    data.top.copy_(y.argmax(1))
    data.y.copy_({y})
    return data.y, data.top
"""


def linted(path, files: dict[str, str]) -> tuple[bool, list[str]]:
    """Write files of a folder. Return whether the whole linter finds no hole, and its lines."""
    said: list[str] = []
    return linter.run(folders.find(str(write_files(path, files))), "cpu", "cpu", said.append), said


def test_the_whole_linter_says_what_is_wrong(tmp_path):
    """Holes, in a report through processes of their own: a wrong file that passes or crashes, a variant that fails or
    no longer compiles, and cases in task.yml that are no longer those of task.py.
    """
    kernels = {
        "wrong/no_bias": "y - data.bias",
        "wrong/doubled": "2 * y",
        "variants/good": "y",
        "variants/off": "y + 1",
        "wrong/crashes": "y.lost",
    }
    files = {f"{place}.py": KERNEL.format(y=y) for place, y in kernels.items()}
    files["variants/old.py"] = "TARGETS = ('sm90',)\n\ndef compile_for(target):\n    raise ValueError('no such tile')\n"
    files["task.yml"] = "tests: [{m: 64, k: 32, seed: 9}]\n"
    right, said = linted(own(tmp_path / "lax", BIAS="0"), files)
    holes = [line.removeprefix("HOLE ").partition(":")[0] for line in said if line.startswith("HOLE")]
    judged = ["bias [y]", "bias [top]", "wrong/crashes.py", "wrong/no_bias.py", "old", "off"]
    wanted = [*(one for one in judged if one != "old" or shutil.which("nvcc")), "task.yml is stale"]
    assert not right and holes == wanted, said
    assert any(line.startswith("HOLE wrong/crashes.py: RUNTIME_ERROR shows nothing of the check") for line in said)
    assert any(line.startswith("wrong/doubled ") and "INCORRECT" in line for line in said)
    assert any(line.startswith("good ") and "2/2 cases right" in line for line in said)
    assert said[-1] == f"lax: {len(holes)} holes found by the linter"


FOLDER = """
import torch

def generate_input({sizes}, seed):
    gen = torch.Generator().manual_seed(seed)
    {given}

def ref_kernel(data):
    return {answer}

def check_implementation(data, output):
    return torch.allclose(output, ref_kernel(data), rtol=1e-5, atol=1e-5), "values differ"
"""
EDGES = FOLDER.format(
    sizes="m, k",
    given="return torch.randn(m, k, generator=gen), torch.randn(k, 3, generator=gen)",
    answer="data[0] @ data[1]",
)
FACTORS = FOLDER.format(
    sizes="n",
    given="a = torch.randn(n, n, generator=gen)\n    return a @ a.T + n * torch.eye(n)",
    answer="torch.linalg.cholesky(data)",
)


@pytest.mark.parametrize(
    ("reference", "cases"),
    [
        (EDGES, "[{m: 0, k: 4, seed: 1}, {m: 2, k: 0, seed: 2}, {m: 5, k: 7, seed: 4}]"),
        (FACTORS, "[{n: 3, seed: 1}, {n: 6, seed: 2}]"),  # which takes no matrix of zeros
    ],
)
def test_empty_cases_and_a_reference_that_refuses_zeros_are_no_holes(tmp_path, reference, cases):
    kernel = reference.replace("ref_kernel", "custom_kernel")
    files = {"reference.py": reference, "submission.py": kernel, "task.yml": f"files: []\ntests: {cases}\n"}
    # The tolerance is what these folders are blamed for: that answers and inputs may have fewer bits.
    holes = [line for line in linted(tmp_path, files)[1] if line.startswith("HOLE") and "less precision" not in line]
    assert holes == []


COPIES = FOLDER.format(sizes="n", given="return torch.randn(n, generator=gen)", answer="data.clone()")
SORTED = "torch.equal(data.sort().values, output.sort().values)"


def test_a_folder_whose_answer_is_its_input_with_two_files_of_one_name(tmp_path):
    """Each file is judged, the submission that comes with the folder too. That its order may be free is a question."""
    kernel = "def custom_kernel(data):\n    return data{}\n"
    files = {
        "task.yml": "tests: [{n: 5, seed: 1}, {n: 90, seed: 2}]\n",
        "reference.py": COPIES.replace("torch.allclose(output, ref_kernel(data), rtol=1e-5, atol=1e-5)", SORTED),
        "submission.py": kernel.format(".clone()"),
        "solutions/correct/submission.py": kernel.format(" + 0"),
        "wrong/bad.py": kernel.format(" * 2"),
        "solutions/wrong/bad.py": kernel.format(" + 1"),
    }
    right, said = linted(tmp_path / "same", files)
    assert right, said
    assert [line.partition(":")[0] for line in said if line.startswith("QUESTION")] == ["QUESTION axis 0 rolled by one"]
    judged = [line.split()[0] for line in said if "INCORRECT" in line or "cases right" in line]
    assert judged == ["solutions/wrong/bad", "wrong/bad", "solutions/correct/submission", "submission"]


@pytest.mark.slow
def test_a_problem_passes_in_short(monkeypatch):
    """In a third of its small cases, the last among them, which says more than the first."""
    found, said = folders.find("nvfp4_gemv"), []
    files = wrong.write(found.folder)
    monkeypatch.setattr(wrong, "write", lambda _: files[:: -(-len(files) // 2)])
    monkeypatch.setattr(linter, "honest", lambda problem: [problem.winner("cpu")])
    found = dataclasses.replace(found, tests=tuple(linter.small(found)[::-3]), benchmarks={"cpu": ()})
    assert linter.run(found, "cpu", "cpu", said.append), "\n".join(said)


@pytest.mark.slow
@pytest.mark.parametrize("name", folders.problem_names())
def test_every_problem_passes(name):
    said: list[str] = []
    assert linter.run(folders.find(name), "cpu", "cpu", said.append), "\n".join(said)
