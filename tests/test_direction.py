"""Imports go one way: problems/common <- problems/<p> <- (as folders) harness <- leaderboard <- tests.

ptx_model/ imports problems/common only, and one file of the harness imports it.
"""

import ast
import sys
from pathlib import Path

import pytest

from problems.common import load
from tests.support import ROOT

OURS = {"problems", "harness", "leaderboard", "ptx_model", "tests", "tools"}
OURS |= {"task", "reference", "submission", "utils"}  # of a problem, by their bare names
KERNEL_LANGUAGES = {"torch", "triton", "cutlass"}
COMPUTED = "a name that is put together at run time"
LAUNCHER = "harness/tools/check_launcher.py"  # it calls the check that it receives, in a separate process
COMMANDS = ("problems.common.load", "problems.common.venv")  # what the leaderboard's commands need of problems/
COMPOSITION = "dsv4_forward"  # the one folder that may name other problems
MODEL_CHECK = "harness/tools/model_check.py"  # the one file of the harness that calls the model of a GPU


def imports(source: str) -> list[tuple[int, str]]:
    """(line, dotted name) of every import in `source`, those inside functions too; a relative one starts with a dot.

    `from a import b` counts as a.b; importlib.import_module("a.b") as a.b.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            stem = "." * node.level + (node.module or "")
            found += [(node.lineno, f"{stem}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            argument = node.args[0] if node.args else None
            constant = isinstance(argument, ast.Constant)
            found.append((node.lineno, str(argument.value) if constant else COMPUTED))
    return found


def admitted(path: str, source: str, name: str) -> bool:
    """Whether the file at `path` (from the repository's root, / between) may import `name`."""
    parts, root = path.split("/"), name.partition(".")[0]
    common = name == "problems.common" or name.startswith("problems.common.")
    if (path, name) == (LAUNCHER, COMPUTED):
        return True
    if not root or name == COMPUTED:  # no root: relative, and problems/common/load.py knows no packages in a problem
        return False
    if parts[0] == "tests":
        return True
    if parts[:2] == ["tools", "new_problem"]:  # a problem as soon as it is copied
        parts[0] = "problems"
    if parts[0] == "tools":  # they make .venv, so no package is there yet
        return root in sys.stdlib_module_names or root == "tools"
    if parts[0] == "leaderboard":
        return root not in OURS or root in ("leaderboard", "harness") or name.startswith(COMMANDS)
    if parts[0] == "harness":
        return root not in OURS or root == "harness" or common or (root == "ptx_model" and path == MODEL_CHECK)
    if parts[0] == "ptx_model":
        beside = parts[1] in ("tools", "tests") and root == "harness"
        return root not in OURS or root == "ptx_model" or common or beside
    if parts[:2] == ["problems", "common"]:  # all that is compiled or read there goes through build.py
        return root not in OURS or name == "problems.common.build"
    if parts[1] == COMPOSITION:
        return root not in OURS or root == "problems" or name.startswith("task.")
    if parts[2] in ("task.py", "reference.py"):
        return root not in OURS or common or (parts[2] == "reference.py" and root == "task")
    # A submission: the winner's selector, a variant, a wrong one.
    required = ()
    if parts[-1].startswith("peer_"):
        required = literal(source, "REQUIRES")
    return root in sys.stdlib_module_names or root in KERNEL_LANGUAGES or root == "task" or common or root in required


def literal(source: str, name: str) -> tuple[str, ...]:
    """The module-level tuple `name` of `source`, () if it has none."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return tuple(ast.literal_eval(node.value))
    return ()


def broken(path: str, source: str) -> list[str]:
    """One line for each import of the file that goes the wrong way."""
    return [f"{path}:{line}: imports {name}" for line, name in imports(source) if not admitted(path, source, name)]


def files() -> list[Path]:
    areas = ("problems", "harness", "leaderboard", "ptx_model", "tools", "tests")
    return [file for area in areas for file in sorted((ROOT / area).rglob("*.py"))]


def test_every_import_goes_one_way():
    wrong = [line for f in files() for line in broken(str(f.relative_to(ROOT)), f.read_text())]
    assert not wrong, "\n".join(wrong)


def test_the_scan_reaches_every_area():
    seen = {str(f.relative_to(ROOT).parent) for f in files()}
    problems = {p.parent for p in load.PROBLEMS.glob("*/task.py")}
    assert problems
    wanted = {"problems/common", "harness", "leaderboard", "ptx_model", "ptx_model/tools", "tools", "tests"}
    wanted |= {str((p / part).relative_to(ROOT)) for p in problems for part in ("", "wrong")}
    wanted |= {str((p / "variants").relative_to(ROOT)) for p in problems if p.name != COMPOSITION}
    assert wanted <= seen, f"no Python file seen in {sorted(wanted - seen)}"


def test_the_folders_of_the_composition_import_each_other_without_a_circle():
    """The files at the top of the folder count as one; submissions import these, and nothing imports a submission."""
    top = load.PROBLEMS / COMPOSITION
    needs: dict[str, set[str]] = {}
    for file in top.rglob("*.py"):
        folder = str(file.parent.relative_to(top))
        for _, name in imports(file.read_text()):
            parts = name.split(".")
            if parts[:2] == ["problems", COMPOSITION]:
                other = parts[2] if (top / parts[2]).is_dir() else "."
                needs.setdefault(folder, set()).add(other)
    needs = {folder: others - {folder} for folder, others in needs.items()}
    assert {"weights", "cache", "torch_ops", "adapters", "kernels", "checkpoint", "generate", "."} <= set(needs)
    assert not needs["weights"] and not {"variants", "wrong"} & set().union(*needs.values())
    left = dict(needs)
    while ready := [folder for folder, others in left.items() if not others & set(left)]:
        for folder in ready:
            del left[folder]
    assert not left, f"a circle: {left}"


def test_the_modules_of_the_model_form_no_circle():
    """Imports for types only, and those inside functions, count."""
    modules = {file.stem: file for file in (ROOT / "ptx_model").glob("*.py") if file.stem != "__init__"}
    assert {"machine", "barrier", "copies", "driver"} <= set(modules)
    left = {}
    for name, file in modules.items():
        left[name] = {word for _, dotted in imports(file.read_text()) for word in dotted.split(".")[1:2]} & set(modules)
    while ready := [name for name, needed in left.items() if not needed & set(left)]:
        for name in ready:
            del left[name]
    assert not left, f"a circle: {left}"


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("problems/common/build.py", "from problems.common import load"),
        ("problems/common/nvfp4.py", "import problems.nvfp4_gemv.task"),
        ("problems/common/load.py", "import task"),
        ("problems/common/tma.py", "from .build import cuda"),
        ("problems/nvfp4_gemv/task.py", "from harness.results import stats"),
        ("problems/nvfp4_gemv/task.py", "import reference"),
        ("problems/nvfp4_gemv/reference.py", "from problems.moe_gemm import task"),
        ("problems/nvfp4_gemv/submission.py", "from problems.nvfp4_gemv.variants import cpu_avx2"),
        ("problems/nvfp4_gemv/variants/sm90_a.py", "import reference"),
        ("problems/nvfp4_gemv/variants/sm90_a.py", "from reference import ref_kernel"),
        ("problems/nvfp4_gemv/variants/sm90_a.py", "from problems.nvfp4_gemv import reference"),
        ("problems/nvfp4_gemv/variants/sm90_a.py", "from problems import nvfp4_gemv"),
        ("problems/nvfp4_gemv/variants/sm90_a.py", "def f():\n    import harness.runner.clock"),
        ("problems/nvfp4_gemv/variants/sm90_a.py", "import numpy"),
        ("problems/nvfp4_gemv/variants/sm90_a.py", 'REQUIRES = ("humming",)\nimport humming'),
        ("problems/nvfp4_gemv/variants/sm90_a.py", "import importlib\nimportlib.import_module('refer' + 'ence')"),
        ("problems/nvfp4_gemv/variants/peer_x.py", 'REQUIRES = ("humming",)\nimport flashinfer'),
        ("problems/nvfp4_gemv/wrong/zeros.py", "from problems.nvfp4_gemv.variants import sm90_plain"),
        ("harness/run.py", "from problems.nvfp4_gemv import task"),
        ("harness/run.py", "import importlib\nimportlib.import_module('problems.nvfp4_gemv.task')"),
        ("harness/results/stats.py", "from leaderboard import board"),
        ("harness/invocation.py", "from ptx_model import driver"),
        ("ptx_model/machine.py", "from harness.results import stats"),
        ("ptx_model/tools/mutants.py", "from problems.nvfp4_gemv import task"),
        ("problems/nvfp4_gemv/variants/sm90_a.py", "import ptx_model"),
        ("leaderboard/report.py", "from problems.common import nvfp4"),
        ("leaderboard/report.py", "import problems.nvfp4_gemv.task"),
        ("leaderboard/report.py", "from tests import support"),
        ("tools/setup.py", "import yaml"),
        ("problems/dsv4_forward/model.py", "import harness.runner.clock"),
    ],
)
def test_a_wrong_import_is_seen(path, line):
    assert len(broken(path, f"import math\n{line}\n")) == 1


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("problems/common/build.py", "import torch"),
        ("problems/nvfp4_gemv/reference.py", "from task import RTOL\nfrom problems.common import nvfp4"),
        ("problems/nvfp4_gemv/submission.py", "from problems.common import load"),
        ("problems/nvfp4_gemv/variants/sm90_a.py", "import torch\nimport triton.language\nfrom task import unpack"),
        ("problems/nvfp4_gemv/variants/sm90_a.py", "from cutlass import cute\nfrom problems.common import build, tma"),
        ("problems/nvfp4_gemv/variants/peer_x.py", 'REQUIRES = ("humming",)\nfrom humming.layer import HummingLayer'),
        ("problems/dsv4_forward/model.py", "import problems.nvfp4_gemv"),
        ("harness/run.py", "from problems.common import load\nimport yaml"),
        (MODEL_CHECK, "def f():\n    from ptx_model import driver"),
        ("ptx_model/machine.py", "from ptx_model import parse\nfrom problems.common import build"),
        ("ptx_model/tools/mutants.py", "from harness.tools import model_check\nfrom ptx_model import driver"),
        ("leaderboard/report.py", "from harness.results import stats\nfrom problems.common import load\nimport pandas"),
    ],
)
def test_a_right_import_passes(path, line):
    assert broken(path, line) == []


HARNESS = ("runner", "results", "problem", "sandbox", "checker", "judge", "lint", "tools")


def test_the_folders_of_the_harness_form_no_circle():
    """Each imports only itself and those before it; the runner only itself. Nothing imports run.py."""
    wrong = []
    for file in sorted((ROOT / "harness").rglob("*.py")):
        parts = file.relative_to(ROOT / "harness").parts
        if len(parts) == 1:  # run.py and the package itself
            continue
        allowed = HARNESS[: HARNESS.index(parts[0]) + 1]
        for line, name in imports(file.read_text()):
            folder = name.split(".")[1] if name.startswith("harness.") else parts[0]
            if folder not in allowed:
                wrong.append(f"{'/'.join(parts)}:{line}: imports {name}")
    assert not wrong, "\n".join(wrong)
