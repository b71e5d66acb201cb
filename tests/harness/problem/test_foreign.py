"""Folders with the traits of other people's problems: a right and a wrong submission of each are told apart."""

from types import SimpleNamespace

import numpy
import pytest
import torch

from harness.checker import foreign
from harness.checker.checker import Caught, Checker
from harness.judge import judging, phases, replies
from harness.judge.handle import RunnerHandle
from harness.judge.outcome import Outcome
from harness.judge.session import Session
from harness.problem import folders, sources
from harness.runner import claims, tree
from harness.runner.buffers import Buffer
from tests.support import SUPPORT, marks
from tests.support.foreign import COMPILED, FOLDERS, NEAR, Folder, write

STORED = SUPPORT / "gpu_mode" / "vectoradd"  # for the CPU
HOW = {
    "cpu": phases.Counts(processes=1, samples=2, warmups=1, buffers=2, extra=6),
    "cuda": phases.Counts(processes=2, samples=4, warmups=1, buffers=2),
}


def check(folder, device: str) -> None:
    """Judge submission.py and solutions/wrong.py of a folder, in tests and a short benchmark."""
    found = folders.find(str(folder))
    target = {"cpu": "cpu", "cuda": "sm90"}[device]
    files = (found.folder / "submission.py", found.folder / "solutions" / "wrong.py")
    handles = [RunnerHandle(file.stem, folders.submission(found, file), target) for file in files]
    way = judging.phases_of(device)
    with Session(found, device) as session:
        tests = way.run_tests(session, handles, list(found.tests), lambda *_: None)
        cases = list(found.benchmarks[device])
        times, _ = way.run_benchmarks(session, handles[:1], cases, HOW[device])
    assert [(o.status, o.reason) for o in tests["submission"]] == [("PASSED", "")] * len(found.tests)
    assert "INCORRECT" in {o.status for o in tests["wrong"]} and all(o.reason for o in tests["wrong"] if o.reason)
    assert not [timing.failure for timing in times["submission"] if timing.failure]
    samples = HOW[device].processes * HOW[device].samples
    assert [len(timing.flat("us")) for timing in times["submission"]] == [samples] * len(cases)


# Large on a GPU, and here no other than small ones; what is sorted is in its own test, what is turned in test_tree.py.
SELDOM = ("large_memory", "large_output", "seed_in_data", "turned", *COMPILED)
OFTEN = [name for name in ("vectoradd", *FOLDERS) if name not in ("triton_kernel", *SELDOM)]


@pytest.mark.parametrize("name", marks.first([*OFTEN, *SELDOM], len(OFTEN)))
def test_right_and_wrong_are_told_apart_on_a_cpu(name, tmp_path):
    check(write(tmp_path, FOLDERS[name]) if name in FOLDERS else STORED, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", FOLDERS)
def test_right_and_wrong_are_told_apart_on_a_gpu(name, tmp_path):
    check(write(tmp_path, FOLDERS[name]), "cuda")


def test_seeds_are_of_a_size_that_the_contents_bear(tmp_path):
    """With 63 bits all values would be equal, and a sort that copies would be right."""
    found = folders.find(str(write(tmp_path, FOLDERS["seed_in_data"])))
    wrong = RunnerHandle("wrong", folders.submission(found, found.folder / "solutions" / "wrong.py"), "cpu")
    with Session(found, "cpu") as session:
        cases = list(found.benchmarks["cpu"])
        times, readings = phases.run_benchmarks(session, [wrong], cases, HOW["cpu"])
    assert [time.failure.status for time in times["wrong"]] == ["INCORRECT"]
    assert any("lose their variety" in note for note in session.notes) and "can be stored" in session.remark
    assert all(0 <= int(seed) < 2**17 for group in readings for seed in group.seeds)


@pytest.mark.parametrize(
    ("bits", "make"),
    [
        (63, lambda n, seed: torch.rand(n, generator=torch.Generator().manual_seed(seed))),
        (53, lambda n, seed: torch.arange(n, dtype=torch.float64) + float(seed)),
        (32, lambda n, seed: torch.from_numpy(numpy.random.RandomState(seed).rand(n))),
        (31, lambda n, seed: torch.arange(n, dtype=torch.int32) + torch.tensor(seed, dtype=torch.int32)),
        (24, lambda n, seed: torch.arange(n, dtype=torch.float32) + seed),
        (0, lambda n, seed: torch.rand(n) + torch.tensor(float(seed))),
    ],
)
def test_the_most_bits_that_seeds_may_have(bits, make):
    reference = SimpleNamespace(generate_input=lambda n, seed: make(n, seed))
    assert foreign.seed_bits(reference, {"n": 64}, 5) == bits


def outcomes(tmp_path, made: Folder, files: tuple = ("submission",), twice: bool = False) -> dict[str, list[Outcome]]:
    """Return what files of a folder get in its test cases, by name."""
    found = folders.find(str(write(tmp_path, made)))
    handles = [RunnerHandle(name, folders.submission(found, tmp_path / f"{name}.py"), "cpu") for name in files]
    cases = list(found.tests)
    with Session(found, "cpu") as session:
        return phases.run_tests(session, handles, cases, lambda *_: None, twice=cases if twice else ())


def first(tmp_path, made: Folder) -> tuple[str, str]:
    """Return (status, first line of the reason) of a folder's submission in the first case."""
    outcome = outcomes(tmp_path, made)["submission"][0]
    return outcome.status, outcome.reason.partition("\n")[0]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("def check_implementation(data, output):\n    return False, 'no'", "own answer too: no"),
        ("def check_implementation(data, output):\n    return ['differs']", r"own answer too: \['differs'\]"),
        ("def check_implementation(data, output):\n    return 1.5", "must return .right, text., a text .* got 1.5"),
        ("def check_implementation(data, output):\n    return output.lost", r"own answer too: .*reference.py:\d+"),
        ("def generate_input(n, seed):\n    pass", r"must name what generate_input takes, \(n, seed\), got size=130"),
        ("def generate_input(size, seed):\n    return {'f': [lambda x: x]}", "data may hold .* got function at f.0"),
        ("def generate_input(size, seed):\n    raise RuntimeError('no CUDA driver\\nmore')", "needs a GPU, .*driver$"),
        ("def ref_kernel(data):\n    return {'s': (data, {'t': object()})}", "must return .* got object at s.1.t"),
        ("def ref_kernel(data):\n    return None", "ref_kernel must return the answer, got None: return the buffer"),
        ("def ref_kernel(data):\n    return [0] * 1025", "at most 1024 tensors, numbers and texts, .* got 1025"),
    ],
)
def test_a_folders_own_fault_is_no_verdict_on_a_submission(tmp_path, more, said):
    with pytest.raises(folders.ProblemError, match=said) as raised:
        outcomes(tmp_path, Folder(more=more))
    assert "\n" not in str(raised.value)


def test_a_class_of_the_reference_that_needs_the_judges_part_belongs_into_task_py(tmp_path):
    more = "class In(NamedTuple):\n    x: torch.Tensor\n\nUSED = [ref_kernel]\n\n"
    more += "def generate_input(size, seed):\n    return In(random(size, seed=seed))"
    with pytest.raises(folders.ProblemError, match=r"NameError: name 'ref_kernel' is not defined .*: move the classes"):
        outcomes(tmp_path, Folder(more=more))


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ("for _ in range(40):\n    data = [data]\nreturn data", "RUNTIME_ERROR", "nested at most 32 deep"),
        ("return 'x' * 2**20", "RUNTIME_ERROR", "and 16000 characters in its texts"),
        ("return type('Half', (float,), {})(0.5)", "INCORRECT", "custom_kernel must return Tensor, got Half"),
        ("return {'y': data * 2}", "INCORRECT", "custom_kernel must return Tensor, got dict(y: Tensor); "),
        ("from .helper import two", "RUNTIME_ERROR", "; relative imports are not supported, this file is in no "),
        ("from helper import two", "RUNTIME_ERROR", "a module of the folder must be in `files` of task.yml"),
        ("from reference import x", "RUNTIME_ERROR", "no submission sees the reference but for classes of its data"),
        ("open(__file__.replace('submission', 'helper'))", "RUNTIME_ERROR", "beside a submission go sources"),
        ("class ModelNew:\n    pass  # no def custom_kernel", "RUNTIME_ERROR", "see docs/gpu_mode.md, KernelBench"),
    ],
)
def test_what_is_wrong_with_an_answer_or_an_import_is_said(tmp_path, body, status, said):
    (tmp_path / "helper.py").write_text("two = 2\n")
    got, line = first(tmp_path, Folder(body))
    assert got == status and said in line, line


@pytest.mark.parametrize("dtype", marks.first(["float16", "bfloat16", "float64"]))
def test_an_answer_in_another_float_is_for_the_check_to_judge_with_a_note(tmp_path, dtype):
    check = NEAR.replace("output,", "output.float(),", 1).replace("1e-5", "2e-2")
    note = f"the reference does not answer in {dtype}, its check was asked"
    assert first(tmp_path, Folder(f"return (data * 2).to(torch.{dtype})", check=check)) == ("PASSED", note)
    status, said = first(tmp_path, Folder(f"return (data * 3).to(torch.{dtype})", check=check))
    assert status == "INCORRECT" and said.startswith(note) and "elements differ" in said


@pytest.mark.parametrize("name", ["Config", "ref_kernel", "Other"])
def test_classes_of_the_data_and_nothing_else_can_be_imported_from_the_reference(tmp_path, name):
    """Of a reference, too, that gets its answer from a module beside it, which no submission sees."""
    more = """
        import beside

        @dataclasses.dataclass
        class Config:
            scale: float

        class Other:
            pass

        def generate_input(size, seed):
            return Config(0.5), random(size, seed=seed)

        def ref_kernel(data):
            return data[1] * data[0].scale * beside.ONE
        """
    (tmp_path / "beside.py").write_text("ONE = 1\n")
    right = f"""
        from reference import {name}

        def custom_kernel(data):
            assert isinstance(data[0], {name})
            try:
                import beside
            except ImportError:
                return data[1] * data[0].scale
        """
    status, said = first(tmp_path, Folder(right, more=more, check=NEAR))
    assert (status, said) == ("PASSED", "") if name == "Config" else "but for classes of its data" in said, said
    before = sources.problem_hash(tmp_path)
    (tmp_path / "beside.py").write_text("ONE = 2\n")
    assert sources.problem_hash(tmp_path) != before
    with pytest.raises(folders.UsageError, match=r"beside\.py is a module of .*, whose reference imports it"):
        folders.submission(folders.find(str(tmp_path)), tmp_path / "beside.py")


@pytest.mark.parametrize(("gpu", "switch"), [(True, True), (True, False), (False, True)])
def test_what_is_refused_with_tf32_may_be_right_without(monkeypatch, gpu, switch):
    """The check is asked with torch's own switches first, which are as before in the end."""
    tf32, asked = torch.backends.cudnn, []

    def check(data, output):
        asked.append(tf32.allow_tf32)
        return bool((output == 1).all()) or not tf32.allow_tf32, "differs"

    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(tf32, "allow_tf32", switch)
    reference = SimpleNamespace(check_implementation=check, ref_kernel=torch.clone, __file__="reference.py")
    right, _ = foreign.said_of(reference, torch.ones(3), torch.full((3,), 2.0))
    assert right is (gpu or not switch) and asked[:2] == ([True, False] if gpu and switch else asked[:2])
    assert tf32.allow_tf32 is switch


def test_an_import_that_takes_too_long_names_the_limit_to_try(tmp_path, monkeypatch):
    monkeypatch.setattr(replies, "IMPORT_LIMIT_S", 0.2)
    status, said = first(tmp_path, Folder("while True:\n    pass\n\ndef custom_kernel(data):\n    return data"))
    assert status == "TIMEOUT" and said.startswith("on import: no answer within 0.") and "try --timeout 0.4" in said
    with Session(folders.find(str(tmp_path)), "cpu", 0.5) as session:
        assert session.import_limit_s == 0.5


def test_a_check_that_gives_no_reason_gets_one_and_nothing_is_written_into_a_folder(tmp_path):
    more = "def check_implementation(data, output):\n    return torch.equal(output, data * 2), ''"
    said = "check_implementation returned (False, '')"
    assert first(tmp_path, Folder("return data * 3", more=more)) == ("INCORRECT", said)
    assert {path.name for path in tmp_path.iterdir()} == {"task.yml", "reference.py", "submission.py", "solutions"}


def test_answers_to_the_public_seeds_are_not_enough(tmp_path):
    """A recorded run asks twice, the second time on contents of a secret seed, and names the seed."""
    text = "import torch\nKNOWN = torch.randn(130, generator=torch.Generator().manual_seed(4130))\n\n"
    text += "def custom_kernel(data):\n    return data * (2 if len(data) > 130 or torch.equal(data, KNOWN) else 3)\n"
    (tmp_path / "stored.py").write_text(text)
    said = outcomes(tmp_path, Folder(), ("submission", "stored"), twice=True)
    assert [outcome.status for outcome in said["submission"]] == ["PASSED", "PASSED"]
    assert [outcome.status for outcome in said["stored"]] == ["INCORRECT", "PASSED"]
    assert "with another one (--seed " in said["stored"][0].reason


def filled(made: Checker, seed: int) -> tuple[dict, Buffer]:
    """What the checker says of its contents, and a buffer that it has filled, under the name `one`."""
    found = made.content({"case": {"size": 40}, "seed": seed}, [])
    buffer = Buffer(found["host"])
    made.buffers["one"] = [buffer]
    made.fill({"runner": "one", "buffer": 0}, [])
    return found, buffer


def test_numbers_and_texts_of_the_data_are_no_part_of_the_layout(tmp_path):
    """They are contents: a runner that had them before the call could work ahead where the answer depends on them."""
    write(tmp_path, FOLDERS["dict_config"])
    made = Checker({"folder": str(tmp_path), "ours": False, "device": "cpu", "files": {}})
    layouts = []
    for seed in (1001, 2**60):
        found, buffer = filled(made, seed)
        layouts.append((found["host"], found["open"]))
        values = tree.unpacked(found["open"]["values"], buffer.memory)
        data = tree.build(found["open"]["data"], buffer.memory, None, values)
        assert data["by"] == made.pristine["by"] and torch.equal(data["x"], made.pristine["x"])
        buffer.close()
    assert layouts[0] == layouts[1]
    assert not any(word in str(layouts) for word in ("half", "whole"))


@pytest.mark.parametrize(
    "lie",
    [
        {},
        {"type": "tuple", "items": [{"type": "value", "value": "1"}] * 60},
        {"type": "object", "value": "os:system", "keys": ["__class__"], "items": [{"type": "value", "value": "1"}]},
        {"type": "dict", "keys": [], "items": [{"type": "value", "value": "1"}]},
        {"type": "value", "value": "no JSON"},
        {"type": "class", "value": "os:system"},
        {"device": "cuda"},
        {"dtype": "float64"},
        {"dtype": "Tensor"},
        {"shape": [2**40]},
        {"shape": [2**48] * 4, "stride": [0] * 4},
        {"stride": [0]},
        {"stride": [-1]},
        {"stride": [4]},
        {"stride": [1, 1]},
        {"conj": True},
        {"value": "ndarray"},
    ],
    ids=str,
)
def test_what_a_runner_says_of_its_answer_is_not_believed(tmp_path, lie):
    """Whatever the claim is, the bytes are those that were fetched, and the verdict is the check's or INCORRECT."""
    write(tmp_path, Folder())
    made = Checker({"folder": str(tmp_path), "ours": False, "device": "cpu", "files": {}})
    _, buffer = filled(made, 5)
    claim, (part,) = claims.told(made.pristine * 2)
    if lie == {"stride": [4]}:  # true, and most words that are looked at would be gaps
        part = part[:, None].repeat(1, 4)[:, 0]
    made.caught["one"] = Caught("", [tree.raw(part).clone()])
    said = {**replies.Claim(type="").model_dump(), **claim, **lie}
    verdict = made.judge({"runner": "one", "buffer": 0, "claims": [said], "baseline": False, "fixed": False}, [])
    buffer.close()
    assert verdict["status"] == ("INCORRECT" if lie not in ({}, {"conj": True}) else "PASSED"), verdict
    assert verdict["reason"] or not lie or verdict["status"] == "PASSED"
