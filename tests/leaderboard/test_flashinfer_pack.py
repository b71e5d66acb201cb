"""leaderboard/pack.py --format flashinfer-bench: folders, dtypes, shapes, and that the package takes it all."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch

from leaderboard import flashinfer_pack, pack
from tests.support import SUPPORT

CASES = {"nvfp4_gemv": "k=320", "moe_gemm": "tokens=7", "fmha_decode": "compressed=65"}
PACKAGES = ("flashinfer-bench==0.1.2", "docstring-parser==0.17.0")  # what its data models and its builder import
DTYPES = {
    *("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "int32", "int16", "int8", "bool")
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A folder of each problem, of its winner for this CPU."""
    top = tmp_path_factory.mktemp("packed")
    for problem, words in CASES.items():
        arguments = ["--format", "flashinfer-bench", "--case", words, "-o", str(top / problem)]
        assert pack.main([problem, "--target", "cpu", *arguments]) == 0
    return {problem: top / problem for problem in CASES}


def read(folder: Path, kind: str) -> dict[str, list[dict]]:
    """The objects of a kind of files, by the file's name."""
    files = sorted((folder / kind).rglob("*.json*"))
    return {path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in files}


@pytest.mark.parametrize("problem", CASES)
def test_folder_has_definitions_solutions_and_workloads_that_fit_together(folders, problem):
    folder = folders[problem]
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


def test_text_among_data_makes_separate_definitions(folders):
    definitions = read(folders["moe_gemm"], "definitions")
    assert set(definitions) == {"moe_gemm_bf16", "moe_gemm_nvfp4"}
    assert all("activation" not in found[0]["inputs"] for found in definitions.values())
    solutions = [p.read_text() for p in (folders["moe_gemm"] / "solutions").rglob("*.json")]
    assert sorted("in_scale2, 'nvfp4',), (x, " in text for text in solutions) == [False, True]


def test_axes_are_in_order_of_memory_and_wrapper_puts_them_back(folders):
    ((definition,),) = read(folders["nvfp4_gemv"], "definitions").values()
    assert definition["inputs"]["a"] == {"shape": ["l", "m", "a_axis_2"], "dtype": "int8"}
    assert definition["outputs"]["c"] == {"shape": ["l", "m", "sfb_permuted_axis_0"], "dtype": "float16"}
    (solution,) = [json.loads(p.read_text()) for p in (folders["nvfp4_gemv"] / "solutions").rglob("*.json")]
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
@pytest.mark.parametrize("problem", CASES)
def test_package_loads_folder_and_runs_solution_and_reference(folders, problem, package, tmp_path):
    env = {**os.environ, "PYTHONPATH": str(package), "FIB_CACHE_PATH": str(tmp_path), "HOME": str(tmp_path)}
    command = [sys.executable, str(SUPPORT / "flashinfer_check.py"), str(folders[problem]), "4"]
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
