"""leaderboard/pack.py for GPU MODE: the file stands alone, gives the same bits, keeps the service's limits and says
where it ran; the folder of a problem is one in that format.
"""

import functools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from harness import run
from harness.checker import foreign
from harness.problem import folders, scan
from harness.runner import tree
from leaderboard import gpu_mode_pack, pack
from problems.common import load
from tests.support import SUPPORT, forked, popcorn
from tests.support.records import full, write

PROBLEMS = ("nvfp4_gemv", "fmha_decode", "moe_gemm")
SMALL = {
    "nvfp4_gemv": {"m": 33, "k": 128, "l": 3},
    "fmha_decode": {
        "batch": 3,
        "queries": 2,
        "heads": 8,
        "window": 64,
        "compressed": 33,
        "page_window": 32,
        "page_compressed": 64,
        "pool": 99,
        "order": "random",
        "content": "ragged",
    },
    "moe_gemm": {
        "tokens": 7,
        "experts": 8,
        "topk": 2,
        "hidden": 192,
        "inner": 320,
        "activation": "bf16",
        "router": "uniform",
        "content": "plain",
    },
}
WINNERS = [
    (problem, name, target)
    for problem in PROBLEMS
    for target, names in load.winners(load.PROBLEMS / problem).items()
    if target in ("cpu", "sm90")
    for name in names
]
needs_nvcc = pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
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


@pytest.fixture
def results(tmp_path):
    """Made-up records: sm90_dp4a ran on a GPU."""
    write(tmp_path / "results", "gpu-box", full("sm90_dp4a", 1.1))
    return tmp_path / "results"


def packed(tmp_path, problem: str, *words: str) -> Path:
    out = tmp_path / "packed" / "submission.py"
    out.parent.mkdir(exist_ok=True)
    assert pack.main([problem, *words, "-o", str(out)]) == 0
    return out


@functools.cache
def data_of(problem: str) -> tuple:
    """The data of a small case, and the module of the problem's task."""
    folder = load.PROBLEMS / problem
    reference, task = load.module(folder, "reference"), load.module(folder, "task")
    made = reference.generate_input(**SMALL[problem], seed=5, device="cpu")
    if hasattr(reference, "generate_weights"):
        made = task.Data(reference.generate_weights(**SMALL[problem], seed=5, device="cpu"), *made)
    return made, task


def bits(tensors: list[torch.Tensor]) -> list[bytes]:
    return [bytes(tensor.contiguous().flatten().view(torch.uint8).numpy()) for tensor in tensors]


def same_bits(tmp_path: Path, problem: str, name: str) -> None:
    """The packed file, in an empty folder, on plain tuples, against the variant in the repository."""
    file = packed(tmp_path, problem, "--variant", name)
    place = tmp_path / "empty"
    place.mkdir()
    shutil.copy2(file, place)
    data, _ = data_of(problem)
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


def test_the_winner_gives_the_same_bits_in_an_empty_folder(tmp_path):
    same_bits(tmp_path, "nvfp4_gemv", load.winner(load.PROBLEMS / "nvfp4_gemv", "cpu"))


@pytest.mark.slow
@pytest.mark.parametrize(("problem", "name"), [(p, n) for p, n, target in WINNERS if target == "cpu"])
def test_every_cpu_winner_gives_the_same_bits_in_an_empty_folder(tmp_path, problem, name):
    if load.missing_cpu_flags(load.PROBLEMS / problem / "variants" / f"{name}.py"):
        pytest.skip("this CPU cannot run it")
    same_bits(tmp_path, problem, name)


@pytest.mark.slow
@pytest.mark.parametrize("problem", PROBLEMS)
def test_the_packed_winner_is_judged_as_a_file_from_outside_and_in_the_packed_folder(tmp_path, problem, capsys):
    file = packed(tmp_path, problem, "--variant", load.winner(load.PROBLEMS / problem, "cpu"))
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy2(file, alone / "packed.py")
    words = ["--submission", str(alone / "packed.py"), "--device", "cpu", "--mode", "test", "--quiet"]
    assert run.main([problem, *words]) == 0, capsys.readouterr().out
    if problem != "nvfp4_gemv":
        assert run.main([str(file.parent / f"{problem}_gpu_mode"), *words]) == 0, capsys.readouterr().out


def test_a_packed_reference_has_what_it_takes_of_this_format(tmp_path):
    """mhc_site's asks for OUTPUTS, which a folder of the service's format may not have in its task.py."""
    file = packed(tmp_path, "mhc_site", "--target", "cpu")
    words = ["--submission", str(file), "--device", "cpu", "--mode", "test", "--quiet", "--case", "tokens=1 hidden=64"]
    assert run.main([str(file.parent / "mhc_site_gpu_mode"), *words]) == 0


@pytest.mark.parametrize(("problem", "name", "target"), WINNERS)
def test_every_winner_is_a_file_that_the_service_takes(tmp_path, problem, name, target):
    file = packed(tmp_path, problem, "--variant", name)
    gpus = {"cpu": (), "sm90": ("H100",)}[target]
    assert popcorn.read(file) == popcorn.Request(problem, gpus)
    assert file.read_text().startswith(f"#!POPCORN leaderboard {problem}\n#")
    assert '#include "' not in file.read_text() and "from problems" not in file.read_text()
    assert scan.findings([file]) == [], "the judge's own scan finds nothing either"


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize(("problem", "name"), [(p, n) for p, n, target in WINNERS if target == "sm90"])
def test_every_sm90_winner_compiles_from_the_packed_file(tmp_path, problem, name, monkeypatch):
    monkeypatch.setenv("KERNEL_BUILD_DIR", str(tmp_path / "builds"))
    (tmp_path / "task.py").write_text("")
    module = load.from_file(tmp_path, packed(tmp_path, problem, "--variant", name))
    (artefact,) = module.compile_for("sm90")
    assert artefact.path.is_file() and artefact.kernels()


def test_a_board_of_the_service_is_named_with_its_gpu(tmp_path):
    assert popcorn.read(packed(tmp_path, "nvfp4_gemv", "--variant", "sm100_native")).gpus == ("NVIDIA",)
    assert popcorn.read(packed(tmp_path, "nvfp4_gemv", "--target", "sm90", "--gpu", "B200")).gpus == ("B200",)
    assert not list((tmp_path / "packed").glob("*_gpu_mode")), "that board has its own folder there"


def test_the_file_says_where_it_ran_or_that_it_never_did(tmp_path, results, capsys):
    file = packed(tmp_path, "nvfp4_gemv", "--variant", "sm90_dp4a", "--results", str(results))
    head = file.read_text().partition('"""')[0]
    assert "# It ran on gpu-box (2026-01-02), with other sources than these: geomean" in head and "over 3 cases" in head
    assert "NEVER" not in head and "It ran on gpu-box" in capsys.readouterr().out
    for name, target in (("sm100_native", "sm100"), ("cpu_portable", "cpu")):
        file = packed(tmp_path, "nvfp4_gemv", "--variant", name, "--results", str(results))
        head = file.read_text().partition('"""')[0]
        assert f"# IT NEVER RAN ON ITS TARGET, {target}: no record says that it passed there." in head
        assert f"IT NEVER RAN ON ITS TARGET, {target}" in capsys.readouterr().out
    write(results, "new-box", full("cpu_portable", 2.0, target="cpu", status="INCORRECT", run="r9"))
    again = packed(tmp_path, "nvfp4_gemv", "--variant", "cpu_portable", "--results", str(results))
    assert "NEVER RAN" in again.read_text(), "a failed run is none"


def test_records_of_these_sources_are_named_as_such(tmp_path, results):
    found = folders.find("nvfp4_gemv").variant("cpu_portable")
    own = {"target": "cpu", "source_hash": scan.source_hash(found.file, found.folder), "run": "r5"}
    write(results, "cpu-box", full("cpu_portable", 3.0, **own))
    file = packed(tmp_path, "nvfp4_gemv", "--variant", "cpu_portable", "--results", str(results))
    assert "# It ran on cpu-box (2026-01-02), with these sources: geomean" in file.read_text()


def test_the_folder_is_read_as_one_of_the_service_and_its_check_works_on_plain_tuples(tmp_path):
    file = packed(tmp_path, "moe_gemm", "--target", "cpu")
    folder = file.parent / "moe_gemm_gpu_mode"
    assert {path.name for path in folder.iterdir()} == {"task.yml", "task.py", "reference.py", "utils.py"}
    found, ours = folders.find(str(folder)), folders.find("moe_gemm")
    assert not found.ours and [c.params for c in found.tests] == [c.params for c in ours.tests]
    assert [c.seed for c in found.benchmarks["cuda"]] == [c.seed for c in ours.benchmarks["cuda"]]
    reference = load.module(folder, "reference")
    data = popcorn.copied(reference.generate_input(**SMALL["moe_gemm"], seed=5))
    want = reference.ref_kernel(data)
    assert reference.check_implementation(data, want) == (True, "")
    good, said = reference.check_implementation(data, want * 1.1)
    assert not good and "mismatch found" in said
    assert all("stream" not in path.read_text().lower() for path in folder.glob("*.py"))


@pytest.mark.parametrize("name", [name for name in folders.problem_names() if not folders.find(name).composition])
def test_a_packed_reference_answers_in_the_form_of_a_submission_and_its_check_tells_wrong_answers(tmp_path, name):
    """The judge shows a check the reference's own answer too, where that finds an answer wrong."""
    problem, folder = folders.find(name), tmp_path / "packed"
    folder.mkdir()
    for file, content in gpu_mode_pack.task_folder(problem).items():
        (folder / file).write_text(content)
    reference, case = load.module(folder, "reference"), problem.tests[0]
    data = reference.generate_input(**case.params, seed=case.seed)
    outputs = load.constants(problem.folder / "task.py", "OUTPUTS")["OUTPUTS"]
    holder = getattr(data, "outputs", data)
    right = reference.ref_kernel(data)
    answers = right if isinstance(right, tuple) else (right,)
    assert isinstance(right, tuple) == (len(outputs) > 1)
    assert [one.dtype for one in answers] == [getattr(holder, output).dtype for output in outputs]
    assert foreign.said_of(reference, data, right) == (True, "")
    wrong = load.from_file(folder, problem.folder / "wrong" / "zeros.py").custom_kernel(tree.clone(data))
    good, said = foreign.said_of(reference, data, wrong)
    assert not good and "mismatch found" in said
    plain = popcorn.copied(data)  # as the service's eval.py hands it on
    assert reference.check_implementation(plain, right) == (True, "")
    assert not reference.check_implementation(plain, wrong)[0]


def test_a_folder_with_other_files_is_not_overwritten(tmp_path, capsys):
    other = tmp_path / "packed" / "moe_gemm_gpu_mode" / "mine.py"
    other.parent.mkdir(parents=True)
    other.write_text("x = 1\n")
    words = ["moe_gemm", "--target", "cpu", "-o", str(tmp_path / "packed" / "submission.py")]
    assert pack.main(words) == 2
    assert "must be new, or of an earlier call, found mine.py" in capsys.readouterr().err
    assert other.read_text() == "x = 1\n"
    other.rename(tmp_path / "mine.py")
    (other.parent / "__pycache__").mkdir()
    assert pack.main(words) == pack.main(words) == 0, "a folder of an earlier call is written anew"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nvfp4_gemv", "--variant", "lost"], "--variant must be one of nvfp4_gemv's variants"),
        (["nvfp4_gemv", "--variant", "sm90_dp4a", "--target", "cpu"], "--target must be one of sm90_dp4a's"),
        (["dsv4_forward", "--variant", "composed"], "dsv4_forward is a composition"),
        (["nothing", "--variant", "x"], "PROBLEM must be one of"),
        (["nothing"], "PROBLEM must be one of"),
        (["dsv4_forward"], "PROBLEM must be one whose variants are single files, dsv4_forward is a composition"),
        (["nvfp4_gemv"], "give --variant NAME, or --target for its winner"),
    ],
)
def test_bad_use_is_one_line(words, message, tmp_path, capsys):
    assert pack.main([*words, "-o", str(tmp_path / "x.py")]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_a_place_that_is_no_python_file_or_cannot_be_written_is_named(tmp_path, capsys):
    assert pack.main(["nvfp4_gemv", "--target", "cpu", "-o", str(tmp_path / "x.txt")]) == 2
    assert "-o must name a .py file" in capsys.readouterr().err
    for place in (tmp_path / "none" / "x.py", "/dev/null/x.py", "/proc/x.py"):
        assert pack.main(["nvfp4_gemv", "--target", "cpu", "-o", str(place)]) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"leaderboard/pack.py: -o: cannot write {place}: ") and err.count("\n") == 1
    words = ["nvfp4_gemv", "--target", "cpu", "--format", "flashinfer-bench", "-o"]
    for place in ("/dev/null/x", "/proc/x"):
        assert pack.main([*words, place]) == 2
        assert f"-o: cannot write {place}: " in capsys.readouterr().err


def test_what_the_service_would_refuse_is_not_written(tmp_path):
    word = "str" + "eam"
    with pytest.raises(ValueError, match='line 2 of the packed file has the refused word "stream": # Up'):
        gpu_mode_pack.checked(f"x = 1\n# Up{word}\n")
    with pytest.raises(ValueError, match="1000001 bytes, at most 1000000 are taken"):
        gpu_mode_pack.checked("#" * 1_000_001)


def test_the_parser_of_the_format_refuses_what_the_service_does(tmp_path):
    def refused(text: str, name: str = "x.py") -> str:
        (tmp_path / name).write_text(text)
        with pytest.raises(popcorn.Refused) as error:
            popcorn.read(tmp_path / name)
        return str(error.value)

    assert "no leaderboard" in refused("\n#!POPCORN leaderboard a\n"), "a blank line ends the search"
    assert "no leaderboard" in refused("x = 1\n#!POPCORN leaderboard a\n")
    assert "unknown, or twice" in refused("#!POPCORN leaderboard a\n#!POPCORN leaderboard b\n")
    assert "unknown, or twice" in refused("#!POPCORN board a\n") and "no value" in refused("#!POPCORN gpu\n")
    assert "no such GPU" in refused("#!POPCORN leaderboard a\n#!POPCORN gpu H200\n")
    assert "the word" in refused("#!POPCORN leaderboard a\n# UPSTR" + "EAM\n")
    assert "name or size" in refused("#!POPCORN leaderboard a\n", "x.txt")
    (tmp_path / "x.py").write_text("# words\n#!POPCORN leaderboard a\n//!POPCORN gpus H100 B200\nx = 1\n")
    assert popcorn.read(tmp_path / "x.py") == popcorn.Request("a", ("H100", "B200"))


ODD = '''"""odd: names that a packer could want for itself."""
import torch
from task import input_t, output_t

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
    assert SOURCE.endswith("odd.py")
    data.z.copy_(run(_named(data.x), data.y) * Path.scale)
    return data.z
'''


@pytest.fixture
def odd(tmp_path) -> Path:
    """A problem outside the repository, with a variant."""
    folder = tmp_path / "vector_add"
    shutil.copytree(SUPPORT / "problems" / "vector_add", folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "variants").mkdir()
    (folder / "variants" / "odd.py").write_text(ODD)
    return folder


def test_a_variant_may_have_any_names_but_those_of_the_packer(tmp_path, odd, capsys):
    file = packed(tmp_path, str(odd), "--variant", "odd")
    x, y = torch.arange(8.0), torch.ones(8)
    place = file.parent
    torch.save((x, y, torch.empty(8)), place / "data.pt")
    assert forked.run(["-c", ALONE], cwd=place, timeout=300).returncode == 0  # a whole start of it: see same_bits
    (out,) = torch.load(place / "out.pt")
    assert torch.equal(out, x + y)
    assert pack.main([str(odd), "--variant", "odd", "--format", "flashinfer-bench", "-o", str(tmp_path / "bench")]) == 0
    (solution,) = [json.loads(path.read_text()) for path in (tmp_path / "bench" / "solutions").rglob("*.json")]
    space: dict = {}
    exec(solution["sources"][0]["content"], space)
    z = torch.empty(8)
    space["_packed_run"](x, y, z)
    assert torch.equal(z, x + y)
    variant = odd / "variants" / "odd.py"
    variant.write_text(ODD + "_packed_mine = 1\n")
    capsys.readouterr()
    assert pack.main([str(odd), "--variant", "odd", "-o", str(place / "again.py")]) == 2
    assert "names that hold _packed are for the packed file: rename yours" in capsys.readouterr().err
