"""The whole model as a problem: cases, what the check lets through, and what a call leaves behind."""

import ast
import dataclasses
import functools
import os

import pytest
import torch

from harness.checker.checker import Checker
from harness.problem import folders, sources
from harness.runner import claims, tree
from problems import wrong
from problems.common import load
from problems.dsv4_forward.cache.state import State
from problems.dsv4_forward.model import Model
from problems.dsv4_forward.weights import config, layout
from problems.dsv4_forward.weights.config import TINY
from tests.support.marks import first

FOLDER = load.PROBLEMS / "dsv4_forward"
TASK, REFERENCE = load.module(FOLDER, "task"), load.module(FOLDER, "reference")
VARIANTS = sorted(file.stem for file in (FOLDER / "variants").glob("*.py"))
WRONG = [file.stem for file in wrong.write(FOLDER)]
QUICK = [case for case in TASK.TESTS if case.config == "tiny"]
SHARP = QUICK[1]  # fp32, three sequences of unlike length, an entry and a block about to end


def params(case) -> dict:
    return {**dataclasses.asdict(case), "device": "cpu"}


@functools.cache
def made(case) -> tuple:
    """(data, want) of a case, from its public seed."""
    weights = REFERENCE.generate_weights(**params(case))
    data = TASK.Data(weights, *REFERENCE.generate_input(**params(case)))
    return data, REFERENCE.ref_kernel(data)


def fresh(data) -> object:
    """The data with state and outputs of its own, for a call to overwrite."""
    inputs = data.inputs._replace(state=data.inputs.state.clone())
    return data._replace(inputs=inputs, outputs=TASK.Outputs(*(t.clone() for t in data.outputs)))


def call(module, data) -> tuple[object, tuple]:
    """(the data that a call was made on, what it returned)."""
    given = fresh(data)
    given = given._replace(weights=module.prepare(given.weights))
    return given, module.custom_kernel(given)


def name(case) -> str:
    return f"{case.config}-{case.format}-{case.batch}x{case.new}-after-{case.context}"


@pytest.mark.parametrize("case", [SHARP, QUICK[5]], ids=name)
def test_data_is_as_task_says(case):
    (weights, inputs, outputs), want = made(case)
    cfg, blocks = config.find(case.config), -(-(case.context + case.new) // 128)
    lengths = [case.context - b for b in range(case.batch)]
    assert weights[:2] == (case.config, case.format)
    assert weights.bytes.numel() == layout.nbytes(layout.layout(cfg, case.format)) == case.weight_bytes()
    assert inputs.tokens.shape == (case.batch, case.new) and 0 <= inputs.tokens.min() <= inputs.tokens.max() < 512
    assert inputs.lengths.tolist() == lengths and inputs.chunk == 128 and inputs.blocks.shape == (case.batch, blocks)
    total = case.batch * blocks
    needed = [-(-(n + case.new) // 128) for n in lengths]
    for row, count in zip(inputs.blocks.tolist(), needed, strict=True):
        assert all(0 <= b < total for b in row[:count]) and row[count:] == [total] * (blocks - count)
    taken = [b for row, count in zip(inputs.blocks.tolist(), needed, strict=True) for b in row[:count]]
    assert len(set(taken)) == len(taken)
    assert inputs.state.numel() == State.nbytes(cfg, case.format, case.batch, total, 128, snapshots=0)
    for tensor, answer, dtype in zip(outputs, want, (torch.float32, torch.int64), strict=True):
        assert (tensor.shape, tensor.dtype) == (answer.shape, dtype) and answer.dtype == dtype
    assert want[0].shape == (case.batch, 512) and bool(torch.isfinite(want[0]).all())


def test_inputs_differ_with_the_seed_and_are_equal_with_it():
    data, want = made(SHARP)
    REFERENCE.generate_weights(**params(SHARP))
    again = REFERENCE.generate_input(**params(SHARP))[0]
    others = [REFERENCE.generate_input(**{**params(SHARP), "seed": seed})[0] for seed in (5, 6, 7)]
    assert all(torch.equal(a, b) for a, b in zip(again[:4], data.inputs[:4], strict=True))
    assert not all(torch.equal(other.blocks, again.blocks) for other in others)
    assert not any(torch.equal(other.tokens, again.tokens) for other in others)
    # The last tokens before the call are its own: the same new ones then give other logits.
    moved = data._replace(inputs=others[0]._replace(tokens=again.tokens))
    apart = (REFERENCE.ref_kernel(moved)[0] - want[0]).norm(dim=1) / want[0].norm(dim=1)
    assert apart.min() > 0.01


def test_what_no_token_wrote_is_nan():
    data, _ = made(QUICK[0])  # three tokens
    state = State(TINY, "fp32", 1, 1, snapshots=0)
    state.buffer.copy_(data.inputs.state)
    for layer in state.layers:
        held = layer.window.data.isnan().all(-1).flatten()
        assert int((~held).sum()) == 3, "rows of the window"


def test_inputs_need_their_weights():
    REFERENCE.generate_weights(**params(QUICK[6]))
    with pytest.raises(ValueError, match="weights of tiny in fp32 on cpu must be generated first"):
        REFERENCE.generate_input(**params(QUICK[0]))


@pytest.mark.parametrize(
    "change", [{"phase": "train"}, {"phase": "prefill"}, {"new": 2}, {"new": 0}, {"batch": 0}, {"batch": 4}]
)
def test_cases_that_are_none_are_refused(change):
    with pytest.raises(ValueError, match="got"):
        dataclasses.replace(QUICK[0], **change)


# Every day both phases, one sequence and three, and each format.
DAILY = [SHARP, *(QUICK[i] for i in (7, 8, 11, 14))]
CASES = DAILY + [case for case in (*TASK.TESTS, *TASK.BENCHMARKS_CPU) if case not in DAILY]


@pytest.mark.parametrize("case", first(CASES, len(DAILY)), ids=name)
def test_every_variant_is_right(case):
    data, want = made(case)
    before = [t.clone() for t in tree.tensors((data.weights, data.inputs))]
    for variant in VARIANTS:
        given, output = call(load.variant("dsv4_forward", variant), data)
        assert output[0] is given.outputs.logits and output[1] is given.outputs.next
        result = REFERENCE.compare(data, want, output)
        assert result.ok, f"{variant}: {result.message}"
        assert result.rel <= TASK.logits_rtol(case.config, case.format)
    after = tree.tensors((data.weights, data.inputs))
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_the_selector_runs_the_winner():
    data, want = made(SHARP)
    module = load.module(FOLDER, "submission")
    assert REFERENCE.compare(data, want, call(module, data)[1]).ok
    assert set(module.WINNERS) == {"cpu", "sm90", "sm100"} and set(sum(module.WINNERS.values(), ())) <= set(VARIANTS)


@pytest.mark.parametrize("stem", WRONG)
def test_what_is_wrong_is_refused(stem):
    """One case of fp32, whose bound is tight, tells all of them from right ones."""
    data, want = made(SHARP)
    module = load.module(FOLDER, f"wrong/{stem}")
    result = REFERENCE.compare(data, want, call(module, data)[1])
    assert not result.ok and "mismatch found!" in result.message
    assert wrong.read(FOLDER)[stem].case == str(folders.find("dsv4_forward").tests[TASK.TESTS.index(SHARP)])


WIDE = QUICK[13]  # nvfp4, three sequences: the widest bound
SIGNS = torch.tensor([[1.0], [0.0], [0.0]]) * torch.tensor([1.0, -1.0]).repeat(2**16)  # what no head makes of the first

SPOILT = {
    "one in twenty zero": lambda logits: logits * (torch.arange(logits.numel()).view(logits.shape) % 20 > 0),
    "largest zero": lambda logits: logits * (logits.abs() < logits.abs().max()),
    "one NaN": lambda logits: logits.index_put((torch.tensor(0), torch.tensor(7)), torch.tensor(torch.nan)),
    "bf16": lambda logits: logits.bfloat16().float(),
    "one sequence's": lambda logits: logits * (1 + 1.5 * REFERENCE.HEAD_RTOL * SIGNS[:, : logits.shape[1]]),
    "zeros": torch.zeros_like,
    "half": lambda logits: logits / 2,
    "another sequence's": lambda logits: logits.roll(1, 0),
}


@pytest.mark.parametrize("how", SPOILT)
@pytest.mark.parametrize("case", [SHARP, WIDE], ids=name)
def test_spoilt_logits_are_refused_in_every_format(case, how):
    data, (logits, _) = made(case)
    bad = SPOILT[how](logits)
    assert not REFERENCE.compare(data, (logits, logits.argmax(1)), (bad, bad.argmax(1))).ok
    assert REFERENCE.compare(data, (logits, logits.argmax(1)), (logits, logits.argmax(1))).ok


def test_next_is_where_the_returned_logits_are_largest():
    data, want = made(SHARP)
    for bad in (want[1] + 1, want[1].roll(1), want[1] * 0 - 1, want[1].int(), want[1][:2], want[1].tolist()):
        assert not REFERENCE.compare(data, want, (want[0], bad)).ok
    for bad in (want[0], list(want), (want[0],), (*want, want[1]), (want[0].double(), want[1]), (want[1], want[0])):
        assert not REFERENCE.compare(data, want, bad).ok
    ok, text = REFERENCE.check_implementation(data, (want[0], want[1].roll(1)))
    assert not ok and "next must be where the logits are largest" in text


def test_the_other_honest_answer_counts_for_each_sequence(monkeypatch):
    """One sequence as with exact activations, the others as with rounded ones: each is near one of the two."""
    data, want = made(WIDE)
    rounded = REFERENCE._logits(data, torch.bfloat16)
    mixed = torch.cat([want[0][:1], rounded[1:]])
    far = REFERENCE.check.norm(mixed, want[0], 1.0, torch.float32, batch=0).rel
    monkeypatch.setattr(REFERENCE, "logits_rtol", lambda *_: far / 2)
    assert REFERENCE.compare(data, want, (mixed, mixed.argmax(1))).ok
    assert not REFERENCE.compare(data, want, (2 * mixed, mixed.argmax(1))).ok


@pytest.mark.parametrize("case", [QUICK[3], QUICK[4]], ids=name)
def test_a_call_leaves_the_sequences_with_their_new_tokens(case):
    """Another step on the state that a call left is what the oracle says of all tokens."""
    data, _ = made(case)
    given, (_, following) = call(load.variant("dsv4_forward", "torch_reference"), data)
    states = [State(TINY, case.format, *sizes(case), snapshots=0) for _ in range(2)]
    for state, buffer in zip(states, (data.inputs.state, given.inputs.state), strict=True):
        state.buffer.copy_(buffer)
        state.reload()
    model = given.weights.model
    sequences = range(case.batch)
    batch = states[0].plan(dict(enumerate(data.inputs.tokens)))
    model.forward(batch, states[0])
    states[0].commit(batch)
    assert states[1].lengths == states[0].lengths == [n + case.new for n in TASK.lengths(case.context, case.batch)]
    steps = [state.plan({sequence: following[sequence : sequence + 1] for sequence in sequences}) for state in states]
    one, other = (model.forward(step, state).logits for step, state in zip(steps, states, strict=True))
    assert torch.equal(one, other)


def sizes(case) -> tuple[int, int]:
    return case.batch, case.batch * -(-(case.context + case.new) // 128)


def test_prepared_weights_follow_their_own():
    """Two models in one process: each call is its own model's, whichever was prepared last."""
    module, answers = load.variant("dsv4_forward", "composed"), []
    for seed in (1, 2):
        case = dataclasses.replace(QUICK[12], seed=seed)
        data, want = made(case)
        answers.append((data, want, module.prepare(data.weights)))
    for data, want, prepared in answers:
        output = module.custom_kernel(fresh(data)._replace(weights=prepared))
        assert REFERENCE.compare(data, want, output).ok
    assert isinstance(prepared.model, Model)
    assert prepared.model.weights.embed.data_ptr() == data.weights.bytes.data_ptr(), "no copy"


def test_the_checker_delivers_and_judges_a_call():
    """The judge's own process, here: data over its buffers, the state overwritten, a verdict."""
    judge = Checker({"folder": str(FOLDER), "ours": True, "device": "cpu", "files": {}})
    case = {k: v for k, v in dataclasses.asdict(QUICK[12]).items() if k != "seed"}
    judge.new_weights({"case": case, "seed": 3}, [])
    said = judge.content({"case": case, "seed": 4}, [])
    opened = said["open"]
    assert (len(opened["inout"]), len(opened["outputs"])) == (1, 2)
    judge.hold({"runner": "r"}, [])
    own = {"reaper": os.getpid(), "pid": os.getpid()}
    judge.allocate({"op": "allocate", "runner": "r", "bytes": said["host"], "count": 1, **own}, [])
    for stem, status in (("variants/composed", "PASSED"), ("wrong/norm_by_mean_magnitude", "INCORRECT")):
        judge.fill({"runner": "r", "buffer": 0}, [])
        (buffer,) = judge.buffers["r"]
        data = tree.build(judge.spec, buffer.memory, TASK)
        weights = tree.build(judge.weights_spec, judge.held["r"].memory, TASK)
        outputs = list(data.outputs)
        assert bool(outputs[0].isnan().all()) and data.inputs.chunk == 128
        module = load.module(FOLDER, stem)
        result = module.custom_kernel(data._replace(weights=module.prepare(weights)))
        judge.caught["r"] = judge._catch("r", buffer, 0, [])
        returned = claims.forms(result, outputs)
        verdict = judge.judge({"runner": "r", "buffer": 0, "claims": returned, "baseline": False, "fixed": False}, [])
        assert verdict["status"] == status, verdict
    judge.release({"op": "release", "runner": "r"}, [])


def test_the_harness_knows_it_as_a_composition():
    found = folders.find("dsv4_forward")
    assert found.composition and found.winner("cpu").name == "composed"
    assert {e.name for e in found.submissions()} == set(VARIANTS)
    for case in (*found.tests, *found.benchmarks["cpu"], *found.benchmarks["cuda"]):
        assert case.bytes > 0 and case.flops > 0


@pytest.mark.parametrize(
    "file", [*(f"variants/{name}.py" for name in VARIANTS), *(f"wrong/{name}.py" for name in WRONG[:2])]
)
def test_what_nobody_gets_to_see_is_not_in_a_submissions_closure(file):
    """Winners are. That all of it obeys the rules is shown in tests/harness/problem/test_scan.py."""
    files = sources.closure(FOLDER / file, FOLDER)
    names = {str(path.relative_to(load.PROBLEMS)) for path in files}
    assert {"dsv4_forward/judged_call.py", "dsv4_forward/model.py"} <= names
    assert not names & {f"dsv4_forward/{hidden}.py" for hidden in ("reference", "check", "task")}
    assert ("nvfp4_gemv/submission.py" in names) == (file == "variants/composed.py")


def test_the_runner_can_load_the_task_alone():
    """Of the folder it has what a submission imports: task.py itself imports nothing of it when loaded."""
    nodes = ast.parse((FOLDER / "task.py").read_text()).body
    found = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    assert found and not any("problems" in ast.unparse(node) for node in found)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("case", [SHARP, QUICK[13], QUICK[14]], ids=name)
def test_a_call_on_a_gpu_is_right_and_waits_for_nothing(case, variant):
    given = {**params(case), "device": "cuda"}
    weights = REFERENCE.generate_weights(**given)
    data = TASK.Data(weights, *REFERENCE.generate_input(**given))
    want = REFERENCE.ref_kernel(data)
    module = load.variant("dsv4_forward", variant)
    prepared = module.prepare(weights)
    for mode in ("default", "error"):  # a first call loads code
        one = fresh(data)._replace(weights=prepared)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(mode)
        try:
            output = module.custom_kernel(one)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert REFERENCE.compare(data, want, output).ok
