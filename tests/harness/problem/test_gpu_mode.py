"""A problem folder in GPU MODE's format runs unchanged, and a right and a wrong submission are told apart."""

import shutil
import textwrap

import pytest

from harness import run
from harness.problem import folders, sources
from tests.support import ROOT, SUPPORT, copy_of, public_sets, write_files
from tests.support.foreign import Folder, write

FOLDER = SUPPORT / "gpu_mode" / "vectoradd"
KERNELBENCH = """
import torch

class Model(torch.nn.Module):
    def __init__(self, n):
        super().__init__()
        self.layer = torch.nn.Linear(n, n)

    def forward(self, x):
        return self.layer(x)

def get_inputs():
    return [torch.rand(3, 8)]

def get_init_inputs():
    return [8]
"""


def test_the_folder_is_read_as_it_stands():
    found = folders.find(str(FOLDER))
    assert not found.ours and found.files["utils.py"] == FOLDER.parent / "utils.py"
    one, two = found.tests
    assert (one.params, one.seed) == ({"sizes": [7, 130], "scale": 1}, 4242)
    assert (two.params, two.seed) == ({"sizes": [1, 3, 1000], "scale": 2}, 5236) and found.ranking_by == "geom"


def test_a_check_that_accepts_zeros_is_told_once(tmp_path, capsys):
    check = "def check_implementation(data, output):\n    return torch.allclose(output, data * 2, atol=1e2), 'differs'"
    assert run.main([str(write(tmp_path, Folder(more=check))), "--mode", "test", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.count("warning: this folder's check accepts an answer of zeros\n") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tests: 3", "tests: Input should be a valid list, got 3"),
        ("{}", "it must have tests"),
        ("3", "Input should be a valid dictionary or instance of _Task, got 3"),
        ("a: [", "not YAML: while parsing"),
        ("tests: []\nlang: cu", r"lang: Input should be 'py', got 'cu'"),
        ("tests: []\nmulti_gpu: true", "multi_gpu: Input should be False, got True"),
        ("tests: []\nranking_by: x", "ranking_by: Input should be 'last', 'mean' or 'geom', got 'x'"),
        ("tests: [{n: 3, seed: x}]", r"tests\.0: seed: must be 0 to 2\^63 - 1, got .*'seed': 'x'"),
        ("tests: [4]", r"tests\.0: Input should be a valid dictionary, got 4"),
        ("tests: [{n: {a: 1}}]", r"tests\.0: n: wanted a number, a text, true, false or a list, got .*{'a': 1}"),
        ("tests: []\nfiles: [x.py]", r"files\.0: "),
        ("tests: []\nfiles: [{name: x.py, source: task.yml}]", "files: x.py .* must be a file whose name ends in .py"),
        ("tests: []\nfiles: [{name: x.py}]", "files: x.py .* is not there"),
        ("tests: []\nfiles: [{name: harness.py, source: task.py}]", "harness.py .* a package of this judge"),
    ],
)
def test_a_malformed_task_yml_gives_one_line_with_the_key(tmp_path, text, message):
    write_files(tmp_path, {"task.py": "", "reference.py": "", "task.yml": text})
    with pytest.raises(folders.UsageError, match=message) as raised:
        folders.find(str(tmp_path))
    assert str(tmp_path / "task.yml") in str(raised.value) and "\n" not in str(raised.value)


def test_an_unknown_key_is_told_with_the_one_that_is_near(tmp_path, capsys):
    task = "tests: [{n: 3}]\nbenchmark: [{n: 4}]\ndescription: x\n"
    write_files(tmp_path, {"reference.py": "", "task.yml": task})
    assert folders.find(str(tmp_path)).benchmarks["cpu"] == ()
    said = capsys.readouterr().err
    assert "'benchmark'" in said and "benchmarks" in said and "description" not in said


def test_a_folder_needs_a_reference_and_python_in_its_submission(tmp_path):
    (tmp_path / "task.yml").write_text("tests: [{n: 3}]\n")
    with pytest.raises(folders.UsageError, match=r"files: reference\.py .* is not there"):
        folders.find(str(tmp_path))
    write_files(tmp_path, {"reference.py": "", "submission.py": "def custom_kernel(data) return data\n"})
    with pytest.raises(folders.UsageError, match=r"submission\.py:1: not Python"):
        folders.find(str(tmp_path)).winner("cpu")


def test_a_task_yaml_is_read_too_and_a_folder_without_either_is_told_what_to_write(tmp_path):
    write_files(tmp_path, {"reference.py": "", "task.py": "input_t = output_t = list\n"})
    with pytest.raises(folders.UsageError, match=r"has no task\.yml: write one, .* `tests: \[{size: 128, seed: 1}\]`"):
        folders.find(str(tmp_path))
    (tmp_path / "task.yaml").write_text("tests: [{n: 3}]\n")
    before = sources.problem_hash(tmp_path)
    assert folders.find(str(tmp_path)).tests[0].params == {"n": 3}
    (tmp_path / "task.yaml").write_text("tests: [{n: 4}]\n")
    assert sources.problem_hash(tmp_path) != before


def test_two_folders_of_one_name_have_two_names(tmp_path):
    """A copy of ours too: its task and its check may be others, so its records are no records of ours."""
    copied = copy_of(FOLDER.parent, tmp_path / "set") / "vectoradd"
    one, other = folders.find(str(FOLDER)).name, folders.find(str(copied)).name
    assert one.startswith("vectoradd@gpu_mode-") and one != other
    ours = folders.find("indexer")
    copy = shutil.copytree(ours.folder, tmp_path / "indexer", ignore=shutil.ignore_patterns("variants", "wrong"))
    found = folders.find(str(copy))
    assert ours.name == "indexer" and found.ours and found.name.startswith(f"indexer@{tmp_path.name}-")


@pytest.mark.parametrize(
    ("given", "files", "said"),
    [
        ("x/task.yml", {"x/task.yml": ""}, ": give the folder, x"),
        ("x/my.py", {"x/my.py": "", "x/task.yml": ""}, ": give the folder, x"),
        ("set", {"set/a/task.yml": "", "set/b/c/task.py": ""}, ": give the folder, set/a, set/b/c"),
        ("empty", {"empty/x.txt": ""}, "got 'empty'"),
        ("nothing", {}, "got 'nothing'"),
        ("a\0b", {}, "got 'a"),
    ],
)
def test_what_is_no_problem_folder_is_recognised(tmp_path, monkeypatch, given, files, said):
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path, files)
    with pytest.raises(folders.UsageError) as raised:
        folders.place(given)
    assert said in str(raised.value) and "\n" not in str(raised.value)


def test_a_folder_without_cases_is_told_where_they_belong(tmp_path, capsys):
    copy_of(FOLDER.parent, tmp_path / "set", {"vectoradd/task.yml": "tests: []\nbenchmarks: []\n"})
    for mode in ("test", "benchmark"):
        assert run.main([str(tmp_path / "set" / "vectoradd"), "--device", "cpu", "--mode", mode]) == 2
        assert capsys.readouterr().err.endswith(f"names no {mode} cases\n")


def test_the_example_for_kernelbench_in_the_documents_works(tmp_path, capsys):
    page = (ROOT / "docs" / "gpu_mode.md").read_text()
    page = page.partition("## KernelBench")[2].partition("`custom_kernel(data)` gets")[0]
    reference, _, task = textwrap.dedent(page[page.index("    # reference.py") :]).partition("# task.yml")
    submission = "def custom_kernel(data):\n    return data[0].layer(data[1][0]).detach()\n"
    files = {"reference.py": reference, "task.yml": task, "model.py": KERNELBENCH, "submission.py": submission}
    assert run.main([str(write_files(tmp_path, files)), "--device", "cpu", "--mode", "test"]) == 0
    assert "zeros" not in capsys.readouterr().out, "its check accepts none"


# --- the tool that tries other people's folders


def test_a_folder_is_tried():
    found = {r["submission"]: r for r in public_sets.tried(FOLDER, "set/vectoradd", "cpu", {"submission.py": "pass"})}
    wanted = dict.fromkeys(("submission.py", "(reference, same)"), "PASSED")
    wanted |= dict.fromkeys(("(reference, scaled)", "(reference, half)"), "INCORRECT")
    assert {name: r["verdict"] for name, r in found.items()} == wanted
    assert found["submission.py"]["right"] and not found["(reference, half)"]["right"]
    assert found["submission.py"]["upstream"] == "pass"


def test_each_difference_is_counted_and_named_with_its_reason():
    tried = [("good.py", "pass", "PASSED", ""), ("graph.py", "pass", "RULE_BROKEN", "graph.py:3: rule 1")]
    tried += [("odd.py", "pass", "REFUSED", "no room"), ("bad.py", "fail", "INCORRECT", "")]
    tried += [("taken.py", "fail", "PASSED", ""), ("gone.py", "exit 1: ImportError", "RUNTIME_ERROR", "")]
    names = ("submission", "upstream", "verdict", "reason")
    said = public_sets.render([{"folder": "set/a", **dict(zip(names, one, strict=True))} for one in tried])
    assert "Of 3 submissions that an eval.py accepts, 1 are accepted here, 1 break a rule" in said
    assert "Of 2 that it finds wrong, 1 are accepted here" in said
    assert said.splitlines()[2:] == [
        "* PASSED: its eval.py: fail: set/a taken.py",
        "* REFUSED: no room: set/a odd.py",
        "* RULE_BROKEN: rule 1: set/a graph.py",
    ]
