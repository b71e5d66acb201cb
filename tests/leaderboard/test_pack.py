"""leaderboard/pack.py for GPU MODE: the file stands alone, gives the same bits, keeps the service's limits and says
where it ran.
"""

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from harness.problem import folders, scan, sources
from leaderboard import flashinfer_pack, gpu_mode_pack, pack
from problems.common import build, load
from tests.support import SUPPORT, forked, popcorn
from tests.support.marks import first, needs_nvcc
from tests.support.records import full, write

PROBLEMS = ("nvfp4_gemv", "fmha_decode", "moe_gemm")
SMALL = {  # words of a test case
    "nvfp4_gemv": "m=33 k=64 l=3",
    "fmha_decode": "batch=3 queries=2",
    "moe_gemm": "tokens=7 activation=bf16",
}
WINNERS = [
    (problem, name, target)
    for problem in PROBLEMS
    for target, names in load.winners(load.PROBLEMS / problem).items()
    if target in ("cpu", "sm90")
    for name in names
]
# Calls a packed file as a service does: on plain tuples, in a process that knows nothing of this repository.
ALONE = """
import importlib.util, sys, torch
spec = importlib.util.spec_from_file_location("submission", "submission.py")
module = sys.modules["submission"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
out = module.custom_kernel(torch.load("data.pt"))
assert not [name for name in sys.modules if name.split(".")[0] in ("problems", "harness", "task")]
torch.save(list(out) if isinstance(out, tuple) else [out], "out.pt")
"""


def packed(tmp_path, problem: str, *words: str) -> Path:
    out = tmp_path / "packed" / "submission.py"
    out.parent.mkdir(exist_ok=True)
    assert pack.main([problem, *words, "-o", str(out)]) == 0
    return out


@functools.cache
def data_of(problem: str) -> tuple:
    """The data of a small case."""
    folder = load.PROBLEMS / problem
    reference, task = load.module(folder, "reference"), load.module(folder, "task")
    case = next(one for one in folders.find(problem).tests if folders.has_words(str(one), SMALL[problem]))
    made = reference.generate_input(**case.params, seed=5, device="cpu")
    if hasattr(reference, "generate_weights"):
        made = task.Data(reference.generate_weights(**case.params, seed=5, device="cpu"), *made)
    return made


def bits(tensors: list[torch.Tensor]) -> list[bytes]:
    return [bytes(tensor.contiguous().flatten().view(torch.uint8).numpy()) for tensor in tensors]


# One that this CPU can run every day, the others at night.
ON_CPU = [(problem, name) for problem, name, target in WINNERS if target == "cpu"]
ON_CPU.sort(key=lambda one: one[1] != load.winner(load.PROBLEMS / "nvfp4_gemv", "cpu"))


@pytest.mark.parametrize(("problem", "name"), first(ON_CPU))
@pytest.mark.slow
def test_packed_cpu_winner_gives_same_bits_in_empty_folder(tmp_path, problem, name):
    """The packed file, on plain tuples, against the variant in the repository."""
    if load.missing_cpu_flags(load.PROBLEMS / problem / "variants" / f"{name}.py"):
        pytest.skip("this CPU cannot run it")
    file = packed(tmp_path, problem, "--variant", name)
    place = tmp_path / "empty"
    place.mkdir()
    shutil.copy2(file, place)
    data = data_of(problem)
    torch.save(popcorn.copied(data), place / "data.pt")
    env = {"PATH": "/usr/local/cuda/bin:/usr/local/bin:/usr/bin:/bin", "HOME": str(place), "TMPDIR": str(place)}
    subprocess.run([sys.executable, "-I", "-B", "-c", ALONE], cwd=place, env=env, check=True, timeout=300)
    module = load.variant(problem, name)
    ours = type(data)(*(part if hasattr(part, "_fields") else part.clone() for part in data))
    if hasattr(module, "prepare"):
        ours = ours._replace(weights=module.prepare(data.weights))
    want = module.custom_kernel(ours)
    assert bits(torch.load(place / "out.pt")) == bits(list(want) if isinstance(want, tuple) else [want])
    left = {path.name for path in place.iterdir()}
    assert left == {"submission.py", "data.pt", "out.pt", ".cache"}, "sources are removed, builds are kept"


@pytest.mark.parametrize(("problem", "name", "target"), WINNERS)
def test_packed_winner_is_taken_by_service_and_scan(tmp_path, problem, name, target):
    file = packed(tmp_path, problem, "--variant", name)
    assert popcorn.read(file) == popcorn.Request(problem, {"cpu": (), "sm90": ("H100",)}[target])
    assert "from problems" not in file.read_text() and scan.findings([file]) == []


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize(("problem", "name"), [(p, n) for p, n, target in WINNERS if target == "sm90"])
def test_packed_sm90_winner_compiles(tmp_path, problem, name, monkeypatch):
    monkeypatch.setenv("KERNEL_BUILD_DIR", str(tmp_path / "builds"))
    (tmp_path / "task.py").write_text("")
    module = load.from_file(tmp_path, packed(tmp_path, problem, "--variant", name))
    (artefact,) = module.compile_for("sm90")
    assert artefact.path.is_file() and artefact.kernels()


def test_header_names_board_and_gpu_and_where_the_variant_ran(tmp_path, capsys):
    file = packed(tmp_path, "nvfp4_gemv", "--variant", "sm100_native")
    assert popcorn.read(file).gpus == ("NVIDIA",) and "board nvfp4_gemv runs on" not in file.read_text()
    file = packed(tmp_path, "nvfp4_gemv", "--target", "sm90", "--gpu", "B200")
    assert popcorn.read(file).gpus == ("B200",)
    assert "# The board nvfp4_gemv runs on sm100: this is for sm90." in file.read_text()
    results = tmp_path / "results"
    write(results, "gpu-box", full("sm90_dp4a", 1.1))
    write(results, "new-box", full("cpu_portable", 2.0, target="cpu", status="INCORRECT", run="r9"))

    def head(name: str) -> str:
        file = packed(tmp_path, "nvfp4_gemv", "--variant", name, "--results", str(results))
        return file.read_text().partition('"""')[0]

    assert "# It passed on gpu-box (2026-01-02, run r1), with other sources than these." in head("sm90_dp4a")
    assert "It passed on gpu-box" in capsys.readouterr().out
    assert "# IT NEVER RAN ON ITS TARGET, cpu: no record says that it passed there." in head("cpu_portable")
    assert "IT NEVER RAN ON ITS TARGET, cpu" in capsys.readouterr().out
    found = folders.find("nvfp4_gemv").variant("cpu_portable")
    own = {"target": "cpu", "source_hash": sources.source_hash(found.file, found.folder), "run": "r5"}
    write(results, "cpu-box", full("cpu_portable", 3.0, **own))
    assert "# It passed on cpu-box (2026-01-02, run r5), with these sources." in head("cpu_portable")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nvfp4_gemv", "--variant", "lost"], "--variant must be a variant of nvfp4_gemv"),
        (["nvfp4_gemv", "--variant", "sm90_dp4a", "--target", "cpu"], "--target must be one of sm90_dp4a's"),
        (["nothing", "--variant", "x"], "PROBLEM must be a name in problems"),
        (["dsv4_forward"], "PROBLEM must be one whose variants are single files, dsv4_forward is a composition"),
        (["nvfp4_gemv"], "give --variant NAME, or --target for its winner"),
        (["nvfp4_gemv", "--target", "cpu", "-o", "x.txt"], "-o must name a .py file"),
        (["nvfp4_gemv", "--target", "cpu", "-o", "/proc/x.py"], "-o: cannot write /proc/x.py: "),
        (
            ["nvfp4_gemv", "--target", "cpu", "--format", "flashinfer-bench", "-o", "/proc/x"],
            "-o: cannot write /proc/x",
        ),
        (["nvfp4_gemv", "--target", "cpu", "--case", "k=64"], "--case goes with --format flashinfer-bench"),
    ],
)
def test_usage_error_is_one_line(words, message, capsys):
    try:
        assert pack.main(words if "-o" in words else [*words, "-o", "/tmp/x.py"]) == 2
    except SystemExit as stop:
        assert stop.code == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


# --- embedding

ODD = '''"""odd: names that a packer could want for itself, and imports in all places."""
from __future__ import annotations

import torch
from task import input_t, output_t
from problems.common import helper

TARGETS = ("cpu",)
SOURCE = __file__
os = shutil = pathlib = 2

class Path:
    scale = 1

def run(x, y):
    return x + y

def _named(value):
    return value

def custom_kernel(data: input_t) -> output_t:
    from problems.common.helper import K as here

    assert SOURCE.endswith("odd.py") and helper.text(SOURCE) == '#include "odd.h"\\n' and here == 3
    data.z.copy_(run(_named(data.x), data.y) * Path.scale)
    return data.z
'''
HELPER = '''"""It has both \'\'\' and quotes."""
# The default_word.
from pathlib import Path

K = 3

def text(source):
    assert Path(source).with_name("odd.h").is_file()
    return Path(source).with_suffix(".cu").read_text()
'''


@pytest.fixture
def odd(tmp_path, monkeypatch) -> Path:
    """A problem outside the repository, with a variant, and a module of problems/common that it uses."""
    folder, common = tmp_path / "vector_add", tmp_path / "common"
    shutil.copytree(SUPPORT / "problems" / "vector_add", folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(build.COMMON, common, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "variants").mkdir()
    (folder / "variants" / "odd.py").write_text(ODD)
    (folder / "variants" / "odd.cu").write_text('#include "odd.h"\n')
    (folder / "variants" / "odd.h").write_text("int one;\n")
    (common / "helper.py").write_text(HELPER.replace("default_word", "default str" + "eam"))
    monkeypatch.setattr(build, "COMMON", common)
    return folder


def test_packed_file_runs_alone_whatever_its_names(tmp_path, odd, capsys):
    file = packed(tmp_path, str(odd), "--variant", "odd")
    x, y = torch.arange(8.0), torch.ones(8)
    torch.save((x, y, torch.empty(8)), file.parent / "data.pt")
    assert forked.run(["-c", ALONE], cwd=file.parent, timeout=300).returncode == 0  # a whole start of it: see above
    (out,) = torch.load(file.parent / "out.pt")
    assert torch.equal(out, x + y)
    words = ["--format", "flashinfer-bench", "-o", str(tmp_path / "bench")]
    assert pack.main([str(odd), "--variant", "odd", *words]) == 0
    (solution,) = [json.loads(path.read_text()) for path in (tmp_path / "bench" / "solutions").rglob("*.json")]
    space: dict = {}
    exec(solution["sources"][0]["content"], space)
    assert torch.equal(space["_packed_run"](x, y, torch.empty(8)), x + y)
    (odd / "variants" / "odd.py").write_text(ODD + "_packed_mine = 1\n")
    capsys.readouterr()
    assert pack.main([str(odd), "--variant", "odd", "-o", str(file.parent / "again.py")]) == 2
    assert "names that hold _packed are for the packed file: rename yours" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    ["import problems.common.helper", "from problems.moe import x", "from problems import common", "from .a import b"],
)
def test_import_that_cannot_be_packed_is_named_with_its_line(tmp_path, odd, capsys, line):
    (odd / "variants" / "odd.py").write_text(f"{ODD}\n\ndef more():\n    {line}\n")
    assert pack.main([str(odd), "--variant", "odd", "-o", str(tmp_path / "x.py")]) == 2
    number = len(ODD.splitlines()) + 4
    assert f"odd.py:{number}: write `from task` or `from problems.common import`" in capsys.readouterr().err


def test_refused_words_and_sizes_are_not_written_and_common_has_another_spelling(tmp_path, odd, capsys):
    assert "programmaticStr" + "eamSerializationAllowed" in (build.COMMON / "launch.cuh").read_text()
    (odd / "variants" / "odd.h").write_text('#include "launch.cuh"\n#include "launch_clusters.cuh"\n')
    text = packed(tmp_path, str(odd), "--variant", "odd").read_text()
    assert "attribute.id = static_cast<cudaLaunchAttributeID>(6 /* PDL */);" in text
    assert "*reinterpret_cast<int*>(&attribute.val) = 1;" in text
    (odd / "variants" / "odd.h").write_text("int x;\n// up" + "stream\n")
    assert pack.main([str(odd), "--variant", "odd", "-o", str(tmp_path / "x.py")]) == 2
    assert 'of the packed file has the refused word "stream": // up' in capsys.readouterr().err
    with pytest.raises(ValueError, match='line 2 of the packed file has the refused word "stream": # Up'):
        gpu_mode_pack.checked("x = 1\n# Upstr" + "eam\n")
    with pytest.raises(ValueError, match="1000001 bytes, at most 1000000 are taken"):
        gpu_mode_pack.checked("#" * 1_000_001)


# --- for flashinfer-bench


BENCHED = {"nvfp4_gemv": "k=320", "moe_gemm": "tokens=7", "fmha_decode": "compressed=65"}
PACKAGES = ("flashinfer-bench==0.1.2", "docstring-parser==0.17.0")  # what its data models and its builder import
DTYPES = {
    *("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "int32", "int16", "int8", "bool")
}


@pytest.fixture(scope="module")
def benches(tmp_path_factory) -> dict[str, Path]:
    """A folder of each problem, of its winner for this CPU."""
    top = tmp_path_factory.mktemp("packed")
    for problem, words in BENCHED.items():
        arguments = ["--format", "flashinfer-bench", "--case", words, "-o", str(top / problem)]
        assert pack.main([problem, "--target", "cpu", *arguments]) == 0
    return {problem: top / problem for problem in BENCHED}


def read(folder: Path, kind: str) -> dict[str, list[dict]]:
    """The objects of a kind of files, by the file's name."""
    files = sorted((folder / kind).rglob("*.json*"))
    return {path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in files}


@pytest.mark.parametrize("problem", BENCHED)
def test_folder_has_definitions_solutions_and_workloads_that_fit_together(benches, problem):
    folder = benches[problem]
    definitions, workloads = read(folder, "definitions"), read(folder, "workloads")
    assert set(definitions) == set(workloads) and all(len(found) == 1 for found in definitions.values())
    for name, (definition,) in definitions.items():
        assert definition["name"] == name and definition["op_type"] == problem
        (solution,) = [json.loads(p.read_text()) for p in (folder / "solutions" / problem / name).iterdir()]
        assert solution["definition"] == name and solution["spec"]["entry_point"] == "main.py::_packed_run"
        specs = {**definition["inputs"], **definition["outputs"]}
        assert {spec["dtype"] for spec in specs.values()} <= DTYPES
        for trace in workloads[name]:
            workload = trace["workload"]
            assert trace["definition"] == name and trace["solution"] is None
            assert set(workload["axes"]) == set(definition["axes"])
            assert set(workload["inputs"]) == set(definition["inputs"])
            for key, given in workload["inputs"].items():
                stored = safetensors.torch.load_file(folder / given["path"])[given["tensor_key"]]
                assert list(stored.shape) == [workload["axes"][axis] for axis in specs[key]["shape"]]
                assert str(stored.dtype) == f"torch.{specs[key]['dtype']}" and stored.is_contiguous()


def test_text_among_data_makes_definitions_and_axes_are_in_order_of_memory(benches):
    definitions = read(benches["moe_gemm"], "definitions")
    assert set(definitions) == {"moe_gemm_bf16", "moe_gemm_nvfp4"}  # ours for a CPU have no fp8
    assert all("activation" not in found[0]["inputs"] for found in definitions.values())
    solutions = [p.read_text() for p in (benches["moe_gemm"] / "solutions").rglob("*.json")]
    assert sorted("in_scale2, 'nvfp4',), (x, " in text for text in solutions) == [False, True]
    ((definition,),) = read(benches["nvfp4_gemv"], "definitions").values()
    assert definition["inputs"]["a"] == {"shape": ["l", "m", "a_axis_2"], "dtype": "int8"}
    assert definition["outputs"]["c"] == {"shape": ["l", "m", "sfb_permuted_axis_0"], "dtype": "float16"}
    (solution,) = [json.loads(p.read_text()) for p in (benches["nvfp4_gemv"] / "solutions").rglob("*.json")]
    run = solution["sources"][0]["content"].rpartition("def _packed_run(")[2]
    assert run.startswith("a, b, sfa, sfb, sfa_permuted, sfb_permuted, c):")
    assert "a.view(torch.float4_e2m1fn_x2).permute([1, 2, 0])" in run and "sfa.permute([1, 2, 0])" in run


def test_too_large_cases_are_named_and_folder_must_be_empty(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(flashinfer_pack, "MOST_BYTES", 3000)
    words = ["--target", "cpu", "--format", "flashinfer-bench", "-o", str(tmp_path / "out")]
    assert pack.main(["nvfp4_gemv", *words, "--case", "k=64"]) == 0
    said = capsys.readouterr().out
    assert "left out, since it takes more than 0 MiB: m=33 k=64 l=3\n" in said and "wrote " in said
    assert pack.main(["nvfp4_gemv", *words, "--case", "k=64"]) == 2
    assert "-o must name a new or an empty folder" in capsys.readouterr().err
    other = ["--target", "cpu", "--format", "flashinfer-bench", "-o", str(tmp_path / "other")]
    assert pack.main(["nvfp4_gemv", *other, "--case", "k=16384"]) == 2
    assert "no case of nvfp4_gemv is left to be written with 'k=16384'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("problem", "case", "message"),
    [
        ("mhc_site", "hidden=192", "y must be dense, of one dtype and order of axes in all cases"),
        ("linear_decode", "tokens=1 format=bf16", "has no tuple among inputs, which links is"),
        ("indexer", "batch=1 kind=fp8", "sizes outputs by inputs, and none has"),
    ],
)
def test_data_without_form_in_package_is_refused(tmp_path, capsys, problem, case, message):
    words = ["--target", "cpu", "--format", "flashinfer-bench", "--case", case, "-o", str(tmp_path / "out")]
    assert pack.main([problem, *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("problem", BENCHED)
def test_package_loads_folder_and_runs_solution_and_reference(benches, problem, package, tmp_path):
    env = {**os.environ, "PYTHONPATH": str(package), "FIB_CACHE_PATH": str(tmp_path), "HOME": str(tmp_path)}
    command = [sys.executable, str(SUPPORT / "flashinfer_check.py"), str(benches[problem]), "4"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = list(map(json.loads, done.stdout.splitlines()))
    assert lines and all(error < 1e-2 for line in lines for error in line["errors"]), lines


@pytest.fixture(scope="session")
def package(tmp_path_factory) -> Path:
    """The package and the little that its models need, in a folder of their own."""
    place = tmp_path_factory.mktemp("environment")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(place), *PACKAGES]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"pip cannot get {PACKAGES[0]} here: {done.stderr.strip().splitlines()[-1:]}")
    return place
