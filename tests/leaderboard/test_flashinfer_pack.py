"""leaderboard/pack.py --format flashinfer-bench: folders, dtypes, what is random, and that the package takes it all."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from leaderboard import flashinfer_pack, pack
from problems.common import load
from tests.support import SUPPORT
from tests.support.records import bench, write

CASES = {"nvfp4_gemv": "k=320", "moe_gemm": "tokens=7", "fmha_decode": "compressed=65"}
PACKAGES = ("flashinfer-bench==0.1.2", "docstring-parser==0.17.0")  # what its data models and its builder import
DTYPES = {
    *("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "int32", "int16", "int8", "bool"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A folder of each problem, of its winner for this CPU, with one record of the first."""
    top = tmp_path_factory.mktemp("packed")
    case = {"m": 129, "k": 320, "l": 3}
    name = load.winner(load.PROBLEMS / "nvfp4_gemv", "cpu")
    write(top / "results", "cpu-box", [bench(name, 0, 12.5, target="cpu") | {"case": case}])
    for problem, words in CASES.items():
        arguments = ["--format", "flashinfer-bench", "--case", words, "--results", str(top / "results")]
        assert pack.main([problem, "--target", "cpu", *arguments, "-o", str(top / problem)]) == 0
    return {problem: top / problem for problem in CASES}


def read(folder: Path, kind: str) -> dict[str, list[dict]]:
    """The objects of a kind of files, by the file's name."""
    found = {}
    for path in sorted((folder / kind).rglob("*.json*")):
        text = path.read_text()
        found[path.stem] = [json.loads(text)] if path.suffix == ".json" else list(map(json.loads, text.splitlines()))
    return found


@pytest.mark.parametrize("problem", CASES)
def test_the_folders_and_names_are_those_of_the_package(folders, problem):
    folder = folders[problem]
    definitions, workloads = read(folder, "definitions"), read(folder, "workloads")
    assert set(definitions) == set(workloads) and all(len(found) == 1 for found in definitions.values())
    for name, (definition,) in definitions.items():
        assert definition["name"] == name and definition["op_type"] == problem
        assert (folder / "definitions" / problem / f"{name}.json").is_file()
        (solution,) = [json.loads(p.read_text()) for p in (folder / "solutions" / problem / name).iterdir()]
        assert solution["definition"] == name and solution["spec"]["entry_point"] == "main.py::_packed_run"
        assert "#!POPCORN" not in solution["sources"][0]["content"]
        for trace in workloads[name]:
            assert trace["definition"] == name and trace["solution"] is None and trace["evaluation"] is None


@pytest.mark.parametrize("problem", CASES)
def test_dtypes_axes_and_stored_tensors_fit_together(folders, problem):
    for name, (definition,) in read(folders[problem], "definitions").items():
        specs = {**definition["inputs"], **definition["outputs"]}
        assert {spec["dtype"] for spec in specs.values()} <= DTYPES
        for trace in read(folders[problem], "workloads")[name]:
            workload = trace["workload"]
            known = workload["axes"] | {a: s["value"] for a, s in definition["axes"].items() if s["type"] == "const"}
            assert set(known) == set(definition["axes"]) and set(workload["inputs"]) == set(definition["inputs"])
            for key, given in workload["inputs"].items():
                if given["type"] == "safetensors":
                    stored = safetensors.torch.load_file(folders[problem] / given["path"])[given["tensor_key"]]
                    assert list(stored.shape) == [known[axis] for axis in specs[key]["shape"]]
                    assert str(stored.dtype) == f"torch.{specs[key]['dtype']}" and stored.is_contiguous()


@pytest.mark.parametrize(
    ("problem", "codes"), [("nvfp4_gemv", {"a", "b"}), ("moe_gemm", {"w13", "w2"}), ("fmha_decode", set())]
)
def test_no_scale_and_no_index_is_random(folders, problem, codes):
    """Only codes are, of which every byte is a value. All else is stored as the judge makes it."""
    for found in read(folders[problem], "workloads").values():
        for trace in found:
            inputs = trace["workload"]["inputs"]
            assert {name for name, given in inputs.items() if given["type"] == "random"} == codes
            assert {given["type"] for given in inputs.values()} <= {"random", "safetensors"}


def test_a_text_among_the_data_makes_definitions_of_their_own(folders):
    definitions = read(folders["moe_gemm"], "definitions")
    assert set(definitions) == {"moe_gemm_bf16", "moe_gemm_nvfp4"}
    assert all("activation" not in found[0]["inputs"] for found in definitions.values())
    solutions = [p.read_text() for p in (folders["moe_gemm"] / "solutions").rglob("*.json")]
    assert sorted("'nvfp4'), Inputs(" in text for text in solutions) == [False, True]


def test_axes_are_in_the_order_of_memory_and_the_wrapper_puts_them_back(folders):
    ((definition,),) = read(folders["nvfp4_gemv"], "definitions").values()
    assert definition["inputs"]["a"] == {
        "shape": ["l", "m", "size_160"] if "size_160" in definition["axes"] else ["l", "m", "k_over_2"],
        "dtype": "int8",
        "description": "a.view(torch.float4_e2m1fn_x2).permute(1, 2, 0) is the tensor that task.py describes",
    }
    assert definition["outputs"]["c"]["shape"][0] == "l" and definition["outputs"]["c"]["dtype"] == "float16"
    (solution,) = [json.loads(p.read_text()) for p in (folders["nvfp4_gemv"] / "solutions").rglob("*.json")]
    run = solution["sources"][0]["content"].rpartition("def _packed_run(")[2]
    assert run.startswith("a, b, sfa, sfb, sfa_permuted, sfb_permuted, c):") and "sfa.permute(1, 2, 0)" in run


def test_a_record_becomes_a_trace_and_what_was_not_measured_is_0(folders):
    (found,) = read(folders["nvfp4_gemv"], "traces").values()
    (trace,) = found
    said = trace["evaluation"]
    assert said["performance"] == {"latency_ms": 0.0125, "reference_latency_ms": 0.0, "speedup_factor": 0.0}
    assert said["environment"]["hardware"] == "Imaginary CPU" and said["status"] == "PASSED"
    assert trace["workload"]["uuid"].startswith("nvfp4_gemv-m=129-k=320-l=3")
    assert not (folders["moe_gemm"] / "traces").exists()
    (solution,) = [json.loads(p.read_text()) for p in (folders["fmha_decode"] / "solutions").rglob("*.json")]
    assert "IT NEVER RAN ON ITS TARGET, cpu" in solution["description"]


def test_cases_that_are_too_large_are_named(tmp_path, capsys, monkeypatch):
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


def test_a_tensor_with_gaps_is_refused():
    leaf = flashinfer_pack.Leaf(("x",), False, torch.float32, (0, 1))
    with pytest.raises(ValueError, match="x must be dense"):
        leaf.flat(torch.zeros(4, 8)[:, ::2])


@pytest.mark.slow
@pytest.mark.parametrize("problem", CASES)
def test_the_package_loads_it_and_runs_solution_and_reference(folders, problem, package, tmp_path):
    env = {**os.environ, "PYTHONPATH": str(package), "FIB_CACHE_PATH": str(tmp_path), "HOME": str(tmp_path)}
    command = [sys.executable, str(SUPPORT / "flashinfer_check.py"), str(folders[problem]), "4"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    *lines, last = map(json.loads, done.stdout.splitlines())
    assert lines and all(error < 1e-2 for line in lines for error in line["errors"]), lines
    assert last == {"traces": int(problem == "nvfp4_gemv")}


@pytest.fixture(scope="session")
def package(tmp_path_factory) -> Path:
    """The package and the little that its models need, in a folder of their own."""
    place = tmp_path_factory.mktemp("environment")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(place), *PACKAGES]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"pip cannot get {PACKAGES[0]} here: {done.stderr.strip().splitlines()[-1:]}")
    return place


def test_that_there_is_no_trace_is_said(tmp_path, capsys):
    arguments = ["--case", "m=16 k=64 l=1", "--results", str(tmp_path / "none"), "-o", str(tmp_path / "out")]
    command = ["nvfp4_gemv", "--target", "cpu", "--format", "flashinfer-bench", *arguments]
    assert pack.main(command) == 0
    assert "no traces of nvfp4_gemv: there is no passed record of cpu_" in capsys.readouterr().out
    assert not (tmp_path / "out" / "traces").exists()
